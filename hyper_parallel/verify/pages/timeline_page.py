"""The timeline of a world: compute and collectives of every rank, from its flight records."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from hyper_parallel.transport.checks.flight_recorder import CALLS
from hyper_parallel.transport.checks.flight_trace import Flight
from hyper_parallel.verify.pages import svg
from hyper_parallel.verify.pages.render import render
from hyper_parallel.verify.pages.sources import CallSites
from hyper_parallel.verify.pages.svg import responsive
from hyper_parallel.verify.pages.tables import Cell, Column, Value, table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from markupsafe import Markup

    from hyper_parallel.verify.step_timeline import StepCall

__all__ = ["step_timeline", "timeline_page"]

_LEFT, _ROW, _BOTTOM = 60.0, 26.0, 76.0
_LEAST = 0.8
"""Minimum width of a call, so that it is visible."""

_MARKS = 4
"""Number of intervals of the time axis."""

_TALL = 20
_MILLI = 1e3

_COLUMNS: tuple[Column | str, ...] = (
    Column("rank", number=True, choice=True), Column("call", number=True), Column("operation", choice=True), "of",
    Column("state", choice=True), Column("begins, ms", number=True), Column("takes, ms", number=True), "where",
)  # fmt: skip


def timeline_page(flight: Flight) -> str:
    """Return a page with a row of bars per rank, the time per rank, and a table of all calls.

    Args:
        flight: the records; each contains the last calls of its rank.
    """
    raised = flight.raised()
    difference = flight.difference()
    unfinished = sum(call["ended"] is None for record in flight.records.values() for call in record["calls"])
    sites = CallSites()
    calls = _calls(flight, sites)
    return render(
        "timeline.html",
        title="Timeline",
        footer="Written by hyper-parallel trace FOLDER --html FILE",
        good=not raised and not unfinished and difference is None,
        verdict=f"{len(raised)} of {flight.world_size} ranks raised, {unfinished} calls had not ended",
        difference=difference,
        picture=responsive(lambda width: _picture(flight, width)),
        shares=_shares(flight),
        calls=calls,
        sites=sites.shown(),
    )


def step_timeline(ranks: Sequence[Sequence[StepCall]]) -> tuple[Markup, Markup] | None:
    """Return a picture of one training step and a table of the time of every rank; None without calls.

    Args:
        ranks: calls per rank; the first :data:`CALLS` of each rank are shown.
    """
    if not any(ranks):
        return None
    flight = Flight(len(ranks), {rank: _record(rank, calls[:CALLS]) for rank, calls in enumerate(ranks)})
    return responsive(lambda width: _picture(flight, width)), _shares(flight)


def _record(rank: int, calls: Sequence[StepCall]) -> dict[str, Any]:
    """Return the calls of a rank in one step as a flight record."""
    rows = [
        {
            "operation": call.operation,
            "text": f"{call.operation} of ranks {', '.join(map(str, call.ranks))}",
            "state": "completed",
            "started": call.started,
            "ended": call.waits if call.ended is None else call.ended,
            "site": call.module or "(no module)",
        }
        for call in calls
    ]
    return {"rank": rank, "written": calls[-1].waits if calls else 0.0, "calls": rows, "error": None}


def _span(flight: Flight) -> tuple[float, float]:
    """Return the start of the first call and the end of the last one."""
    spans = [_times(call, record) for record in flight.records.values() for call in record["calls"]]
    return min((start for start, _ in spans), default=0.0), max((end for _, end in spans), default=0.0)


def _times(call: dict[str, Any], record: dict[str, Any]) -> tuple[float, float]:
    """Return start and end of a call; an unfinished call lasts until the record was written."""
    end = record["written"] if call["ended"] is None else call["ended"]
    return call["started"], max(call["started"], end)


def _picture(flight: Flight, width: float) -> Markup:
    begin, end = _span(flight)
    scale = (width - _LEFT - 10) / (end - begin or 1.0)
    bottom = len(flight.records) * _ROW
    parts = []
    for row, (rank, record) in enumerate(sorted(flight.records.items())):
        y = row * _ROW
        parts.append(svg.text(_LEFT - 8, y + 17, f"rank {rank}", anchor="end"))
        spans = [_times(call, record) for call in record["calls"]]
        if spans:
            first, last = min(start for start, _ in spans), max(stop for _, stop in spans)
            ground = f"fill:{svg.colour('line')};fill-opacity:.5"
            parts.append(svg.rect(_LEFT + (first - begin) * scale, y + 4, (last - first) * scale, _ROW - 8,
                                  style=ground, hint="compute"))  # fmt: skip
        for call, (start, stop) in zip(record["calls"], spans, strict=True):
            hue = "one" if call["ended"] is not None else "bad"
            hint = f"{call['text']} ({call['state']}), {(stop - start) * _MILLI:.2f} ms, at {call['site']}"
            length = max(_LEAST, (stop - start) * scale)
            parts.append(svg.rect(_LEFT + (start - begin) * scale, y + 4, length, _ROW - 8,
                                  style=f"fill:{svg.colour(hue)}", hint=hint))  # fmt: skip
    for mark in range(_MARKS + 1):
        x = _LEFT + (end - begin) * scale * mark / _MARKS
        parts += [svg.line(x, bottom, x, bottom + 5),
                  svg.text(x, bottom + 18, f"{(end - begin) * _MILLI * mark / _MARKS:.4g}", size=12, fill="quiet",
                           anchor="start" if not mark else "end" if mark == _MARKS else "middle")]  # fmt: skip
    parts.append(svg.text((_LEFT + width - 10) / 2, bottom + 34, "time, ms", size=12, fill="quiet", anchor="middle"))
    return svg.picture(width, bottom + _BOTTOM / 2, "calls of every rank over time", "", parts, fit=True)


def _shares(flight: Flight) -> Markup:
    heads: list[Column | str] = [
        Column("rank", number=True), Column("collectives, ms", number=True), Column("compute, ms", number=True),
        "longest",
    ]  # fmt: skip
    return table("Time of every rank between its first call and its last one", heads,
                 [_share(rank, record) for rank, record in sorted(flight.records.items())])  # fmt: skip


def _share(rank: int, record: dict[str, Any]) -> list[Value]:
    spans = sorted(_times(call, record) for call in record["calls"])
    busy, reached = 0.0, float("-inf")
    for start, stop in spans:  # asynchronous calls may overlap
        busy += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    whole = reached - spans[0][0] if spans else 0.0
    seconds: dict[str, float] = defaultdict(float)
    for call in record["calls"]:
        start, stop = _times(call, record)
        seconds[call["operation"]] += stop - start
    longest = max(seconds, key=lambda operation: seconds[operation], default="no calls")
    return [rank, _milliseconds(busy), _milliseconds(whole - busy), longest]


def _calls(flight: Flight, sites: CallSites) -> Markup:
    begin, _ = _span(flight)
    rows: list[list[Value]] = []
    for rank, record in sorted(flight.records.items()):
        for call in record["calls"]:
            start, stop = _times(call, record)
            state = Cell(call["state"], kind="" if call["ended"] is not None else "bad")
            rows.append([rank, call["number"], call["operation"], call["text"], state, _milliseconds(start - begin),
                         _milliseconds(stop - start), sites.cell(call["site"])])  # fmt: skip
    return table("Every recorded call", _COLUMNS, rows, search=True, tall=len(rows) > _TALL, empty="no calls")


def _milliseconds(seconds: float) -> Cell:
    return Cell(f"{seconds * _MILLI:.2f}", key=seconds)
