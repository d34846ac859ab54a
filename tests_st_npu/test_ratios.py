"""Ratios of times within one run: recorded in every run, red on devices only, outside of a generous band.

On CPU nothing is judged: the rehearsal shows that every ratio is computed and recorded.
"""

from __future__ import annotations

import json
import statistics
import time

import numpy as np

from hyper_parallel.verify.report import report_json
from hyper_parallel.verify.report_files import write_text

BANDS = {
    "block beside hand-written": 3.0,
    "redistribution beside the collective": 3.0,
    "collective and work at once beside one after the other": 1.25,
}
"""The largest ratio that is not a failure on a device."""

_REPEATS = {"rehearsal": 1, "night": 20}
_COLUMNS = {"rehearsal": 8, "night": 4096}


def _torch(device):
    """PyTorch's collectives, and a function that waits for the device."""
    import torch

    return torch.distributed, (lambda: None) if device == "cpu" else getattr(torch, device).synchronize


class _Collectives:
    """The transport's collectives by PyTorch's names: where MindSpore computes on CPU, its own have no world."""

    def __init__(self):
        from hyper_parallel.transport.base import active_transport

        self._transport = active_transport()
        self._ranks = tuple(range(self.get_world_size()))

    def get_world_size(self):
        return self._transport.world_size

    def all_reduce(self, x, *, async_op=False):
        started = self._transport.start("all_reduce", x, "sum", self._ranks)
        return started if async_op else started.wait()

    def all_gather_into_tensor(self, _, part):
        return self._transport.all_gather(part, self._ranks, [tuple(part.shape)] * len(self._ranks))


def _mindspore(device):
    """The transport's collectives, and a function that waits for the device."""
    import mindspore

    return _Collectives(), (lambda: None) if device == "cpu" else mindspore.runtime.synchronize


_FRAMEWORKS = {"torch": _torch, "mindspore": _mindspore}


def _of_framework(device):
    """The platform, the collectives beside which DTensors are measured, and a function that waits for the device."""
    from hyper_parallel.platform.select import current_platform

    platform = current_platform()
    return (platform, *_FRAMEWORKS[platform.platform_type](device))


def _values(platform, device, *shape):
    """Random values in a plain tensor on the device."""
    array = np.random.default_rng(0).standard_normal(shape).astype("float32")
    return platform.to_device(platform.from_numpy(array), device)


def _median(wait, repeats, *functions):
    """Median seconds of each function, which take turns, after a first call of each that is not counted."""
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


def _torch_block(dist, columns, x, up, down):
    """A block of two layers, a step of it, and the same step of a rank's part by hand."""
    from torch import nn
    from torch.nn import functional

    block = nn.Sequential(nn.Linear(columns, 4 * columns), nn.GELU(), nn.Linear(4 * columns, columns)).to(x.device)
    for leaf in (x, up, down):
        leaf.requires_grad_()

    def ours():
        block(x).sum().backward()

    def by_hand():
        out = functional.gelu(x @ up.T) @ down.T
        dist.all_reduce(out.detach())
        out.sum().backward()
        dist.all_reduce(x.grad)

    return block, ours, by_hand


def _mindspore_block(dist, columns, x, up, down):
    """The same of MindSpore."""
    import mindspore
    from mindspore import mint, nn, ops

    block = nn.SequentialCell([nn.Dense(columns, 4 * columns), nn.GELU(), nn.Dense(4 * columns, columns)])

    def ours():
        mindspore.value_and_grad(lambda x: block(x).sum(), 0, block.trainable_params())(x)

    def loss(x, up, down):
        out = ops.gelu(x @ mint.transpose(up, 0, 1)) @ mint.transpose(down, 0, 1)
        return out.sum(), out

    by_hand_step = mindspore.value_and_grad(loss, (0, 1, 2), has_aux=True)

    def by_hand():
        (_, out), (gradient, _, _) = by_hand_step(x, up, down)
        dist.all_reduce(out)
        dist.all_reduce(gradient)

    return block, ours, by_hand


_BLOCKS = {"torch": _torch_block, "mindspore": _mindspore_block}


def _block(device, repeats, columns):
    """A column-wise and a row-wise layer, forward and backward, beside the same by hand, an all-reduce each way."""
    from hyper_parallel import ColwiseParallel, RowwiseParallel, init_device_mesh, parallelize_module

    platform, dist, wait = _of_framework(device)
    world = dist.get_world_size()
    shapes = ((columns, columns), (4 * columns // world, columns), (columns, 4 * columns // world))
    x, up, down = (_values(platform, device, *shape) for shape in shapes)
    block, ours, by_hand = _BLOCKS[platform.platform_type](dist, columns, x, up, down)
    mesh = init_device_mesh(device, (world,))
    parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    mine, hand = _median(wait, repeats, ours, by_hand)
    return mine / hand


def _redistribution(device, repeats, columns):
    """Shard to Replicate beside the all-gather into a tensor."""
    from hyper_parallel import Replicate, Shard, init_device_mesh, zeros

    platform, dist, wait = _of_framework(device)
    world = dist.get_world_size()
    mesh = init_device_mesh(device, (world,))
    x = zeros(world * columns, columns, device_mesh=mesh, placements=[Shard(0)])
    part, whole = (_values(platform, device, rows, columns) for rows in (columns, world * columns))
    ours, bare = _median(
        wait,
        repeats,
        lambda: x.redistribute(placements=[Replicate()]),
        lambda: dist.all_gather_into_tensor(whole, part),
    )
    return ours / bare


def _overlap(device, repeats, columns):
    """A started all-reduce with products of matrices beside the two one after the other: 1 is no overlap."""
    platform, dist, wait = _of_framework(device)
    x, y = (_values(platform, device, columns, columns) for _ in range(2))

    def work():
        return [y @ y for _ in range(4)]

    def at_once():
        started = dist.all_reduce(x, async_op=True)
        work()
        started.wait()

    def one_after_the_other():
        dist.all_reduce(x, async_op=True).wait()
        wait()
        work()

    together, apart = _median(wait, repeats, at_once, one_after_the_other)
    return together / apart


def _measured(device, repeats, columns):
    """All ratios on this rank."""
    return dict(
        zip(BANDS, (part(device, repeats, columns) for part in (_block, _redistribution, _overlap)), strict=True)
    )


def test_ratios_are_recorded_and_inside_their_bands(on_ranks, platform_name, suite_device, effort, reports):
    """The slowest rank's ratios become a report that `trend` follows; on devices none is above its band."""
    ranks = on_ranks(_measured, 2, suite_device, _REPEATS[effort], _COLUMNS[effort])
    ratios = {name: max(rank[name] for rank in ranks) for name in BANDS}
    rows = [
        {"name": name, "ratio": ratio, "budget": BANDS[name], "ok": effort == "rehearsal" or ratio <= BANDS[name]}
        for name, ratio in ratios.items()
    ]
    path = reports / f"ratios-{platform_name}-{suite_device}.json"
    write_text(path, report_json(rows) + "\n")
    assert [row["name"] for row in json.loads(path.read_text(encoding="utf-8"))["rows"]] == list(BANDS)
    assert all(ratio > 0 for ratio in ratios.values())
    assert all(row["ok"] for row in rows), rows
