"""Runs the gates after the tests of an environment, and keeps the result next to its report."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hyper_parallel.verify.report import report_json
from workshop.coverage.baseline import read_baseline
from workshop.coverage.gates import (
    check_baseline,
    check_exceptions,
    check_floors,
    check_ranks,
    check_shared,
    check_started,
    exceptions_over,
    percent,
)
from workshop.coverage.settings import EnvironmentSettings, Settings
from workshop.coverage.store import Store, process_of

__all__ = ["GateResult", "gate", "gate_combined"]

_LOST_SHARE = 0.01
"""Share of ranks that may leave no data: a rank that is ended before it measures, or in a library's code that lets no
handler of Python run, cannot save any. They are listed with their tests."""


@dataclass
class GateResult:
    """The result of the gates of one environment.

    Attributes:
        name: the environment, or ``combined``.
        total: percentage, lines and branches together.
        ranks: number of ranks that were started.
        failures: one line each.
        checked: gates that hold, one line each.
        unchecked: gates that were not checked, with the reason.
    """

    name: str
    total: float = 0.0
    ranks: int = 0
    failures: list[str] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Return True if every check passed."""
        return not self.failures

    def json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return {"ok": self.ok, **asdict(self)}

    def text(self) -> str:
        """Return the result for a terminal."""
        lines = [f"coverage of {self.name}: {self.total:.2f} % of lines and branches"]
        lines += [f"  held: {what}" for what in self.checked]
        lines += [f"  not checked: {what}" for what in self.unchecked]
        lines += [f"  FAILED: {what}" for what in self.failures]
        return "\n".join(lines)


def gate(store: Store, settings: Settings, environment: str, selection: Sequence[str] = ()) -> GateResult:
    """Combine and publish one environment, and check every gate.

    Args:
        store: where data lies.
        settings: the floors.
        environment: name of the tox environment.
        selection: arguments that chose a part of its tests; floors, ratchet and number of ranks are of all tests.
    """
    result = GateResult(environment)
    own = settings.environment(environment)
    _check_ranks(result, store, replace(own, ranks=0) if selection else own)
    report = store.publish(environment, own.omit)
    result.total = percent(report["totals"])
    if selection:
        arguments = shlex.join(selection)
        result.unchecked.append(f"floors and ratchet: they are of all tests, and this run had `{arguments}`")
    else:
        _check_floors_and_ratchet(result, store, settings, own, report)
    _save(result, store)
    return result


def gate_combined(
    store: Store,
    settings: Settings,
    environments: Sequence[str],
    report: dict[str, Any],
    failed: Sequence[str] = (),
) -> GateResult:
    """Check the gates of the combined report: shared code, floors and ratchet.

    Args:
        store: where data lies.
        settings: the floors.
        environments: those that the report combines; floors need all that the settings name.
        report: the combined one.
        failed: environments that were to be combined and have no data.
    """
    result = GateResult("combined", percent(report["totals"]))
    result.failures += [f"no data of {name}: its tests did not end; run `tox -e {name}`" for name in failed]
    missing = [name for name in settings.combined if name not in environments]
    if missing:
        result.unchecked.append(f"floors and ratchet: they need the data of {', '.join(missing)} as well")
    else:
        _check_floors_and_ratchet(result, store, settings, settings.environment("combined"), report)
    shared = settings.shared
    if shared.environments:
        reports = {name: store.report(name) for name in shared.environments if name in store.environments()}
        what = f"shared code is reached from {' and '.join(shared.environments)}, each file to {shared.floor:g} %"
        _add_gate(result, what, check_shared(reports, shared))
    else:
        result.unchecked.append("shared code: no environments are named")
    _save(result, store)
    return result


def _check_ranks(result: GateResult, store: Store, own: EnvironmentSettings) -> None:
    """Check that ranks were started, and that each left its data."""
    ledger = store.launched(result.name)
    launched = ledger or {}
    result.ranks = len(launched)
    measured, broken = store.measured(result.name)
    broken_ranks = [name for name in broken if process_of(name) in launched]
    result.failures += check_started(ledger, own.ranks, str(store.ledger(result.name)), result.name)
    lost = [pid for pid in launched if pid not in measured]
    if len(lost) <= _LOST_SHARE * len(launched):
        result.unchecked += [f"data of {launched[pid]} (process {pid}), which left none" for pid in lost]
        launched = {pid: name for pid, name in launched.items() if pid not in lost}
    if launched:
        _add_gate(result, f"data of {len(launched)} started ranks", check_ranks(launched, measured, broken_ranks))
    elif not result.failures:
        result.unchecked.append("ranks: none was started, and none need be")
    others = [name for name in broken if name not in broken_ranks]
    if others:  # of processes that tests end on purpose
        result.unchecked.append(f"half data files of processes that are no ranks: {', '.join(others)}")


def _save(result: GateResult, store: Store) -> None:
    (store.folder(result.name) / "gate.json").write_text(report_json(result.json()), encoding="utf-8")


def _add_gate(result: GateResult, what: str, failures: list[str]) -> None:
    result.failures += failures
    if not failures:
        result.checked.append(what)


def _check_floors_and_ratchet(
    result: GateResult, store: Store, settings: Settings, own: EnvironmentSettings, report: dict[str, Any]
) -> None:
    baseline = read_baseline(store.root / settings.baseline, result.name)
    excepted = baseline.exceptions
    if own.total or own.files:
        failures = check_floors(report, own, excepted)
        _add_gate(result, f"floors: total {own.total:g} %, {len(own.files)} patterns of files", failures)
        failures = check_exceptions(report, own, excepted)
        _add_gate(result, f"exceptions: {len(excepted)} files may be below their floor, each with its reason", failures)
        if over := exceptions_over(report, own, excepted):
            result.unchecked.append(f"needless exceptions, which reach their floor: {', '.join(over)}")
    else:
        result.unchecked.append(f"floors: {result.name} has none")
        _add_gate(result, "something was measured", [] if report["files"] else ["no file was measured"])
    if baseline.files:
        existing = [name for name in baseline.files if (store.root / name).exists()]
        failures = check_baseline(report, baseline.files, settings.slack, existing)
        _add_gate(result, f"ratchet: {len(baseline.files)} files are not below their baseline", failures)
    else:
        result.unchecked.append(f"ratchet: {settings.baseline} has no entry for {result.name}")
