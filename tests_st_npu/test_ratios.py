"""Ratios of times within one run: recorded in every run, red on cards only, outside of a generous band.

On CPU nothing is judged: the rehearsal shows that every ratio is computed and recorded.
"""

from __future__ import annotations

import json
import statistics
import time

import pytest

from hyper_parallel.verify.report_files import write_text
from hyper_parallel.verify.run_header import report_json

pytestmark = pytest.mark.platforms("torch")

BANDS = {
    "block beside hand-written": 3.0,
    "redistribution beside the collective": 3.0,
    "collective and work at once beside one after the other": 1.25,
}
"""The largest ratio that is no failure on a card."""

_REPEATS = {"rehearsal": 1, "night": 20}
_COLUMNS = {"rehearsal": 8, "night": 4096}


def _median(device, repeats, *functions):
    """Median seconds of each function, which take turns, after a first call of each that is not counted."""
    import torch

    def wait():
        if device != "cpu":
            getattr(torch, device).synchronize()

    seconds = [[] for _ in functions]
    for turn in range(repeats + 1):
        for function, taken in zip(functions, seconds, strict=True):
            wait()
            start = time.perf_counter()
            function()
            wait()
            if turn:
                taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in seconds]


def _block(device, repeats, columns):
    """A column-wise and a row-wise layer, forward and backward, beside the same by hand, an all-reduce each way."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn import functional

    from hyper_parallel import ColwiseParallel, RowwiseParallel, init_device_mesh, parallelize_module

    world = dist.get_world_size()
    mesh = init_device_mesh(device, (world,))
    block = nn.Sequential(nn.Linear(columns, 4 * columns), nn.GELU(), nn.Linear(4 * columns, columns)).to(device)
    up, down = (
        torch.randn(shape, device=device).requires_grad_()
        for shape in ((4 * columns // world, columns), (columns, 4 * columns // world))
    )
    parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(columns, columns, device=device, requires_grad=True)

    def ours():
        block(x).sum().backward()

    def by_hand():
        out = functional.gelu(x @ up.T) @ down.T
        dist.all_reduce(out.detach())
        out.sum().backward()
        dist.all_reduce(x.grad)

    mine, hand = _median(device, repeats, ours, by_hand)
    return mine / hand


def _redistribution(device, repeats, columns):
    """Shard to Replicate beside the all-gather into a tensor."""
    import torch
    import torch.distributed as dist

    from hyper_parallel import Replicate, Shard, init_device_mesh, zeros

    world = dist.get_world_size()
    mesh = init_device_mesh(device, (world,))
    x = zeros(world * columns, columns, device_mesh=mesh, placements=[Shard(0)])
    part, whole = torch.zeros(columns, columns, device=device), torch.zeros(world * columns, columns, device=device)
    ours, bare = _median(
        device,
        repeats,
        lambda: x.redistribute(placements=[Replicate()]),
        lambda: dist.all_gather_into_tensor(whole, part),
    )
    return ours / bare


def _overlap(device, repeats, columns):
    """A started all-reduce with products of matrices beside the two one after the other: 1 is no overlap."""
    import torch
    import torch.distributed as dist

    x, y = (torch.ones(columns, columns, device=device) for _ in range(2))

    def work():
        return [y @ y for _ in range(4)]

    def at_once():
        started = dist.all_reduce(x, async_op=True)
        work()
        started.wait()

    def one_after_the_other():
        dist.all_reduce(x, async_op=True).wait()
        if device != "cpu":
            getattr(torch, device).synchronize()
        work()

    together, apart = _median(device, repeats, at_once, one_after_the_other)
    return together / apart


def _measured(device, repeats, columns):
    """All ratios on this rank."""
    return dict(
        zip(BANDS, (part(device, repeats, columns) for part in (_block, _redistribution, _overlap)), strict=True)
    )


def test_ratios_are_recorded_and_inside_their_bands(on_ranks, suite_device, effort, reports):
    """The slowest rank's ratios become a report that `trend` follows; on cards none is above its band."""
    ranks = on_ranks(_measured, 2, suite_device, _REPEATS[effort], _COLUMNS[effort])
    ratios = {name: max(rank[name] for rank in ranks) for name in BANDS}
    rows = [
        {"name": name, "ratio": ratio, "budget": BANDS[name], "ok": effort == "rehearsal" or ratio <= BANDS[name]}
        for name, ratio in ratios.items()
    ]
    path = reports / f"ratios-{suite_device}.json"
    write_text(path, report_json(rows) + "\n")
    assert [row["name"] for row in json.loads(path.read_text(encoding="utf-8"))["rows"]] == list(BANDS)
    assert all(ratio > 0 for ratio in ratios.values())
    assert all(row["ok"] for row in rows), rows
