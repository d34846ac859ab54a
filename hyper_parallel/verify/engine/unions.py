"""Values that are right only together: rows that ranks split into calls differently, and counts that ranks add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from hyper_parallel.verify.engine.bounds import Key
from hyper_parallel.verify.engine.matching import compact, find_part, rows_of
from hyper_parallel.verify.engine.pairing import PairedRuns

__all__ = ["adds_up", "is_union"]

Lacks: TypeAlias = Callable[[int, str], bool]


def is_union(runs: PairedRuns, name: str, step: int, lacks: Lacks) -> bool:
    """Return whether all ranks' rows of an output in a step are together the same as on the single device.

    The batch may be the second dim, as in the last state of a recurrent module.

    Args:
        runs: both runs.
        name: name of the output.
        step: number of optimizer steps completed before the output.
        lacks: function that returns whether a rank lacks the parameters of a module, as a different stage of a pipeline
            does.
    """
    reference = runs.bounds.reference
    keys = [key for key in reference if (key[0], key[1], key[2]) == ("output", name, step)]
    least = min((np.ndim(reference[key].value) for key in keys), default=0)
    return any(_is_union_along(runs, dim, keys, lacks) for dim in range(2 if least > 2 else least - 1))


def _is_union_along(runs: PairedRuns, dim: int, keys: Sequence[Key], lacks: Lacks) -> bool:
    """Return whether all ranks' rows along ``dim`` are together the same as on the single device."""
    reference, (_, name, step, _) = runs.bounds.reference, keys[0]
    values = [np.moveaxis(np.asarray(reference[key].value), dim, 0) for key in keys]
    if any(value.shape[1:] != values[0].shape[1:] for value in values):
        return False
    whole = np.concatenate(values)
    allowed = np.concatenate([np.moveaxis(np.asarray(runs.bounds.allowed(key)), dim, 0) for key in keys])
    covered = np.zeros(len(whole), dtype=bool)
    for rank in range(runs.parallel.world_size):
        index = runs.ranks[rank]
        own = [np.asarray(index[key].value) for key in index if (key[0], key[1], key[2]) == ("output", name, step)]
        own = [np.moveaxis(value, dim, 0) if value.ndim > dim else value for value in own]
        if any(value.ndim < 2 or value.shape[1:] != whole.shape[1:] for value in own):
            if lacks(rank, reference[keys[0]].module):
                continue  # a pipeline stage with a different output; the rows must be on the other ranks
            return False
        match = find_part(np.concatenate(own), whole, allowed) if own else None
        rows = None if match is None else rows_of(compact(match.positions, whole.shape), whole.shape)
        if own and rows is None:
            return False
        if rows is not None:
            covered[rows[0]] = True
    return bool(covered.all())


def adds_up(runs: PairedRuns, key: Key, groups: Sequence[Sequence[int]]) -> bool:
    """Return whether the integers that ranks of a group added to a value sum to what the single device added.

    Args:
        runs: both runs.
        key: key of a parameter or buffer after a step; its value before training must be recorded as well.
        groups: groups of ranks.
    """
    first = (*key[:2], -1, 0)
    before, after = (np.asarray(runs.bounds.reference[each].value) for each in (first, key))
    if sorted(rank for group in groups for rank in group) != list(range(runs.parallel.world_size)):
        return False
    for group in groups:
        added = np.zeros(after.shape, np.float64)
        for rank in group:
            index = runs.ranks[rank]
            if key not in index or np.shape(index[key].value) != after.shape:
                return False
            own = np.asarray(index[key].value).astype(np.float64) - before
            if (own % 1).any():
                return False
            added += own
        if not np.array_equal(added, after.astype(np.float64) - before):
            return False
    return True
