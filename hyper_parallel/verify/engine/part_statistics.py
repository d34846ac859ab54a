"""Hypotheses: local statistics used as global ones, unequal numbers of rows, gradients not cleared, different data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.bounds import Key
from hyper_parallel.verify.engine.causes import Cause
from hyper_parallel.verify.engine.evidence import Evidence
from hyper_parallel.verify.engine.matching import rows_of
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.placement import Placement
from hyper_parallel.verify.engine.scalars import combinations_of_ranks, rows_of_rank
from hyper_parallel.verify.engine.verdict import Difference
from hyper_parallel.verify.engine.wording import ranks_words

__all__ = [
    "at_boundaries",
    "kept_value",
    "local_statistics",
    "other_inputs",
    "other_targets",
    "unequal_rows",
    "weighted_by_rows",
]

_ENOUGH = 4
"""Number of values that must confirm a relation, in addition to those that determine it."""

_Wrong = Mapping[Key, Difference]


def local_statistics(runs: PairedRuns, _key: Key, _wrong: _Wrong, evidence: Evidence | None) -> Cause | None:
    """Test for a norm, mean or softmax over a sharded dim that was computed from the rank's shard alone.

    If the statistic is over the last dim, each row is the reference's times a factor of that row. If it is over the
    rows, each column, or each channel of images, is the reference's times a factor plus a shift of that column.
    """
    if evidence is None or not evidence.ranks:
        return None
    if any(evidence.actual[rank].ndim < 2 or evidence.actual[rank].dtype.kind != "f" for rank in evidence.ranks):
        return None
    tests = (("row", -1, _rows_scaled), ("column", 0, _columns_moved), ("channel", 0, _channels_moved))
    for words, dim, relation in tests:
        axis = _axis_of_parts(runs, evidence, dim)
        counts = [relation(evidence, rank) for rank in evidence.ranks] if axis else [None]
        confirmed = [count for count in counts if count is not None]
        if len(confirmed) == len(counts) and sum(confirmed) >= _ENOUGH:
            moved = "a factor" if words == "row" else "a factor and plus a shift"
            text = (
                f"each {words} is the reference's times {moved} of its own, on {ranks_words(evidence.ranks)}: a norm, "
                f"mean or softmax over a dim that is sharded over {axis} used the rank's part alone"
            )
            return Cause("missing-reduction", axis, text)
    return None


def at_boundaries(runs: PairedRuns, key: Key, _wrong: _Wrong, evidence: Evidence | None) -> Cause | None:
    """Test whether only the first or last rows of shards are wrong, where they border on another shard."""
    if evidence is None or key[0] not in {"output", "value"} or not evidence.ranks:
        return None
    dims = evidence.actual[evidence.ranks[0]].ndim
    for dim in range(dims):
        for words, end in (("first", 0), ("last", 1)):
            counts = [_border(evidence, rank, dim, end) for rank in evidence.ranks]
            parts = {evidence.placements[rank].words for rank in evidence.ranks}
            every = all(rank in evidence.ranks for rank in evidence.placements if _borders(evidence, rank, dim, end))
            if all(counts) and len(set(counts)) == 1 and len(parts) > 1 and every:  # fewer may be chance
                axis = _axis_of_parts(runs, evidence, dim) or next(iter(runs.axes.groups))
                shown = ", ".join(dict.fromkeys(str(count) for count in counts))
                text = f"only the {words} {shown} rows of dim {dim} of each part are wrong"
                text += f", on {ranks_words(evidence.ranks)}"
                return Cause("boundary", axis, f"{text}; the parts are next to one another over {axis}")
        ends = [_outermost(evidence, rank, dim) for rank in evidence.ranks]
        if len({evidence.placements[rank].words for rank in evidence.ranks}) > 1 and all(ends):
            axis = _axis_of_parts(runs, evidence, dim) or next(iter(runs.axes.groups))
            text = f"only the first and the last rows of dim {dim} of parts are wrong, {max(ends)} at most"
            text += f", on {ranks_words(evidence.ranks)}"
            return Cause("boundary", axis, f"{text}; the parts are next to one another over {axis}")
    return None


def _outermost(evidence: Evidence, rank: int, dim: int) -> int:
    """Return the largest number of wrong rows at either end of a rank's shard.

    Returns:
        0 if inner rows are wrong, if more than a third of the rows are wrong at one end, or if no row is wrong at an
            end that borders on another shard.
    """
    wrong, place = evidence.wrong[rank], evidence.placements[rank]
    if place.positions is None or wrong.ndim != len(place.shape) or wrong.shape[dim] == place.shape[dim]:
        return 0
    rows = wrong.any(axis=tuple(other for other in range(wrong.ndim) if other != dim))
    right = np.flatnonzero(~rows)
    if not right.size or rows[right[0] : right[-1] + 1].any():
        return 0
    counts = int(right[0]), int(rows.size - 1 - right[-1])
    bordering = [count for end, count in enumerate(counts) if _borders(evidence, rank, dim, end)]
    return max(counts) if bordering and all(bordering) and 3 * max(counts) <= rows.size else 0


def _borders(evidence: Evidence, rank: int, dim: int, end: int) -> bool:
    """Return whether a rank's rows of a dim begin (or end) where another rank's rows end (or begin)."""
    place = evidence.placements[rank]
    rows = None if place.positions is None else rows_of(place.positions, place.shape)
    if rows is None or dim >= len(rows):
        return False
    return bool(rows[dim][0] > 0 if end == 0 else rows[dim][-1] < place.shape[dim] - 1)


def _border(evidence: Evidence, rank: int, dim: int, end: int) -> int:
    """Return how many rows at an end of a rank's shard are wrong; 0 if other rows are, or no shard follows there."""
    wrong, place = evidence.wrong[rank], evidence.placements[rank]
    rows = None if place.positions is None or wrong.ndim != len(place.shape) else rows_of(place.positions, place.shape)
    size = wrong.shape[dim] if dim < wrong.ndim else 0
    if rows is None or size < 2 or size == place.shape[dim]:
        return 0
    line = rows[dim]
    if line[-1] - line[0] != size - 1 or (line[0] == 0 if end == 0 else line[-1] == place.shape[dim] - 1):
        return 0
    some = np.flatnonzero(wrong.any(axis=tuple(other for other in range(wrong.ndim) if other != dim)))
    count = len(some)
    at_end = some[-1] == count - 1 if end == 0 else some[0] == size - count
    return count if count < size and at_end else 0


