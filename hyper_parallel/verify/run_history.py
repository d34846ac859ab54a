"""The history of nightly runs: a few values of every report, and what changed since the night before."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from hyper_parallel.verify.report_files import read_json, reading
from hyper_parallel.verify.report_values import COMMANDS, Measured, report_totals
from hyper_parallel.verify.run_comparison import Change, changes_between
from hyper_parallel.verify.run_header import run_header

__all__ = ["History", "Night", "night_of", "read_history"]

_COMMAND = "hyper-parallel trend HISTORY --add REPORT"
_GOOD = ("more", "less", "time")


@dataclass(frozen=True)
class Night:
    """What is kept of one night.

    Attributes:
        header: of the run that added it: date, revision, versions, platform and command line.
        values: of its reports, by name.
        skipped: per suite of tests, the reasons of skipped tests with their numbers.
    """

    header: dict[str, Any]
    values: dict[str, Measured]
    skipped: dict[str, dict[str, int]]

    def json(self) -> dict[str, Any]:
        """Return the night as a JSON object."""
        values = {name: [measured.value, measured.good] for name, measured in self.values.items()}
        return {"header": self.header, "values": values, "skipped": self.skipped}


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
        return {"nights": [night.json() for night in self.nights]}

    def text(self) -> str:
        """Return the last night beside the one before, for a terminal."""
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
    return Night(dict(content["header"]), values, skipped)


def night_of(paths: Sequence[Path]) -> Night:
    """Return a night of reports.

    Args:
        paths: JSON reports of commands, JUnit files of tests, and folders with such files; other files in a folder are
            left out. The tests of ``folder/suite.xml`` are called ``folder/suite``.

    Raises:
        ValueError: a file is no report of either kind, or there is no value at all.
    """
    values: dict[str, Measured] = {}
    skipped: dict[str, dict[str, int]] = {}
    for path, name, required in _files(paths):
        if path.suffix == ".xml":
            suite, reasons = _tests(path, name, required=required)
            values |= suite
            skipped |= {name: reasons} if reasons else {}
            continue
        totals = _totals(path, required=required)
        values |= {what: value for what, value in totals.items() if isinstance(value.value, (int, float))}
    if not values:
        msg = f"{', '.join(map(str, paths))}: no report of {COMMANDS}, and no JUnit file"
        raise ValueError(msg)
    return Night(run_header().json(), values, skipped)


def _files(paths: Iterable[Path]) -> Iterable[tuple[Path, str, bool]]:
    """Return the files to read, the name of each, and whether it was named itself."""
    for path in paths:
        if not path.is_dir():
            yield path, path.stem, True
            continue
        for file in sorted(path.rglob("*")):
            if file.suffix in (".json", ".xml"):
                yield file, file.relative_to(path).with_suffix("").as_posix(), False


def _totals(path: Path, *, required: bool) -> dict[str, Measured]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        msg = f"{path} is no report: {error}"
        raise ValueError(msg) from error
    with reading(path):
        totals = report_totals(document) if isinstance(document, dict) else {}
    if required and not totals:
        msg = f"{path} is no report that can be followed: those of {COMMANDS} can, and JUnit files"
        raise ValueError(msg)
    return totals


def _tests(path: Path, name: str, *, required: bool) -> tuple[dict[str, Measured], dict[str, int]]:
    """Return numbers of tests in a JUnit file, and why tests were skipped."""
    try:
        root = ET.parse(path).getroot()  # noqa: S314 - written by our own run
    except (ET.ParseError, OSError) as error:
        msg = f"{path} is no report of tests: {error}"
        raise ValueError(msg) from error
    if root.tag not in ("testsuite", "testsuites"):
        if not required:
            return {}, {}
        msg = f"{path} is no report of tests: its root is {root.tag}, not testsuites"
        raise ValueError(msg)
    reasons: dict[str, int] = {}
    executed = failed = 0
    for case in root.iter("testcase"):
        left_out = case.find("skipped")
        if left_out is not None:
            reason = left_out.get("message") or "without a reason"
            reasons[reason] = reasons.get(reason, 0) + 1
            continue
        executed += 1
        failed += case.find("failure") is not None or case.find("error") is not None
    numbers = {"executed": (executed, "more"), "failed": (failed, "less"), "skipped": (sum(reasons.values()), "less")}
    return {f"tests of {name}: {what}": Measured(*pair) for what, pair in numbers.items()}, reasons
