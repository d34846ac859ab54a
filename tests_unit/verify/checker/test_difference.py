"""The comparison of an array with the expected one."""

import numpy as np
import pytest

from hyper_parallel.verify.checker.difference import difference, is_single_precision, rounding_bound

DIFFERENCES = [
    (np.zeros(2), np.zeros(3), "has shape [2], should have [3]"),
    (np.zeros(2, np.float32), np.zeros(2), "has dtype float32, should have float64"),
    (np.array([1, 2]), np.array([1, 3]), "is 2 at [1], should be 3 (1 of 2 differ)"),
    (np.array([1.0, np.nan]), np.array([1.0, 2.0]), "is nan at [1], should be 2.0 (1 of 2 differ)"),
    (np.array([0.0]), np.array([-0.0]), ""),
    (np.array([np.nan, np.inf]), np.array([np.nan, np.inf]), ""),
    (np.array([1.0, np.inf]), np.array([1.0, -np.inf]), "is inf at [1], should be -inf (1 of 2 differ)"),
    (np.array([1.0, np.inf]), np.array([1.0, 2.0]), "is inf at [1], should be 2.0 (1 of 2 differ)"),
    (np.zeros((0, 2)), np.zeros((0, 2)), ""),
]


@pytest.mark.parametrize("actual, wanted, text", DIFFERENCES)
@pytest.mark.parametrize("allowed", [0.0, 1e-9])
def test_differences_are_described(actual, wanted, text, allowed):
    """The message has the shape, dtype or worst element; zeros of either sign are equal, and so are two NaN."""
    assert difference(actual, wanted, allowed) == text


def test_exact_means_to_the_bit():
    """One unit in the last place passes under the bound of rounding and fails where nothing is allowed."""
    near, one = np.array([1.0 + 2**-52]), np.array([1.0])
    assert difference(near, one, rounding_bound(one)) == ""
    assert difference(near, one) != ""
    assert difference(np.array([1.0 + 2**-40]), one, rounding_bound(one)) != ""


def test_each_element_has_its_own_bound():
    """An array of bounds is used per element; infinity accepts any value, of integers too."""
    actual, wanted = np.array([1.5, 2.5]), np.array([1.0, 2.0])
    assert difference(actual, wanted, np.array([0.5, 0.25])) == "is 2.5 at [1], should be 2.0 (1 of 2 differ)"
    assert difference(actual, wanted, np.array([0.5, np.inf])) == ""
    assert difference(np.array([1, 7]), np.array([1, 2]), np.array([0.0, np.inf])) == ""


def test_half_precision_is_compared_in_double():
    """A difference of float16 numbers that overflows there is still a difference."""
    assert difference(np.array([6e4], np.float16), np.array([-6e4], np.float16), 1.0) != ""


def test_the_bound_of_rounding():
    """64 units of the coarsest dtype, of the largest magnitude, sum or given scale; a tolerance replaces the units."""
    array = np.array([0.5, -3.0, np.inf], np.float32)
    eps = 2.0**-23
    assert rounding_bound(array) == 64 * eps * 3
    assert rounding_bound(array, summed=8.0) == 64 * eps * 8
    assert rounding_bound(array, scale=0.25) == 64 * eps * 0.25
    assert rounding_bound(array, eps=2.0**-7) == 64 * 2.0**-7 * 3
    assert rounding_bound(array, tolerance=1e-2, scale=0.25) == 3e-2
    assert rounding_bound(np.array([3])) == 0.0


def test_doubles_computed_in_single_precision():
    """Doubles rounded to single precision are recognised; true doubles, short fractions and integers are not."""
    array = np.random.default_rng(0).standard_normal((5, 3))
    rounded = array.astype(np.float32)
    assert is_single_precision([array, rounded.astype(np.float64)])
    assert is_single_precision([rounded.astype(np.complex128)])
    for other in (array, rounded, np.arange(1e6), np.arange(64) / 64, 2.0 ** -np.arange(300), np.full(5, np.nan), None):
        assert not is_single_precision([other])
