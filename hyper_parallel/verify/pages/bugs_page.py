"""The page of the bug corpus: what was caught, which tensor was named and which cause, and on what evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyper_parallel.verify.bugs.results import BugResult, CorpusReport
from hyper_parallel.verify.pages.render import render
from hyper_parallel.verify.pages.tables import Cell, Column, Value, code, table

if TYPE_CHECKING:
    from markupsafe import Markup

__all__ = ["bugs_page"]

_BUGS: tuple[Column | str, ...] = (
    "program", Column("framework", choice=True), "report", "what goes wrong", Column("broken form", choice=True),
    "first wrong value", Column("tensor", choice=True), Column("cause found", choice=True),
    Column("cause", choice=True), "evidence", Column("fixed form", choice=True),
    Column("values compared", number=True), Column("seconds", number=True),
)  # fmt: skip


def bugs_page(report: CorpusReport) -> str:
    """Return a document over a run of the corpus."""
    return render(
        "bugs.html",
        title="Bug corpus",
        footer="Written by hyper-parallel verify bugs --html FILE",
        good=report.ok,
        verdict=report.text(),
        table=_table(report),
    )


def _table(report: CorpusReport) -> Markup:
    rows = [_row(result) for result in report.results]
    text = "Documented bugs as programs, broken and fixed, and the harness's verdict on both forms"
    return table(text, _BUGS, rows, search=True, tall=True, empty="none was run")


def _row(result: BugResult) -> list[Value]:
    bug, broken, fixed = result.bug, result.broken, result.fixed
    return [
        code(bug.name), bug.framework, bug.source, bug.sentence,
        Cell("caught", kind="good") if result.caught else Cell("missed", kind="bad"),
        broken.error or f"{broken.kind} {broken.name}",
        _right(right=result.tensor_right, documented=f"{bug.kind} {bug.tensor}"),
        broken.cause,
        _right(right=result.cause_right, documented=bug.cause),
        broken.evidence,
        Cell("passes", kind="good") if result.passed else Cell(f"false alarm: {fixed.text()}", "false alarm", "bad"),
        fixed.checked,
        Cell(f"{result.seconds:.1f}", key=result.seconds),
    ]  # fmt: skip


def _right(*, right: bool, documented: str) -> Cell:
    return Cell("right", kind="good") if right else Cell(f"documented: {documented}", "other", "warn")
