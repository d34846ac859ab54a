"""The side of a threshold on which each number lies: of ReLU, comparisons, signs, clamps and buckets.

A change by one ULP can move a number next to a threshold to the other side, where its gradient or bucket differs. A
rank's sides are right if all numbers on the wrong side are nearer to the threshold than rounding moves them. The
recorder keeps the side and the distance to the nearest threshold, which is continuous. A rank's numbers are found among
the reference's by these distances. If an earlier flip has changed some numbers, the call is placed where most calls of
the same shapes were found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.bounds import Bounds, Key
from hyper_parallel.verify.engine.decisions import Call, Decision, calls_of
from hyper_parallel.verify.engine.matching import find_part
from hyper_parallel.verify.frameworks.contract.records import THRESHOLDS, Run

__all__ = ["sides_of"]

_FAILURES = 8
"""If the numbers of this many consecutive calls are not found, the search stops for the rank: all its values are
wrong.
"""

_Places = dict[tuple[tuple[int, ...], tuple[int, ...]], Counter[bytes]]


def sides_of(bounds: Bounds, parallel: Run, names: Sequence[Mapping[str, str]]) -> list[Decision]:
    """Return the calls in which rounding moved numbers of a rank to the other side of a threshold.

    Args:
        bounds: tolerances of the reference.
        parallel: the run on all ranks.
        names: for each rank, the reference's name of each renamed module.
    """
    reference = calls_of(bounds.records.values(), {}, THRESHOLDS)
    found: list[Decision] = []
    for rank, (records, modules) in enumerate(zip(parallel.ranks, names, strict=True)):
        places: _Places = {}
        later: list[tuple[Call, list[Call]]] = []
        failures = 0
        for group, calls in calls_of(records.records, modules, THRESHOLDS).items():
            for number, call in enumerate(calls):
                if group not in reference or failures > _FAILURES:
                    continue
                others = _candidates(call, number, reference[group], len(calls))
                decision = next(filter(None, (_found(bounds, rank, call, other, places) for other in others)), None)
                if decision is None:
                    later += [(call, other) for other in others[:1]]
                failures = 0 if decision is not None else failures + 1
                found += [] if decision is None else [decision]
        for call, other in later if failures <= _FAILURES else ():
            decision = _assumed(bounds, rank, call, other, places)
            found += [] if decision is None else [decision]
    return [decision for decision in found if decision.flips]


def _candidates(call: Call, number: int, reference: Sequence[Call], count: int) -> list[list[Call]]:
    """Return the reference's calls that may match a rank's call: that of the same number, and all of the step."""
    same = [[reference[number]]] if count == len(reference) else []
    shape = np.shape(call.scores)[1:]
    joined = len(reference) > 1 and all(np.shape(other.scores)[1:] == shape for other in reference)
    return [*same, *([list(reference)] if joined or not same else [])]


def _whole(bounds: Bounds, calls: Sequence[Call]) -> tuple[Any, Any, Any]:
    """Return the distances, their tolerances and the sides of calls, joined along the first dim."""
    arrays = ((call.scores, bounds.allowed(_margin(call)), call.choice) for call in calls)
    margins, allowed, sides = (tuple(map(np.asarray, each)) for each in zip(*arrays, strict=True))
    if len(calls) == 1:
        return margins[0], allowed[0], sides[0]
    return np.concatenate(margins), np.concatenate(allowed), np.concatenate(sides)


def _margin(call: Call) -> Key:
    return (THRESHOLDS[0], *call.own[1:])


def _found(bounds: Bounds, rank: int, call: Call, others: Sequence[Call], places: _Places) -> Decision | None:
    """Return the decision of a call, and store the positions of its numbers in the reference; None if not found."""
    shapes = {np.shape(other.scores)[1:] for other in others}
    if len(shapes) > 1:
        return None
    whole = _whole(bounds, others)
    match = find_part(np.asarray(call.scores), whole[0], whole[1])
    if match is None:
        return None
    positions = np.asarray(match.positions)
    key = (np.shape(call.scores), whole[0].shape)
    places.setdefault(key, Counter())[positions.astype(np.int64).tobytes()] += 1
    return _judged(rank, call, whole, positions)


def _assumed(bounds: Bounds, rank: int, call: Call, others: Sequence[Call], places: _Places) -> Decision | None:
    """Return the decision of a call that is placed like most calls of the same shapes; None if there are none."""
    if len({np.shape(other.scores)[1:] for other in others}) > 1:
        return None
    whole = _whole(bounds, others)
    votes = places.get((np.shape(call.scores), whole[0].shape))
    if votes is None:
        return None
    positions = np.frombuffer(votes.most_common(1)[0][0], np.int64).reshape(np.shape(call.scores))
    return _judged(rank, call, whole, positions)


def _judged(rank: int, call: Call, whole: tuple[Any, Any, Any], positions: Any) -> Decision:
    """Return the decision of a call, with the sides that numbers next to a threshold take from the reference.

    The expected value of each of these numbers is the distance up to which it is mirrored, with the sign of the
    reference's side. It is 0 for all other numbers, because their side may change when the call runs again after a
    replay.
    """
    margin, allowed, side = (array.reshape(-1)[positions] for array in whole)
    own, chosen = np.asarray(call.scores), np.asarray(call.choice)
    with np.errstate(invalid="ignore"):
        near = (margin <= 2 * allowed) & (own <= 2 * allowed) & (np.abs(own - margin) <= allowed)
    flips = np.flatnonzero(near & (chosen != side))
    expected = np.zeros(chosen.shape, np.float32)
    signs = np.where(side.reshape(-1)[flips], 1, -1)
    expected.reshape(-1)[flips] = signs * np.maximum(2 * allowed.reshape(-1)[flips], np.finfo(np.float32).tiny)
    return Decision(rank, call.own, call.own, chosen, expected, tuple(map(int, flips)))
