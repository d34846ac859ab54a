"""Tells whether the reference was trained on the samples that the ranks saw together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from hyper_parallel.verify.program.records import RankRecords, Run

__all__ = ["other_batch"]


def other_batch(reference: Run, parallel: Run, name: str) -> str | None:
    """Return what is wrong if the ranks saw samples that the reference did not see; None otherwise.

    Compared are the rows of each input of the ranks' first call of a model with those of all calls of the reference's
    first step. Nothing is claimed about inputs that differ in their other sizes, as slices of sequences do.

    Args:
        reference: the run on one rank.
        parallel: the run on all ranks.
        name: of the program.
    """
    own = _rows(reference.ranks)
    theirs = _rows(parallel.ranks, calls=1)
    for key, rows in theirs.items():
        if key not in own or not rows - own[key]:
            continue
        per_rank = max(len(_rows([rank], calls=1).get(key, ())) for rank in parallel.ranks)
        fix = (
            f"if its batch size of {per_rank} is per rank, give the reference the whole batch with --single-args and "
            "the "
            "script's own option, or divide the batch by WORLD_SIZE in the script; if ranks are to see the same "
            "samples, "
            "seed their data alike"
            if per_rank == len(own[key]) < len(rows)
            else "seed the data alike in both, and let each rank take its part of one global batch"
        )
        return (
            f"{name}: the reference is trained on another batch than the ranks together, so they cannot agree: in the "
            f"first step one rank alone sees {len(own[key])} samples, the {parallel.world_size} ranks {len(rows)} "
            f"different ones, {len(rows - own[key])} of which the reference does not see; {fix}"
        )
    return None


def _rows(ranks: Iterable[RankRecords], calls: int | None = None) -> dict[Any, set[bytes]]:
    """Return, by input and sizes of a row, the different rows of the first ``calls`` calls of models, as bytes."""
    rows: dict[Any, set[bytes]] = {}
    for rank in ranks:
        for call, name, array in rank.notes.get("inputs", ()):
            if array.ndim and (calls is None or call < calls):
                key = name, array.shape[1:], array.dtype.str
                rows.setdefault(key, set()).update(np.ascontiguousarray(row).tobytes() for row in array)
    return rows
