"""Bounds measured with perturbed repeats, tried on a small network in NumPy that adds in different orders."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from hyper_parallel.verify.engine.noise import (
    DISPLACED_MULTIPLE,
    HALF_MULTIPLE,
    MULTIPLE,
    NOISE_SHARE,
    _largest_moves,
    allowed_movement,
    displace,
    movement,
    multiple_of,
    perturb,
    seed_of,
    unit,
)

RATES = {"sgd": 0.1, "adamw": 1e-2}


def product(left, right, order):
    """Return ``left @ right``, added in one piece (0), term by term (1), or in ``order`` pieces."""
    terms = left.shape[1]
    if order == 0:
        return left @ right
    cuts = np.linspace(0, terms, (terms if order == 1 else order) + 1).astype(int)
    return sum(left[:, start:stop] @ right[start:stop] for start, stop in pairwise(cuts))


def gradients(parameters, inputs, targets, order):
    """Return loss, output and gradients of two layers with softmax; the last parameter has a gradient of noise."""
    first, bias, second, shift = parameters
    hidden = np.tanh(product(inputs, first, order) + bias)
    logits = product(hidden, second, order) + shift
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    rows = np.arange(len(targets))
    delta = shares.copy()
    delta[rows, targets] -= 1
    delta /= len(targets)
    ones = np.ones((1, len(targets)), inputs.dtype)
    inner = product(delta, second.T, order) * (1 - hidden**2)
    noise = product(ones, delta, order).sum(keepdims=True)[0]
    loss = -np.log(shares[rows, targets]).mean()
    weights = product(inputs.T, inner, order), product(ones, inner, order)[0], product(hidden.T, delta, order)
    return loss, logits, [*weights, noise]


class Training:
    """Values of three training steps, by kind, number of the parameter and step."""

    def __init__(self, seed, dtype, optimizer, order, moved=None, displaced=None, epsilon=1e-8):
        rng = np.random.default_rng(seed)
        sizes = rng.integers(3, 30, 3)
        shapes = [sizes[:2], sizes[1:2], sizes[1:], (1,)]
        parameters = [(rng.standard_normal(shape) / 2).astype(dtype) for shape in shapes]
        first, second = [np.zeros_like(p) for p in parameters], [np.zeros_like(p) for p in parameters]
        if moved:
            parameters = [perturb(p, seed_of(moved[0], number), moved[1]) for number, p in enumerate(parameters)]
        self.values = {}
        for step in range(3):
            inputs, targets = rng.standard_normal((7, sizes[0])).astype(dtype), rng.integers(0, sizes[2], 7)
            if moved:
                inputs = perturb(inputs, seed_of(moved[0], "inputs", step), moved[1])
            loss, logits, slopes = gradients(parameters, inputs, targets, order)
            self.values["loss", 0, step], self.values["output", 0, step] = np.asarray(loss), logits
            for number, slope in enumerate(slopes):
                self.values["gradient", number, step] = slope.copy()
                if displaced:
                    by = displaced[2]["gradient", number, step]
                    slope = displace(slope, by, seed_of(displaced[0], number), displaced[1])  # noqa: PLW2901
                if optimizer == "adamw":
                    first[number] = 0.9 * first[number] + 0.1 * slope
                    second[number] = 0.99 * second[number] + 0.01 * slope**2
                    mean, square = first[number] / (1 - 0.9 ** (step + 1)), second[number] / (1 - 0.99 ** (step + 1))
                    slope = mean / (np.sqrt(square) + epsilon)  # noqa: PLW2901
                    self.values["state", number, step] = second[number].copy()
                parameters[number] = (parameters[number] - RATES[optimizer] * slope).astype(dtype)
                self.values["weight", number, step] = parameters[number]


def bounds(seed, dtype, optimizer, epsilon=1e-8):
    """Return the reference's values and their allowed differences."""
    reference = Training(seed, dtype, optimizer, 0, epsilon=epsilon).values
    moves = [(number, sign) for number in (1, 2) for sign in (1, -1)]
    repeats = [Training(seed, dtype, optimizer, 0, moved=move, epsilon=epsilon).values for move in moves]
    allowed = allowed_of(reference, repeats)
    pair = [Training(seed, dtype, optimizer, 0, displaced=(3, s, allowed), epsilon=epsilon).values for s in (1, -1)]
    return reference, allowed_of(reference, repeats, pair)


def allowed_difference(reference, repeats, displaced=(), floor=0.0, dtype=""):
    """Return how far a correct run may be from the reference, per element, from whole repeats."""
    moves = [_largest_moves(reference, kind) if len(kind) else None for kind in (repeats, (), displaced)]
    return allowed_movement(reference, *moves, floor=floor, dtype=dtype)


