"""Tensors over random meshes, shapes and placements: what is distributed, redistributed and gathered is what it was."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hyper_parallel import Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")

MESHES = st.sampled_from([(2,), (3,), (4,), (2, 2), (1, 3), (3, 1), (2, 1, 2)])
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 5, 7]), min_size=1, max_size=3).map(tuple)


def placements_of(data, mesh, dims, *, partial):
    """Random placements for each axis of a mesh."""
    choices = [Replicate(), *(Shard(dim) for dim in range(-dims, dims)), *([Partial()] if partial else [])]
    return data.draw(st.tuples(*(st.sampled_from(choices) for _ in mesh)))


@settings(max_examples=40)
@given(mesh=MESHES, shape=SHAPES, data=st.data())
def test_no_value_changes_on_the_way(mesh, shape, data):
    """A tensor of whole numbers is the same after any chain of placements, on every rank, bit for bit."""
    import torch

    array = np.random.default_rng(len(shape)).integers(-99, 99, shape).astype(np.float32)
    start = placements_of(data, mesh, len(shape), partial=False)
    chain = [placements_of(data, mesh, len(shape), partial=True) for _ in range(data.draw(st.integers(1, 3)))]

    def on_rank():
        grid = init_device_mesh("cpu", mesh, mesh_dim_names=tuple("abc"[: len(mesh)]))
        value = distribute_tensor(torch.from_numpy(array.copy()), grid, start)
        results = [value.full_tensor().numpy()]
        for placements in chain:
            value = value.redistribute(grid, placements)
            assert tuple(value.shape) == shape
            results.append(value.full_tensor().numpy())
        return results

    for results in simulate(on_rank, math.prod(mesh), platform="torch"):
        assert len(results) == len(chain) + 1
        for result in results:
            np.testing.assert_array_equal(result, array)
