"""Training on cards beside one device: optimizers, accumulation, clipping, many steps, checkpoints, memory."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.platforms("torch")

_STEPS = {"rehearsal": 30, "night": 300}


def _data():
    """Weights, batches and targets as arrays, the same on every rank."""
    rng = np.random.default_rng(11)
    weights = [rng.standard_normal(shape).astype("float32") / 3 for shape in ((10, 7), (10,), (5, 10), (5,))]
    return weights, rng.standard_normal((6, 7)).astype("float32"), rng.integers(0, 5, 6)


def _model(device):
    """A small model with these weights, its batch and its targets on ``device``."""
    import torch
    from torch import nn

    arrays, x, y = _data()
    model = nn.Sequential(nn.Linear(7, 10), nn.GELU(), nn.Linear(10, 5)).to(device)
    with torch.no_grad():
        for parameter, array in zip(model.parameters(), arrays, strict=True):
            parameter.copy_(torch.from_numpy(array))
    return model, torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)


def _optimizer(name, parameters):
    import torch

    makers = {
        "sgd": lambda: torch.optim.SGD(parameters, 0.05, momentum=0.9, foreach=False),
        "sgd foreach": lambda: torch.optim.SGD(parameters, 0.05, momentum=0.9, foreach=True),
        "adamw": lambda: torch.optim.AdamW(parameters, 0.01, foreach=False),
        "adamw foreach": lambda: torch.optim.AdamW(parameters, 0.01, foreach=True),
        "sgd fused": lambda: torch.optim.SGD(parameters, 0.05, momentum=0.9, fused=True),
        "adamw fused": lambda: torch.optim.AdamW(parameters, 0.01, fused=True),
    }
    return makers[name]()


def _train(model, x, y, optimizer, steps):
    """Return the losses of ``steps`` steps of two accumulated halves each, clipped."""
    from torch.nn import functional

    from hyper_parallel import clip_grad_norm_

    losses = []
    for _ in range(steps):
        for half in (slice(0, 3), slice(3, 6)):
            loss = functional.cross_entropy(model(x[half]), y[half]) / 2
            loss.backward()
            losses.append(float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss.detach()))
        clip_grad_norm_(list(model.parameters()), 0.7)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _parallel(mesh, device, *, style_names=("0", "2")):
    from hyper_parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, x, y = _model(device)
    parallelize_module(model, mesh, dict(zip(style_names, (ColwiseParallel(), RowwiseParallel()), strict=True)))
    return model, x, y


@pytest.mark.launch("processes")
@pytest.mark.world_size(3)
def test_every_optimizer_steps_like_one_device(mesh, device):
    """Accumulated, clipped steps of each optimizer, one by one, foreach and fused, leave the weights of one device."""
    import torch

    for name in ("sgd", "sgd foreach", "sgd fused", "adamw", "adamw foreach", "adamw fused"):
        alone, x, y = _model("cpu")
        alone = alone.double()
        expected = _train(alone, x.double(), y, _optimizer(name.partition(" ")[0], list(alone.parameters())), 3)
        model, x, y = _parallel(mesh, device)
        losses = _train(model, x, y, _optimizer(name, list(model.parameters())), 3)
        np.testing.assert_allclose(losses, expected, rtol=2e-5, err_msg=name)
        for here, there in zip(model.parameters(), alone.parameters(), strict=True):
            value = here.full_tensor() if hasattr(here, "full_tensor") else here
            assert value.device.type == device
            torch.testing.assert_close(value.detach().cpu().double(), there.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.launch("processes")
@pytest.mark.world_size(2)
def test_many_steps_leave_nothing_behind(mesh, device, effort):
    """The loss follows one device's; from the tenth step on neither memory nor the number of groups grows."""
    import gc

    import torch.distributed as dist

    steps = _STEPS[effort]
    alone, x, y = _model(device)
    expected = _train(alone, x, y, _optimizer("adamw", list(alone.parameters())), steps)
    model, x, y = _parallel(mesh, device)
    optimizer = _optimizer("adamw", list(model.parameters()))
    losses = _train(model, x, y, optimizer, 10)
    gc.collect()
    before = _left_over(dist, device)
    losses += _train(model, x, y, optimizer, steps - 10)
    gc.collect()
    assert _left_over(dist, device) == before
    np.testing.assert_allclose(losses, expected, rtol=2e-3)
    assert losses[-1] < losses[0] / 3


def _left_over(dist, device):
    """The number of groups and of tensors, and the bytes in use on a card."""
    import gc

    import torch

    tensors = sum(1 for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter))
    used = 0 if device == "cpu" else getattr(torch, device).memory_allocated()
    return len(dist.distributed_c10d._world.pg_map), tensors, used


@pytest.mark.launch("simulated", "processes")
@pytest.mark.world_size(3)
def test_loading_and_moving_weights_starts_no_collective(mesh, device, rank):
    """One rank alone loads, moves and casts its weights: had it called the others, they would not have answered."""
    import copy

    from hyper_parallel.transport.base import active_transport

    model, x, _ = _parallel(mesh, device)
    if rank == 0:
        other = copy.deepcopy(model)
        other.load_state_dict(model.state_dict())
        other.to(device).double().float()
    active_transport().barrier((0, 1, 2))
    assert model(x).shape == (6, 5)


def _saved(folder, device):
    """Save on this world a tensor whose shards are uneven."""
    from hyper_parallel.core.checkpoint import save

    save(_state(device, 1.0), folder)


def _loaded(folder, device):
    """Load on this world what another one saved."""
    from hyper_parallel.core.checkpoint import load

    state = _state(device, 0.0)
    load(state, folder)
    assert str(state["w"].to_local().device.type) == device
    return state["w"].full_tensor().detach().cpu().numpy()


def _state(device, scale):
    import torch

    from hyper_parallel import Shard, distribute_tensor, init_device_mesh
    from hyper_parallel.transport.base import active_transport

    mesh = init_device_mesh(device, (active_transport().world_size,))
    whole = scale * torch.arange(35, dtype=torch.float32, device=device).reshape(5, 7)
    return {"w": distribute_tensor(whole, mesh, [Shard(0)])}


def test_a_checkpoint_of_four_loads_on_two_on_one_and_on_the_host(on_ranks, suite_device, tmp_path):
    """What four ranks saved from cards, two and one load on cards and one on CPU, bit for bit."""
    on_ranks(_saved, 4, str(tmp_path), suite_device)
    for size, device in ((2, suite_device), (1, suite_device), (1, "cpu")):
        for array in on_ranks(_loaded, size, str(tmp_path), device, device=device):
            np.testing.assert_array_equal(array, np.arange(35, dtype="float32").reshape(5, 7))
