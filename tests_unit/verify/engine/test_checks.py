"""One comparison of one tensor on one rank."""

import pytest

from hyper_parallel.verify.engine.checks import TensorCheck


def test_a_check_is_one_line():
    """A check says when, what, where and why; -1 is the time before training."""
    check = TensorCheck("gradient", "a.b", "a.b.weight", 0, 1, 0, float("inf"), 0.0, "the single device has none")
    assert str(check) == "step 1, gradient of a.b.weight, rank 1: the single device has none"
    assert not check.ok
    equal = TensorCheck("weight", "a.b", "a.b.weight", -1, 0, 3, 0.0, 1e-9)
    assert str(equal) == "before training, weight of a.b.weight, rank 0: equal"
    assert equal.ok


@pytest.mark.parametrize("error, bound, share", [(1.0, 4.0, 0.25), (0.0, 0.0, 0.0), (1e-30, 0.0, float("inf"))])
def test_an_error_is_a_share_of_what_is_allowed(error, bound, share):
    """Where nothing is allowed, any error is infinitely too large."""
    assert TensorCheck("state", "", "number", 0, 0, 1, error, bound).share == share
