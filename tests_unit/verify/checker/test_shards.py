"""Splitting global values into local shards and partial values, and reassembling them."""

import numpy as np
import pytest

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placements import PARTIAL_OPS, Partial, Replicate, Shard
from hyper_parallel.verify.checker.shards import (
    REDUCE,
    can_be_partial,
    extremum_gradients,
    local_box,
    local_shards,
    reduce_group,
    reduction_groups,
    split_partial,
)
from hyper_parallel.verify.ops.claims import mesh_of

VALUES = {
    "sum": np.array([[1.0, -2.0, 0.0], [4.0, 0.0, -3.0]]),
    "truth": np.array([[True, False, True], [False, True, False]]),
}


def values(op):
    """Return an array that can be split into partial values of `op`."""
    return VALUES["truth" if op in ("all", "any") else "sum"]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("op", PARTIAL_OPS)
def test_partial_values_reduce_to_the_value(op, count):
    """Partial values of any seed reduce to the array, exactly for integers."""
    array = values(op)
    for seed in range(20):
        parts = split_partial(array, op, count, np.random.default_rng(seed), integral=True)
        assert len(parts) == count
        total = parts[0]
        for part in parts[1:]:
            total = REDUCE[op](total, part)
        np.testing.assert_array_equal(total / count if op == "avg" else total, array)


def test_partial_values_are_not_tame():
    """Partial values have both signs, zeros of both signs, ties, and losing values on either side of zero."""
    array, rng = np.zeros((4, 5)), np.random.default_rng(0)
    first, second = split_partial(array, "sum", 2, rng, integral=True)
    assert (first < 0).any()
    assert (first > 0).any()
    zeros = np.signbit(second[second == 0])
    assert zeros.any()
    assert not zeros.all()
    left, right = split_partial(array, "max", 2, rng, integral=True)
    assert ((left == 0) & (right == 0)).any()
    assert (np.minimum(left, right) < 0).any()


@pytest.mark.parametrize("mesh", [(1,), (3,), (2, 2), (2, 3)])
@pytest.mark.parametrize("places", [[Replicate()], [Shard(0)], [Shard(1)], [Partial("sum")], [Partial("max")]])
def test_reassembled_shards_are_the_global_tensor(mesh, places):
    """The reduced shards equal each rank's box of the global array, on uneven and empty shards too."""
    array = np.arange(10.0).reshape(2, 5) - 4
    layout = Layout.place(mesh_of(mesh), (places * len(mesh)), array.shape)
    shards = local_shards(array, layout, np.random.default_rng(3), integral=True)
    whole = Layout.of(layout.mesh, layout.dim_axes, (), layout.shape)
    kinds = [(op, layout.mesh.shape[axis]) for axis, op in layout.partials]
    for at, ranks in reduction_groups(layout, [axis for axis, _ in layout.partials]):
        value = reduce_group([shards[rank] for rank in ranks], kinds)
        np.testing.assert_array_equal(value, local_box(array, whole, at))


def test_nan_is_no_extremum():
    """An array with NaN has no partial values of a maximum, and a boolean one none of a sum."""
    assert not can_be_partial(np.array([1.0, np.nan]), "max")
    assert can_be_partial(np.array([1.0, np.nan]), "sum")
    assert not can_be_partial(np.array([True]), "sum")


def test_ranks_that_tie_share_the_gradient():
    """Of three ranks, two attain the maximum: each gets half of the gradient, the third none."""
    layout = Layout.place(mesh_of((3,)), [Partial("max")], (1,))
    gradients = extremum_gradients(np.array([6.0]), layout, [np.array([2.0]), np.array([1.0]), np.array([2.0])])
    assert [float(gradient[0]) for gradient in gradients] == [3.0, 0.0, 3.0]


def test_losers_of_an_extremum_get_nothing():
    """A gradient of NaN goes to the rank that attains the maximum; the others get zero."""
    layout = Layout.place(mesh_of((2,)), [Partial("max")], (3,))
    shards = [np.array([1.0, 5.0, 2.0]), np.array([4.0, 0.0, 2.0])]
    first, second = extremum_gradients(np.array([np.nan, 1.0, 3.0]), layout, shards)
    np.testing.assert_array_equal(first, [0.0, 1.0, 1.5])
    np.testing.assert_array_equal(second, [np.nan, 0.0, 1.5])
