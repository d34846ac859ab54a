"""The page of a model verification. It shows the contents of the report and computes no verdict."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.verify.engine.checks import TensorCheck
from hyper_parallel.verify.model_report import ModelReport, Summary
from hyper_parallel.verify.pages.charts import Dot, bar, curves, dots
from hyper_parallel.verify.pages.meshes import layout_svg, mesh_svg
from hyper_parallel.verify.pages.render import render
from hyper_parallel.verify.pages.svg import responsive
from hyper_parallel.verify.pages.tables import Cell, Column, Value, size, size_words, table
from hyper_parallel.verify.pages.timeline_page import step_timeline
from hyper_parallel.verify.parameter_layouts import ParameterLayout

__all__ = ["model_page"]

_RUNS: tuple[Column | str, ...] = (
    "run", Column("framework", choice=True), "mesh", "launch", Column("result", choice=True, words=True),
    Column("tensors", number=True), Column("largest error", number=True), Column("seconds", number=True),
)  # fmt: skip

_STEPS: tuple[Column | str, ...] = (
    Column("step", number=True), Column("single device", number=True), Column("parallel", number=True),
    Column("error", number=True), Column("allowed", number=True), "result",
)  # fmt: skip

_MODULES: tuple[Column | str, ...] = (
    "module", Column("kind", choice=True), Column("result", choice=True), Column("tensors", number=True),
    Column("values", number=True), Column("largest error", number=True), Column("allowed", number=True),
    "largest error in",
)  # fmt: skip

_TRAFFIC: tuple[Column | str, ...] = (
    "module", Column("phase", choice=True), Column("collective", choice=True), Column("over", choice=True),
    Column("count", number=True), Column("received", number=True), "share of the largest",
    Column("implicit", number=True, hint="decided by the library, not by the plan"),
)  # fmt: skip

_DOTS = 40
"""Maximum number of modules in the picture; the table lists all of them."""

_TALL = 20
"""Number of rows above which a table has its own scroll bar."""

_FEW = 8
"""Maximum number of rows of a table without a search field."""

_PICTURES = 12
"""Maximum number of layouts that are drawn; the list of parameters has all of them."""

_EMPTY = Cell("", key="")


_TIMELINE = {
    "simulated": (
        "The last training step on every rank: grey is compute, coloured the wait for slower ranks, as if every rank "
        "had a processor of its own and transfers took no time"
    ),
    "processes": "The last training step on every rank: grey is compute, coloured a call into the transport",
}


def model_page(reports: Sequence[ModelReport], note: str = "") -> str:
    """Return a page for one or several runs.

    Args:
        reports: reports of the runs.
        note: remark at the top, for example that the command was interrupted.
    """
    equal = sum(report.ok for report in reports)
    several = len(reports) != 1 or bool(note)
    good = bool(reports) and equal == len(reports) and not note
    return render(
        "model.html",
        title="Model verification",
        footer="Written by hyper-parallel verify model --html FILE",
        summary={"good": good, "text": f"{equal} of {len(reports)} runs equal to one device"} if several else None,
        note=note,
        overview=_overview(reports) if len(reports) > 1 else "",
        runs=[_run(report) for report in reports],
    )


def _overview(reports: Sequence[ModelReport]) -> Markup:
    rows: list[list[Value]] = []
    for number, report in enumerate(reports):
        worst = report.worst
        rows.append([
            Cell(Markup('<a href="#run-{}">{}</a>').format(number, report.name), key=report.name),
            report.platform, report.mesh, report.launch,
            Cell(_state(report), kind="good" if report.ok else "bad"),
            sum(report.counts.values()),
            _EMPTY if worst is None else _number(worst.error),
            Cell(f"{report.seconds:.1f}", key=report.seconds),
        ])  # fmt: skip
    return table("Every run", _RUNS, rows)


def _run(report: ModelReport) -> dict[str, Any]:
    gradients, gradients_caption = _gradients(report)
    return {
        "title": f"{report.name} on {report.platform}, {report.mesh}",
        "good": report.ok,
        "state": _state(report),
        "details": _details(report),
        "error": report.error,
        "settings": _settings(report),
        "mesh": _mesh(report),
        "mesh_text": report.mesh,
        "losses": _losses(report),
        "gradients": gradients,
        "gradients_caption": gradients_caption,
        "modules": _modules(report),
        "steps": _steps(report),
        "collectives": _collectives(report),
        "timeline": step_timeline(report.timeline),
        "timeline_caption": _TIMELINE[report.launch],
        "parameters": _parameters(report),
        "skipped": report.skipped,
    }


def _state(report: ModelReport) -> str:
    if report.error:
        return "ENDED"
    if report.first is not None:
        return f"DIVERGED first in module {report.faulty_module or '(model)'}"
    return "equal" if report.ok else "NOT VERIFIED"


def _details(report: ModelReport) -> list[str]:
    """Return the report's verdict without the run's name and state, which the page shows above it."""
    if report.first is not None:
        wrong = sum(not check.ok for check in report.checks)
        return [
            str(report.first),
            *report.explanation,
            *report.plan_notes,
            f"{wrong} of {len(report.checks)} tensors differ; modules that differ stand first below.",
        ]
    _, _, verdict = report.verdict().partition(" s): ")
    return [verdict.removeprefix("equal, "), *report.plan_notes]


def _settings(report: ModelReport) -> dict[str, str]:
    return {
        "framework": f"{report.platform}, ranks are {report.launch}",
        "steps": str(report.steps),
        **report.settings,
        "allowed error": report.bound,
        **({"proofs": report.proofs.line()} if report.proofs is not None else {}),
        "time": f"{report.seconds:.1f} s",
    }


def _mesh(report: ModelReport) -> Markup | None:
    if not report.axes:
        return None
    shape, names = tuple(report.axes.values()), tuple(report.axes)
    return mesh_svg(DeviceMesh.abstract("cpu", shape, tuple(range(math.prod(shape))), names))


def _losses(report: ModelReport) -> Markup | None:
    if not report.losses:
        return None
    series = {"single device": report.losses}
    if report.parallel_losses:
        series["parallel"] = report.parallel_losses
    return responsive(lambda width: curves(f"loss per step of {report.name}", series, x="step", y="loss", width=width))


def _steps(report: ModelReport) -> Markup | str:
    if not report.losses:
        return ""
    checks = {check.step: check for check in report.checks if check.kind == "loss" and check.rank == 0}
    pairs = zip(report.losses, report.parallel_losses or [math.nan] * len(report.losses), strict=False)
    rows: list[list[Value]] = [
        [step + 1, f"{single:.9g}", f"{parallel:.9g}", *_error(checks.get(step))]
        for step, (single, parallel) in enumerate(pairs)
    ]
    return table("Loss per step, single device and parallel", _STEPS, rows, tall=len(rows) > _TALL)


def _error(check: TensorCheck | None) -> list[Value]:
    if check is None:
        return [_EMPTY, _EMPTY, Cell("not compared", kind="warn")]
    return [_number(check.error), _number(check.bound), _result(wrong=not check.ok)]


def _gradients(report: ModelReport) -> tuple[Markup | None, str]:
    """Return the picture of the largest gradient error of every module, and its caption."""
    summaries = report.summaries("gradient")
    if not summaries:
        return None, ""
    rows = [
        Dot(summary.module or "(model)", summary.worst.error, summary.worst.bound, not summary.wrong,
            str(summary.worst))
        for summary in summaries[:_DOTS]
    ]  # fmt: skip
    more = f" (the first {_DOTS} of {len(summaries)}; the table below has all)" if len(summaries) > _DOTS else ""
    caption = f"Largest difference of a module's gradients over all ranks and steps; the tick is what was allowed{more}"
    text = "gradient difference per module"
    return responsive(lambda width: dots(text, rows, x="largest gradient error of a module", width=width)), caption


def _modules(report: ModelReport) -> Markup:
    rows = [_module(summary) for summary in report.summaries()]
    text = "What was compared, per module and kind, over all ranks and steps"
    return table(text, _MODULES, rows, search=True, tall=len(rows) > _TALL, empty="nothing was compared")


def _module(summary: Summary) -> list[Value]:
    worst = summary.worst
    tensor = f"{worst.name}, {worst.when}, rank {worst.rank}"
    return [
        Cell(summary.module or "(model)", kind="bad" if summary.wrong else ""),
        summary.kind,
        _result(wrong=bool(summary.wrong), count=summary.wrong),
        summary.tensors,
        summary.values,
        _number(worst.error),
        _number(worst.bound),
        f"{tensor}: {worst.why.partition(' (error')[0]}" if worst.why else tensor,  # the error has a column of its own
    ]


def _collectives(report: ModelReport) -> Markup:
    most = max((row.bytes for row in report.traffic), default=0)
    rows: list[list[Value]] = [
        [
            row.module or "(model)", row.phase, row.collective, ", ".join(row.axes), row.count,
            size(row.bytes),
            Cell(bar(row.bytes / most if most else 0.0, size_words(row.bytes)), key=row.bytes),
            row.implicit,
        ]
        for row in report.traffic
    ]  # fmt: skip
    count, volume = sum(row.count for row in report.traffic), sum(row.bytes for row in report.traffic)
    text = (
        "Collectives of one training step, as received by the worst rank: "
        f"{count} collectives, {size_words(volume)}"
    )  # fmt: skip
    return table(text, _TRAFFIC, rows, search=len(rows) > _FEW, tall=len(rows) > _TALL, empty="no collectives")


def _parameters(report: ModelReport) -> dict[str, Any] | None:
    """Return the numbers of parameters and layouts, pictures of the sharded layouts with captions, and notes."""
    if not report.parameter_layouts:
        return None
    groups: dict[Layout, list[str]] = {}
    plain = []
    for parameter in report.parameter_layouts:
        layout = parameter.layout
        if layout is None:
            plain.append(parameter.path)
        else:
            groups.setdefault(layout, []).append(parameter.path)
    sharded = [layout for layout in groups if not layout.is_replicated]
    replicated = [path for layout, paths in groups.items() if layout.is_replicated for path in paths]
    notes = []
    if len(sharded) > _PICTURES:
        notes.append(f"{_PICTURES} of {len(sharded)} layouts are drawn.")
    if replicated:
        notes.append(f"Whole on every rank: {', '.join(replicated)}.")
    if plain:
        notes.append(f"Plain tensors, the same on every rank: {', '.join(plain)}.")
    return {
        "table": _plan(report),
        "count": f"{len(report.parameter_layouts)} parameters in {len(groups)} layouts",
        "pictures": [
            (layout_svg(layout), f"{', '.join(groups[layout])}: {layout.notation()}") for layout in sharded[:_PICTURES]
        ],
        "notes": notes,
    }


def _plan(report: ModelReport) -> Markup:
    """Return the plan as a table: the placement of every parameter on each axis, and its largest shard."""
    axes = list(dict.fromkeys(name for parameter in report.parameter_layouts for name in parameter.mesh_names))
    heads: list[Column | str] = [
        "parameter", "global shape", *(Column(f"over {axis}", choice=True) for axis in axes), "largest shard",
    ]  # fmt: skip
    rows = [_planned(parameter, axes) for parameter in report.parameter_layouts]
    text = "What the plan makes of every parameter: its placement over each axis, and its largest shard"
    return table(text, heads, rows, search=len(rows) > _FEW, tall=len(rows) > _TALL)


def _planned(parameter: ParameterLayout, axes: Sequence[str]) -> list[Value]:
    layout, shape = parameter.layout, " x ".join(map(str, parameter.shape)) or "scalar"
    if layout is None:
        return [parameter.path, shape, *(Cell("plain tensor", kind="quiet") for _ in axes), shape]
    over = {name: repr(layout.placement_on(number)) for number, name in enumerate(parameter.mesh_names)}
    places = itertools.product(*map(range, parameter.mesh_shape))
    largest = max((layout.local_shape_at(place) for place in places), key=math.prod)
    return [
        parameter.path, shape, *(over.get(axis, "") for axis in axes), " x ".join(map(str, largest)) or "scalar",
    ]  # fmt: skip


def _result(*, wrong: bool, count: int = 0) -> Cell:
    if not wrong:
        return Cell("equal", kind="good")
    return Cell(f"{count}\N{NO-BREAK SPACE}differ" if count else "differs", key="differs", kind="bad")


def _number(value: float) -> Cell:
    if not math.isfinite(value):
        return Cell("not comparable", key=1e308, kind="bad")
    return Cell(f"{value:.1e}" if value else "0", key=value)
