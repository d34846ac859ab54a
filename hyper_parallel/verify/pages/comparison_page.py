"""The page of two runs side by side. It shows what the comparison contains and computes no verdict of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyper_parallel.verify.pages.render import render
from hyper_parallel.verify.pages.tables import Cell, Column, Value, table

if TYPE_CHECKING:
    from markupsafe import Markup

    from hyper_parallel.verify.run_comparison import Comparison

__all__ = ["comparison_page"]

_KINDS = {"worse": "bad", "better": "good", "other": ""}
_TALL = 20


def comparison_page(comparison: Comparison) -> str:
    """Return a document: the verdict, where both reports come from, and every value that differs."""
    rows: list[list[Value]] = [
        [change.what, Cell(change.verdict, kind=_KINDS[change.verdict]), change.before, change.after]
        for change in comparison.changes
    ]
    text = f"Values that differ, what got worse first; {comparison.equal} are equal"
    heads: list[Column | str] = ["value", Column("verdict", choice=True), "first run", "second run"]
    return render(
        "comparison.html",
        title="Two runs side by side",
        footer="Written by hyper-parallel compare BEFORE AFTER --html FILE",
        good=comparison.ok,
        verdict=f"{len(comparison.worse)} worse, {len(comparison.changes)} changed, {comparison.equal} equal",
        runs=_runs(comparison),
        changes=table(text, heads, rows, search=True, tall=len(rows) > _TALL, empty="nothing differs"),
    )


def _runs(comparison: Comparison) -> Markup:
    first, second = comparison.headers
    names = [name for name in dict.fromkeys([*first, *second]) if name != "versions"]
    rows: list[list[Value]] = [[name, str(first.get(name, "")), str(second.get(name, ""))] for name in names]
    versions = [dict(header.get("versions", {})) for header in comparison.headers]
    rows += [[name, *(str(known.get(name, "")) for known in versions)] for name in {**versions[0], **versions[1]}]
    return table("Where both reports come from", ["", "first run", "second run"], rows, empty="no report has a header")
