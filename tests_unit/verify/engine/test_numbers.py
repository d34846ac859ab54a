"""Sizes and counts behind a factor, and distances of arrays."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.verify.engine.distance import distance, within
from hyper_parallel.verify.engine.numbers import axes_of_factor, axis_sizes, integer_weights, ratio_of_counts

SIZES = {"dp": 2, "tp": 3, "pp": 1}


@pytest.mark.parametrize(
    "factor, axes",
    [(3.0, ("tp",)), (1 / 2, ("dp",)), (6.0, ("dp", "tp")), (9.0, ("tp", "tp")), (5.0, ()), (1.0, ()), (-2.0, ())],
)
def test_axes_of_a_factor(factor, axes):
    """A factor is the product of sizes, or its inverse, with the fewest axes."""
    assert axes_of_factor(factor, SIZES) == axes


def test_axes_among_many_groups():
    """Among many groups the fewest axes are found too, at once, and of factors that are no product none."""
    sizes = {f"group {number}": 2 + number % 3 for number in range(60)}
    assert axes_of_factor(8.0, sizes) == ("group 57", "group 59")
    assert axes_of_factor(1 / 4, sizes) == ("group 59",)
    assert axes_of_factor(14.0, sizes) == ()
    assert axes_of_factor(float("inf"), sizes) == ()


def test_words_of_sizes():
    """Axes are named with their sizes."""
    assert axis_sizes(("dp", "tp"), SIZES) == "dp x tp (2 x 3)"


def test_ratios_of_counts():
    """A ratio of small counts is recognised where precision suffices; others and 1 are none."""
    assert str(ratio_of_counts(35 / 44, 1e-12)) == "35/44"
    for factor, tolerance in ((np.pi, 1e-12), (1.0, 1e-12), (-0.5, 1e-12), (np.inf, 1e-12), (0.5, 1e-3), (1e4, 1e-12)):
        assert ratio_of_counts(factor, tolerance) is None


def test_integer_weights():
    """The smallest counts of a weighted mean are found; one value, poor precision and other means have none."""
    values = np.random.default_rng(0).random(3)
    mean = float((values * [5, 7, 2]).sum() / 14)
    assert integer_weights(list(values), mean, 1e-13) == (5, 7, 2)
    assert integer_weights([1.0], 1.0, 1e-13) is None
    assert integer_weights(list(values), mean, 1e-4) is None
    assert integer_weights(list(values), 7.0, 1e-13) is None
    assert integer_weights([0.3] * 30, 0.3, 1e-13) is None


def test_distances():
    """Shape, kind, values that are not finite and elements beyond their bound are reported with numbers."""
    ones, bound = np.ones(3), np.full(3, 1e-12)
    assert distance(ones, ones, bound).why == ""
    assert within(np.zeros((0, 2)), np.zeros((0, 2)), np.zeros((0, 2)))
    assert distance(np.ones(2), ones, bound).why == "has shape [2], the single device [3]"
    far = distance(ones + np.array([0, 0, 1e-6]), ones, bound)
    numbers = "1 of 3 elements differ, relative error 1.0e-06, allowed 1.0e-12"
    assert far.why == f"has 1.000001 at [2], the single device 1 ({numbers})"
    assert (round(far.ratio), far.bound) == (1000000, 1e-12)
    assert distance(np.arange(3), np.array([0, 1, 3]), np.zeros(3)).why == "differs in 1 of 3 elements"
    assert within(np.arange(3), np.array([0, 1, 3]), np.array([0, 0, np.inf]))
    infinite = np.array([1.0, np.inf, -np.inf])
    assert within(infinite, infinite, bound)
    why = "has 1 element that is inf or nan, the single device 0"
    assert distance(np.array([1, np.nan, 1]), ones, bound).why == why
    assert distance(ones * 1j, ones * 1j, bound).ratio == 0
