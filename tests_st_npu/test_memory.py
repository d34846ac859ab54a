"""Activations that are recomputed, kept in part, or moved to the host: the same gradients, and less memory on cards."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.platforms("torch"), pytest.mark.launch("processes"), pytest.mark.world_size(2)]

_SIZES = {"rehearsal": (256, 16), "night": (8192, 256)}  # rows of the batch, columns; 4 KiB and more are swapped
_BLOCKS = 4
MOST = {"recomputed": 0.75, "kept in part": 0.95, "swapped": 0.75}
"""The memory of a step at its peak, as a part of the plain step's."""


def _blocks(mesh, device, columns):
    """Blocks of two layers, each column-wise and then row-wise."""
    import torch
    from torch import nn

    from hyper_parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(5)
    blocks = nn.Sequential(
        *(nn.Sequential(nn.Linear(columns, 3 * columns), nn.GELU(), nn.Linear(3 * columns, columns)) for _ in
          range(_BLOCKS))
    ).to(device)  # fmt: skip
    plan = {f"{block}.0": ColwiseParallel() for block in range(_BLOCKS)}
    return parallelize_module(blocks, mesh, {**plan, **{f"{block}.2": RowwiseParallel() for block in range(_BLOCKS)}})


def _ways(platform):
    """Wrappers of a block, by name; one keeps products of matrices and notes of each operator whether it was kept."""
    asked = []

    def keeps(_, op, *__, **___):
        asked.append(op in platform.kept_operators())
        return asked[-1]

    def contexts():
        return platform.create_selective_checkpoint_contexts(keeps)

    return asked, {
        "plain": lambda block: block,
        "recomputed": platform.ckpt_wrapper,
        "kept in part": lambda block: platform.ckpt_wrapper(block, context_fn=contexts),
        "swapped": platform.swap_wrapper,
    }


def _step(mesh, device, wrap, rows, columns):
    """Return gradients on the host, the most bytes beyond those of the weights, and how often a block has run."""
    import torch

    model, runs = _blocks(mesh, device, columns), []
    for block in range(_BLOCKS):
        model[block][1].register_forward_hook(lambda *_: runs.append(1))
        model[block] = wrap(model[block])
    x = torch.linspace(-1, 1, rows * columns, device=device).reshape(rows, columns).requires_grad_()
    engine = None if device == "cpu" else getattr(torch, device)
    if engine is not None:
        engine.synchronize()
        engine.reset_peak_memory_stats()
    before = 0 if engine is None else engine.memory_allocated()
    model(x).square().mean().backward()
    if engine is not None:
        engine.synchronize()
    most = 0 if engine is None else engine.max_memory_allocated() - before
    gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]
    return [(each.full_tensor() if hasattr(each, "full_tensor") else each).cpu() for each in gradients], most, len(runs)


def test_every_way_gives_the_same_gradients_and_takes_less_memory(mesh, device, effort):
    """Recomputed, kept in part and swapped to the host: equal gradients, lower peaks where the device counts memory."""
    import torch

    from hyper_parallel.platform.select import current_platform

    asked, ways = _ways(current_platform())
    steps = {name: _step(mesh, device, wrap, *_SIZES[effort]) for name, wrap in ways.items()}
    plain, most, _ = steps.pop("plain")
    for name, (gradients, peak, _) in steps.items():
        assert all(map(torch.equal, plain, gradients)), name
        assert device == "cpu" or peak < MOST[name] * most, f"{name}: {peak} of {most} bytes"
    assert {name: runs for name, (_, _, runs) in steps.items()} == {
        "recomputed": 2 * _BLOCKS, "kept in part": 2 * _BLOCKS, "swapped": _BLOCKS,
    }  # fmt: skip
    assert asked.count(True) == 2 * _BLOCKS
    assert False in asked


def test_activations_moved_by_a_context_change_no_gradient(mesh, device):
    """What is saved inside async_save_on_cpu comes back unchanged, whatever its size."""
    import torch

    from hyper_parallel.platform.select import current_platform

    platform = current_platform()

    def gradients(everything):
        model, x = _blocks(mesh, device, 40), torch.linspace(-1, 1, 240, device=device).reshape(6, 40)
        with platform.on_device(device), platform.async_save_on_cpu(lambda _: everything):
            loss = model(x).square().mean()
        loss.backward()
        return [(p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad) for p in model.parameters()]

    assert all(map(torch.equal, gradients(everything=False), gradients(everything=True)))


def test_a_shard_costs_no_whole(mesh, device):
    """Scaling a sharded tensor takes the memory of its shard at the peak, where the device counts memory."""
    import torch

    from hyper_parallel import Shard, zeros

    rows, columns = 512, 1024
    x = zeros(rows, columns, device_mesh=mesh, placements=[Shard(0)])
    shard = x.to_local()
    assert shard.shape == (rows // 2, columns)
    assert shard.device.type == device
    if device == "cpu":
        return
    engine = getattr(torch, device)
    engine.reset_peak_memory_stats()
    before = engine.memory_allocated()
    y = x * 2.0
    engine.synchronize()
    assert engine.max_memory_allocated() - before < 1.25 * shard.nbytes
    assert y.to_local().shape == shard.shape
