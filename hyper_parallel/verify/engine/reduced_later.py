"""Gradients that are not reduced when the optimizer reads them, because its step reduces them.

Such gradients are right if the sum or mean of the ranks' gradients is the reference's, and the weight after the step is
right. A weight that hardly moves would be right in any case, so its update must be large compared with its tolerance.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from hyper_parallel.verify.engine.bounds import Key
from hyper_parallel.verify.engine.distance import distance
from hyper_parallel.verify.engine.noise import unit
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.store import same_values
from hyper_parallel.verify.frameworks.contract.records import OWN_GRADIENTS

__all__ = ["reduced_later"]

_APART = 100.0
"""Smallest distance between the ranks' own gradients, relative to their tolerance."""

_NOTICED = 0.01
"""Largest tolerance of a weight, relative to its update, for a right weight to imply that the gradient was right."""


def reduced_later(runs: PairedRuns, key: Key, known: Collection[str] = ()) -> tuple[str, float] | None:
    """Return how the ranks' gradients combine to the reference's, and the error ratio; None if they do not combine.

    Args:
        runs: both runs.
        key: key of a gradient that differs.
        known: combinations found for gradients of the step whose weights are right. If this gradient combines in the
            same way, its weight may be wrong, provided that it is right on some rank or equally wrong on all ranks: the
            error then comes after a reduction.
    """
    holders = runs.holders(key)
    own = all(key[1] in runs.noted(rank, OWN_GRADIENTS) for rank in holders)
    right = _weight_is_right(runs, key, holders, weak=own)
    if not right and not (known and _comes_of_a_reduction(runs, key, holders)):
        return None
    for axis, groups in runs.axes.sets():
        if {rank for group in groups for rank in group} != set(holders):
            continue
        for words, mean in (("mean", True), ("sum", False)):
            ratios = [_ratio(runs, key, group, mean=mean, apart=1.0 if own else _APART) for group in groups]
            text = f"the {words} over {axis}"
            if max(ratios) <= 1 and (right or text in known):
                return text, max(ratios)
    return None


def _ratio(runs: PairedRuns, key: Key, group: Sequence[int], *, mean: bool, apart: float) -> float:
    """Return the distance of the sum or mean of a group's gradients from the reference's, relative to the tolerance."""
    places = [runs.placement(key, rank) for rank in group]
    first = places[0]
    if first is None or any(place is None or place.pending or not first.same_place(place) for place in places):
        return np.inf
    values = [runs.value(key, rank) for rank in group]
    expected, allowed = runs.expected(key, first)
    if any(value.shape != expected.shape or value.dtype.kind != "f" for value in values):
        return np.inf
    divisor = len(group) if mean else 1
    total = np.sum(values, axis=0, dtype=np.float64) / divisor
    slack = unit(expected, runs.bounds.reference[key].dtype) * np.sum(np.abs(values), axis=0) / divisor
    farthest = max(float(np.linalg.norm(value - values[0])) for value in values)
    if farthest <= apart * float(np.linalg.norm(allowed + slack)):
        return np.inf  # already reduced: the error is not a share of a rank's own gradient
    return float(distance(total, expected, allowed + slack, runs.bounds.floor(key)).ratio)


def _weight_is_right(runs: PairedRuns, key: Key, holders: Sequence[int], *, weak: bool) -> bool:
    """Return whether the weight after the step is right on all ranks, and would be wrong with a wrong gradient.

    With ``weak``, the second condition is left out. The gradient that updated the weight was not recorded; the report's
    power, which comes from the gradients' tolerances, says which errors would go undetected.
    """
    reference = runs.bounds.reference
    before, after = (("weight", key[1], key[2] + step, 0) for step in (-1, 0))
    if before not in reference or after not in reference or runs.holders(after) != holders:
        return False
    update = np.abs(np.asarray(reference[after].value) - np.asarray(reference[before].value))
    allowed = np.asarray(runs.bounds.allowed(after))
    moved = update > 0
    if not weak and (not moved.any() or float(np.median(allowed[moved] / update[moved])) > _NOTICED):
        return False
    distances = runs.distances(after).values()
    return all(each is not None and each.ratio <= 1 for each in distances)


def _comes_of_a_reduction(runs: PairedRuns, key: Key, holders: Sequence[int]) -> bool:
    """Return whether the weight after the step is right on a rank, or bitwise equal on all ranks."""
    after = ("weight", key[1], key[2], 0)
    if after not in runs.bounds.reference or runs.holders(after) != holders:
        return False
    if any(each is not None and each.ratio <= 1 for each in runs.distances(after).values()):
        return True
    return all(same_values(runs.ranks[holders[0]][after].value, runs.ranks[rank][after].value) for rank in holders)
