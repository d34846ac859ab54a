"""Facets *identity* and *groups*: the rank, its groups and positions."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.simulate import simulate


@pytest.mark.parametrize("world", [2, 3])
def test_identity_and_groups(platform_name, world):
    """Ranks, positions and groups by handle, tuple, list and None agree; a group of the same ranks is the same."""
    turned = (*range(1, world), 0)

    def rank():
        platform = platform_named(platform_name)
        handle = platform.create_group(list(turned))
        platform.barrier()
        platform.barrier(handle)
        mine = platform.get_rank()
        return (
            (mine, platform.get_world_size(), platform.get_backend(), platform.get_backend(handle)),
            [platform.get_process_group_ranks(group) for group in (None, handle, turned, list(turned))],
            [platform.get_group_local_rank(group) for group in (None, handle, turned)],
            [platform.get_global_rank(turned, position) for position in range(world)],
            (platform.create_group(range(world)) == handle, platform.ranks_of(handle) == platform.ranks_of()),
            platform.tensor_to_numpy(platform.all_reduce(platform.from_numpy(np.ones(2)), handle)).tolist(),
        )

    everyone = list(range(world))
    for number, (who, ranks, positions, back, groups_, total) in enumerate(simulate(rank, world, platform_name)):
        assert who == (number, world, "simulated", "simulated")
        assert ranks == [everyone, everyone, list(turned), list(turned)]
        assert positions == [number, number, turned.index(number)]
        assert back == list(turned)
        assert groups_ == (True, True)
        assert total == [world, world]
