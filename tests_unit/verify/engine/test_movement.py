"""Movements of repeats: their codes, what is folded, and tensors as a whole."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from hyper_parallel.verify.engine.bounds import ROUNDED, Bounds
from hyper_parallel.verify.engine.distance import energy_of, share_of_movement, whole_distance
from hyper_parallel.verify.engine.movement import Movements, decode, encode, exponent_of, whole_movement
from hyper_parallel.verify.engine.noise import ROUNDED_MULTIPLE
from hyper_parallel.verify.engine.scratch import Scratch
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Record, Run

RNG = np.random.default_rng(3)


@pytest.mark.parametrize("dtype, most", [(np.float32, 1.25), (np.float64, 1.5)])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e12])
def test_codes_round_up_a_little(dtype, most, scale):
    """A decoded movement is never smaller, and at most a quarter (float64: half) larger, or the next denormal."""
    random = np.random.default_rng(31)
    spread = 10.0 ** random.uniform(-11 if dtype is np.float32 else -24, 0, 999)
    moved = (np.abs(random.standard_normal(999)) * spread * scale).astype(dtype)
    exponent = exponent_of(float(moved.max()))
    decoded = decode(encode(moved, exponent), exponent, dtype)
    assert (decoded >= moved).all()
    assert (decoded <= moved.astype(np.float64) * most + np.finfo(dtype).smallest_subnormal).all()
    assert (decode(encode(decoded, exponent), exponent, dtype) == decoded).all()


def test_codes_of_nothing_and_of_no_number():
    """No movement is none; NaN, infinity and what exceeds all codes are unbounded."""
    moved = np.array([0.0, np.nan, np.inf, 1e9], np.float32)
    assert decode(encode(moved, 1), 1, np.float32).tolist() == [0.0, np.inf, np.inf, np.inf]


def _reference(*values):
    return {("output", f"m{i}", 0, 0): Record("output", f"m{i}", "", 0, 0, value) for i, value in enumerate(values)}


@pytest.mark.parametrize("stored", [True, False])
def test_folding_keeps_the_largest_movement(stored, tmp_path):
    """Of several repeats of a kind the largest movement remains per element, whether on disk or in memory."""
    value = RNG.standard_normal((7, 9)).astype(np.float32)
    moves = [(RNG.standard_normal((7, 9)) * 1e-6).astype(np.float32) for _ in range(3)]
    with Scratch(tmp_path) as scratch:
        movements = Movements(_reference(value, np.ones(40)), scratch if stored else None)
        key, other = ("output", "m0", 0, 0), ("output", "m1", 0, 0)
        for move in moves:
            movements.fold("moved", key, value + move)
            movements.fold("moved", ("output", "unknown", 0, 0), value)
        exponent = movements.exponent(key)
        found = decode(movements.codes("moved", key), exponent, np.float32)
        largest = np.max([np.abs((value + move) - value) for move in moves], axis=0)
        assert (found >= largest).all()
        assert (found <= largest * 1.25).all()
        assert movements.codes("displaced", key) is None
        assert not movements.folded("moved", other)
        movements.close()


def test_folding_in_another_process(tmp_path):
    """A copy that another process folds into writes to the same file; its summary completes the original."""
    value = RNG.standard_normal(50)
    with Scratch(tmp_path) as scratch:
        movements = Movements(_reference(value), scratch)
        key = ("output", "m0", 0, 0)
        copy = pickle.loads(pickle.dumps(movements))  # noqa: S301 - written on the same line
        copy.fold("moved", key, value * (1 + 1e-9))
        movements.merge(copy.summary())
        assert (movements.codes("moved", key) > 0).all()
        assert movements.whole("moved", key).scale == pytest.approx(1e-9, rel=1e-3)
        copy.close()
        movements.close()


def test_integers_and_infinities():
    """An integer that a repeat changes is unbounded; elements that are not finite in the reference are left out."""
    movements = Movements(_reference(np.arange(4), np.array([1.0, np.inf, 2.0])), None)
    movements.fold("moved", ("output", "m0", 0, 0), np.array([0, 1, 5, 3]))
    assert movements.codes("moved", ("output", "m0", 0, 0)).tolist() == [0, 0, 255, 0]
    movements.fold("moved", ("output", "m1", 0, 0), np.array([1.5, np.inf, 2.0]))
    codes = movements.codes("moved", ("output", "m1", 0, 0))
    assert codes[1:].tolist() == [0, 0]
    assert codes[0] > 0
    assert movements.whole("moved", ("output", "m1", 0, 0)).norm == pytest.approx(0.5 / 5**0.5)


def test_a_repeat_of_another_shape_counts_as_none():
    """A value that a repeat has in another shape is not measured by it."""
    movements = Movements(_reference(np.ones((3, 2))), None)
    movements.fold("moved", ("output", "m0", 0, 0), np.ones((2, 2)))
    assert not movements.folded("moved", ("output", "m0", 0, 0))


def test_the_movement_as_a_whole_sees_a_scale():
    """Along the tensor, random movements cancel and a scale does not; complex tensors count by both parts."""
    value = RNG.standard_normal(4000).astype(np.float32)
    noise = (RNG.standard_normal(4000) * 1e-4).astype(np.float32)
    exponent = exponent_of(float(np.abs(value).max()))
    random, scaled = (whole_movement(move, value, exponent) for move in (noise, value * np.float32(1e-4)))
    assert abs(random.scale) < 1e-5
    assert random.norm == pytest.approx(1e-4, rel=0.1)
    assert scaled.scale == pytest.approx(1e-4, rel=1e-3)
    both = value[:2000] + 1j * value[2000:]
    assert whole_movement(both * -2e-4, both, exponent).scale == pytest.approx(-2e-4, rel=1e-3)
    assert whole_movement(np.ones(3), np.zeros(3), 0).norm == 0.0


def _bounds(value, by):
    def run(array):
        return Run([RankRecords(0, [Record("gradient", "w", "", 0, 0, array)])])

    moved = [run((value * (1 + by * sign * RNG.standard_normal(value.shape))).astype(value.dtype)) for sign in (1, -1)]
    return Bounds(run(value), moved)


def test_a_scale_that_no_element_shows_is_found():
    """A gradient multiplied by 1.00001 is within the bounds of all elements, and not of the tensor; a part as well."""
    value = RNG.standard_normal((60, 70)).astype(np.float32)
    bounds, key = _bounds(value, 1e-6), ("gradient", "w", 0, 0)
    energy = float((value.astype(np.float64) ** 2).sum())
    wrong = (value.astype(np.float64) * 1.00001).astype(np.float32)
    assert (np.abs(wrong - value) <= bounds.allowed(key)).all()
    found = whole_distance(wrong, value, bounds.whole(key), energy)
    assert found.ratio > 1
    assert found.why == "is 1.00001 times the single device's as a whole (allowed 1.9e-06 more or less)"
    part = whole_distance(wrong[:20], value[:20], bounds.whole(key), energy)
    assert 0.5 < part.ratio < found.ratio
    right = (value * (1 + 1e-7 * RNG.standard_normal(value.shape))).astype(np.float32)
    assert whole_distance(right, value, bounds.whole(key), energy).ratio < 0.1


@pytest.mark.parametrize("dtype, unit", [("bfloat16", 2.0**-7), ("float16", 2.0**-10), ("", 0.0)])
def test_a_gradient_whose_terms_are_rounded_in_one_direction_may_be_off_by_one_unit(dtype, unit):
    """A float32 gradient through half precision has one unit more as a whole, a state two, other values none."""
    value, names = RNG.standard_normal((8, 9)).astype(np.float32), ("gradient", "state", "weight")

    def run(scale, perturbation):
        records = [Record("output", "half", "", 0, 0, np.ones(3, np.float32), dtype=dtype)]
        records += [Record(kind, "w", "", 0, 0, (value * scale).astype(np.float32)) for kind in names]
        return Run([RankRecords(0, records)], settings={"perturbation": perturbation})

    moved, rounded = run(1.0, None), run(1.001, ROUNDED)
    with_half, without = Bounds(moved, [moved, rounded]), Bounds(moved, [moved])
    for kind, units in zip(names, (1, 2, 0), strict=True):
        key = (kind, "w", 0, 0)
        measured = ROUNDED_MULTIPLE * with_half.movements.whole("rounded", key).scale
        assert with_half.whole(key).scale - without.whole(key).scale == pytest.approx(measured + units * unit)


def test_a_part_with_all_the_noise_moves_more_along_itself():
    """A part that has all the movement of its tensor, and little of its energy, may be off by that movement."""
    random, key = np.random.default_rng(7), ("weight", "w", 0, 0)
    value = np.concatenate([random.standard_normal(60), 0.01 * random.standard_normal(30)]).astype(np.float32)
    moving = np.where(np.arange(90) < 60, 1e-7, 0.01).astype(np.float32)

    def run(array):
        return Run([RankRecords(0, [Record(*key[:2], "", 0, 0, array)])])

    bounds = Bounds(run(value), [run(value + moving * random.standard_normal(90, np.float32)) for _ in range(2)])
    allowed, whole, energy = bounds.allowed(key), bounds.whole(key), energy_of(value)
    share = share_of_movement(value[60:], allowed[60:], value, allowed)
    assert share > 0.99
    assert whole_distance(1.5 * value[60:], value[60:], whole, energy).ratio > 1
    assert whole_distance(1.5 * value[60:], value[60:], whole, energy, noise=share).ratio < 1
    assert share_of_movement(value[:60], allowed[:60], value, allowed) < 0.01
    assert share_of_movement(value[:60], np.full(60, np.inf), value, allowed) == 1.0