def allowed_of(reference, repeats, displaced=()):
    """Return the allowed difference of every value."""
    largest = {}
    for (kind, _, step), value in reference.items():
        largest[kind, step] = max(largest.get((kind, step), 0.0), float(np.abs(value).max()))
    return {
        key: allowed_difference(
            value, [r[key] for r in repeats], [d[key] for d in displaced], NOISE_SHARE * largest[key[0], key[2]]
        )
        for key, value in reference.items()
    }


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("optimizer, epsilon", [("sgd", 1e-8), ("adamw", 1e-8), ("adamw", 1e-16)])
def test_correct_runs_never_alarm_and_keep_a_margin(dtype, optimizer, epsilon):
    """Another order of summation stays within half of what is allowed, gradients of pure noise under AdamW included."""
    for seed in range(8):
        reference, allowed = bounds(seed, dtype, optimizer, epsilon)
        for order in (1, 2, 3):
            actual = Training(seed, dtype, optimizer, order, epsilon=epsilon).values
            for key, value in reference.items():
                assert (np.abs(actual[key] - value) <= 0.5 * allowed[key]).all(), (seed, order, key)


def test_a_few_zeros_that_never_moved_may_be_off_by_units_of_the_largest_value():
    """A sum that cancels in all repeats may be one unit of its terms in another order; many zeros may not."""
    largest, ulp = 0.7, float(np.finfo(np.float64).eps)
    for count, share in ((1, 0.064), (7, 0.064), (8, NOISE_SHARE)):
        zeros = np.zeros(count)
        allowed = allowed_difference(zeros, [zeros] * 4, floor=NOISE_SHARE * largest)
        np.testing.assert_allclose(allowed, np.full(count, MULTIPLE * share * largest * ulp), rtol=1e-12)
    moved = allowed_difference(np.zeros(1), [np.full(1, ulp)], floor=NOISE_SHARE * largest)
    assert moved == MULTIPLE * ulp


def test_an_error_of_1e_9_in_one_component_is_caught():
    """In float64 an error of 1e-9 relative in any component but the smallest of a gradient exceeds the bound."""
    for seed in range(8):
        reference, allowed = bounds(seed, np.float64, "adamw")
        for number in range(3):
            slope = reference["gradient", number, 0]
            visible = np.abs(slope) > 1e-3 * np.abs(slope).max()
            assert visible.mean() > 0.6
            assert (1e-9 * np.abs(slope) > allowed["gradient", number, 0])[visible].all()


def test_a_gradient_of_noise_has_a_free_step_but_only_there():
    """AdamW may step either way where the gradient is noise; the other weights stay bound to rounding."""
    _, allowed = bounds(0, np.float64, "adamw", 1e-20)
    assert allowed["weight", 3, 0] >= RATES["adamw"]
    assert np.median(allowed["weight", 0, 0]) < 1e-10


def test_a_movement_is_one_unit_in_the_last_place_and_antithetic():
    """A number moves to one of its neighbours; the other sign moves it to the other."""
    array = np.random.default_rng(0).standard_normal((5, 7))
    array[0, 0], array[1, 1], array[2, 2] = 0.0, np.inf, np.nan
    up, down = perturb(array, 3, 1), perturb(array, 3, -1)
    moved = np.isfinite(array) & (array != 0)
    assert (np.abs(up[moved] - array[moved]) == np.abs(np.spacing(array[moved]))).all()
    assert ((up + down)[moved] == 2 * array[moved]).all()
    assert np.array_equal(up[~moved], array[~moved], equal_nan=True)
    assert np.array_equal(perturb(array, 3, 1), up, equal_nan=True)
    assert not np.array_equal(perturb(array, 4, 1), up, equal_nan=True)


def test_other_dtypes_move_or_stay():
    """Integers and empty arrays stay; complex numbers move in both parts; bfloat16 in float32 moves by its own unit."""
    integers = np.arange(3)
    assert np.array_equal(perturb(integers, 0, 1), integers)
    assert np.array_equal(displace(integers, 1.0, 0, 1), integers)
    assert perturb(np.zeros((0, 2)), 0, 1).shape == (0, 2)
    complexes = np.array([1.3 + 2.7j, 3.1 - 1.9j])
    moved = perturb(complexes, 0, 1)
    assert moved.dtype == complexes.dtype
    assert (moved.real != complexes.real).all()
    assert (moved.imag != complexes.imag).all()
    half = bfloat16(np.random.default_rng(0).standard_normal(40))
    assert np.array_equal(bfloat16(perturb(half, 0, 1)), perturb(half, 0, 1))
    assert (perturb(half, 0, 1) != half).all()


