"""Holds the rows of ``bench`` to those of an earlier run instead of their budgets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hyper_parallel.verify.report_files import read_json_rows, reading
from workshop.bench.turns import MEDIAN

__all__ = ["BAND", "earlier_ratios", "held_to"]

BAND = 1.3
"""By how much a ratio may be larger than in the earlier run."""


def earlier_ratios(path: Path) -> dict[str, float]:
    """Return the ratios of a report of ``bench``, by the names of the rows; rows in seconds have none.

    Raises:
        ValueError: it is no such report, or has no ratios.
    """
    rows = read_json_rows(path, ("name", "budget"), "python ci/workshop bench")
    with reading(path):
        ratios = {_lasting(row["name"]): float(row["ratio"]) for row in rows if "ratio" in row}
    if not ratios:
        msg = f"--baseline {path} has no ratios; write one with `python ci/workshop bench --report {path}`"
        raise ValueError(msg)
    return ratios


def held_to(rows: Sequence[dict[str, Any]], ratios: dict[str, float], path: Path) -> list[dict[str, Any]]:
    """Return ``rows`` with the earlier ratios times :data:`BAND` as budgets.

    Raises:
        ValueError: a row has no earlier ratio.
    """
    missing = [row["name"] for row in rows if "ratio" in row and _lasting(row["name"]) not in ratios]
    if missing:
        names = ", ".join(map(repr, missing))
        msg = (
            f"--baseline {path} has no ratio of {names}; write it anew with `python ci/workshop bench --report {path}`"
        )
        raise ValueError(msg)
    return [_held(row, ratios[_lasting(row["name"])] * BAND) if "ratio" in row else row for row in rows]


def _lasting(name: str) -> str:
    """Return the part of a row's name that is the same in each run."""
    return MEDIAN if name.startswith(MEDIAN) else name


def _held(row: dict[str, Any], budget: float) -> dict[str, Any]:
    return {**row, "budget": budget, "ok": row["ratio"] <= budget}
