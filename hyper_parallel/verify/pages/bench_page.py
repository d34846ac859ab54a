"""What the library and the harness cost, beside what they may."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hyper_parallel.verify.pages.charts import bar
from hyper_parallel.verify.pages.document import page
from hyper_parallel.verify.pages.markup import Html, escape
from hyper_parallel.verify.pages.tables import Cell, Column, Value, table
from hyper_parallel.verify.report_files import other_version

__all__ = ["RATIOS", "TIMINGS", "bench_page", "read_rows"]

RATIOS, TIMINGS = "bench.json", "bench-harness.json"  # names of the reports

_NEEDED = {RATIOS: ("name", "plain", "peer", "ours", "ratio", "budget", "ok"),
           TIMINGS: ("name", "seconds", "budget", "problem", "ok")}  # fmt: skip
_COMMANDS = {RATIOS: "hyper-parallel bench", TIMINGS: "hyper-parallel bench --harness"}


def read_rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """Rows of a report in a folder; none where it is not there.

    Raises:
        ValueError: it cannot be read, or another version wrote it.
    """
    path = folder / name
    if not path.exists():
        return []
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        missing = [key for key in _NEEDED[name] for row in rows if key not in row]
    except (OSError, ValueError, TypeError) as error:
        msg = f"{path} is no report of `{_COMMANDS[name]}`: {error}"
        raise ValueError(msg) from error
    if missing:
        raise ValueError(other_version(path, list(dict.fromkeys(missing)), _COMMANDS[name]))
    return rows


def bench_page(ratios: Sequence[Mapping[str, Any]], timings: Sequence[Mapping[str, Any]]) -> str:
    """A document over both reports, each of which may be empty."""
    rows = [*ratios, *timings]
    late = [row["name"] for row in rows if not row["ok"]]
    said = f"{len(rows) - len(late)} of {len(rows)} figures within their budgets"
    over = f"<p>over: {escape(', '.join(late))}</p>" if late else ""
    verdict = (
        f'<div class="verdict {"bad" if late or not rows else "good"}"><strong>{escape(said)}</strong>{over}</div>'
    )
    parts = [verdict, "<h2>The harness, as its users run it</h2>", _timings(timings)]
    parts += ["<h2>The host, per operation</h2>", _RATIO, _ratios(ratios)]
    return page("What it costs", "\n".join(map(str, parts)), footer=f"Written from {RATIOS} and {TIMINGS}")


_RATIO = (
    "<p>Microseconds of processor time, all three in one run. The ratio is our overhead over the plain operation to "
    "that of PyTorch's DTensor; for the block, our time to that of tensor parallelism written by hand.</p>"
)


def _timings(rows: Sequence[Mapping[str, Any]]) -> Html:
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
    return table("Seconds of wall time", heads, cells, empty="not measured: hyper-parallel bench --harness")


def _ratios(rows: Sequence[Mapping[str, Any]]) -> Html:
    names = ("plain", "peer", "ours", "ratio", "budget")
    heads: list[Column | str] = ["operation", *(Column(name, number=True) for name in names), "used"]
    cells: list[list[Value]] = [
        [row["name"], *(f"{row[name]:.1f}" for name in names[:3]), f"{row['ratio']:.2f}", f"{row['budget']:g}",
         _used(row, row["ratio"])]
        for row in rows
    ]  # fmt: skip
    return table("Microseconds per call", heads, cells, empty="not measured: hyper-parallel bench")


def _used(row: Mapping[str, Any], value: float) -> Cell:
    share = value / row["budget"]
    said = f"{share:.0%}" if row["ok"] else f"{share:.0%}, not within"
    return Cell(Html(f"{bar(share, said)} {said}"), key=share, kind="" if row["ok"] else "bad")