def bfloat16(array):
    """Return ``array`` cut to bfloat16, in float32."""
    return (np.asarray(array, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def test_half_precision_is_recognised_in_float32():
    """bfloat16 and float16 numbers in float32 have their own unit and multiple; constants are float32."""
    values = np.random.default_rng(0).standard_normal(40).astype(np.float32)
    assert (unit(values), multiple_of(values)) == (2.0**-23, MULTIPLE)
    assert (unit(bfloat16(values)), multiple_of(bfloat16(values))) == (2.0**-7, HALF_MULTIPLE)
    as_float16 = values.astype(np.float16)
    assert (unit(as_float16), multiple_of(as_float16)) == (2.0**-10, HALF_MULTIPLE)
    assert (unit(as_float16.astype(np.float32)), multiple_of(as_float16.astype(np.float32))) == (2.0**-10, 16.0)
    assert unit(np.ones(40, np.float32)) == 2.0**-23
    assert unit(values[:3]) == 2.0**-23


@pytest.mark.parametrize("dtype, digits", [("bfloat16", 7), ("float16", 10)])
def test_half_precision_of_few_numbers_is_told(dtype, digits):
    """The dtype of a recorded value counts where too few numbers show it, and where numbers are the smallest of it."""
    few = np.array([0.5, -1.0, 3.0], np.float32)
    assert (unit(few), multiple_of(few)) == (2.0**-23, MULTIPLE)
    assert (unit(few, dtype), multiple_of(few, dtype)) == (2.0**-digits, HALF_MULTIPLE)
    assert np.array_equal(np.abs(perturb(few, 0, 1, dtype) - few), 2.0**-digits * np.array([0.5, 1.0, 2.0]))
    assert (allowed_difference(few, [few], dtype=dtype) == HALF_MULTIPLE * 2.0**-digits * np.abs(few)).all()
    smallest = np.array([2.0**-24, -(2.0**-20)], np.float32)  # below the normal numbers of float16
    spacing = 2.0**-24 if dtype == "float16" else 2.0**-7 * np.abs(smallest)
    assert (np.abs(perturb(smallest, 0, 1, dtype) - smallest) == spacing).all()
    assert (allowed_difference(smallest, [smallest], dtype=dtype) == HALF_MULTIPLE * spacing).all()


def test_a_converted_loss_has_the_unit_of_float32():
    """A float64 number that fits in float32 was computed there; short fractions, integers and arrays were not."""
    loss = np.asarray(float(np.float32(55.119232)))
    assert unit(loss) == 2.0**-23
    assert unit(np.asarray(55.119232)) == unit(np.asarray(0.5)) == unit(np.asarray(3.0)) == 2.0**-52
    assert unit(np.full(3, float(loss))) == 2.0**-52


def test_a_displacement_has_the_given_size_and_both_signs():
    """Each element moves by exactly what is given; the same seed moves it the same way in every step."""
    slope = np.zeros(50)
    up, down = displace(slope, 0.5, 7, 1), displace(slope, 0.5, 7, -1)
    assert set(up) == {0.5, -0.5}
    assert (up == -down).all()
    assert (displace(slope, np.full(50, np.inf), 7, 1) == 0).all()
    assert (displace(slope, 0.5, None, -1) == -0.5).all()


def test_elements_that_did_not_move_take_the_scale_of_their_neighbours():
    """The median of row, column, vicinity and tensor bounds a scale from below; outliers loosen nobody else."""
    rng = np.random.default_rng(0)
    scales = np.array([1e-16, 1e-12])[:, None]
    array = rng.standard_normal((2, 40))
    moves = [scales * rng.standard_normal((2, 40)) for _ in range(4)]
    for move in moves:
        move[:, 5] = 0.0
    moves[0][0, 7] = 1.0
    result = movement(array, [array + move for move in moves])
    assert result[0, 7] == pytest.approx(1.0)
    assert result[1, 5] > 1e-13
    assert np.median(result[0]) < 1e-11
    vector = movement(array[1], [array[1] + move[1] for move in moves])
    assert vector[5] > 1e-13


def test_what_did_not_move_is_allowed_its_last_place():
    """A constant may be off by the multiple of its unit, a zero by that of the floor, complex values by the modulus."""
    constant = np.full(3, 0.75)
    assert allowed_difference(constant, [constant]) == pytest.approx(MULTIPLE * 2.0**-52 * 0.75)
    assert allowed_difference(np.zeros(9), [np.zeros(9)], floor=2.0) == pytest.approx(MULTIPLE * 2.0**-51)
    complexes = np.array([3 + 4j])
    assert allowed_difference(complexes, [complexes]) == pytest.approx(MULTIPLE * 2.0**-52 * 5)
    displaced = allowed_difference(constant, [constant], [constant + 0.5, constant - 0.25])
    assert displaced == pytest.approx(DISPLACED_MULTIPLE * 0.5)


def test_values_that_are_not_finite():
    """An infinity of the reference has no scale; one of a repeat alone allows anything there."""
    array = np.array([np.inf, 1.0, 2.0])
    allowed = allowed_difference(array, [np.array([np.inf, np.inf, 2.0])])
    assert allowed[1] == np.inf
    assert np.isfinite(allowed[[0, 2]]).all()


def test_bad_repeats_are_refused():
    """A repeat has the reference's shape."""
    with pytest.raises(ValueError, match=r"a repeat of the reference has shape \[3\], not \[2\]"):
        movement(np.ones(2), [np.ones(3)])


def test_seeds_depend_on_every_name():
    """A seed is equal in every process, and differs by run and array."""
    assert seed_of(0, "inputs", 1) == seed_of(0, "inputs", 1)
    assert len({seed_of(0, "a"), seed_of(1, "a"), seed_of(0, "b"), seed_of(0, "a", 0)}) == 4
