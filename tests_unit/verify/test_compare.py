"""The comparison of values under a bound."""

import numpy as np
import pytest

from hyper_parallel.verify.compare import Comparison, difference


@pytest.mark.parametrize(
    "actual, expected, why",
    [
        (np.zeros((2, 3)), np.zeros((3, 2)), "has shape [2, 3], single device [3, 2]"),
        (np.zeros(2, np.float32), np.zeros(2), "has dtype float32, single device float64"),
        (np.array([1, 2]), np.array([1, 3]), "1 of 2 values differ"),
        (np.array([1.0, np.nan]), np.array([1.0, 2.0]), "parallel has 1 values that are not finite"),
        (np.array([np.nan]), np.array([np.nan]), "single device has 1 values that are not finite"),
        (np.array([1.0, 2.5]), np.array([1.0, 2.0]), "2.5 at [1], single device 2 (error 2.5e-01, bound 1.0e-09)"),
        (np.array(3.0), np.array(2.0), "3, single device 2 (error 5.0e-01, bound 1.0e-09)"),
        (np.array([1e-30]), np.array([0.0]), "1e-30 at [0], single device 0 (error inf, bound 1.0e-09)"),
    ],
)
def test_differences_are_described(actual, expected, why):
    """Shape, dtype, values that are not finite and every error beyond the bound are reported with the numbers."""
    assert difference(actual, expected, 1e-9)[1] == why


def test_no_factor_is_forgiven():
    """A gradient that is off by the number of ranks differs."""
    array = np.random.default_rng(0).standard_normal((5, 3))
    assert difference(array * 2, array, 1e-6)[0] == pytest.approx(1.0)


def test_equal_empty_and_small():
    """Equal and empty arrays and differences of rounding pass; a tensor that cancels is measured against its kind."""
    assert difference(np.ones(3), np.ones(3), 1e-12) == (0.0, "")
    assert difference(np.zeros((0, 3)), np.zeros((0, 3)), 1e-12) == (0.0, "")
    assert difference(np.array([1.0 + 1e-13]), np.array([1.0]), 1e-12)[1] == ""
    assert difference(np.array([1e-17]), np.array([0.0]), 1e-12, floor=1e-3)[1] == ""


def test_missing_and_skipped_are_recorded():
    """A tensor missing from one run is wrong; a tensor that cannot be compared is listed once."""
    comparison = Comparison(1)
    comparison.missing("gradient", "a.b", "a.b.weight", 0, "the parallel run has none")
    comparison.skip("output of a", "plain")
    comparison.skip("output of a", "plain")
    (check,) = comparison.checks
    assert str(check) == "step 1, gradient of a.b.weight, rank 1: the parallel run has none"
    assert not check.ok
    assert comparison.skipped == ["output of a: plain"]


def test_the_allowed_error_is_absolute():
    """An error within what is allowed passes, at zero too; errors and bounds are reported relative to the magnitude."""
    comparison = Comparison(0)
    comparison.compare("gradient", "", "close", 0, np.array([2.0 + 1e-12, 0.0]), np.array([2.0, 0.0]), 1.1e-12)
    comparison.compare("gradient", "", "cancelled", 0, np.array([1e-17]), np.array([0.0]), 1e-16)
    comparison.compare("gradient", "", "far", 0, np.array([2.0, 1e-11]), np.array([2.0, 0.0]), 1e-12)
    comparison.compare("state", "", "number", 0, np.array(3), np.array(2))
    assert [check.ok for check in comparison.checks] == [True, True, False, False]
    assert comparison.checks[0].bound == 1.1e-12 / 2
    assert comparison.checks[0].share == pytest.approx(1 / 1.1, rel=1e-3)
    assert comparison.checks[2].why == "1e-11 at [1], single device 0 (error 5.0e-12, bound 5.0e-13)"
    assert comparison.checks[3].share == float("inf")


def test_infinities_of_a_buffer_must_be_the_same_ones():
    """A buffer may have non-finite values if both runs have them in the same places; a weight may not."""
    comparison = Comparison(0)
    mask = np.array([0.0, -np.inf, 3.0])
    comparison.compare("buffer", "", "same", 0, mask, mask)
    comparison.compare("buffer", "", "moved", 0, mask[::-1].copy(), mask)
    comparison.compare("buffer", "", "sign", 0, -mask, mask)
    comparison.compare("buffer", "", "finite", 0, mask + np.array([0.0, 0.0, 1e-3]), mask)
    comparison.compare("weight", "", "weight", 0, mask, mask)
    assert [check.name for check in comparison.checks if check.ok] == ["same"]
