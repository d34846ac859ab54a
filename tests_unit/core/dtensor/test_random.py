"""The generator behind every random DTensor: bits that depend on nothing but seed, call and place."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.dtensor import random
from hyper_parallel.core.dtensor.factories import rand, randn
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.platform.select import current_platform
from hyper_parallel.transport.base import active_transport
from hyper_parallel.verify.simulate import simulate

PLACEMENTS = (Replicate(), Shard(0), Shard(1))


def _signatures():
    """Bytes of every kind of draw of one tensor, whole, on this rank, for every placement."""
    return [_signature_of(placement) for placement in PLACEMENTS]


def _signature_of(placement):
    platform = current_platform()
    world = active_transport().world_size
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    random.manual_seed(7, mesh)
    single, double = (platform.str_to_dtype(name) for name in ("float32", "float64"))
    draws = [make(7, 5, device_mesh=mesh, placements=[placement], dtype=kind)
             for make in (rand, randn) for kind in (single, double)]  # fmt: skip
    ones = platform.wrap(platform.from_numpy(np.ones((7, 5), np.float32)), Layout.place(mesh, [Replicate()], (7, 5)))
    draws.append(platform.dispatcher.ops.dropout(ones.redistribute(placements=[placement]), 0.3, True))
    return [platform.tensor_to_numpy(one.full_tensor()).tobytes() for one in draws]


@pytest.mark.platforms("torch", "mindspore", together=True)
def test_bits_are_equal_for_layouts_worlds_and_frameworks():
    """One seed gives the same bits whole, by rows and by columns, on 1, 3 and 6 ranks, on both frameworks."""
    expected = simulate(_signatures, 1, "torch")[0]
    assert expected == [expected[0]] * len(PLACEMENTS)
    assert len(set(expected[0])) == 5
    for world in (1, 3, 6):
        for platform in ("torch", "mindspore"):
            assert simulate(_signatures, world, platform, timeout=300) == [expected] * world