def weighted_by_rows(runs: PairedRuns, key: Key, _wrong: _Wrong, evidence: Evidence | None) -> Cause | None:
    """Test whether the mean of the ranks' values, weighted with the rows of each rank's batch, is the reference's."""
    if evidence is None or not evidence.ranks:
        return None
    for axis, groups in runs.axes.sets():
        members = {rank: group for group in groups for rank in group}
        weights = {rank: rows_of_rank(runs, rank, key[2]) for rank in members}
        if not all(weights.values()) or len(set(weights.values())) == 1:
            continue
        if all(rank in members and _mean_fits(evidence, rank, members[rank], weights) for rank in evidence.ranks):
            shown = " : ".join(str(weights[rank]) for rank in members[evidence.ranks[0]])
            text = f"the mean over {axis} weighted with the ranks' rows, {shown}, equals the reference"
            return Cause("missing-reduction", axis, f"{text}; each alone does not")
    return None


def unequal_rows(runs: PairedRuns, key: Key, wrong: _Wrong, evidence: Evidence | None) -> Cause | None:
    """Test for gradients averaged with equal weights although the ranks have unequal numbers of rows."""
    loss = next((other for other in runs.bounds.reference if other[0] == "loss" and other[2] == key[2]), None)
    if loss is None or loss in wrong or evidence is None or not runs.holders(loss):
        return None
    expected, allowed = float(runs.bounds.reference[loss].value), float(runs.bounds.allowed(loss))
    for words, combined in combinations_of_ranks(runs, loss):
        if all(abs(float(value) - expected) <= allowed for value in combined.values()):
            if "weighted" not in words:
                return None
            axis = words.removeprefix("mean over ").partition(",")[0]
            rows = ", ".join(str(rows_of_rank(runs, rank, key[2])) for rank in combined)
            text = f"the ranks' losses are means over {rows} rows, and only their {words} is the reference's loss"
            return Cause("scaled-by-count", axis, f"{text}: the gradients need the same weights")
    return None


