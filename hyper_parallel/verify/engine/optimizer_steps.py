"""Hypotheses about weights that are wrong after a step whose gradients and states are right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.bounds import Key
from hyper_parallel.verify.engine.causes import Cause
from hyper_parallel.verify.engine.evidence import Evidence
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.verdict import Difference
from hyper_parallel.verify.engine.wording import ranks_words

__all__ = ["another_step", "part_not_updated", "scaled_update"]

_ENOUGH = 4
"""Number of values that must confirm a relation, in addition to those that determine it."""

_Wrong = Mapping[Key, Difference]


def part_not_updated(runs: PairedRuns, key: Key, _wrong: _Wrong, evidence: Evidence | None) -> Cause | None:
    """Test whether every wrong element of a weight is bitwise equal to its value before the step."""
    before = (key[0], key[1], key[2] - 1, 0)
    if key[0] != "weight" or key[2] < 0 or evidence is None or not evidence.ranks:
        return None
    for rank in evidence.ranks:
        wrong = evidence.wrong[rank]
        if before not in runs.ranks[rank] or runs.value(before, rank).shape != wrong.shape:
            return None
        if not np.array_equal(runs.value(before, rank)[wrong], evidence.actual[rank][wrong]):
            return None
    wrong, total = evidence.share
    text = f"the step left {wrong} of {total} elements unchanged, bit for bit, on {ranks_words(evidence.ranks)}"
    return Cause("not-updated", "", text)


def another_step(runs: PairedRuns, key: Key, wrong: _Wrong, evidence: Evidence | None) -> Cause | None:
    """Test whether the update is wrong although the weight's gradient, state and value before the step are right."""
    kind, name, step, _ = key
    if kind != "weight" or step < 0 or evidence is None or not evidence.ranks:
        return None
    gradients = [other for other in runs.bounds.reference if other[:3] == ("gradient", name, step)]
    states = [
        other for other in runs.bounds.reference
        if other[0] == "state" and other[2] == step and other[1].startswith(f"{name}:")
    ]  # fmt: skip
    before = (kind, name, step - 1, 0)
    known = [*gradients[-1:], before]
    if any(other in wrong for other in (*gradients, *states, before)) or before not in runs.bounds.reference:
        return None
    if not gradients or any(other not in runs.ranks[rank] for other in known for rank in evidence.ranks):
        return None
    right = (
        "gradient and weight before the step are" if not states else "gradient, state and weight before the step are"
    )
    fits = _decay(runs, before, evidence) or _learning_rate(runs, before, evidence) or _blocks(runs, before, evidence)
    if fits is not None:
        return Cause("optimizer", "", f"the {right} right; {fits}")
    return Cause("optimizer", "", f"the {right} right; {_nearest(runs, before, evidence)}")


def scaled_update(runs: PairedRuns, key: Key, _wrong: _Wrong, evidence: Evidence | None) -> Cause | None:
    """Test whether a buffer is a moving average whose new term is the right one times a factor."""
    before = (key[0], key[1], key[2] - 1, 0)
    if key[0] != "buffer" or evidence is None or before not in runs.bounds.reference:
        return None
    factors = []
    for rank in evidence.ranks:
        expected, old, rest = _columns(runs, before, evidence, rank)
        found = _fit(rest, [expected, old], evidence, rank)
        if found is None or abs(found[0]) < 1e-9:
            return None
        factors.append(1 + found[0])
    if not factors or max(factors) - min(factors) > 1e-3 * abs(factors[0]):
        return None
    text = f"what is new in it is the reference's times {factors[0]:.5g}, and what it keeps is right"
    text += f", on {ranks_words(evidence.ranks)}"
    counts = _counts_of_variance(runs, key, evidence, factors)
    return Cause("scaled-by-count" if counts else "scaled", "", f"{text}{counts}")


def _counts_of_variance(runs: PairedRuns, key: Key, evidence: Evidence, factors: list[float]) -> str:
    """Return text if the factors are those of unbiased variances with a rank's own ``n / (n - 1)``; otherwise empty."""
    module = runs.bounds.reference[key].module
    output = next((other for other in runs.bounds.reference if other[0] == "output" and other[1] == module), None)
    if output is None or any(output not in runs.ranks[rank] for rank in evidence.ranks):
        return ""
    channels = evidence.expected[evidence.ranks[0]].size
    shown: dict[str, None] = {}
    for rank, factor in zip(evidence.ranks, factors, strict=True):
        own, whole = (np.size(index[output].value) / channels for index in (runs.ranks[rank], runs.bounds.reference))
        corrected = own / (own - 1) * (whole - 1) / whole if min(own, whole) > 1 else 1.0
        if own == whole or abs(factor - corrected) > 0.01 * abs(corrected - 1):
            return ""
        shown.setdefault(f"n / (n - 1) with {own:g}, the numbers per channel of a rank, for {whole:g}")
    return f": {', '.join(shown)}"


