"""Cases that are built out of blind ones."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.verify.engine.blind_spots import BlindSpot
from hyper_parallel.verify.engine.harden import (
    SPREAD,
    STEPS,
    random_cotangent,
    repairs,
    spread_constant,
    unequal_sizes,
    uneven_rows,
)


def test_each_blind_spot_is_repaired_or_left():
    """Sizes, rows, steps, constants and cotangents are repaired and said; the rest is the user's."""
    kinds = ("equal-sizes", "even-dims", "one-step", "constant-parameters", "constant-cotangents", "equal-data")
    spots = [BlindSpot(kind, "norm.weight", "facts", "repair") for kind in kinds]
    result = repairs(spots, {"dp": 2, "tp": 2}, rows=8, steps=1)
    assert (result.mesh, result.rows, result.steps) == ({"dp": 2, "tp": 3}, 11, STEPS)
    assert (result.spread, result.weigh_loss, result.left) == (("norm.weight",), True, spots[-1:])
    assert result.words == [
        "the mesh is dp=2 x tp=3 instead of dp=2 x tp=2",
        "the batch has 11 rows instead of 8",
        "3 steps are made instead of 1",
        "norm.weight gets random values around its own",
        "the loss weights outputs with random numbers",
    ]


def test_a_good_case_stays():
    """Without blind spots nothing is changed, and nothing said."""
    result = repairs([], {"dp": 2, "tp": 2}, rows=8, steps=1)
    assert (dict(result.mesh), result.rows, result.steps, result.words) == ({"dp": 2, "tp": 2}, 8, 1, [])


@pytest.mark.parametrize(
    "mesh, expected",
    [
        ({"dp": 2, "tp": 2}, {"dp": 2, "tp": 3}),
        ({"dp": 2, "cp": 2, "tp": 2}, {"dp": 2, "cp": 3, "tp": 4}),
        ({"pp": 1, "dp": 1, "tp": 4}, {"pp": 1, "dp": 1, "tp": 4}),
    ],
)
def test_sizes_become_unequal(mesh, expected):
    """Axes of one rank stay; the others get different sizes, none smaller than before."""
    assert unequal_sizes(mesh) == expected


@pytest.mark.parametrize(
    "rows, mesh, expected", [(8, {"dp": 2}, 9), (7, {"dp": 3}, 7), (6, {"a": 2, "b": 3}, 7), (4, {}, 4)]
)
def test_rows_become_uneven(rows, mesh, expected):
    """The next number that no axis divides."""
    assert uneven_rows(rows, mesh) == expected


def test_random_numbers_depend_on_seed_and_name_only():
    """Cotangents have both signs; constants are spread around their value, and other parameters stay."""
    weights = random_cotangent((4, 5), 0, "out")
    assert (weights > 0).any()
    assert (weights < 0).any()
    assert np.array_equal(weights, random_cotangent((4, 5), 0, "out"))
    assert not np.array_equal(weights, random_cotangent((4, 5), 1, "out"))
    for value, scale in ((0.0, SPREAD), (1.0, SPREAD), (-4.0, 4 * SPREAD)):
        spread = spread_constant(np.full(1000, value, np.float32), 0, "norm")
        assert spread.dtype == np.float32
        assert spread.std() == pytest.approx(scale, rel=0.1)
        assert spread.mean() == pytest.approx(value, abs=scale / 5)
    for array in (np.arange(3.0), np.ones(3, int), np.ones(1)):
        assert spread_constant(array, 0, "norm") is array
