"""The page of one night: suites by devices and frameworks, what failed and was skipped, what is new."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from markupsafe import Markup

from hyper_parallel.verify.pages.tables import Cell, Column, Value, code, number, table
from workshop.pages import render

if TYPE_CHECKING:
    from workshop.nights.changes import NightChanges
    from workshop.nights.reports import CommandReport, SuiteReport

__all__ = ["night_page"]

_KINDS = {"worse": "bad", "better": "good", "other": "", "equal": ""}
_TALL = 20
_VERSION = re.compile(r"(?:^|/)(?P<environment>py\d+(?:-[a-z]+\d+)+)/(?P<suite>[^/]+)$")


def night_page(night: NightChanges, logs: Mapping[tuple[str, str], str], nights: str = "") -> str:
    """Return a document.

    Args:
        night: the reports and the history.
        logs: addresses of logs, relative to the page, by suite and test.
        nights: address of the page of all nights, relative to this one; empty if there is none.
    """
    header = night.history.last.header
    return render(
        "night.html",
        title="Report of a night",
        footer="Written by python ci/workshop trend HISTORY --add REPORT --night FILE",
        good=night.ok,
        verdict=night.summary(),
        nights=nights,
        facts={name: str(text) for name, text in header.items() if name != "versions"},
        versions={str(name): str(version) for name, version in dict(header.get("versions", {})).items()},
        suites=_suites(night),
        by_version=_by_version(night),
        failures=_failures(night, logs),
        skipped=_skipped(night),
        commands=_commands(night),
        runs=_runs(night),
    )


def _device(suite: SuiteReport) -> str:
    device, devices = suite.facts.get("device", "unknown"), suite.facts.get("devices", "")
    return f"{devices} x {device}" if devices else device


def _frameworks(suite: SuiteReport) -> str:
    return suite.facts.get("frameworks", "unknown")


def _suites(night: NightChanges) -> Markup:
    rows: list[list[Value]] = [_suite(night, suite) for suite in night.reports.suites]
    rows += [
        [code(name), "", "", 0, 0, 0, 0, Cell(f"no report; {number} tests ran the night before", kind="bad")]
        for name, number in night.absent().items()
    ]
    heads: list[Column | str] = [
        "suite", Column("devices", choice=True), Column("frameworks", choice=True), Column("ran", number=True),
        Column("passed", number=True), Column("failed", number=True), Column("skipped", number=True),
        "since the night before",
    ]  # fmt: skip
    return table("Every suite of tests, with the devices and frameworks that it ran on", heads, rows, search=True,
                 tall=len(rows) > _TALL, empty="no suite has a report")  # fmt: skip


def _suite(night: NightChanges, suite: SuiteReport) -> list[Value]:
    new, fewer = night.new_failures(suite), night.fewer_tests(suite)
    skips = sum(night.new_skips(suite, reason) for reason in suite.skipped)
    counts = ((new, "new failures"), (fewer, "tests fewer"), (skips, "more skipped"))
    parts = [f"{count} {what}" for count, what in counts if count]
    failed = len(suite.failed)
    since = Cell(", ".join(parts) or "nothing new", kind="bad" if new else "warn" if parts else "")
    return [code(suite.name), _device(suite), _frameworks(suite), suite.executed, suite.executed - failed,
            Cell(failed, kind="bad" if failed else ""), suite.number("skipped"), since]  # fmt: skip


def _by_version(night: NightChanges) -> Markup:
    """Return a row for each version of Python and the frameworks, a column for each suite: what failed, since when."""
    found: dict[str, dict[str, SuiteReport]] = {}
    for suite in night.reports.suites:
        if match := _VERSION.search(suite.name):
            found.setdefault(match["environment"], {})[match["suite"]] = suite
    names = sorted({name for suites in found.values() for name in suites})
    rows: list[list[Value]] = [
        [code(environment), *(_outcome(night, suites.get(name)) for name in names)]
        for environment, suites in sorted(found.items())
    ]
    caption = "Versions of Python and the frameworks; the tests that failed are below"
    return table(caption, ["environment", *names], rows, tall=len(rows) > _TALL,
                 empty="no environment of a version has a report")  # fmt: skip


def _outcome(night: NightChanges, suite: SuiteReport | None) -> Cell:
    if suite is None:
        return Cell("no report", kind="warn")
    if not suite.failed:
        return Cell(f"{suite.executed} passed", kind="good" if suite.executed else "warn")
    since = min(night.since(suite, case) for case in suite.failed)
    return Cell(f"{len(suite.failed)} of {suite.executed} failed, since {since}", kind="bad")


def _failures(night: NightChanges, logs: Mapping[tuple[str, str], str]) -> Markup:
    rows: list[list[Value]] = []
    for suite, case, is_new in night.failures():
        address = logs.get((suite.name, case.name))
        link: Cell = Cell(f"in {suite.name}.xml")
        if address is not None:
            link = Cell(Markup('<a href="{}">log</a>').format(address), key="log")
        since = Cell("new", kind="bad") if is_new else Cell(night.since(suite, case))
        rows.append([code(case.name), code(suite.name), since, case.text, link])
    heads: list[Column | str] = ["test", Column("suite", choice=True), Column("since", choice=True), "failure",
                                 "log of its ranks"]  # fmt: skip
    return table("Tests that failed, new failures first", heads, rows, search=True, tall=len(rows) > _TALL,
                 empty="no test failed")  # fmt: skip


def _skipped(night: NightChanges) -> Markup:
    rows: list[list[Value]] = [
        [code(suite.name), _device(suite), _frameworks(suite), count, night.new_skips(suite, reason), reason]
        for suite in night.reports.suites
        for reason, count in suite.skipped.items()
    ]
    heads: list[Column | str] = [
        Column("suite", choice=True), Column("devices", choice=True), Column("frameworks", choice=True),
        Column("tests", number=True), Column("new", number=True), "reason",
    ]  # fmt: skip
    return table("Tests that were skipped, and why", heads, rows, tall=len(rows) > _TALL,
                 empty="no test was skipped")  # fmt: skip


def _commands(night: NightChanges) -> Markup:
    changes, before = night.changes(), {} if night.before is None else night.before.values
    rows: list[list[Value]] = []
    for report in night.reports.commands:
        for what, measured in report.named_values().items():
            shown: list[Value] = [str(measured.value), "", ""]  # of words, which the history does not keep
            if isinstance(measured.value, (int, float)):
                verdict = changes[what].verdict if what in changes else "equal"
                earlier = number(before[what].value if what in before else None)
                shown = [number(measured.value), earlier, Cell(verdict, kind=_KINDS[verdict])]
            rows.append([what, code(report.name), *shown])
    heads: list[Column | str] = ["value", Column("report", choice=True), Column("this night", number=True),
                                 Column("night before", number=True), Column("verdict", choice=True)]  # fmt: skip
    return table("Values in the reports of commands", heads, rows, search=True, tall=len(rows) > _TALL,
                 empty="no command has a report")  # fmt: skip


def _runs(night: NightChanges) -> Markup:
    """Return where the reports come from: those of one run with one command are one row."""
    names = ("date", "revision", "versions", "command")
    reports: list[SuiteReport | CommandReport] = [*night.reports.suites, *night.reports.commands]
    runs: dict[tuple[str, ...], list[str]] = {}
    for report in reports:
        facts = tuple(str(report.facts.get(name, "") or "unknown") for name in names)
        runs.setdefault(facts, []).append(report.name)
    rows: list[list[Value]] = [
        [code(together[0]) if len(together) == 1 else ", ".join(together), *facts] for facts, together in runs.items()
    ]
    return table("Where each report comes from", ["report", *names], rows, tall=len(rows) > _TALL)
