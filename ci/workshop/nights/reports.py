"""The reports of one night, read from a folder: suites of tests with their outcomes, and reports of commands."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from hyper_parallel._text import first_line
from hyper_parallel.verify.report import PROPERTY
from hyper_parallel.verify.report_files import reading
from hyper_parallel.verify.report_values import COMMANDS, Measured, report_totals
from workshop.nights.contradictions import contradictions

__all__ = ["CaseResult", "CommandReport", "NightReports", "SuiteReport", "read_reports", "read_suite"]

_LOGS = ("failure", "error", "system-out", "system-err")


@dataclass(frozen=True)
class CaseResult:
    """One test of a suite.

    Attributes:
        name: module and test, with its parameters.
        outcome: ``passed``, ``failed`` or ``skipped``.
        text: first line of the failure, or the reason of the skip.
        log: of a failed test: its traceback, what it printed, and the sections of its ranks.
    """

    name: str
    outcome: str
    text: str = ""
    log: str = ""


@dataclass(frozen=True)
class SuiteReport:
    """One JUnit file.

    Attributes:
        name: the file's path in the folder of the night, without its suffix, such as ``npu-torch-4/st-npu-torch``.
        cases: its tests.
        facts: of the run, as far as the file has them: ``date``, ``revision``, ``versions``, ``command``,
            ``frameworks``, ``device``, ``devices``.
    """

    name: str
    cases: tuple[CaseResult, ...]
    facts: Mapping[str, str]

    def number(self, outcome: str) -> int:
        """Return how many tests had this outcome."""
        return sum(case.outcome == outcome for case in self.cases)

    @property
    def executed(self) -> int:
        """How many tests ran: all but the skipped ones."""
        return len(self.cases) - self.number("skipped")

    @property
    def failed(self) -> tuple[CaseResult, ...]:
        """The tests that failed."""
        return tuple(case for case in self.cases if case.outcome == "failed")

    @property
    def skipped(self) -> Counter[str]:
        """Reasons of skipped tests with their numbers."""
        return Counter(case.text for case in self.cases if case.outcome == "skipped")

    def values(self) -> dict[str, Measured]:
        """Return the suite's numbers of tests by name, for the history."""
        numbers = {
            "executed": Measured(self.executed, "more"),
            "failed": Measured(len(self.failed), "less"),
            "skipped": Measured(self.number("skipped"), "less"),
        }
        return {f"tests of {self.name}: {what}": value for what, value in numbers.items()}


@dataclass(frozen=True)
class CommandReport:
    """One JSON report of a command.

    Attributes:
        name: the file's path in the folder of the night, without its suffix.
        values: what is followed over the nights, by name.
        facts: of the report's header.
        contradictions: rows that failed although they are proven, in words.
    """

    name: str
    values: Mapping[str, Measured]
    facts: Mapping[str, str]
    contradictions: tuple[str, ...] = ()

    def named_values(self) -> dict[str, Measured]:
        """Return the values with the report's folder before their names, if it has one: other cells have the same."""
        folder = self.name.rpartition("/")[0]
        return {f"{folder}: {what}" if folder else what: value for what, value in self.values.items()}


@dataclass(frozen=True)
class NightReports:
    """All reports of a night.

    Attributes:
        suites: of tests.
        commands: reports of commands.
    """

    suites: tuple[SuiteReport, ...]
    commands: tuple[CommandReport, ...]


def read_reports(paths: Sequence[Path]) -> NightReports:
    """Read the reports of a night.

    Args:
        paths: JSON reports of commands, JUnit files of tests, and folders with such files; other files in a folder are
            left out. The tests of ``folder/suite.xml`` are called ``folder/suite``.

    Raises:
        ValueError: a file is not a report of either kind, or there is none at all.
    """
    suites: list[SuiteReport] = []
    commands: list[CommandReport] = []
    for path, name, required in _files(paths):
        if path.suffix == ".xml":
            suite = read_suite(path, name, required=required)
            suites += [suite] if suite is not None else []
        else:
            report = _command(path, name, required=required)
            commands += [report] if report is not None else []
    if not suites and not commands:
        msg = f"there is no report of {COMMANDS}, and no JUnit file, in {', '.join(map(str, paths))}"
        raise ValueError(msg)
    return NightReports(tuple(suites), tuple(commands))


def _files(paths: Iterable[Path]) -> Iterable[tuple[Path, str, bool]]:
    """Return the files to read, the name of each, and whether it was named itself."""
    for path in paths:
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                if file.suffix in (".json", ".xml"):
                    yield file, file.relative_to(path).with_suffix("").as_posix(), False
        else:
            yield path, path.stem, True


def _command(path: Path, name: str, *, required: bool) -> CommandReport | None:
    """Return a command's report, None for another JSON file unless it is required."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        msg = f"{path} is not a report: {getattr(error, 'strerror', error)}"
        raise ValueError(msg) from error
    with reading(path):
        totals = report_totals(document) if isinstance(document, dict) else {}
        facts = _header(document.get("header", {})) if totals else {}
        failed = contradictions(document) if totals else ()
    if totals:
        return CommandReport(name, totals, facts, failed)
    if not required:
        return None
    msg = (
        f"{path} cannot be followed: it is neither a JUnit file nor one of the reports of {COMMANDS}, or another "
        "version wrote it"
    )
    raise ValueError(msg)


def _header(header: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts of a report's header as texts."""
    versions = ", ".join(f"{name} {version}" for name, version in dict(header.get("versions", {})).items())
    return {**{name: str(value) for name, value in header.items()}, "versions": versions}


def read_suite(path: Path, name: str, *, required: bool = True) -> SuiteReport | None:
    """Read a JUnit file.

    Args:
        path: of the file.
        name: of the suite.
        required: whether another XML file is an error; it is None otherwise.

    Raises:
        ValueError: the file cannot be read, or it is required and no report of tests.
    """
    try:
        root = ET.parse(path).getroot()  # noqa: S314 - written by our own run
    except (ET.ParseError, OSError) as error:
        msg = f"{path} is not a JUnit file: {getattr(error, 'strerror', error)}"
        raise ValueError(msg) from error
    if root.tag in ("testsuite", "testsuites"):
        return SuiteReport(name, tuple(map(_case, root.iter("testcase"))), _facts(root))
    if not required:
        return None
    msg = f"{path} is not a JUnit file: its root is {root.tag}, not testsuites"
    raise ValueError(msg)


def _case(element: ET.Element) -> CaseResult:
    name = ".".join(filter(None, map(element.get, ("classname", "name"))))
    skip = element.find("skipped")
    if skip is not None:
        return CaseResult(name, "skipped", skip.get("message") or "without a reason")
    failures = [part for part in element if part.tag in ("failure", "error")]
    if not failures:
        return CaseResult(name, "passed")
    log = [f"{part.get('message') or ''}\n{part.text or ''}".strip() for part in element if part.tag in _LOGS]
    return CaseResult(name, "failed", first_line(failures[0].get("message") or ""), "\n\n".join(log))


def _facts(root: ET.Element) -> dict[str, str]:
    """Return what the file says of its run: the date at least, if it has one, and what the plugin wrote."""
    date = next((suite.get("timestamp", "") for suite in root.iter("testsuite")), "")
    properties = {entry.get("name", ""): entry.get("value", "") for entry in root.iterfind(".//testsuite/properties/*")}
    known = {name.removeprefix(PROPERTY): text for name, text in properties.items() if name.startswith(PROPERTY)}
    return {"date": date, **known}
