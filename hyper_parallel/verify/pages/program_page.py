"""The page of a program's verification: the first difference, all others, and the compared values."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from hyper_parallel.verify.engine.causes import CAUSES
from hyper_parallel.verify.engine.verdict import Difference, UnequalReplicas, Verdict
from hyper_parallel.verify.engine.wording import plural, ranks_words, value_words, when_words
from hyper_parallel.verify.pages.render import render
from hyper_parallel.verify.pages.sources import CallSites
from hyper_parallel.verify.pages.tables import Cell, Column, Text, Value, table
from hyper_parallel.verify.program.report import UNPLACED, HardenedCase, ProgramReport

if TYPE_CHECKING:
    from markupsafe import Markup

__all__ = ["program_page"]

_COUNTS: tuple[Column | str, ...] = (
    "kind of value", Column("compared", number=True, hint="one value on three ranks counts three times"),
    Column("different", number=True), "result",
)  # fmt: skip

_DIFFERENCES: tuple[Column | str, ...] = (
    "value", Column("kind", choice=True), "when", Column("ranks", choice=True), Column("error", number=True),
    Column("allowed", number=True), Column("cause", choice=True), "called at",
)  # fmt: skip

_TALL = 20
"""Number of rows above which a table has its own scroll bar."""


def program_page(report: ProgramReport) -> str:
    """Return a page for the verification of a program.

    Args:
        report: report of ``verify_program``.
    """
    sites = CallSites()
    calls = [sites.linked(line) for line in report.calls]
    cases = _cases(report, sites)
    return render(
        "program.html",
        title="Program verification",
        footer="Written by hyper-parallel verify program --html FILE",
        good=report.ok,
        state=_state(report),
        run=report.heading(),
        rounding=report.rounding,
        refused=report.refusals(),
        calls=calls,
        failure=report.failure,
        failure_cause=f"{report.kind}: {CAUSES[report.kind]}" if report.kind else "",
        cases=cases,
        sites=sites.shown(),
    )


_TITLES = {
    "upcast": "in a wider dtype",
    "accumulate": "to one batch without micro-batches",
    "logged": "in logged numbers",
    "resume": "when started again",
}
"""Explanations of cases by their title."""


def _state(report: ProgramReport) -> str:
    """Return the overall verdict in one line."""
    if report.failure:
        return report.failed()
    if report.verdict is None:
        return "NOT VERIFIED"
    if report.verdict.equal and report.verdict.unplaced:
        return UNPLACED
    if report.verdict.equal and not report.equal:
        failed = next((case for case in report.hardened if not case.ok), None)
        return f"NOT EQUAL {_TITLES.get(failed.title if failed else '', 'in a harder case')}"
    if report.refused and report.equal:
        return "INCONCLUSIVE: all values match, but this case cannot expose some bugs"
    return f"INCONCLUSIVE: {report.inconclusive}" if report.inconclusive else report.verdict.headline()


def _cases(report: ProgramReport, sites: CallSites) -> list[dict[str, Any]]:
    """Return the requested case, and those that ``--harden`` added."""
    own = (
        [] if report.verdict is None else [{"title": "", "changes": [], "failure": "", **_case(report.verdict, sites)}]
    )
    return [*own, *(_hardened(case, sites) for case in report.hardened)]


def _hardened(case: HardenedCase, sites: CallSites) -> dict[str, Any]:
    shown = {
        "title": _TITLES.get(case.title, "in a harder case").capitalize(),
        "changes": case.words,
        "good": case.ok,
        "failure": case.failure,
    }
    if case.verdict is None:
        return {**shown, "state": f"not run: {case.skipped}" if case.skipped else case.failed()}
    return {**_case(case.verdict, sites), **shown}


def _case(verdict: Verdict, sites: CallSites) -> dict[str, Any]:
    return {
        "good": verdict.equal and not verdict.unplaced,
        "state": verdict.headline(),
        "first": None if verdict.first is None else _first(verdict.first, sites),
        "counts": _counts(verdict),
        "differences": _differences(verdict.differences, sites),
        "replicas": [_replicas(replicas) for replicas in verdict.replicas],
        "lists": {
            "Incomplete": verdict.incomplete,
            "Placement unknown": verdict.unplaced,
            "Not compared, and why": verdict.skipped,
            "Blind spots of this case": verdict.blind,
            "Notes": verdict.notes,
        },
        "settings": dict(verdict.settings),
    }


def _replicas(replicas: UnequalReplicas) -> str:
    when = when_words(replicas.kind, replicas.step)
    return f"{value_words(replicas.kind, replicas.name)}, {when}, on {ranks_words(replicas.ranks)}"


def _first(first: Difference, sites: CallSites) -> dict[str, Text]:
    """Return the facts about the first difference, by name."""
    facts: dict[str, Text] = {
        "value": value_words(first.kind, first.name),
        "when": when_words(first.kind, first.step, first.call),
        "where": ranks_words(first.ranks),
        "module": first.module,
        "numbers": first.why,
        "placement": first.placement,
        "called at": sites.linked(first.site),
    }
    if first.cause is not None:
        facts["cause"] = str(first.cause)
        facts["evidence"] = first.cause.evidence
    return facts


def _counts(verdict: Verdict) -> Markup:
    different: Counter[str] = Counter()
    for difference in verdict.differences:
        different[difference.kind] += len(difference.ranks)
    rows: list[list[Value]] = [
        [
            plural(kind), count, different[kind],
            Cell("different", kind="bad") if different[kind] else Cell("equal", kind="good"),
        ]
        for kind, count in verdict.counts.items()
    ]  # fmt: skip
    return table("What was compared with one device", _COUNTS, rows, empty="nothing was compared")


def _differences(differences: list[Difference], sites: CallSites) -> Markup | str:
    if not differences:
        return ""
    rows: list[list[Value]] = [
        [
            value_words(difference.kind, difference.name), difference.kind,
            Cell(when_words(difference.kind, difference.step, difference.call), key=number),
            ranks_words(difference.ranks), _number(difference.error), _number(difference.bound),
            "" if difference.cause is None else difference.cause.kind, sites.cell(difference.site),
        ]
        for number, difference in enumerate(differences)
    ]  # fmt: skip
    caption = "Every difference in the order of execution; errors are relative to the value's largest magnitude"
    return table(caption, _DIFFERENCES, rows, search=len(rows) > 1, tall=len(rows) > _TALL)


def _number(number: float) -> Cell:
    return Cell(f"{number:.2g}", key=number) if math.isfinite(number) else Cell("not a number", key="")
