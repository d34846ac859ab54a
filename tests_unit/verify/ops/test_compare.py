"""The comparison of an array with the expected one."""

import numpy as np
import pytest

from hyper_parallel.verify.ops.compare import difference, is_single_precision

DIFFERENCES = [
    (np.zeros(2), np.zeros(3), "has shape [2], should have [3]"),
    (np.zeros(2, np.float32), np.zeros(2), "has dtype float32, should have float64"),
    (np.array([1, 2]), np.array([1, 3]), "is 2 at [1], should be 3 (1 of 2 differ)"),
    (np.array([1.0, np.nan]), np.array([1.0, 2.0]), "is nan at [1], should be 2.0 (1 of 2 differ)"),
    (np.array([0.0]), np.array([-0.0]), None),
    (np.array([np.nan, np.inf]), np.array([np.nan, np.inf]), None),
    (np.array([1.0, np.inf]), np.array([1.0, -np.inf]), "is inf at [1], should be -inf (1 of 2 differ)"),
]


@pytest.mark.parametrize("actual, wanted, text", DIFFERENCES)
@pytest.mark.parametrize("exact", [True, False])
def test_differences_are_described(actual, wanted, text, exact):
    """The message has the shape, dtype or worst element; zeros of either sign are equal, and so are two NaN."""
    assert difference(actual, wanted, exact=exact) == text


def test_exact_means_to_the_bit():
    """One unit in the last place passes under the bound and fails where the operator is exact."""
    near = np.array([1.0 + 2**-52])
    assert difference(near, np.array([1.0]), exact=False) is None
    assert difference(near, np.array([1.0]), exact=True) is not None
    assert difference(np.array([1.0 + 2**-40]), np.array([1.0]), exact=False) is not None


def test_doubles_computed_in_single_precision():
    """Doubles rounded to single precision are recognised; true doubles, short fractions and integers are not."""
    array = np.random.default_rng(0).standard_normal((5, 3))
    rounded = array.astype(np.float32)
    assert is_single_precision([array, rounded.astype(np.float64)])
    assert is_single_precision([rounded.astype(np.complex128)])
    for other in (array, rounded, np.arange(1e6), np.arange(64) / 64, 2.0 ** -np.arange(300), np.full(5, np.nan), None):
        assert not is_single_precision([other])
