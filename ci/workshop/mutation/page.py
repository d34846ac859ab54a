"""The page on the power of the verifier: which changed rules it noticed, and which it did not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel.verify.pages.charts import bar
from hyper_parallel.verify.pages.tables import Cell, Column, Value, code, table
from hyper_parallel.verify.report_files import read_json
from workshop.pages import render

if TYPE_CHECKING:
    from markupsafe import Markup

__all__ = ["mutation_page", "read_mutation"]

_COUNTS = ("mutants", "killed", "equivalent", "survived")
_NEEDED = (*_COUNTS, "score", "kinds", "operators", "survivors", "equivalents")


def read_mutation(path: Path) -> dict[str, Any]:
    """Return a report on the verifier's power.

    Raises:
        ValueError: the file cannot be read, or another version wrote it.
    """
    return read_json(path, _NEEDED, "python ci/workshop mutants")


def mutation_page(report: Mapping[str, Any]) -> str:
    """Return a document over one report; its keys are in ``verify/ops/README.md``."""
    verdict = f"{report['killed']} of {_meant(report)} changed rules noticed"
    if report["survived"]:
        verdict += f"; {report['survived']} survived"
    return render(
        "mutation.html",
        title="Power of the verifier",
        footer="Written from reports/mutation.json",
        good=bool(_meant(report)) and not report["survived"],
        verdict=verdict,
        score=report["score"],
        facts=_facts(report),
        tables={
            "Survivors": _survivors(report),
            "Kinds of change": _counted("Mutants per kind of change", "kind", report["kinds"]),
            "Operators": _counted("Mutants per operator", "operator", report["operators"], tall=True),
            "Equivalent mutants, and why": _equivalents(report),
        },
    )


def _meant(counts: Mapping[str, Any]) -> int:
    """Return the number of mutants that are not equivalent, and so had to be noticed."""
    mutants: int = counts["mutants"] - counts["equivalent"]
    return mutants


def _facts(report: Mapping[str, Any]) -> dict[str, str]:
    names = {
        "platform": "framework",
        "generated": "generated",
        "wanted": "asked for",
        "seed": "seed",
        "seconds": "time",
    }
    facts = {name: str(report[key]) for key, name in names.items() if key in report}
    if isinstance(report.get("seconds"), (int, float)):
        facts["time"] = f"{report['seconds']:.0f} s"
    return facts


def _survivors(report: Mapping[str, Any]) -> Markup:
    heads: list[Column | str] = [
        "operator",
        Column("kind", choice=True),
        "change",
        Column("full sweep", choice=True, hint="whether the full sweep, unlike the quick one, notices it"),
    ]
    rows: list[list[Value]] = [
        [code(mutant["op"]), mutant["kind"], mutant["change"],
         Cell(mutant["full"], kind="warn" if mutant["full"] == "killed" else "bad")]
        for mutant in report["survivors"]
    ]  # fmt: skip
    return table("Changes that were not noticed", heads, rows, search=True, empty="none")


def _equivalents(report: Mapping[str, Any]) -> Markup:
    rows: list[list[Value]] = [
        [code(mutant["op"]), mutant["kind"], mutant["change"], mutant["reason"]] for mutant in report["equivalents"]
    ]
    heads: list[Column | str] = ["operator", Column("kind", choice=True), "change", "reason"]
    text = "Changes that change nothing"
    return table(text, heads, rows, search=True, tall=True, empty="none")


def _counted(caption: str, what: str, counts: Mapping[str, Mapping[str, int]], *, tall: bool = False) -> Markup:
    heads: list[Column | str] = [what, *(Column(name, number=True) for name in _COUNTS), "noticed"]
    rows = [_count(code(name) if tall else name, mutants) for name, mutants in counts.items()]
    return table(caption, heads, rows, search=tall, tall=tall, empty="none")


def _count(head: Value, counts: Mapping[str, int]) -> list[Value]:
    meant = _meant(counts)
    share = counts["killed"] / meant if meant else 0.0
    return [
        head,
        counts["mutants"],
        counts["killed"],
        counts["equivalent"],
        Cell(counts["survived"], kind="bad" if counts["survived"] else ""),
        Cell(bar(share, f"{counts['killed']} of {meant}"), key=share) if meant else Cell("n/a", key="", kind="quiet"),
    ]
