"""Streams, events and collectives that run beside other work: every value is the one of a single stream."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = [pytest.mark.launch("processes"), pytest.mark.world_size(3)]

_TURNS = {"rehearsal": 3, "night": 50}
_SIZES = {"rehearsal": 64, "night": 1 << 20}


def _part(rank, turn, size):
    """What a rank has in a turn: small integers, so that every order of summation is exact."""
    return ((np.arange(size) + 3 * rank + turn) % 7).astype("float32")


def test_collectives_overlap_with_work_on_another_stream(device, rank, effort):
    """A started collective and work on a second stream, ordered by events, give what they give one after the other."""
    from hyper_parallel.platform.select import current_platform
    from hyper_parallel.transport.base import active_transport

    platform, transport, ranks, size = current_platform(), active_transport(), (0, 1, 2), _SIZES[effort]
    stream, kept = platform.new_stream(), []
    for turn in range(_TURNS[effort]):
        parts = [_part(member, turn, size) for member in ranks]
        x = platform.to_device(platform.from_numpy(parts[rank]), device)
        ready, done = platform.new_event(), platform.new_event()
        ready.record(platform.get_current_stream())
        started = transport.start("all_reduce", x, "sum", ranks)
        with platform.get_stream_context()(stream):
            stream.wait_event(ready)
            worked = x * 3 + 1
            done.record(stream)
        total = started.wait()
        platform.get_current_stream().wait_event(done)
        kept.append((x, worked, total))  # the memory of neither stream is given away while the other may read it
        np.testing.assert_array_equal(platform.tensor_to_numpy(worked * 2), (parts[rank] * 3 + 1) * 2)
        np.testing.assert_array_equal(platform.tensor_to_numpy(total), sum(parts))
    stream.synchronize()


def test_a_redistribution_overlaps_with_work_on_another_stream(mesh, device, effort):
    """A DTensor moves while the second stream works on its local tensor; both results and the gradient are exact."""
    from hyper_parallel import Replicate, Shard, distribute_tensor
    from hyper_parallel.platform.select import current_platform

    platform, rows = current_platform(), _SIZES[effort] // 16
    stream, whole = platform.new_stream(), _part(0, 1, 5 * rows).reshape(rows, 5)
    x = distribute_tensor(platform.to_device(platform.from_numpy(whole), device), mesh, [Shard(0)])
    local, ready, done = x.to_local(), platform.new_event(), platform.new_event()
    ready.record(platform.get_current_stream())
    with platform.get_stream_context()(stream):
        stream.wait_event(ready)
        worked = local * 5
        done.record(stream)
    moved = x.redistribute(placements=[Replicate()])
    platform.get_current_stream().wait_event(done)
    np.testing.assert_array_equal(platform.tensor_to_numpy(moved.to_local()), whole)
    np.testing.assert_array_equal(platform.tensor_to_numpy(worked), 5 * platform.tensor_to_numpy(local))
    stream.synchronize()
