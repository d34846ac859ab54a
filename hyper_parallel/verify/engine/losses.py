"""Hypotheses about a loss or another single number that was divided by counts or sizes other than the reference's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import product

import numpy as np

from hyper_parallel.verify.engine.bounds import Key
from hyper_parallel.verify.engine.causes import Cause
from hyper_parallel.verify.engine.evidence import Evidence
from hyper_parallel.verify.engine.numbers import axes_of_factor, axis_sizes, integer_weights, ratio_of_counts
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.scalars import combinations_of_ranks, rows_of_rank
from hyper_parallel.verify.frameworks.contract.records import Record

__all__ = ["explain_loss"]

_POWERS = (1.0, 0.5, 2.0, 0.25, 4.0)
"""Scale factors of losses that are tried; programs use them against overflow and divide gradients by them later."""

_CHANCE = 1e-3
"""Largest accepted probability that powers fit by chance."""


def explain_loss(runs: PairedRuns, key: Key) -> Cause | None:
    """Return the sizes or counts that turn the ranks' numbers into the reference's, or None."""
    expected = float(runs.bounds.reference[key].value)
    values = {rank: float(runs.value(key, rank)) for rank in runs.holders(key) if runs.value(key, rank).size == 1}
    if not values or not np.isfinite([expected, *values.values()]).all() or not expected:
        return None
    tolerance = max(4 * float(np.max(runs.bounds.allowed(key))) / abs(expected), 1e-13)
    return (
        _by_size(runs, key, expected, values, tolerance)
        or _by_weights(runs, expected, values, tolerance)
        or _by_powers_of_two(runs, expected, values, tolerance)
        or _by_ratio(runs, key, expected, tolerance)
        or _by_calls(runs, key, values, tolerance)
    )


def _by_size(runs: PairedRuns, key: Key, expected: float, values: dict[int, float], tolerance: float) -> Cause | None:
    """Test whether each rank's number, or the ranks' mean or sum, is the reference's times sizes of groups."""
    sizes = runs.axes.sizes()
    own = set(values.values())
    candidates = [("each rank's value", next(iter(own)))] if max(own) - min(own) <= tolerance * abs(expected) else []
    for words, combined in combinations_of_ranks(runs, key):
        numbers = [float(value) for value in combined.values()]
        if max(numbers) - min(numbers) <= tolerance * abs(expected):
            candidates.append((f"the {words} of the ranks' values", numbers[0]))
    for words, value in candidates:
        axes = axes_of_factor(value / expected, sizes, tolerance)
        if axes and "weighted" in words and _nearer_to_one(_factors_of_gradients(runs, key[2]), value / expected):
            rows = ", ".join(str(rows_of_rank(runs, rank, key[2])) for rank in values)
            text = f"the ranks' losses are means over {rows} rows, each divided by {axis_sizes(axes, sizes)}"
            text = f"{text}, so that ranks with different numbers of rows count equally in the sum"
            text = f"{text}; weighted with the numbers of rows, the means average to the reference's"
            return Cause("scaled-by-count", axes[0], text)
        if axes:
            inverse = "" if value > expected else "1 / "
            text = f"{words} is the reference's times {value / expected:.9g}, {inverse}the size of"
            return Cause("scaled-by-size", " x ".join(axes), f"{text} {axis_sizes(axes, sizes)}")
    return None


def _factors_of_gradients(runs: PairedRuns, step: int) -> list[float]:
    """Return the factor that fits best for each gradient of a step on each rank."""
    keys = [key for key in runs.bounds.reference if key[0] == "gradient" and key[2] == step and runs.holders(key)]
    return [factor for key in keys for factor, _ in Evidence(runs, key, runs.holders(key)).factors().values()]


def _nearer_to_one(factors: list[float], claimed: float) -> bool:
    """Return whether the factors of gradients are nearer to 1 than to the loss's; a wrong loss would scale them."""
    median = float(np.median(factors)) if factors else claimed
    return bool(median > 0 and claimed > 0 and abs(np.log(median)) < abs(np.log(median / claimed)))


def _by_weights(runs: PairedRuns, expected: float, values: dict[int, float], tolerance: float) -> Cause | None:
    """Test whether each rank divided by its own count, so that the mean weighted with counts is the reference's."""
    for axis, groups in runs.axes.sets():
        size = len(groups[0])
        if any(len(group) != size for group in groups) or not all(rank in values for group in groups for rank in group):
            continue
        means = [float(np.mean([values[group[place]] for group in groups])) for place in range(size)]
        counts = integer_weights(means, expected, tolerance)
        if counts is not None and len(set(counts)) > 1:
            shown = " : ".join(map(str, counts))
            text = f"the mean over {axis} weighted with {shown} equals the reference within {tolerance:.0e}"
            return Cause(
                "scaled-by-count", axis, f"{text}; weighted equally it does not: each rank divides by its own count"
            )
    return None


def _by_powers_of_two(runs: PairedRuns, expected: float, values: dict[int, float], tolerance: float) -> Cause | None:
    """Test whether the mean or sum of the ranks' numbers, each times its own power of two, is the reference's."""
    for axis, groups in runs.axes.sets():
        group = groups[0]
        count = len(_POWERS) ** len(group)
        if len(groups) > 1 or not all(rank in values for rank in group) or tolerance * count > _CHANCE:
            continue
        chosen = sorted(product(_POWERS, repeat=len(group)), key=lambda powers: sum(power != 1 for power in powers))
        for powers in chosen:
            total = sum(power * values[rank] for power, rank in zip(powers, group, strict=True))
            for words, number in (("mean", total / len(group)), ("sum", total)):
                if len(set(powers)) > 1 and abs(number - expected) <= tolerance * abs(expected):
                    shown = ", ".join(f"{power:g}" for power in powers)
                    text = f"the {words} over {axis} of the ranks' losses times {shown} is the reference's"
                    return Cause("scaled", axis, f"{text}: the ranks scale their losses by different powers of two")
    return None


def _by_ratio(runs: PairedRuns, key: Key, expected: float, tolerance: float) -> Cause | None:
    """Test whether the mean or sum of the ranks' numbers is the reference's times a ratio of two counts."""
    for words, combined in combinations_of_ranks(runs, key):
        numbers = [float(value) for value in combined.values()]
        ratio = ratio_of_counts(numbers[0] / expected, tolerance)
        if ratio is not None and max(numbers) - min(numbers) <= tolerance * abs(expected):
            text = f"the {words} of the ranks' values is the reference's times {ratio}, a ratio of counts"
            return Cause("scaled-by-count", words.partition(" over ")[2].partition(",")[0], text)
    return None


def _by_calls(runs: PairedRuns, key: Key, values: Collection[int], tolerance: float) -> Cause | None:
    """Test whether a step's losses were not divided by their number, so that their sum is that many times too large."""
    whole = _of_step(runs.bounds.reference, key)
    for rank in values:
        own = _of_step(runs.ranks[rank], key)
        times = len(own) / len(whole)
        if len(own) == len(whole) or not sum(whole) or abs(sum(own) / sum(whole) - times) > tolerance * times:
            return None
    text = f"the step has {len(own)} losses where the reference has {len(whole)}, and their sum is {times:g} times"
    return Cause("scaled-by-count", "", f"{text} the reference's: the losses are not divided by their number")


def _of_step(index: Mapping[Key, Record], key: Key) -> list[float]:
    return [
        float(record.value) for other, record in index.items() if other[:3] == key[:3] and np.size(record.value) == 1
    ]
