"""Host operations on numpy arrays."""

import numpy as np
import pytest

from hyper_parallel.transport.base import ReductionError
from hyper_parallel.transport.host.numpy_ops import BFLOAT16, NumpyOps, narrow, widen

OPS = NumpyOps()


def test_copy_shares_nothing():
    """A copy does not see later writes, and is contiguous."""
    x = np.arange(6.0).reshape(2, 3).T
    copy = OPS.copy(x)
    x[:] = 0
    assert copy.flags.c_contiguous
    assert copy.sum() == 15


def test_fold_is_from_the_left():
    """Reductions fold in the order of their parts: the first two are added first."""
    parts = [np.float32([1e8]), np.float32([-1e8]), np.float32([1e-3])]
    assert OPS.reduce(parts, "sum")[0] == np.float32(1e-3)
    assert OPS.reduce(parts[::-1], "sum")[0] == 0


@pytest.mark.parametrize("op, expected", [("sum", 7), ("prod", 8), ("max", 4), ("min", 1), ("all", 1), ("any", 1)])
def test_integer_reductions(op, expected):
    """Every reduction of integers keeps the dtype."""
    parts = [np.array(value, np.int32) for value in (1, 2, 4)]
    total = OPS.reduce(parts, op)
    assert (total, total.dtype, total.shape) == (expected, np.int32, ())


def test_one_part_is_normalised():
    """Both all and any of a single part give 0 and 1, as they do of several."""
    assert OPS.reduce([np.array([0, 5])], "any").tolist() == [0, 1]


def test_average_of_integers_is_refused():
    """Integers have no average."""
    with pytest.raises(ReductionError):
        OPS.reduce([np.array([1])], "avg")


def test_bfloat16_rounds_to_nearest_even():
    """Narrowing rounds to nearest even and keeps NaN; widening is exact."""
    values = np.float32([1.0, 1.00390625, 1.01171875, -3.0, np.inf, np.nan])
    back = widen(narrow(values))
    assert back[:5].tolist() == [1.0, 1.0, 1.015625, -3.0, np.inf]
    assert np.isnan(back[5])


def test_bfloat16_sums_round_after_every_step():
    """A sum in bfloat16 rounds after each addition, as frameworks do."""
    parts = [narrow(np.float32([256.0])), narrow(np.float32([1.0])), narrow(np.float32([1.0]))]
    total = OPS.reduce(parts, "sum")
    assert (total.dtype, widen(total)[0], OPS.dtype(total)) == (BFLOAT16, 256.0, "bfloat16")
    assert OPS.inexact(total)
