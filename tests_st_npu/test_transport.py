"""The transports over real processes, and PyTorch's own collectives over them."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest

from hyper_parallel.transport.processes import rehearsed_engine
from hyper_parallel.verify.launch import launch
from workshop.conformance.transport import check_transport

_BYTES = {"rehearsal": (1, 4099), "night": (1, 4099, 1 << 20, 64 << 20)}


def test_every_collective_equals_numpy(platform_name, suite_device):
    """Every collective equals NumPy for every dtype, shape and rank order, on three processes."""
    suite = partial(check_transport, exact=suite_device == "cpu" and not rehearsed_engine(), device=suite_device)
    results = launch(suite, 3, platform_name, (platform_name,), device=suite_device)
    assert len(results) == 3
    assert all(len(arrays) > 100 for arrays in results)
    assert all(isinstance(array, np.ndarray) for arrays in results for array in arrays)


@pytest.mark.platforms("torch")
@pytest.mark.launch("processes")
@pytest.mark.world_size(3)
def test_collectives_of_torch_in_every_form(device, rank, effort):
    """Lists and tensors, blocking and not, in the world and in a sub-group, from one byte on: exact results."""
    import torch
    import torch.distributed as dist

    pair = dist.new_group([0, 2])
    for group, members in ((None, [0, 1, 2]), (pair, [0, 2])):
        if rank not in members:
            continue
        for size in _BYTES[effort]:
            parts = {member: torch.full((size,), 3 + member, dtype=torch.int8, device=device) for member in members}
            for later in (False, True):
                _check_forms(dist, group, members, rank, parts, later)
    dist.barrier()


@pytest.mark.launch("processes")
@pytest.mark.world_size(4)
def test_many_groups_do_not_mix(device, rank):
    """Every group of two or more of four ranks reduces its own members, in turn and twice over the same groups."""
    from hyper_parallel.platform.select import current_platform
    from hyper_parallel.transport.base import active_transport

    platform, transport = current_platform(), active_transport()
    groups = [group for count in (2, 3, 4) for group in itertools.combinations(range(4), count)]
    for turn in (1, 2):
        for number, group in enumerate(groups):
            if rank in group:
                x = platform.to_device(platform.from_numpy(np.full(5, 10.0**rank * turn, "float32")), device)
                total = platform.tensor_to_numpy(transport.all_reduce(x, "sum", group))
                assert total.tolist() == [turn * sum(10.0**member for member in group)] * 5, (number, group)
    transport.barrier((0, 1, 2, 3))


def _check_forms(dist, group, members, rank, parts, later):
    """Call each collective on ``parts``, by member, and compare."""
    import torch

    mine, count, me = parts[rank], len(members), members.index(rank)
    others, wanted = list(parts.values()), torch.cat(list(parts.values()))
    total, sent = sum(others), [part + 10 * me for part in others]
    arrived = torch.cat([parts[rank] + 10 * index for index in range(count)])

    def done(work):
        assert (work is not None) == later
        if later:
            work.wait()

    x = mine.clone()
    done(dist.all_reduce(x, group=group, async_op=later))
    assert torch.equal(x, total)
    x = mine.clone()
    done(dist.broadcast(x, src=members[-1], group=group, async_op=later))
    assert torch.equal(x, others[-1])
    x = mine.clone()
    done(dist.reduce(x, dst=members[0], group=group, async_op=later))
    assert rank != members[0] or torch.equal(x, total)
    listed = [torch.empty_like(mine) for _ in members]
    done(dist.all_gather(listed, mine, group=group, async_op=later))
    assert all(map(torch.equal, listed, others))
    whole = torch.empty_like(wanted)
    done(dist.all_gather_into_tensor(whole, mine, group=group, async_op=later))
    assert torch.equal(whole, wanted)
    x = torch.empty_like(mine)
    done(dist.reduce_scatter_tensor(x, torch.cat(sent), group=group, async_op=later))
    assert torch.equal(x, mine * count + 10 * sum(range(count)))
    x = torch.empty_like(mine)
    done(dist.reduce_scatter(x, sent, group=group, async_op=later))
    assert torch.equal(x, mine * count + 10 * sum(range(count)))
    whole = torch.empty_like(wanted)
    done(dist.all_to_all_single(whole, torch.cat(sent), group=group, async_op=later))
    assert torch.equal(whole, arrived)
    listed = [torch.empty_like(mine) for _ in members]
    done(dist.all_to_all(listed, sent, group=group, async_op=later))
    assert torch.equal(torch.cat(listed), arrived)
