"""Distances of float32 arrays that are clearly within their bounds are measured in float32, all others in float64."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.verify.engine import distance as module
from hyper_parallel.verify.engine.comparison import compare_paired
from hyper_parallel.verify.engine.distance import distance, energy_of
from hyper_parallel.verify.engine.pairing import PairedRuns

SPECIAL = (np.nan, np.inf, -np.inf, 0.0, 1e-45, 3e38)


def _in_float64(actual, expected, allowed, floor):
    """Return the distance that float64 gives, by arrays that the short way does not take."""
    return distance(actual, expected, allowed.astype(np.float64), floor)


@pytest.mark.parametrize("seed", range(40))
def test_the_short_way_says_what_float64_says(seed):
    """Ratio, error and bound agree to float32's digits, and the verdict always, also of inf, NaN and bounds of 0."""
    draw = np.random.default_rng(seed)
    shape = [(7,), (5, 3), (), (2, 3, 5)][seed % 4]
    expected = np.asarray(draw.normal(size=shape) * 10.0 ** draw.integers(-30, 30), np.float32)
    allowed = np.asarray(np.abs(expected) * 2.0**-18 * draw.uniform(0.5, 2, shape), np.float32)
    actual = np.asarray(expected + allowed * draw.uniform(-1, 1, shape) * [0.5, 0.98, 0.9999, 1.1][seed // 4 % 4])
    actual = actual.astype(np.float32)
    if seed >= 16 and shape:
        for array in (actual, expected, allowed):
            place = tuple(int(draw.integers(size)) for size in shape)
            array[place] = SPECIAL[int(draw.integers(len(SPECIAL)))]
        allowed = np.abs(np.nan_to_num(allowed, nan=0.0, posinf=np.inf))
    short, long = distance(actual, expected, allowed, 1e-30), _in_float64(actual, expected, allowed, 1e-30)
    assert (short.ratio > 1, short.why) == (long.ratio > 1, long.why)
    for name in ("ratio", "error", "bound"):
        own, other = (min(getattr(each, name), 1e30) for each in (short, long))  # of a bound of 0, any large number
        assert own == other or own == pytest.approx(other, rel=1e-5, abs=1e-37), name


@pytest.mark.parametrize("ratio, short", [(0.5, True), (0.995, False), (1.5, False)])
def test_only_what_is_clearly_within_its_bounds_takes_the_short_way(ratio, short):
    """Near the bound, a difference is measured in float64."""
    expected = np.float32([1.0, 2.0, 3.0])
    allowed = np.float32([1e-3, 1e-3, 1e-3])
    actual = (expected + np.float32([0, ratio * 1e-3, 0])).astype(np.float32)
    assert (module._near(actual, expected, allowed, 0.0) is not None) == short
    assert (distance(actual, expected, allowed).ratio > 1) == (ratio > 1)


@pytest.mark.parametrize("magnitude", [1e-38, 1e-20, 1.0, 1e20, 3e38])
def test_energies_of_any_magnitude(magnitude):
    """The sum of squares neither overflows nor vanishes, and leaves out what is not finite."""
    array = np.float32([magnitude, -0.5 * magnitude, 0.25 * magnitude])
    assert energy_of(array) == pytest.approx(np.square(array.astype(np.float64)).sum(), rel=1e-6)
    assert energy_of(np.append(array, [np.nan, np.inf]).astype(np.float32)) == pytest.approx(energy_of(array), rel=1e-6)


@pytest.mark.parametrize("fault", [False, True])
def test_runs_under_larger_bounds_are_measured_again_where_they_differed(runs, fault):
    """A second comparison gives the verdict of a new one; weights, states and gradients within bounds are kept."""
    reference, repeats, parallel = runs(mesh={"dp": 2, "tp": 2}, clip=0.5)
    if fault:
        for record in parallel.ranks[1].records:
            if record.kind == "gradient" and record.step == 1:
                record.value[...] *= 1.5
    first = PairedRuns(reference, repeats, parallel, None, None)
    before = compare_paired(first)
    again = PairedRuns(reference, first.bounds, parallel, None, None, earlier=first)
    measured = []
    again.distance = lambda key, rank: measured.append(key) or PairedRuns.distance(again, key, rank)
    after = compare_paired(again)
    assert after.text() == before.text()
    assert before.equal is not fault
    kept = {key for key in measured if key[0] in ("gradient", "state", "weight")}
    assert kept == {(each.kind, each.name, each.step, each.call) for each in before.differences} & kept
    assert bool(kept) == fault
