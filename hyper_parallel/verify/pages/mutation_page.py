"""The power of the verifier: which changed rules it noticed, and which it did not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyper_parallel.verify.pages.charts import bar
from hyper_parallel.verify.pages.document import page
from hyper_parallel.verify.pages.markup import Html, escape
from hyper_parallel.verify.pages.tables import Cell, Column, Value, table
from hyper_parallel.verify.report_files import read_json

__all__ = ["mutation_page", "read_mutation"]

_COUNTS = ("mutants", "killed", "equivalent", "survived")
_NEEDED = (*_COUNTS, "score", "kinds", "operators", "survivors", "equivalents")

_INTRODUCTION = (
    "<p>Rules, or the library's own code, were changed on purpose, one slip each, and the quick sweep, or the trials "
    "of that code, had to notice. <em>Killed</em>: they did. <em>Equivalent</em>: a machine found that the change "
    "claims nothing that the rule does not claim too, or a table of the library says why it changes nothing. "
    '<span class="bad">Survived</span>: neither; each is listed.</p>'
)


def read_mutation(path: Path) -> dict[str, Any]:
    """A report on the verifier's power.

    Raises:
        ValueError: it cannot be read, or another version wrote it.
    """
    return read_json(path, _NEEDED, "hyper-parallel verify mutants")


def mutation_page(report: Mapping[str, Any]) -> str:
    """A document over one report; its keys are in ``verify/ops/README.md``."""
    parts = [_verdict(report), _INTRODUCTION, _facts(report)]
    parts.append("<h2>Survivors</h2>" + str(_survivors(report)))
    parts.append("<h2>Kinds of change</h2>" + str(_counted("Mutants per kind of change", "kind", report["kinds"])))
    per_operator = _counted("Mutants per operator", "operator", report["operators"], tall=True)
    parts.append("<h2>Operators</h2>" + str(per_operator))
    parts.append("<h2>Equivalent mutants, and why</h2>" + str(_equivalents(report)))
    return page("Power of the verifier", "\n".join(parts), footer="Written from reports/mutation.json")


def _verdict(report: Mapping[str, Any]) -> str:
    meant = report["mutants"] - report["equivalent"]
    good = bool(meant) and not report["survived"]
    said = f"{report['killed']} of {meant} changed rules noticed"
    if report["survived"]:
        said += f"; {report['survived']} survived"
    return (
        f'<div class="verdict {"good" if good else "bad"}"><strong>{escape(said)}</strong>'
        f"<p>score {report['score']:.4f}, equivalent mutants left out</p></div>"
    )


def _facts(report: Mapping[str, Any]) -> str:
    known = {
        "platform": "framework",
        "generated": "generated",
        "wanted": "asked for",
        "seed": "seed",
        "seconds": "time",
    }
    shown = {name: report[key] for key, name in known.items() if key in report}
    if isinstance(shown.get("time"), (int, float)):
        shown["time"] = f"{shown['time']:.0f} s"
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in shown.items())
    return f'<dl class="facts">{items}</dl>'


def _survivors(report: Mapping[str, Any]) -> Html:
    heads: list[Column | str] = [
        "operator",
        Column("kind", choice=True),
        "change",
        Column("full sweep", choice=True, hint="whether the full sweep, unlike the quick one, notices it"),
    ]
    rows: list[list[Value]] = [
        [_code(one["op"]), one["kind"], one["change"],
         Cell(one["full"], kind="warn" if one["full"] == "killed" else "bad")]
        for one in report["survivors"]
    ]  # fmt: skip
    return table("Changes that were not noticed", heads, rows, search=True, empty="none")


def _equivalents(report: Mapping[str, Any]) -> Html:
    rows: list[list[Value]] = [
        [_code(one["op"]), one["kind"], one["change"], one["reason"]] for one in report["equivalents"]
    ]
    heads: list[Column | str] = ["operator", Column("kind", choice=True), "change", "reason"]
    text = "Changes that change nothing"
    return table(text, heads, rows, search=True, tall=True, empty="none")


def _counted(caption: str, what: str, counts: Mapping[str, Mapping[str, int]], *, tall: bool = False) -> Html:
    heads: list[Column | str] = [what, *(Column(name, number=True) for name in _COUNTS), "noticed"]
    rows = [_count(name, one, code=tall) for name, one in counts.items()]
    return table(caption, heads, rows, search=tall, tall=tall, empty="none")


def _count(name: str, one: Mapping[str, int], *, code: bool) -> list[Value]:
    meant = one["mutants"] - one["equivalent"]
    share = one["killed"] / meant if meant else 0.0
    noticed = Cell(bar(share, f"{one['killed']} of {meant}"), key=share) if meant else Cell("n/a", key="", kind="quiet")
    return [
        _code(name) if code else name,
        one["mutants"],
        one["killed"],
        one["equivalent"],
        Cell(one["survived"], kind="bad" if one["survived"] else ""),
        noticed,
    ]


def _code(name: str) -> Cell:
    return Cell(Html(f"<code>{escape(name)}</code>"), key=name)
