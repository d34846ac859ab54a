"""Finding a part of an array by its values: every way to shard."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.verify.engine.matching import box_positions, find_part, rows_of

RNG = np.random.default_rng(5)
WHOLE = RNG.standard_normal((7, 5, 4))
PARTS = {
    "uneven block": WHOLE[4:7],
    "one row": WHOLE[:, 2:3],
    "last dim": WHOLE[:, :, 1:3],
    "two dims": WHOLE[2:5, 3:],
    "interleaved": WHOLE[1::3],
    "permuted": WHOLE[[6, 0, 3]],
    "fused projection": WHOLE[[0, 1, 4, 5]],
    "permuted whole": WHOLE[::-1],
    "flat piece": WHOLE.reshape(-1)[31:77],
    "transposed": WHOLE[2:4].transpose(2, 0, 1).copy(),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_found_bit_for_bit_and_within_a_bound(name):
    """Blocks, rows in any order, several dims, flat pieces and views are found, exactly and after rounding."""
    part = PARTS[name]
    match = find_part(part, WHOLE)
    assert match.unique
    assert np.array_equal(WHOLE.reshape(-1)[match.positions], part)
    moved = part * (1 + 1e-14 * RNG.standard_normal(part.shape))
    match = find_part(moved, WHOLE, np.full(WHOLE.shape, 1e-12))
    assert np.array_equal(WHOLE.reshape(-1)[match.positions], part)


def test_what_is_no_part_is_not_found():
    """Other values, empty arrays, larger arrays and other kinds of numbers are nowhere."""
    for part in (WHOLE[:2] + 1e-9, WHOLE[:0], np.zeros((9, 9, 9)), np.zeros(3, dtype=np.int64), WHOLE[:2, 1:4] * 2):
        assert find_part(part, WHOLE) is None
    assert find_part(WHOLE[:2] + 1e-9, WHOLE, np.full(WHOLE.shape, 1e-12)) is None


def test_constant_values_fit_several_places():
    """A part of equal values is found, but not surely; integers are found by rows."""
    match = find_part(np.ones((2, 3)), np.ones((6, 3)))
    assert not match.unique
    assert find_part(np.zeros(4), np.zeros((3, 4))).unique is False
    whole = np.arange(12).reshape(6, 2)
    assert find_part(whole[2:5], whole).unique
    assert find_part(np.array([True, False]), np.array([[True, False], [False, False]])) is not None


def test_values_that_are_alike_place_nothing_surely():
    """Saturated values that fit in many places within a bound are placed, but not surely."""
    whole = np.sign(RNG.standard_normal((4, 8)))
    whole[2, 5] = 0.997
    match = find_part(whole[2:3, 4:8] * (1 - 1e-7), whole, np.full(whole.shape, 1e-5))
    assert match is None or not match.unique


def test_a_float32_part_of_a_float64_whole_is_found():
    """Values are compared in the dtype of the part; NaN equals NaN."""
    whole = WHOLE.copy()
    whole[3, 0, 0] = np.nan
    assert find_part(whole[2:5].astype(np.float32), whole).unique


def test_rows_and_positions_are_inverse():
    """Positions of a product of rows give the rows back; other positions have none."""
    rows = (np.array([4, 1]), np.array([0, 2, 3]))
    positions = box_positions(rows, (5, 4))
    assert np.array_equal(positions, [[16, 18, 19], [4, 6, 7]])
    assert all(np.array_equal(own, line) for own, line in zip(rows, rows_of(positions, (5, 4)), strict=True))
    assert rows_of(np.array([[0, 5], [9, 2]]), (5, 4)) is None
    assert rows_of(np.arange(3), (5, 4)) is None
    assert box_positions((), ()).shape == ()


@pytest.mark.parametrize("rows", [[0, 3, 6, 9], [11, 2, 7, 5], [4, 5, 6, 7]])
def test_rows_are_told_apart_where_their_sums_are_not(rows):
    """Wide bounds, as of half precision: a block whose rows are wrong hides neither interleaved nor shuffled rows."""
    rng = np.random.default_rng(3)
    whole = rng.standard_normal((12, 24))
    part = whole[rows] + 0.02 * rng.standard_normal((4, 24))
    match = find_part(part, whole, np.full(whole.shape, 0.15))
    assert match is not None
    assert rows_of(match.positions, whole.shape)[0].tolist() == rows


def test_texts_that_begin_alike_are_found_if_they_are_padded_to_another_width():
    """Pairs of texts share their first tokens, whose values fit both; the other columns form a block."""
    whole = np.random.default_rng(3).standard_normal((6, 5, 4))
    whole[3:, :2] = whole[:3, :2]
    rows = [0, 1, 3, 4]
    match = find_part(whole[rows, :4], whole, np.full(whole.shape, 1e-9))
    assert [line.tolist() for line in rows_of(match.positions, whole.shape)] == [rows, [0, 1, 2, 3], [0, 1, 2, 3]]
    assert find_part(whole[rows][:, [0, 2, 4]], whole, np.full(whole.shape, 1e-9)) is None
