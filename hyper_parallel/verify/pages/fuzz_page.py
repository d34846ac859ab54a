"""The page of a fuzz run: programs by outcome, why programs were refused, and every finding with its program."""

from __future__ import annotations

from markupsafe import Markup

from hyper_parallel.verify.fuzz.outcome import FINDINGS, OUTCOMES
from hyper_parallel.verify.fuzz.report import Finding, FuzzReport
from hyper_parallel.verify.pages.render import render
from hyper_parallel.verify.pages.tables import Cell, Column, Value, code, table

__all__ = ["fuzz_page"]

_MOST_CALLS = 500

_FINDINGS: tuple[Column | str, ...] = (
    Column("kind", choice=True), Column("framework", choice=True), "what is wrong", "calls",
    Column("differentiated", choice=True), Column("programs alike", number=True), Column("seed", number=True),
    Column("program", number=True), Column("by itself", choice=True), "reproducer",
)  # fmt: skip


def fuzz_page(report: FuzzReport) -> str:
    """Return a document over a run."""
    return render(
        "fuzz.html",
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
        tables={
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