def kept_value(runs: PairedRuns, key: Key, wrong: _Wrong, evidence: Evidence | None) -> Cause | None:
    """Test whether a value is the right one plus a multiple of the previous step's value, which was not cleared."""
    before = (key[0], key[1], key[2] - 1, key[3])
    reference = runs.bounds.reference
    if evidence is None or not evidence.ranks or before not in reference or before in wrong:
        return None
    if np.shape(reference[before].value) != np.shape(reference[key].value):
        return None
    times: set[int] = set()
    for rank in evidence.ranks:
        old = evidence.placements[rank].take(runs.bounds.reference[before].value)
        rest, squares = evidence.actual[rank] - evidence.expected[rank], float((np.abs(old) ** 2).sum())
        factor = round(float(np.vdot(old, rest).real) / squares) if squares else 0
        slack = evidence.slack(rank, evidence.actual[rank])
        slack = slack + abs(factor) * evidence.placements[rank].take(runs.bounds.allowed(before))
        if factor < 1 or rest.size < _ENOUGH or not (np.abs(rest - factor * old) <= 2 * slack).all():
            return None
        times.add(factor)
    if len(times) > 1:
        return None
    count = times.pop()
    times_words = "" if count == 1 else f"{count} times "
    text = f"minus {times_words}the value of the previous step it equals the reference: that value was not cleared"
    return Cause("stale", "", text)


def other_inputs(runs: PairedRuns, key: Key, wrong: _Wrong, evidence: Evidence | None) -> Cause | None:
    """Test whether all elements of a step's first output are wrong on some ranks, although the weights are right."""
    if evidence is None or key[0] != "output" or not evidence.ranks:
        return None
    if key[3] and "optimizers that call the model" in runs.reference_notes:
        return None  # an optimizer that calls the model changes weights between calls of one step
    first = next(other for other in runs.bounds.reference if other[0] == "output" and other[2:] == key[2:])
    module = runs.bounds.reference[key].module
    weights = [other for other in wrong if other[0] == "weight" and other[2] < key[2] and other[1].startswith(module)]
    parts = all(evidence.placements[rank].positions is not None for rank in evidence.ranks)
    own = [name for name in runs.parameters.names() if not module or name.startswith(f"{module}.")]
    if not all(runs.parameters.of(name, rank) for name in own for rank in evidence.ranks):
        return None  # the module's parameters were not compared
    if first != key or weights or not parts or not all(evidence.wrong[rank].all() for rank in evidence.ranks):
        return None
    text = f"every row of the step's first output is wrong on {ranks_words(evidence.ranks)}"
    if not own and " (no_grad)" in key[1]:  # only trained parameters are recorded
        return Cause("unexplained", "", f"{text}; neither what went into it nor its parameters were recorded")
    right = f", although the parameters of {module or 'the model'} are right" if own else ""
    return Cause("data", "", f"{text}{right}: other inputs")


