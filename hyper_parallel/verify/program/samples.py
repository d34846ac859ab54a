"""Samples that ranks feed to their model and the reference does not: data that differ before any computation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hyper_parallel.verify.program.bounds import Key
from hyper_parallel.verify.program.runs import PairedRuns

__all__ = ["foreign_samples"]


def foreign_samples(runs: PairedRuns, key: Key) -> dict[int, int]:
    """Return, by rank whose part of an output was not recognised, how many rows of its inputs are not the reference's.

    Args:
        runs: both runs, with the inputs of models that the recorder noted.
        key: of the output.
    """
    known = _rows(runs.reference_notes)
    foreign: dict[int, int] = {}
    for rank in runs.holders(key):
        own = _rows(runs.parallel.ranks[rank].notes)
        count = sum(len(rows - known[name]) for name, rows in own.items() if name in known)
        if count and runs.placement(key, rank) is None:
            foreign[rank] = count
    return foreign


def _rows(notes: Mapping[str, Any]) -> dict[Any, set[bytes]]:
    """Return the rows of each noted input as bytes, by name, sizes of a row and dtype."""
    rows: dict[Any, set[bytes]] = {}
    for _, name, value in notes.get("inputs", ()):
        array = np.asarray(value)
        if array.ndim:
            known = rows.setdefault((name, array.shape[1:], array.dtype.str), set())
            known.update(np.ascontiguousarray(row).tobytes() for row in array)
    return rows
