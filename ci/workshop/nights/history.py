"""The history of nightly runs: a few values of every report, and what changed since the night before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hyper_parallel.verify.report import run_header
from hyper_parallel.verify.report_files import read_json, reading
from hyper_parallel.verify.report_values import Measured
from hyper_parallel.verify.run_comparison import Change, changes_between
from workshop.nights.reports import NightReports

__all__ = ["History", "Night", "night_of", "read_history"]

_COMMAND = "python ci/workshop trend HISTORY --add REPORT"
_GOOD = ("more", "less", "time")


@dataclass(frozen=True)
class Night:
    """What is kept of one night.

    Attributes:
        header: of the run that added it: date, revision, versions, platform and command line.
        values: of its reports, by name.
        skipped: per suite of tests, the reasons of skipped tests with their numbers.
        failed: per suite of tests, the names of those that failed, each with the day since which it fails whenever it
            runs; a history keeps them of its last two nights.
    """

    header: dict[str, Any]
    values: dict[str, Measured]
    skipped: dict[str, dict[str, int]]
    failed: dict[str, dict[str, str]] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        """Return the night as a JSON object."""
        values = {name: [measured.value, measured.good] for name, measured in self.values.items()}
        return {"header": self.header, "values": values, "skipped": self.skipped, "failed": self.failed}


@dataclass(frozen=True)
class History:
    """Nights, the oldest first.

    Attributes:
        nights: at least one.
    """

    nights: tuple[Night, ...]

    @property
    def last(self) -> Night:
        """The newest night."""
        return self.nights[-1]

    @property
    def changes(self) -> tuple[Change, ...]:
        """What differs between the last two nights, what got worse first; nothing after a single one."""
        if len(self.nights) == 1:
            return ()
        return changes_between(self.nights[-2].values, self.last.values)

    @property
    def worse(self) -> tuple[Change, ...]:
        """What is worse than in the night before."""
        return tuple(change for change in self.changes if change.verdict == "worse")

    def series(self, name: str) -> list[float | None]:
        """Return a value in every night; None where it was not reported."""
        return [night.values[name].value if name in night.values else None for night in self.nights]

    def summary(self) -> str:
        """Return the verdict in one line."""
        if len(self.nights) == 1:
            return f"{len(self.last.values)} values, and no night before to compare them with"
        changes = self.changes
        equal = len(self.last.values) - sum(change.after != "absent" for change in changes)
        return f"{len(self.worse)} worse, {len(changes)} changed, {equal} equal"

    def json(self) -> dict[str, Any]:
        """Return the history as a JSON object."""
        older = [replace(night, failed={}) for night in self.nights[:-2]]
        return {"nights": [night.json() for night in (*older, *self.nights[-2:])]}

    def text(self) -> str:
        """Return the last night and the one before, for a terminal."""
        dates = [str(night.header.get("date", "unknown date")) for night in (self.nights[0], self.last)]
        lines = [
            f"{len(self.nights)} nights, {dates[0]} to {dates[1]}" if len(self.nights) > 1 else f"1 night, {dates[1]}"
        ]
        lines += [f"{change.verdict:6}  {change.what}: {change.before} -> {change.after}" for change in self.changes]
        for suite, reasons in self.last.skipped.items():
            lines += [f"skipped  {suite}: {count} tests: {reason}" for reason, count in reasons.items()]
        return "\n".join([*lines, self.summary()])


def read_history(path: Path) -> tuple[Night, ...]:
    """Return the nights in a file that ``trend`` wrote, the oldest first.

    Raises:
        ValueError: the file cannot be read, or it is no history.
    """
    document = read_json(path, ("nights",), _COMMAND)
    with reading(path):
        return tuple(_night(night) for night in document["nights"])


def _night(content: Mapping[str, Any]) -> Night:
    values = {}
    for name, (value, good) in content["values"].items():
        if good not in _GOOD or isinstance(value, bool) or not isinstance(value, (int, float)):
            msg = f"{name!r} has the value {value!r}, {good!r}"
            raise ValueError(msg)
        values[str(name)] = Measured(value, good)
    skipped = {
        str(suite): {str(reason): int(count) for reason, count in reasons.items()}
        for suite, reasons in content["skipped"].items()
    }
    header = dict(content["header"])
    failed = {}
    for suite, names in content.get("failed", {}).items():
        dated = names if isinstance(names, dict) else dict.fromkeys(names, _day(header))  # of a file without days
        failed[str(suite)] = {str(name): str(day) for name, day in dated.items()}
    return Night(header, values, skipped, failed)


def night_of(reports: NightReports, before: Night | None = None) -> Night:
    """Return what is kept of a night with these reports.

    Args:
        reports: of the night.
        before: the night before: what failed then and fails now has its day, and a suite without a report its failures.
    """
    values: dict[str, Measured] = {}
    for report in reports.commands:
        numbers = report.named_values().items()
        values |= {what: value for what, value in numbers if isinstance(value.value, (int, float))}
    for suite in reports.suites:
        values |= suite.values()
    skipped = {suite.name: dict(suite.skipped) for suite in reports.suites if suite.skipped}
    header = run_header().json()
    failed = {} if before is None else dict(before.failed)
    for suite in reports.suites:
        known = failed.pop(suite.name, {})
        if suite.failed:
            failed[suite.name] = {case.name: known.get(case.name, _day(header)) for case in suite.failed}
    return Night(header, values, skipped, failed)


def _day(header: Mapping[str, Any]) -> str:
    return str(header.get("date", "unknown date"))[:10]
