"""Sorting on MindSpore."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel import Replicate, Shard, distribute_tensor, init_device_mesh
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("mindspore")


def test_orders_of_a_number(kernel):
    """Sorting a tensor without dims returns it."""
    for descending in (False, True):
        assert kernel("argsort", np.asarray(2.0, np.float32), -1, descending=descending) == 0


def test_unique_values_are_those_of_the_whole_tensor():
    """ops.unique and mnp.unique of shards have the values, places and dtypes of one device, also without elements."""
    import mindspore

    def results(place):
        whole = np.array([5, 2, 5, 1, 2, 9, 7], np.int32)
        called = [
            *(mindspore.ops.unique(place(whole.astype(kind))) for kind in (np.int32, np.int64, np.float32)),
            mindspore.numpy.unique(place(whole[:6].reshape(3, 2)), return_inverse=True),
            (mindspore.numpy.unique(place(whole)),),
        ]
        return [(tensor.asnumpy().tolist(), str(tensor.dtype)) for pair in called for tensor in pair]

    def on_rank():
        mesh = init_device_mesh("cpu", (3,))
        empty = distribute_tensor(mindspore.Tensor(np.zeros((0, 2), np.int64)), mesh, [Shard(0)])
        values, places = mindspore.ops.unique(empty)
        assert (values.shape, values.dtype, places.shape) == ((0,), mindspore.int64, (0, 2))
        assert (places.dtype, values.placements) == (mindspore.int64, (Replicate(),))
        return results(lambda array: distribute_tensor(mindspore.Tensor(array), mesh, [Shard(0)]))

    expected = results(mindspore.Tensor)
    assert expected[:2] == [([5, 2, 1, 9, 7], "Int32"), ([0, 1, 0, 2, 1, 3, 4], "Int32")]
    for result in simulate(on_rank, 3, platform="mindspore"):
        assert result == expected


RNG = np.random.default_rng(7)
F32 = np.float32


def real(*shape):
    """Random numbers of both signs."""
    return RNG.standard_normal(shape).astype(F32)


def test_bins_depend_on_the_element_alone(canonical):
    """With unsorted edges the bin of an element does not depend on the other elements."""
    edges, x = np.array([0.4, -1.0, 2.0, 0.1, -0.3]), real(40).astype(np.float64)
    for right in (False, True):
        bins = canonical("bucketize", x, edges, right=right)
        assert bins.tolist() == [canonical("bucketize", x[at : at + 1], edges, right=right)[0] for at in range(40)]
        ordered = np.sort(edges)
        wanted = np.searchsorted(ordered, [*x, *ordered, np.nan], "right" if right else "left")
        assert (
            canonical("bucketize", np.array([*x, *ordered, np.nan]), ordered, right=right).tolist() == wanted.tolist()
        )