def _columns(runs: PairedRuns, before: Key, evidence: Evidence, rank: int) -> tuple[Any, Any, Any]:
    """Return the expected value, the previous value and the error, as flat float64 arrays."""
    old = evidence.placements[rank].take(runs.bounds.reference[before].value)
    expected = evidence.expected[rank].astype(np.float64)
    rest = evidence.actual[rank].astype(np.float64) - expected
    return expected.reshape(-1), np.asarray(old, np.float64).reshape(-1), rest.reshape(-1)


def _fit(rest: Any, columns: list[Any], evidence: Evidence, rank: int) -> list[float] | None:
    """Return the factors with which the columns sum to the error, within the tolerance; None if there are none."""
    table = np.stack(columns, axis=1)
    if len(rest) < len(columns) + _ENOUGH or not np.isfinite(table).all() or not np.isfinite(rest).all():
        return None
    factors, _, rank_of_table, _ = np.linalg.lstsq(table, rest, rcond=1e-9)
    allowed = 2 * evidence.slack(rank, evidence.actual[rank]).reshape(-1)
    close = (np.abs(table @ factors - rest) <= allowed).all() and np.abs(rest).max() > 4 * np.median(allowed)
    return [float(factor) for factor in factors] if close and rank_of_table == len(columns) else None


def _multiples(
    runs: PairedRuns, before: Key, evidence: Evidence, column: Callable[[Any, Any], Any]
) -> list[float] | None:
    """Return, for each rank, the error as a multiple of ``column(expected, previous value)``; None if it is not one."""
    found = []
    for rank in evidence.ranks:
        expected, old, rest = _columns(runs, before, evidence, rank)
        factors = _fit(rest, [column(expected, old)], evidence, rank)
        if factors is None:
            return None
        found.append(factors[0])
    return found


def _decay(runs: PairedRuns, before: Key, evidence: Evidence) -> str | None:
    """Test whether the error is a multiple of the weight before the step."""
    found = _multiples(runs, before, evidence, lambda _, old: old)
    if found is None:
        return None
    shown = ", ".join(dict.fromkeys(f"{factor:.4g}" for factor in found))
    return f"the weight is the reference's plus {shown} times the weight before the step: it decays otherwise"


def _learning_rate(runs: PairedRuns, before: Key, evidence: Evidence) -> str | None:
    """Test whether the update is a multiple of the reference's."""
    found = _multiples(runs, before, evidence, lambda expected, old: expected - old)
    if found is None:
        return None
    shown = ", ".join(dict.fromkeys(f"{1 + factor:.5g}" for factor in found))
    return f"the update is the reference's times {shown}"


def _blocks(runs: PairedRuns, before: Key, evidence: Evidence) -> str | None:
    """Test whether updates of blocks of rows are multiples of the reference's, one block for each rank of an axis."""
    rank = evidence.ranks[0]
    shape = evidence.actual[rank].shape
    expected, old, rest = _columns(runs, before, evidence, rank)
    if len(shape) < 2 or shape[1] < 2:
        return None
    update, off = (flat.reshape(shape[0], -1) for flat in (expected - old, rest))
    squares = (update**2).sum(axis=1)
    factors = 1 + (update * off).sum(axis=1) / np.where(squares, squares, 1)
    allowed = 2 * evidence.slack(rank, evidence.actual[rank]).reshape(shape[0], -1)
    if not (squares > 0).all() or (np.abs((factors - 1)[:, None] * update - off) > allowed).any():
        return None
    same = 4 * float(np.median(allowed)) / float(np.abs(update).max())
    changes = np.flatnonzero(np.abs(np.diff(factors)) > same) + 1
    sizes = {name: len(groups[0]) for name, groups in runs.axes.sets()}
    axis = next((name for name, size in sizes.items() if size == len(changes) + 1 and size > 1), None)
    if axis is None:
        return None
    bounds = [0, *changes.tolist(), shape[0]]
    shown = ", ".join(f"rows {a}:{b} times {factors[a]:.5g}" for a, b in pairwise(bounds))
    return f"the update is the reference's {shown}: the optimizer computes on the part of each rank of {axis}"


def _nearest(runs: PairedRuns, before: Key, evidence: Evidence) -> str:
    """Return text with the best factor from the reference's update to the rank's update, and the residual."""
    rank = evidence.ranks[0]
    expected, old, rest = _columns(runs, before, evidence, rank)
    update = expected - old
    square = float(update @ update)
    if not square:
        return "the reference does not change the weight"
    factor = 1 + float(update @ rest) / square
    residual = float(np.linalg.norm(rest - (factor - 1) * update)) / square**0.5
    return f"nearest: the update of rank {rank} is {factor:.4g} times the reference's, residual {100 * residual:.2g} %"