def other_targets(runs: PairedRuns, key: Key, wrong: _Wrong, _evidence: Evidence | None) -> Cause | None:
    """Test whether a loss is wrong although every earlier output was compared and is right."""
    outputs = [other for other in runs.bounds.reference if other[0] == "output" and other[2] == key[2]]
    compared = [
        other for other in outputs
        if runs.holders(other) and all(runs.placement(other, rank) is not None for rank in runs.holders(other))
    ]  # fmt: skip
    if key[0] != "loss" or not outputs or compared != outputs or any(other in wrong for other in outputs):
        return None
    text = "every output before it equals the reference's"
    padded = [words for words in runs.padding if runs.padded_rows_have_gradients(key[2])]
    if padded:
        return Cause("padding", "", f"{text}, and rows that the single device lacks have gradients: {padded[0]}")
    expected = float(runs.bounds.reference[key].value)
    off = {rank: float(runs.value(key, rank)) - expected for rank in runs.holders(key)}
    allowed = 4 * float(np.max(runs.bounds.allowed(key)))
    for axis, size in runs.axes.sizes().items():
        for sign, words in ((1, "plus"), (-1, "minus")):
            if size > 1 and off and all(abs(rest - sign * np.log(size)) <= allowed for rest in off.values()):
                return Cause("loss", axis, f"{text}; it is the reference's {words} log {size}, the size of {axis}")
    return Cause("loss", "", f"{text}, and no size, count or logarithm of a size explains the loss")


def _mean_fits(evidence: Evidence, rank: int, group: Sequence[int], weights: Mapping[int, int]) -> bool:
    place = evidence.placements[rank]
    others = [other for other in group if other in evidence.actual and place.same_place(evidence.placements[other])]
    if len(others) < len(group):
        return False
    count = sum(weights[other] for other in group)
    total = sum(evidence.actual[other] * (weights[other] / count) for other in group)
    size = sum(np.abs(evidence.actual[other]) * (weights[other] / count) for other in group)
    return evidence.off(rank, total, size)[0]


def _rows_scaled(evidence: Evidence, rank: int) -> int | None:
    """Return how many numbers confirm that rows are multiples of the expected rows; None if they are not."""
    actual, expected = _as_rows(evidence.actual[rank]), _as_rows(evidence.expected[rank])
    squares = (expected**2).sum(axis=1)
    factors = (actual * expected).sum(axis=1) / np.where(squares == 0, 1, squares)
    slack = evidence.slack(rank, evidence.actual[rank]).reshape(actual.shape) * (1 + np.abs(factors))[:, None]
    if not (np.abs(actual - factors[:, None] * expected) <= slack).all():
        return None
    return int((squares > 0).sum()) * int(actual.shape[1] - 1)


def _channels_moved(evidence: Evidence, rank: int) -> int | None:
    return _columns_moved(evidence, rank, 1) if evidence.actual[rank].ndim > 2 else None


def _columns_moved(evidence: Evidence, rank: int, dim: int = -1) -> int | None:
    """Return how many numbers confirm that columns are multiples of the expected columns plus a shift; None if not.

    Args:
        evidence: the values.
        rank: the rank that has the columns.
        dim: dim of the columns.
    """
    actual, expected = (_as_rows(np.moveaxis(each[rank], dim, -1)) for each in (evidence.actual, evidence.expected))
    centred = expected - expected.mean(axis=0)
    squares = (centred**2).sum(axis=0)
    factors = ((actual - actual.mean(axis=0)) * centred).sum(axis=0) / np.where(squares == 0, 1, squares)
    slack = _as_rows(np.moveaxis(evidence.slack(rank, evidence.actual[rank]), dim, -1)) * (2 + 2 * np.abs(factors))
    if not (np.abs(actual - actual.mean(axis=0) - factors * centred) <= slack).all():
        return None
    return int((squares > 0).sum()) * max(0, len(actual) - 2)


def _as_rows(array: Any) -> Any:
    return array.reshape(-1, array.shape[-1])


def _axis_of_parts(runs: PairedRuns, evidence: Evidence, dim: int) -> str:
    """Return an axis over which ranks have different shards of ``dim``; empty if each rank has the complete dim."""
    for axis, groups in runs.axes.sets():
        for group in groups:
            places = [evidence.placements[rank] for rank in group if rank in evidence.ranks]
            if any(_indices(place, dim) != _indices(places[0], dim) for place in places[1:]):
                return axis
    return ""


def _indices(placement: Placement, dim: int) -> tuple[int, ...]:
    positions = placement.all_positions()
    return tuple(np.unique(np.unravel_index(positions.reshape(-1), placement.shape)[dim]).tolist())
