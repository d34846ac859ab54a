"""Random numbers on devices: the same on every world, and on CPU."""

from __future__ import annotations

from hyper_parallel.verify.simulate import simulate


def _drawn(device):
    """Initial values and a mask of a DTensor whose shards are uneven, as bytes."""
    from hyper_parallel import Shard, distribute_tensor, init_device_mesh, rand, randn
    from hyper_parallel.core.dtensor import random
    from hyper_parallel.platform.select import current_platform
    from hyper_parallel.transport.base import active_transport

    platform = current_platform()
    mesh = init_device_mesh(device, (active_transport().world_size,))
    random.manual_seed(7, mesh)
    draws = [make(7, 5, device_mesh=mesh, placements=[Shard(0)]) for make in (rand, randn)]
    ones = distribute_tensor(platform.ones((7, 5), device=device), mesh, [Shard(1)])
    draws.append(_dropout(platform.platform_type)(ones, 0.3, training=True))
    assert not any(platform.differing_device(draw.to_local(), device) for draw in draws)
    return [platform.tensor_to_numpy(draw.full_tensor()).tobytes() for draw in draws]


def _dropout(framework):
    """The framework's own function."""
    if framework == "torch":
        from torch.nn.functional import dropout
    else:
        from mindspore.mint.nn.functional import dropout
    return dropout


def test_masks_and_initial_values_do_not_depend_on_world_or_device(platform_name, on_ranks, suite_device):
    """One seed gives the bits of one simulated rank on CPU on 1, 2 and 4 ranks, on devices and simulated there."""
    expected = simulate(_drawn, 1, platform_name, ("cpu",))[0]
    for size in (1, 2, 4):
        assert on_ranks(_drawn, size, suite_device) == [expected] * size
    assert simulate(_drawn, 3, platform_name, (suite_device,), device=suite_device) == [expected] * 3
