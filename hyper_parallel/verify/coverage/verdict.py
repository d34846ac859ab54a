"""What is checked after a run of an environment, and the verdict that is kept beside its report."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hyper_parallel.verify.coverage.gates import (
    changed_lines,
    check_baseline,
    check_changed,
    check_floors,
    check_ranks,
    check_shared,
    percent,
)
from hyper_parallel.verify.coverage.settings import Settings
from hyper_parallel.verify.coverage.store import Store, process_of

__all__ = ["Verdict", "diff_against", "gate", "gate_shared", "write_baseline"]


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


def gate(store: Store, settings: Settings, environment: str, base: str | None) -> Verdict:
    """Combine and publish one environment, and hold it against every gate.

    Args:
        store: where data lies.
        settings: the floors.
        environment: name of the tox environment.
        base: revision against which changed lines count, or None.
    """
    verdict = Verdict(environment)
    own, launched = settings.environment(environment), store.launched(environment)
    verdict.ranks = len(launched)
    measured, broken = store.measured(environment)
    halves = [name for name in broken if process_of(name) in launched]
    _note(verdict, f"data of {len(launched)} started ranks", check_ranks(launched, measured, halves))
    others = [name for name in broken if name not in halves]
    if others:  # of processes that tests end on purpose
        verdict.unchecked.append(f"half data files of processes that are no ranks: {', '.join(others)}")
    report = store.publish(environment, own.omit)
    verdict.total = percent(report["totals"])
    if own.total or own.files:
        _note(verdict, f"floors: total {own.total:g} %, {len(own.files)} patterns of files", check_floors(report, own))
    else:
        verdict.unchecked.append(f"floors: {environment} has none")
        _note(verdict, "something was measured", [] if report["files"] else ["no file was measured"])
    _ratchet(verdict, store, settings, report)
    _changed(verdict, store, settings, report, base)
    (store.folder(environment) / "gate.json").write_text(json.dumps(verdict.json(), indent=2), encoding="utf-8")
    return verdict


def gate_shared(store: Store, settings: Settings, report: dict[str, Any]) -> Verdict:
    """Hold the combined report against the gate of shared code."""
    verdict = Verdict("combined", percent(report["totals"]))
    shared = settings.shared
    if shared.environments:
        there = {name: store.report(name) for name in shared.environments if name in store.environments()}
        what = f"shared code is reached from {' and '.join(shared.environments)}, each file to {shared.floor:g} %"
        _note(verdict, what, check_shared(there, shared))
    else:
        verdict.unchecked.append("shared code: no environments are named")
    (store.folder("combined") / "gate.json").write_text(json.dumps(verdict.json(), indent=2), encoding="utf-8")
    return verdict


def _note(verdict: Verdict, what: str, failures: list[str]) -> None:
    verdict.failures += failures
    if not failures:
        verdict.checked.append(what)


def _ratchet(verdict: Verdict, store: Store, settings: Settings, report: dict[str, Any]) -> None:
    baseline = _read_baseline(store.root / settings.baseline).get(verdict.name)
    if not baseline:
        fix = f"`hyper-parallel coverage gate {verdict.name} --update-baseline` writes one"
        verdict.unchecked.append(f"ratchet: {settings.baseline} has no entry for {verdict.name}; {fix}")
        return
    existing = [name for name in baseline if (store.root / name).exists()]
    failures = check_baseline(report, baseline, settings.slack, existing)
    _note(verdict, f"ratchet: {len(baseline)} files are not below their baseline", failures)


def _changed(verdict: Verdict, store: Store, settings: Settings, report: dict[str, Any], base: str | None) -> None:
    if base is None:
        verdict.unchecked.append("changed lines: no --base revision was given")
        return
    changed = {name: rows for name, rows in diff_against(store.root, base).items() if name in report["files"]}
    what = f"changed lines of {len(changed)} files since {base}: at least {settings.changed:g} %"
    _note(verdict, what, check_changed(report, changed, settings.changed))


def diff_against(root: Path, base: str) -> dict[str, set[int]]:
    """Lines that changed since the common ancestor with ``base``, uncommitted ones included.

    Raises:
        ValueError: git does not know ``base``.
    """
    if base.startswith("-"):
        msg = f"--base {base!r} is no revision"
        raise ValueError(msg)
    ancestor = _git(root, base, "merge-base", base, "HEAD").strip()
    return changed_lines(_git(root, base, "diff", "--unified=0", "--no-color", "--no-ext-diff", ancestor, "--"))


def _git(root: Path, base: str, *arguments: str) -> str:
    done = subprocess.run(  # noqa: S603 - a revision is no option, see above
        ["git", *arguments],  # noqa: S607 - found on PATH, as everywhere
        cwd=root,
        text=True,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        msg = f"--base {base}: git says: {done.stderr.strip()}"
        raise ValueError(msg)
    return done.stdout


def _read_baseline(path: Path) -> dict[str, dict[str, float]]:
    if not path.exists():
        return {}
    try:
        baseline: dict[str, dict[str, float]] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        msg = f"{path} is no JSON: {error}"
        raise ValueError(msg) from error
    return baseline


def write_baseline(store: Store, settings: Settings, environment: str) -> int:
    """Raise the baseline of ``environment`` to its report; number of entries. No file that exists is lowered."""
    path = store.root / settings.baseline
    baseline = _read_baseline(path)
    before = baseline.get(environment, {})
    now = {name: round(percent(one["summary"]), 2) for name, one in store.report(environment)["files"].items()}
    kept = {name: value for name, value in before.items() if (store.root / name).exists()}
    merged = {name: max(kept.get(name, 0.0), now.get(name, 0.0)) for name in sorted({*kept, *now})}
    baseline[environment] = merged
    path.write_text(json.dumps(baseline, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return len(merged)
