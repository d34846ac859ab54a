"""What is checked after a run of an environment, and the verdict that is kept beside its report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hyper_parallel.verify.coverage.baseline import read_baseline
from hyper_parallel.verify.coverage.gates import (
    check_baseline,
    check_exceptions,
    check_floors,
    check_ranks,
    check_shared,
    check_started,
    exceptions_over,
    percent,
)
from hyper_parallel.verify.coverage.settings import EnvironmentSettings, Settings
from hyper_parallel.verify.coverage.store import Store, process_of

__all__ = ["Verdict", "gate", "gate_combined"]


@dataclass
class Verdict:
    """The outcome of the gates.

    Attributes:
        name: the environment, or ``combined``.
        total: percentage, lines and branches together.
        ranks: number of ranks that were started.
        failures: one line each.
        checked, unchecked: what was held against something, and what was not, with the reason.
    """

    name: str
    total: float = 0.0
    ranks: int = 0
    failures: list[str] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether everything that was checked held."""
        return not self.failures

    def json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {"ok": self.ok, **asdict(self)}

    def text(self) -> str:
        """For a terminal."""
        lines = [f"coverage of {self.name}: {self.total:.2f} % of lines and branches"]
        lines += [f"  held: {what}" for what in self.checked]
        lines += [f"  not checked: {what}" for what in self.unchecked]
        lines += [f"  FAILED: {what}" for what in self.failures]
        return "\n".join(lines)


def gate(store: Store, settings: Settings, environment: str) -> Verdict:
    """Combine and publish one environment, and hold it against every gate.

    Args:
        store: where data lies.
        settings: the floors.
        environment: name of the tox environment.
    """
    verdict = Verdict(environment)
    own = settings.environment(environment)
    _ranks(verdict, store, own)
    report = store.publish(environment, own.omit)
    verdict.total = percent(report["totals"])
    _floors_and_ratchet(verdict, store, settings, own, report)
    _keep(verdict, store)
    return verdict


def gate_combined(store: Store, settings: Settings, environments: Sequence[str], report: dict[str, Any]) -> Verdict:
    """Hold the combined report against the gate of shared code, and against its own floors and baseline.

    Args:
        store: where data lies.
        settings: the floors.
        environments: what the report combines; without all that the settings name, it is no measure of a file.
        report: the combined one.
    """
    verdict = Verdict("combined", percent(report["totals"]))
    missing = [name for name in settings.combined if name not in environments]
    if missing:
        verdict.unchecked.append(f"floors and ratchet: they need the data of {', '.join(missing)} as well")
    else:
        _floors_and_ratchet(verdict, store, settings, settings.environment("combined"), report)
    shared = settings.shared
    if shared.environments:
        there = {name: store.report(name) for name in shared.environments if name in store.environments()}
        what = f"shared code is reached from {' and '.join(shared.environments)}, each file to {shared.floor:g} %"
        _note(verdict, what, check_shared(there, shared))
    else:
        verdict.unchecked.append("shared code: no environments are named")
    _keep(verdict, store)
    return verdict


def _ranks(verdict: Verdict, store: Store, own: EnvironmentSettings) -> None:
    """Ranks were started, and each left its data."""
    written = store.launched(verdict.name)
    launched = written or {}
    verdict.ranks = len(launched)
    measured, broken = store.measured(verdict.name)
    halves = [name for name in broken if process_of(name) in launched]
    verdict.failures += check_started(written, own.ranks, str(store.ledger(verdict.name)), verdict.name)
    if launched:
        _note(verdict, f"data of {len(launched)} started ranks", check_ranks(launched, measured, halves))
    elif not verdict.failures:
        verdict.unchecked.append("ranks: none was started, and none need be")
    others = [name for name in broken if name not in halves]
    if others:  # of processes that tests end on purpose
        verdict.unchecked.append(f"half data files of processes that are no ranks: {', '.join(others)}")


def _keep(verdict: Verdict, store: Store) -> None:
    (store.folder(verdict.name) / "gate.json").write_text(json.dumps(verdict.json(), indent=2), encoding="utf-8")


def _note(verdict: Verdict, what: str, failures: list[str]) -> None:
    verdict.failures += failures
    if not failures:
        verdict.checked.append(what)


def _floors_and_ratchet(
    verdict: Verdict, store: Store, settings: Settings, own: EnvironmentSettings, report: dict[str, Any]
) -> None:
    baseline = read_baseline(store.root / settings.baseline, verdict.name)
    excepted = baseline.exceptions
    if own.total or own.files:
        failures = check_floors(report, own, excepted)
        _note(verdict, f"floors: total {own.total:g} %, {len(own.files)} patterns of files", failures)
        failures = check_exceptions(report, own, excepted)
        _note(verdict, f"exceptions: {len(excepted)} files may be below their floor, each with its reason", failures)
        if over := exceptions_over(report, own, excepted):
            verdict.unchecked.append(f"needless exceptions, which reach their floor: {', '.join(over)}")
    else:
        verdict.unchecked.append(f"floors: {verdict.name} has none")
        _note(verdict, "something was measured", [] if report["files"] else ["no file was measured"])
    if baseline.files:
        existing = [name for name in baseline.files if (store.root / name).exists()]
        failures = check_baseline(report, baseline.files, settings.slack, existing)
        _note(verdict, f"ratchet: {len(baseline.files)} files are not below their baseline", failures)
    else:
        verdict.unchecked.append(f"ratchet: {settings.baseline} has no entry for {verdict.name}")
