"""The page of `explain`: ranking of plans, memory, times, pictures of the mesh and of the shards, collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.verify.explanation import Explanation, duration
from hyper_parallel.verify.pages.charts import bar
from hyper_parallel.verify.pages.meshes import layout_svg, mesh_svg
from hyper_parallel.verify.pages.render import render
from hyper_parallel.verify.pages.tables import Cell, Column, Value, size, size_words, table
from hyper_parallel.verify.repeated_layers import folded

if TYPE_CHECKING:
    from markupsafe import Markup

    from hyper_parallel.core.dtensor.layout import Layout

__all__ = ["explain_page"]

_TALL = 20
"""Number of rows above which a table has its own scroll bar."""

_PICTURES = 12
"""Maximum number of layouts that are drawn; the table of parameters lists all of them."""


def explain_page(explanations: Sequence[Explanation], failed: Sequence[str] = ()) -> str:
    """Return a page for one or several plans.

    Args:
        explanations: explanations of the plans, fastest communication first.
        failed: plans that could not be explained, in words.
    """
    wrong = sum(bool(each.wrong) for each in explanations)
    return render(
        "explain.html",
        title="Explained plans",
        footer="Written by hyper-parallel explain --html FILE",
        good=not wrong and not failed,
        verdict=f"{len(explanations) - wrong} of {len(explanations) + len(failed)} plans pass every check",
        failed=failed,
        ranking=_ranking(explanations) if len(explanations) > 1 else "",
        plans=[_plan(each) for each in explanations],
    )


def _ranking(explanations: Sequence[Explanation]) -> Markup:
    heads: list[Column | str] = [
        "plan", Column("framework", choice=True), Column("time", number=True), Column("received", number=True),
        Column("collectives", number=True), Column("size on a rank", number=True),
    ]  # fmt: skip
    rows: list[list[Value]] = [
        [each.plan, each.platform, _time(each.seconds), size(each.bytes), sum(row.count for row in each.traffic),
         size(each.memory.total)]
        for each in explanations
    ]  # fmt: skip
    return table("Plans by the time of their collectives in a step", heads, rows)


def _plan(each: Explanation) -> dict[str, Any]:
    shape, names = tuple(each.axes.values()), tuple(each.axes)
    return {
        "title": f"{each.name} on {each.platform}, {each.mesh}",
        "good": not each.wrong,
        "lines": [*each.wrong, *each.checked, *each.notes, *each.empty_shards(), *each.unpriced()],
        "proofs": _proofs(each),
        "mesh": mesh_svg(DeviceMesh.abstract("cpu", shape, tuple(range(math.prod(shape))), names)),
        "mesh_text": each.mesh,
        "memory": _memory(each),
        "axes": _axes(each),
        "parameters": _parameters(each),
        "pictures": _pictures(each),
        "collectives": _collectives(each),
    }


def _proofs(each: Explanation) -> Markup | None:
    """Return a table of the placements (rows of rules) that are not proven; its caption has the calls by level."""
    if each.proofs is None:
        return None
    rows: list[list[Value]] = [[level, op, row] for level, op, row in each.proofs.rows]
    heads: list[Column | str] = [Column("level", choice=True), "operator", "row"]
    return table(each.proofs.line(), heads, rows, tall=len(rows) > _TALL, empty="every row is proven")


def _memory(each: Explanation) -> Markup:
    memory = each.memory
    kinds = {"weights": memory.weights, "gradients": memory.gradients, "optimizer": memory.optimizer}
    if memory.activations is not None:
        kinds["kept for backward"] = memory.activations
    most = max(*kinds.values(), 1)
    rows: list[list[Value]] = [
        [name, size(count), Cell(bar(count / most, size_words(count)), key=count)] for name, count in kinds.items()
    ]
    text = f"Memory of a rank: {size_words(memory.total)}"
    return table(text, ["for", Column("size", number=True), "share of the largest"], rows)


def _axes(each: Explanation) -> Markup:
    heads: list[Column | str] = [
        "over", "a link of", Column("ranks", number=True), Column("collectives", number=True),
        Column("received", number=True), Column("time", number=True),
    ]  # fmt: skip
    rows: list[list[Value]] = [
        [", ".join(row.axes) or "other ranks", each.link_words(row.axes), row.ranks, row.count, size(row.bytes),
         _time(row.seconds)]
        for row in each.over_axes()
    ]  # fmt: skip
    text = f"Time of the collectives of a step, one after the other: {duration(each.seconds)}"
    return table(text, heads, rows, empty="no collectives")


def _parameters(each: Explanation) -> Markup:
    heads: list[Column | str] = [
        "parameter", Column("layout", choice=True), Column("layers", number=True),
        Column("size on a rank", number=True), Column("of", number=True),
    ]  # fmt: skip
    rows: list[list[Value]] = [
        [fold.path, each.layout_text(fold.rows[0]), len(fold.rows), size(sum(map(each.local_bytes, fold.rows))),
         size(sum(map(each.whole_bytes, fold.rows)))]
        for fold in folded((row.path, each.layout_text(row), row) for row in each.parameters)
    ]  # fmt: skip
    return table("Parameters, repeated layers as one", heads, rows, search=True, tall=len(rows) > _TALL)


def _pictures(each: Explanation) -> list[tuple[Markup, str]]:
    """Return pictures of the sharded layouts with their parameters."""
    groups: dict[Layout, list[Any]] = {}
    for parameter in each.parameters:
        layout = parameter.layout
        if layout is not None and not layout.is_replicated:
            groups.setdefault(layout, []).append(parameter)
    pictures = []
    for layout, rows in list(groups.items())[:_PICTURES]:
        paths = ", ".join(fold.path for fold in folded((row.path, 0, row) for row in rows))
        pictures.append((layout_svg(layout), f"{paths}: {layout.notation()}"))
    return pictures


def _collectives(each: Explanation) -> Markup:
    heads: list[Column | str] = [
        "module", Column("phase", choice=True), Column("collective", choice=True), Column("over", choice=True),
        Column("count", number=True), Column("received", number=True), Column("implicit", number=True),
    ]  # fmt: skip
    rows: list[list[Value]] = [
        [row.module or "(model)", row.phase, row.collective, ", ".join(row.axes), row.count, size(row.bytes),
         row.implicit]
        for row in each.folded_traffic()
    ]  # fmt: skip
    text = "Collectives of one training step, received by the worst rank"
    return table(text, heads, rows, search=True, tall=len(rows) > _TALL, empty="no collectives")


def _time(seconds: float | None) -> Cell:
    return Cell(duration(seconds), key=1e308 if seconds is None else seconds)
