"""The page of costs: what the library and the harness cost, and their budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from hyper_parallel.verify.pages.charts import bar
from hyper_parallel.verify.pages.tables import Cell, Column, Value, table
from hyper_parallel.verify.report_files import read_json_rows
from workshop.bench.turns import in_tenths
from workshop.pages import render

__all__ = ["MINDSPORE", "RATIOS", "TIMINGS", "TRAINING", "bench_page", "read_rows"]

RATIOS, MINDSPORE, TIMINGS = "bench.json", "bench-mindspore.json", "bench-harness.json"  # names of the reports
TRAINING = "bench-training.json"

_NEEDED = {RATIOS: ("name", "plain", "peer", "ours", "ratio", "budget", "ok"),
           MINDSPORE: ("name", "budget", "ok"),
           TRAINING: ("name", "plain", "ours", "ratio", "budget", "ok"),
           TIMINGS: ("name", "seconds", "budget", "problem", "ok")}  # fmt: skip
_COMMAND = "python ci/workshop bench"
_COMMANDS = {RATIOS: _COMMAND, MINDSPORE: f"{_COMMAND} --platform mindspore", TRAINING: f"{_COMMAND} --training",
             TIMINGS: f"{_COMMAND} --harness"}  # fmt: skip


def read_rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the rows of a report in a folder; none where the file does not exist.

    Raises:
        ValueError: the file cannot be read, or another version wrote it.
    """
    path = folder / name
    return read_json_rows(path, _NEEDED[name], _COMMANDS[name]) if path.exists() else []


def bench_page(
    ratios: Sequence[Mapping[str, Any]],
    timings: Sequence[Mapping[str, Any]],
    mindspore: Sequence[Mapping[str, Any]] = (),
    training: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return a document over the reports, each of which may be empty.

    Args:
        ratios: rows of PyTorch's operations.
        timings: of the harness.
        mindspore: rows of MindSpore's operations, and what is timed in seconds.
        training: rows of training steps over real processes.
    """
    rows = [*ratios, *mindspore, *training, *timings]
    late = [row["name"] for row in rows if not row["ok"]]
    return render(
        "bench.html",
        title="What it costs",
        footer=f"Written from {RATIOS}, {MINDSPORE}, {TRAINING} and {TIMINGS}",
        good=bool(rows) and not late,
        verdict=f"{len(rows) - len(late)} of {len(rows)} figures within their budgets",
        late=late,
        timings=_timings([*timings, *(row for row in mindspore if "seconds" in row)]),
        training=_ratios(training, ("plain", "ours", "ratio", "budget"), TRAINING),
        ratios=_ratios(ratios, ("plain", "peer", "ours", "ratio", "budget"), RATIOS),
        mindspore=_ratios(
            [row for row in mindspore if "seconds" not in row], ("plain", "ours", "ratio", "budget"), MINDSPORE
        ),
    )


def _timings(rows: Sequence[Mapping[str, Any]]) -> Markup:
    heads: list[Column | str] = [
        "what",
        Column("seconds", number=True),
        Column("budget", number=True),
        "used",
        "problem",
    ]
    cells: list[list[Value]] = [
        [row["name"], f"{row['seconds']:.2f}", f"{row['budget']:g}", _used(row, row["seconds"]), row["problem"]]
        for row in rows
    ]
    return table("Seconds of wall time", heads, cells, empty="not measured: python ci/workshop bench --harness")


def _ratios(rows: Sequence[Mapping[str, Any]], names: Sequence[str], report: str) -> Markup:
    heads: list[Column | str] = ["operation", *(Column(name, number=True) for name in names), "used"]
    cells: list[list[Value]] = [
        [row["name"], *(in_tenths(row[name]) for name in names[:-2]), f"{row['ratio']:.2f}", f"{row['budget']:g}",
         _used(row, row["ratio"])]
        for row in rows
    ]  # fmt: skip
    return table("Microseconds per call", heads, cells, empty=f"not measured: {_COMMANDS[report]}")


def _used(row: Mapping[str, Any], value: float) -> Cell:
    share = value / row["budget"]
    text = f"{share:.0%}" if row["ok"] else f"{share:.0%}, not within"
    return Cell(Markup("{} {}").format(bar(share, text), text), key=share, kind="" if row["ok"] else "bad")
