"""Compares two reports of one command: values that are worse, better, or only in one report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.verify.report_files import read_json, reading
from hyper_parallel.verify.report_values import COMMANDS, Measured, report_values

__all__ = ["Change", "Comparison", "changes_between", "compare_reports"]

_SLOWER = 1.25
"""Ratio from which a measured time is worse; smaller differences are noise."""

_NOISE = "noise"

_COMMAND = "hyper-parallel ... --report FILE.json"


@dataclass(frozen=True)
class Change:
    """One value that differs between two reports.

    Attributes:
        what: name of the value, such as ``add on torch: checks``.
        before: value of the first report, or ``absent``.
        after: value of the second report, or ``absent``.
        verdict: ``worse``, ``better``, or ``other`` for values that only the second report has.
    """

    what: str
    before: str
    after: str
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """The differences between two reports.

    Attributes:
        headers: headers of the reports that have one.
        equal: number of equal values.
        changes: the differences, worse values first.
    """

    headers: tuple[dict[str, Any], dict[str, Any]]
    equal: int
    changes: tuple[Change, ...]

    @property
    def worse(self) -> tuple[Change, ...]:
        """The values that are worse."""
        return tuple(change for change in self.changes if change.verdict == "worse")

    @property
    def ok(self) -> bool:
        """Whether something was compared and nothing is worse."""
        return not self.worse and self.equal + len(self.changes) > 0

    def json(self) -> dict[str, Any]:
        """Return the comparison as a JSON object."""
        changes = [asdict(change) for change in self.changes]
        return {"ok": self.ok, "headers": list(self.headers), "equal": self.equal, "changes": changes}

    def text(self) -> str:
        """Return the comparison for a terminal."""
        lines = [f"{change.verdict:6}  {change.what}: {change.before} -> {change.after}" for change in self.changes]
        return "\n".join([*lines, f"{len(self.worse)} worse, {len(self.changes)} changed, {self.equal} equal"])


def compare_reports(before: Path, after: Path) -> Comparison:
    """Compare two reports of one command in :func:`report_values`.

    Args:
        before: JSON of the first run.
        after: JSON of the second one.

    Raises:
        ValueError: a file is not such a report, or the reports are of different commands.
    """
    documents = [read_json(path, (), _COMMAND) for path in (before, after)]
    with reading(before, after):
        (first_kind, first), (second_kind, second) = map(report_values, documents)
    for path, kind in ((before, first_kind), (after, second_kind)):
        if not kind:
            msg = f"{path} cannot be compared: it is none of the reports of {COMMANDS}, or another version wrote it"
            raise ValueError(msg)
    if first_kind != second_kind:
        msg = (
            f"{before} is a report of {first_kind}, but {after} is one of {second_kind}; compare two reports of one "
            "command"
        )
        raise ValueError(msg)
    with reading(before, after):
        changes = changes_between(first, second)
    headers = tuple(dict(document.get("header", {})) for document in documents)
    return Comparison((headers[0], headers[1]), len({**first, **second}) - len(changes), changes)


def changes_between(before: Mapping[str, Measured], after: Mapping[str, Measured]) -> tuple[Change, ...]:
    """Return the values that differ between two runs, worse ones first; times within the noise are left out."""
    names = list(dict.fromkeys([*before, *after]))
    differing = [name for name in names if before.get(name) != after.get(name)]
    compared = [_change(name, before.get(name), after.get(name)) for name in differing]
    changes = [change for change in compared if change.verdict != _NOISE]
    return tuple(sorted(changes, key=lambda change: ("worse", "better", "other").index(change.verdict)))


def _change(what: str, before: Measured | None, after: Measured | None) -> Change:
    if before is None or after is None:
        # values that are no longer reported are no longer checked
        return Change(what, _shown(before), _shown(after), "worse" if after is None else "other")
    if isinstance(before.good, tuple):
        ranks = [before.good.index(value.value) for value in (before, after)]
        got_worse = ranks[1] > ranks[0]
    elif before.good == "more":
        got_worse = after.value < before.value
    else:
        got_worse = after.value > before.value
    return Change(what, _shown(before), _shown(after), _verdict(before, after, got_worse=got_worse))


def _verdict(before: Measured, after: Measured, *, got_worse: bool) -> str:
    if before.good == "time" and max(before.value, after.value) < _SLOWER * min(before.value, after.value):
        return _NOISE
    return "worse" if got_worse else "better"


def _shown(value: Measured | None) -> str:
    if value is None:
        return "absent"
    return f"{value.value:.4g}" if isinstance(value.value, float) else str(value.value)
