"""Pages of all reports; pages with only a verdict, facts and tables are defined here. No page computes a verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup

from hyper_parallel.verify.bugs.results import BugResult, CorpusReport
from hyper_parallel.verify.fuzz.program import FINDINGS, OUTCOMES
from hyper_parallel.verify.fuzz.report import Finding, FuzzReport
from hyper_parallel.verify.model_report import ModelReport
from hyper_parallel.verify.ops.report import SweepReport
from hyper_parallel.verify.pages.model_page import model_page
from hyper_parallel.verify.pages.operators_page import operators_page
from hyper_parallel.verify.pages.program_page import program_page
from hyper_parallel.verify.pages.render import render
from hyper_parallel.verify.pages.tables import Cell, Column, Value, code, table
from hyper_parallel.verify.program.report import ProgramReport

if TYPE_CHECKING:
    from hyper_parallel.verify.report import Report
    from hyper_parallel.verify.run_comparison import Comparison

__all__ = ["bugs_page", "comparison_page", "fuzz_page", "page_of"]


def page_of(report: Report) -> str:
    """Return the HTML page of a report, as a complete document.

    Args:
        report: report of ``verify_program`` or ``verify_model``, or of the commands ``verify ops``, ``verify bugs``,
            ``fuzz``.

    Raises:
        TypeError: reports of this class have no page.
    """
    if isinstance(report, ProgramReport):
        return program_page(report)
    if isinstance(report, ModelReport):
        return model_page([report])
    if isinstance(report, SweepReport):
        return operators_page([report.json()])
    if isinstance(report, FuzzReport):
        return fuzz_page(report)
    if isinstance(report, CorpusReport):
        return bugs_page(report)
    msg = f"{type(report).__name__} has no page; its text is report.text()"
    raise TypeError(msg)


# -- the bug corpus ----------------------------------------------------------------------------------------------------

_BUGS: tuple[Column | str, ...] = (
    "program", Column("framework", choice=True), "report", "what goes wrong", Column("broken form", choice=True),
    "first wrong value", Column("tensor", choice=True), Column("cause found", choice=True),
    Column("cause", choice=True), "evidence", Column("fixed form", choice=True),
    Column("values compared", number=True), Column("seconds", number=True),
)  # fmt: skip


def bugs_page(report: CorpusReport) -> str:
    """Return a page for a run of the corpus."""
    return render(
        "report.html",
        title="Bug corpus",
        footer="Written by hyper-parallel verify bugs --html FILE",
        good=report.ok,
        verdict=report.text(),
        intro=(
            "Each program trains once on a single device and once on simulated ranks, with its bug and without. "
            "Caught: the broken form was found to differ. Passes: every value of the fixed form was compared and is "
            "equal. The tensor is right if the value that is named first is the one that the bug touches first, the "
            "cause if it has the documented class."
        ),
        sections={"": _bugs(report)},
    )


def _bugs(report: CorpusReport) -> Markup:
    rows = [_bug(result) for result in report.results]
    text = "Documented bugs as programs, broken and fixed, and the harness's verdict on both forms"
    return table(text, _BUGS, rows, search=True, tall=True, empty="none was run")


def _bug(result: BugResult) -> list[Value]:
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


# -- random programs ---------------------------------------------------------------------------------------------------

_MOST_CALLS = 500

_FINDINGS: tuple[Column | str, ...] = (
    Column("kind", choice=True), Column("framework", choice=True), "what is wrong", "calls",
    Column("differentiated", choice=True), Column("programs alike", number=True), Column("seed", number=True),
    Column("program", number=True), Column("by itself", choice=True), "reproducer",
)  # fmt: skip


def fuzz_page(report: FuzzReport) -> str:
    """Return a page for a fuzz run."""
    return render(
        "report.html",
        title="Random programs",
        footer="Written by hyper-parallel fuzz --html FILE",
        good=report.ok,
        verdict=report.text().split("\n")[0] if report.checked else "nothing was checked",
        facts={
            "seed": str(report.seed),
            "programs": str(report.programs),
            "compared to the bit": str(report.exact),
            "results compared": str(report.compared),
            "gradients among them": str(report.gradients),
            "time": f"{report.seconds:.0f} s",
        },
        intro=(
            "Each program ran on simulated ranks and on a single device. Refused: by an error of this library. "
            "Accepted: only the single device refuses it, so there is nothing to compare with. Wrong, internal error "
            "and hang are findings; their programs were made small."
        ),
        sections={
            "Findings": _findings(report),
            "Outcomes": _outcomes(report),
            "Why programs were refused": _counted("Refused programs by message", "message", dict(report.refusals)),
            "Worlds": _counted("Programs per number of ranks", "ranks", dict(report.worlds)),
            "Calls": _counted("Calls in all programs", "call", dict(report.steps.most_common(_MOST_CALLS))),
        },
    )


def _findings(report: FuzzReport) -> Markup:
    rows = [_finding(finding) for finding in report.findings]
    return table("Programs that are wrong, made small", _FINDINGS, rows, search=True, empty="none")


def _finding(finding: Finding) -> list[Value]:
    source = Markup("<pre>{}</pre>").format(finding.source) if finding.source else "needs the programs before it"
    return [
        Cell(finding.kind, kind="bad"), finding.framework, finding.text, finding.calls, finding.mode, finding.alike,
        finding.seed, finding.number, Cell("fails", kind="bad") if finding.shown else Cell("not shown", kind="warn"),
        source,
    ]  # fmt: skip


def _outcomes(report: FuzzReport) -> Markup:
    columns: list[Column | str] = ["framework", *(Column(kind, number=True) for kind in OUTCOMES)]
    rows: list[list[Value]] = [
        [
            framework,
            *(Cell(counts[kind], kind="bad" if kind in FINDINGS and counts[kind] else "") for kind in OUTCOMES),
        ]
        for framework, counts in report.outcomes.items()
    ]
    return table("Programs by outcome", columns, rows, empty="none was run")


def _counted(caption: str, what: str, counts: dict[str, int]) -> Markup:
    rows: list[list[Value]] = [[code(name), count] for name, count in counts.items()]
    columns: list[Column | str] = [what, Column("programs" if what != "call" else "times", number=True)]
    return table(caption, columns, rows, search=len(rows) > 20, tall=len(rows) > 20, empty="none")


# -- two runs side by side ---------------------------------------------------------------------------------------------

_KINDS = {"worse": "bad", "better": "good", "other": ""}
_TALL = 20


def comparison_page(comparison: Comparison) -> str:
    """Return a page with the verdict, the origin of both reports, and every value that differs."""
    rows: list[list[Value]] = [
        [change.what, Cell(change.verdict, kind=_KINDS[change.verdict]), change.before, change.after]
        for change in comparison.changes
    ]
    text = f"Values that differ, what got worse first; {comparison.equal} are equal"
    heads: list[Column | str] = ["value", Column("verdict", choice=True), "first run", "second run"]
    return render(
        "report.html",
        title="Two runs side by side",
        footer="Written by hyper-parallel compare BEFORE AFTER --html FILE",
        good=comparison.ok,
        verdict=f"{len(comparison.worse)} worse, {len(comparison.changes)} changed, {comparison.equal} equal",
        sections={
            "": table(text, heads, rows, search=True, tall=len(rows) > _TALL, empty="nothing differs"),
            "Runs": _runs(comparison),
        },
    )


def _runs(comparison: Comparison) -> Markup:
    first, second = comparison.headers
    names = [name for name in dict.fromkeys([*first, *second]) if name != "versions"]
    rows: list[list[Value]] = [[name, str(first.get(name, "")), str(second.get(name, ""))] for name in names]
    versions = [dict(header.get("versions", {})) for header in comparison.headers]
    rows += [[name, *(str(known.get(name, "")) for known in versions)] for name in {**versions[0], **versions[1]}]
    return table("Where both reports come from", ["", "first run", "second run"], rows, empty="no report has a header")
