"""Operators and redistributions on devices: `--device npu|cuda`, or rehearsed on CPU over gloo.

Operands are small integers, so that every device and every order of summation gives exactly NumPy's result.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hyper_parallel import Replicate, Shard, distribute_tensor
from hyper_parallel.platform.select import current_platform

pytestmark = [pytest.mark.launch("processes"), pytest.mark.world_size(1)]  # sizes: conftest.py

PLACEMENTS = (Shard(0), Shard(1), Replicate())
OPERATORS = {
    "matmul": (lambda a, b: a @ b, lambda a, b: a @ b, (5, 7), (7, 3)),
    "add": (lambda a, b: a + b, lambda a, b: a + b, (5, 3), (5, 3)),
    "multiply": (lambda a, b: a * b, lambda a, b: a * b, (1, 9), (1, 9)),
    "sum": (lambda a, _: a.sum(), lambda a, _: a.sum(), (5, 3), (1, 1)),
    "reshape": (lambda a, _: a.reshape(10, 3), lambda a, _: a.reshape(10, 3), (5, 6), (1, 1)),
}


def spread(array, mesh, device, placement):
    """Distribute an array over the devices."""
    platform = current_platform()
    return distribute_tensor(platform.to_device(platform.from_numpy(array), device), mesh, [placement])


def global_array(x):
    """Return the global value of a DTensor as an array."""
    return current_platform().tensor_to_numpy(x.full_tensor())


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_equals_numpy(name, mesh, device, world_size):
    """For every pair of placements, uneven shards included, the result equals NumPy's."""
    ours, numpys, *shapes = OPERATORS[name]
    rng = np.random.default_rng(world_size)
    arrays = [rng.integers(-4, 5, shape).astype("float32") for shape in shapes]
    for placements in itertools.product(PLACEMENTS, repeat=2):
        operands = [spread(array, mesh, device, placement) for array, placement in zip(arrays, placements, strict=True)]
        np.testing.assert_array_equal(global_array(ours(*operands)), numpys(*arrays), err_msg=f"{name} of {placements}")


def test_a_redistribution_changes_no_value(mesh, device, world_size):
    """From every placement to every other one, the global value is unchanged."""
    array = np.arange(35, dtype="float32").reshape(5, 7)
    assert mesh.size() == world_size
    for before, after in itertools.product(PLACEMENTS, repeat=2):
        moved = spread(array, mesh, device, before).redistribute(placements=[after])
        np.testing.assert_array_equal(global_array(moved), array, err_msg=f"{before} to {after}")


def test_two_runs_are_equal_bit_for_bit(mesh, device, rank, world_size):
    """A second run sums in the same order and gives the same bits, on every rank."""
    array = np.random.default_rng(5).standard_normal((64, 33)).astype("float32")

    def run():
        a, b = spread(array, mesh, device, Shard(1)), spread(np.ascontiguousarray(array.T), mesh, device, Shard(0))
        return global_array(a @ b).tobytes()

    assert run() == run(), f"rank {rank} of {world_size}"
