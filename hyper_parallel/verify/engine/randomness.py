"""Hypotheses about random numbers: masks that are equal on ranks but should differ, or the reverse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.bounds import Key
from hyper_parallel.verify.engine.causes import Cause
from hyper_parallel.verify.engine.evidence import Evidence
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.wording import ranks_words

__all__ = ["explain_dropped", "explain_masks"]


def explain_masks(runs: PairedRuns, key: Key, masks: Mapping[int, Any], wrong: Sequence[int]) -> Cause:
    """Return why masks differ: equal on ranks with different shards, or different on ranks with the same shard.

    Args:
        runs: both runs.
        key: key of the value whose placements are those of the masks.
        masks: for each rank, booleans that are true for elements that are kept.
        wrong: ranks whose masks differ from the reference's.
    """
    places = {rank: runs.placement(key, rank) for rank in masks}
    differs: Cause | None = None
    for rank, here in places.items():
        for other, there in places.items():
            if rank >= other or here is None or there is None or masks[rank].ndim != masks[other].ndim:
                continue
            rows = tuple(slice(0, min(sizes)) for sizes in zip(masks[rank].shape, masks[other].shape, strict=True))
            mask, other_mask = masks[rank][rows], masks[other][rows]
            between = _axis_between(runs, rank, other)
            if here.same_place(there):
                if not np.array_equal(mask, other_mask) and differs is None:
                    words = f"ranks {rank} and {other} hold the same part ({here.words}) but draw different masks"
                    differs = Cause("random-differs", between, words)
            elif mask.size >= 6 and mask.any() and not mask.all() and np.array_equal(mask, other_mask):
                words = (
                    f"ranks {rank} and {other} hold different parts ({here.words}; {there.words}) but draw equal masks"
                )
                return Cause("random-shared", between, words)
    verb = "draws" if len(wrong) == 1 else "draw"
    text = f"{ranks_words(wrong)} {verb} other numbers than the single device"
    fix = "a parity test needs random streams that do not depend on the rank"
    return differs or Cause("random-differs", "", f"{text}; {fix}")


def explain_dropped(runs: PairedRuns, key: Key, wrong: Sequence[int], evidence: Evidence) -> Cause | None:
    """Return why an output differs if only the positions of zeros differ, as after dropout without a recorded mask."""
    for rank in evidence.ranks:
        if not _only_dropped(evidence.actual[rank], evidence.expected[rank], evidence.allowed[rank]):
            return None
    if not evidence.ranks:
        return None
    if all(np.all(evidence.expected[rank] != 0) for rank in evidence.ranks):
        text = "some elements are zero and the others scaled, as by dropout, but the single device drops none"
        return Cause("random-differs", "", text)
    return explain_masks(runs, key, {rank: value != 0 for rank, value in evidence.actual.items()}, wrong)


def _only_dropped(actual: Any, expected: Any, allowed: Any) -> bool:
    """Return whether some elements of rows, but not all, are zero in one array only, and all others are multiples."""
    zero = (actual == 0) != (expected == 0)
    both = (actual != 0) & (expected != 0)
    if not zero.any() or not both.any() or actual.ndim < 1:
        return False
    rows = zero.reshape(-1, zero.shape[-1])
    kept = both.reshape(-1, zero.shape[-1])
    if not (rows.any(axis=1) & kept.any(axis=1)).any():
        return False
    factor = float(np.median(actual[both] / expected[both]))
    return bool((np.abs(actual - factor * expected)[both] <= (1 + abs(factor)) * allowed[both]).all())


def _axis_between(runs: PairedRuns, rank: int, other: int) -> str:
    groups = ((axis, group) for axis, groups in runs.axes.sets() for group in groups)
    return next((axis for axis, group in groups if rank in group and other in group), "")
