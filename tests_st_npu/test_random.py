"""Random numbers on cards: the same on every world, and on CPU."""

from __future__ import annotations

import pytest

from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


def _drawn(device):
    """Initial values and a mask of a DTensor whose shards are uneven, as bytes."""
    import torch
    from torch.nn import functional

    from hyper_parallel import Shard, distribute_tensor, init_device_mesh, rand, randn
    from hyper_parallel.core.dtensor import random
    from hyper_parallel.transport.base import active_transport

    mesh = init_device_mesh(device, (active_transport().world_size,))
    random.manual_seed(7, mesh)
    draws = [make(7, 5, device_mesh=mesh, placements=[Shard(0)]) for make in (rand, randn)]
    ones = distribute_tensor(torch.ones(7, 5, device=device), mesh, [Shard(1)])
    draws.append(functional.dropout(ones, 0.3, training=True))
    assert all(draw.to_local().device.type == device for draw in draws)
    return [draw.full_tensor().cpu().numpy().tobytes() for draw in draws]


def test_masks_and_initial_values_do_not_depend_on_world_or_device(on_ranks, suite_device):
    """One seed gives the bits of one simulated rank on CPU on one, two and four ranks, on cards and simulated there."""
    expected = simulate(_drawn, 1, "torch", ("cpu",))[0]
    for size in (1, 2, 4):
        assert on_ranks(_drawn, size, suite_device) == [expected] * size
    assert simulate(_drawn, 3, "torch", (suite_device,), device=suite_device) == [expected] * 3
