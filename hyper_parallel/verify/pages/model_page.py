"""The page of a model verification. It shows what the report says; it computes no verdict of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.verify.compare import TensorCheck
from hyper_parallel.verify.model_report import ModelReport, Summary
from hyper_parallel.verify.pages.charts import Dot, bar, curves, dots
from hyper_parallel.verify.pages.document import page
from hyper_parallel.verify.pages.markup import Html, escape
from hyper_parallel.verify.pages.meshes import layout_svg, mesh_svg
from hyper_parallel.verify.pages.tables import Cell, Column, Value, table

__all__ = ["model_page"]

_RUNS: tuple[Column | str, ...] = (
    "run", Column("framework", choice=True), "mesh", "launch", Column("result", choice=True),
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
    Column("count", number=True), Column("bytes", number=True), "share of the largest",
    Column("implicit", number=True, hint="decided by the library, not by the plan"),
)  # fmt: skip

_DOTS = 40
"""Modules in the picture; the table has all of them."""

_SCREEN = 20
"""Rows beyond which a table scrolls in itself."""

_FEW = 8
"""Rows up to which nobody searches."""

_PICTURES = 12
"""Layouts that are drawn; the list of parameters has all of them."""


def model_page(reports: Sequence[ModelReport], note: str = "") -> str:
    """A document over one or several runs.

    Args:
        reports: the runs.
        note: what else must be known, such as that the command was interrupted.
    """
    parts = [] if len(reports) == 1 and not note else [_together(reports, note)]
    if len(reports) > 1:
        parts.append(str(_overview(reports)))
    parts += [_run(report, number, alone=len(reports) == 1) for number, report in enumerate(reports)]
    return page("Model verification", "\n".join(parts), footer="Written by hyper-parallel verify model --html FILE")


def _together(reports: Sequence[ModelReport], note: str) -> str:
    held = sum(report.ok for report in reports)
    state = "good" if reports and held == len(reports) and not note else "bad"
    head = f"{held} of {len(reports)} runs equal to one device"
    return f'<div class="verdict {state}"><strong>{escape(head)}</strong>{_paragraph(note)}</div>'


def _overview(reports: Sequence[ModelReport]) -> Html:
    rows: list[list[Value]] = []
    for number, report in enumerate(reports):
        worst = report.worst
        rows.append([
            Cell(Html(f'<a href="#run-{number}">{escape(report.name)}</a>'), key=report.name),
            report.platform, report.mesh, report.launch,
            Cell(_state(report), kind="good" if report.ok else "bad"),
            sum(report.counts.values()),
            Cell("", key="") if worst is None else _number(worst.error),
            Cell(f"{report.seconds:.1f}", key=report.seconds),
        ])  # fmt: skip
    return table("Every run", _RUNS, rows)


def _run(report: ModelReport, number: int, *, alone: bool) -> str:
    title = f"{report.name} on {report.platform}, {report.mesh}"
    parts = [
        f'<section id="run-{number}">',
        f"<h2>{escape(title)}</h2>",
        _verdict(report),
        _settings(report),
        f'<div class="pictures">{_mesh(report)}{_losses(report)}</div>',
        _gradients(report),
        _compared(report),
        _steps(report),
        _collectives(report),
        _layouts(report, open_=alone),
        _left_out(report),
        "</section>",
    ]
    return "\n".join(filter(None, parts))


def _state(report: ModelReport) -> str:
    if report.error:
        return "ENDED"
    if report.first is not None:
        return f"DIVERGED first in module {report.faulty_module or '(model)'}"
    return "equal" if report.ok else "NOT VERIFIED"


def _verdict(report: ModelReport) -> str:
    # The line of the terminal, without the run's name, which is the heading, and without the state, which is above it.
    _, _, said = report.verdict().partition(" s): ")
    said = said.removeprefix("equal, ")
    more = ""
    if report.first is not None:
        said = str(report.first)
        wrong = sum(not one.ok for one in report.checks)
        more = _paragraph(f"{wrong} of {len(report.checks)} tensors differ; modules that differ stand first below.")
    trace = f"<details><summary>traceback of every rank</summary><pre>{escape(report.error)}</pre></details>"
    return (
        f'<div class="verdict {"good" if report.ok else "bad"}"><strong>{escape(_state(report))}</strong>'
        f"{_paragraph(said)}{more}{trace if report.error else ''}</div>"
    )


def _settings(report: ModelReport) -> str:
    facts = {
        "framework": f"{report.platform}, ranks are {report.launch}",
        "steps": str(report.steps),
        **report.settings,
        "allowed error": report.bound,
        "time": f"{report.seconds:.1f} s",
    }
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items() if value)
    return f'<h3>Settings</h3><dl class="facts">{items}</dl>'


def _mesh(report: ModelReport) -> str:
    if not report.axes:
        return ""
    shape, names = tuple(report.axes.values()), tuple(report.axes)
    mesh = DeviceMesh.grid("cpu", shape, tuple(range(math.prod(shape))), names)
    return f"<div><h3>Mesh</h3>{_figure(mesh_svg(mesh), f'Ranks on {report.mesh}')}</div>"


def _losses(report: ModelReport) -> str:
    if not report.losses:
        return ""
    series = {"single device": report.losses}
    if report.parallel_losses:
        series["parallel"] = report.parallel_losses
    picture = curves(f"loss per step of {report.name}", series, x="step", y="loss")
    said = "Both runs over each other: broad the single device, dashed the parallel run"
    return f"<div><h3>Loss</h3>{_figure(picture, said)}</div>"


def _steps(report: ModelReport) -> str:
    if not report.losses:
        return ""
    checks = {one.step: one for one in report.checks if one.kind == "loss" and one.rank == 0}
    pairs = zip(report.losses, report.parallel_losses or [math.nan] * len(report.losses), strict=False)
    rows: list[list[Value]] = [
        [step + 1, f"{wanted:.9g}", f"{found:.9g}", *_error(checks.get(step))]
        for step, (wanted, found) in enumerate(pairs)
    ]
    body = table("Loss per step, single device and parallel", _STEPS, rows, tall=len(rows) > _SCREEN)
    return str(body)


def _error(check: TensorCheck | None) -> list[Value]:
    if check is None:
        return [Cell("", key=""), Cell("", key=""), Cell("not compared", kind="warn")]
    return [_number(check.error), _number(check.bound), _result(wrong=not check.ok)]


def _gradients(report: ModelReport) -> str:
    found = report.summaries("gradient")
    if not found:
        return ""
    rows = [
        Dot(one.module or "(model)", one.worst.error, one.worst.bound, not one.wrong, str(one.worst))
        for one in found[:_DOTS]
    ]
    more = f" (the first {_DOTS} of {len(found)}; the table below has all)" if len(found) > _DOTS else ""
    said = f"Largest difference of a module's gradients over all ranks and steps; the tick is what was allowed{more}"
    return f"<h3>Gradients</h3>{_figure(dots('gradient difference per module', rows), said)}"


def _compared(report: ModelReport) -> str:
    rows = [_summary(one) for one in report.summaries()]
    text = "What was compared, per module and kind, over all ranks and steps"
    body = table(text, _MODULES, rows, search=True, tall=len(rows) > _SCREEN, empty="nothing was compared")
    return f"<h3>Modules</h3>{body}"


def _summary(one: Summary) -> list[Value]:
    worst = one.worst
    where = f"{worst.name}, step {worst.step + 1}, rank {worst.rank}"
    name = (one.module or "(model)") + (" ← diverged first" if one.first else "")
    return [
        Cell(name, kind="bad" if one.wrong else ""),
        one.kind,
        _result(wrong=bool(one.wrong), count=one.wrong),
        one.tensors,
        one.values,
        _number(worst.error),
        _number(worst.bound),
        f"{where}: {worst.why.partition(' (error')[0]}" if worst.why else where,  # the error has its own column
    ]


def _collectives(report: ModelReport) -> str:
    most = max((one.bytes for one in report.traffic), default=0)
    rows: list[list[Value]] = [
        [
            one.module or "(model)", one.phase, one.collective, ", ".join(one.axes), one.count,
            Cell(f"{one.bytes:,}", key=one.bytes),
            Cell(bar(one.bytes / most if most else 0.0, f"{one.bytes} bytes"), key=one.bytes),
            one.implicit,
        ]
        for one in report.traffic
    ]  # fmt: skip
    total = (
        f"{sum(one.count for one in report.traffic)} collectives, {sum(one.bytes for one in report.traffic):,} bytes"
    )
    text = f"Collectives of one training step, bytes received by the worst rank: {total}"
    body = table(text, _TRAFFIC, rows, search=len(rows) > _FEW, tall=len(rows) > _SCREEN, empty="no collectives")
    return f"<h3>Collectives</h3>{body}"


def _layouts(report: ModelReport, *, open_: bool) -> str:
    groups: dict[Layout, list[str]] = {}
    plain = []
    for one in report.parameter_layouts:
        layout = one.layout
        if layout is None:
            plain.append(one.path)
        else:
            groups.setdefault(layout, []).append(one.path)
    if not report.parameter_layouts:
        return ""
    split = [layout for layout in groups if not layout.is_replicated]
    figures = [_figure(layout_svg(layout), f"{', '.join(groups[layout])}: {layout.notation()}") for layout in split]
    whole = [path for layout, paths in groups.items() if layout.is_replicated for path in paths]
    notes = ""
    if len(split) > _PICTURES:
        notes += _paragraph(f"{_PICTURES} of {len(split)} layouts are drawn.")
    if whole:
        notes += _paragraph(f"Whole on every rank: {', '.join(whole)}.")
    if plain:
        notes += _paragraph(f"Plain tensors, the same on every rank: {', '.join(plain)}.")
    count = f"{len(report.parameter_layouts)} parameters in {len(groups)} layouts"
    return (
        f"<h3>Parameters on ranks</h3><details{' open' * open_}><summary>{count}: filled is what a rank holds of the "
        f'whole tensor</summary><div class="pictures">{"".join(figures[:_PICTURES])}</div>{notes}</details>'
    )


def _left_out(report: ModelReport) -> str:
    if not report.skipped:
        return ""
    items = "".join(f"<li>{escape(one)}</li>" for one in report.skipped)
    return f"<h3>Not compared, and why</h3><ul>{items}</ul>"


def _result(*, wrong: bool, count: int = 0) -> Cell:
    if not wrong:
        return Cell("equal", kind="good")
    return Cell(f"{count}\N{NO-BREAK SPACE}differ" if count else "differs", key="differs", kind="bad")


def _number(value: float) -> Cell:
    if not math.isfinite(value):
        return Cell("not comparable", key=1e308, kind="bad")
    return Cell(f"{value:.1e}" if value else "0", key=value)


def _figure(picture: Html, caption: str) -> str:
    return f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>"


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>" if text else ""
