"""Training on devices compared with one device: optimizers, accumulation, clipping, checkpoints, memory, repeats.

What ranks compute is compared with what one rank computes, of MindSpore in another process: it has one device in each.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from hyper_parallel.transport.real.launched_processes import close_launched_teams
from hyper_parallel.verify.frameworks import harness_of

_STEPS = {"rehearsal": 30, "night": 300}
_HALVES = (slice(0, 3), slice(3, 6))


def _torch_optimizers():
    """Optimizers of PyTorch by name; the first word is the one that does the same in float64."""
    from torch.optim import SGD, AdamW

    return {
        "sgd": lambda parameters: SGD(parameters, 0.05, momentum=0.9, foreach=False),
        "sgd foreach": lambda parameters: SGD(parameters, 0.05, momentum=0.9, foreach=True),
        "sgd fused": lambda parameters: SGD(parameters, 0.05, momentum=0.9, fused=True),
        "adamw": lambda parameters: AdamW(parameters, 0.01, foreach=False),
        "adamw foreach": lambda parameters: AdamW(parameters, 0.01, foreach=True),
        "adamw fused": lambda parameters: AdamW(parameters, 0.01, fused=True),
    }


def _mindspore_optimizers():
    """The same of MindSpore, which has no foreach; those of ``mint`` do not step where MindSpore computes on CPU."""
    from mindspore import nn
    from mindspore.experimental import optim

    return {
        "sgd": lambda parameters: nn.Momentum(parameters, 0.05, 0.9),
        "sgd of nn": lambda parameters: nn.SGD(parameters, 0.05, 0.9),
        "sgd of experimental": lambda parameters: optim.SGD(parameters, 0.05, momentum=0.9),
        "adam": lambda parameters: optim.AdamW(parameters, 0.01, weight_decay=0.0),
        "adam of nn": lambda parameters: nn.Adam(parameters, 0.01),
        "adam of experimental": lambda parameters: optim.Adam(parameters, 0.01),
        "adamw": lambda parameters: optim.AdamW(parameters, 0.01),
    }


_OPTIMIZERS = {"torch": _torch_optimizers, "mindspore": _mindspore_optimizers}


def _data(dtype):
    """Weights, batches and targets as arrays, the same on every rank."""
    rng = np.random.default_rng(11)
    shapes = {"up.weight": (10, 7), "up.bias": (10,), "down.weight": (5, 10), "down.bias": (5,)}
    weights = {path: (rng.standard_normal(shape) / 3).astype("float32") for path, shape in shapes.items()}
    x = rng.standard_normal((6, 1, 7)).astype("float32")
    return {path: array.astype(dtype) for path, array in weights.items()}, x.astype(dtype), rng.integers(0, 5, (6, 1))


def _model(device, dtype="float32"):
    """A small model with these weights, its batch and its targets on ``device``."""
    from hyper_parallel.platform.select import current_platform

    platform = current_platform()
    weights, *batch = _data(dtype)
    with harness_of(platform).on_device(device):
        model = harness_of(platform).tutorial_model(7, 10, 5, dtype)
    harness_of(platform).load_arrays(model, weights)
    return (model, *(platform.to_device(platform.from_numpy(array), device) for array in batch))


def _parallel(mesh, device):
    """The same, the first layer column-wise and the second row-wise."""
    from hyper_parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, x, y = _model(device)
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, x, y


def _array(value):
    """The whole value on the host."""
    from hyper_parallel.platform.select import current_platform

    platform = current_platform()
    return platform.tensor_to_numpy(platform.detach(value.full_tensor() if hasattr(value, "full_tensor") else value))


def _train(model, x, y, optimizer, steps, *, device="cpu"):
    """Return the losses of ``steps`` steps of two accumulated halves each, clipped."""
    from hyper_parallel.platform.select import current_platform

    platform, losses = current_platform(), []

    def loss_of(half):
        return lambda: harness_of(platform).reference_loss(model(x[half]), y[half]) / 2

    with harness_of(platform).on_device(device):
        for _ in range(steps):
            result = harness_of(platform).training_step(model, *map(loss_of, _HALVES))
            harness_of(platform).clip_gradients(model, result.gradients, 0.7)
            optimizer(result)
            losses.append(float(_array(result.loss)))
    return losses


def _ready(name, device, dtype="float32"):
    """A model of this world, its batch and its targets, and an optimizer; on one rank a plain model."""
    from hyper_parallel import init_device_mesh
    from hyper_parallel.transport.base import active_transport

    world = active_transport().world_size
    made = _model(device, dtype) if world == 1 else _parallel(init_device_mesh(device, (world,)), device)
    return (*made, _optimizer_of(made[0], name)[1])


def _optimizer_of(model, name):
    """The platform, and an optimizer of a model."""
    from hyper_parallel.platform.select import current_platform

    platform = current_platform()
    return platform, harness_of(platform).optimizer(model, _OPTIMIZERS[platform.platform_type]()[name], 0.0)


def _trained(name, device, dtype="float32"):
    """Losses of three steps, and the weights that they leave; these are on the device."""
    from hyper_parallel.platform.select import current_platform

    platform = current_platform()
    model, x, y, optimizer = _ready(name, device, dtype)
    losses = _train(model, x, y, optimizer, 3, device=device)
    weights = harness_of(platform).trainable(model)
    assert not any(platform.differing_device(platform.get_param_local_data(each), device) for each in weights.values())
    return losses, {path: _array(weight) for path, weight in weights.items()}


def test_every_optimizer_steps_like_one_device(on_ranks, suite_device, platform_name):
    """Accumulated, clipped steps of every kind of optimizer leave the weights of one rank on CPU in float64."""
    for name in _OPTIMIZERS[platform_name]():
        plain = name.partition(" ")[0]
        ((expected, weights),) = on_ranks(_trained, 1, plain, "cpu", "float64", device="cpu")
        for losses, values in on_ranks(_trained, 3, name, suite_device):
            np.testing.assert_allclose(losses, expected, rtol=2e-5, err_msg=name)
            assert list(values) == list(weights) == list(_data("float32")[0])
            for path, array in values.items():
                np.testing.assert_allclose(array, weights[path], rtol=1e-4, atol=1e-5, err_msg=f"{name}: {path}")


def _classes_in_parallel(device, dtype="float32"):
    """The loss of a step over logits whose classes are sharded, and the weights that it leaves."""
    from hyper_parallel import ColwiseParallel, Shard, init_device_mesh, loss_parallel, parallelize_module
    from hyper_parallel.transport.base import active_transport

    (model, x, y), world = _model(device, dtype), active_transport().world_size
    if world > 1:
        plan = {
            "up": ColwiseParallel(use_local_output=False),
            "down": ColwiseParallel(input_layouts=Shard(-1), use_local_output=False),
        }
        parallelize_module(model, init_device_mesh(device, (world,)), plan)
    platform, optimizer = _optimizer_of(model, "sgd")
    with loss_parallel(), harness_of(platform).on_device(device):
        result = harness_of(platform).training_step(model, lambda: harness_of(platform).reference_loss(model(x), y))
        optimizer(result)
    return float(_array(result.loss)), {
        path: _array(weight) for path, weight in harness_of(platform).trainable(model).items()
    }


def test_a_loss_over_sharded_classes_is_that_of_one_device(on_ranks, suite_device):
    """Five classes over three ranks: loss and weights after a step are those of one rank on CPU in float64."""
    ((expected, weights),) = on_ranks(_classes_in_parallel, 1, "cpu", "float64", device="cpu")
    for loss, values in on_ranks(_classes_in_parallel, 3, suite_device):
        np.testing.assert_allclose(loss, expected, rtol=2e-5)
        assert list(values) == list(weights)
        for path, array in values.items():
            np.testing.assert_allclose(array, weights[path], rtol=1e-4, atol=1e-5, err_msg=path)
            assert not np.allclose(array, _data("float32")[0][path], atol=1e-4), path


def _many(steps, device):
    """Losses of many steps, and what was left over after ten of them and after all."""
    model, x, y, optimizer = _ready("adamw", device)
    losses = _train(model, x, y, optimizer, 10, device=device)
    before = _left_over(device)
    losses += _train(model, x, y, optimizer, steps - 10, device=device)
    return losses, before, _left_over(device)


def test_many_steps_leave_nothing_behind(on_ranks, suite_device, effort):
    """The loss follows one device's; from the tenth step on neither memory nor the number of groups grows."""
    ((expected, *_),) = on_ranks(_many, 1, _STEPS[effort], suite_device)
    assert len(expected) == _STEPS[effort]
    for losses, before, after in on_ranks(_many, 2, _STEPS[effort], suite_device):
        assert after == before
        assert before[1] > 0
        np.testing.assert_allclose(losses, expected, rtol=2e-3)
        assert losses[-1] < losses[0] / 3


def _left_over(device):
    """The number of groups and of tensors, and the bytes in use on a device."""
    import gc

    from hyper_parallel.platform.select import current_platform

    gc.collect()
    kinds, groups, used = _COUNTED[current_platform().platform_type](device)
    return groups, sum(1 for each in gc.get_objects() if type(each) in kinds), used


def _torch_counted(device):
    """What counts as a tensor, the number of groups, and the bytes in use."""
    import torch
    import torch.distributed as dist

    used = 0 if device == "cpu" else getattr(torch, device).memory_allocated()
    return (torch.Tensor, torch.nn.Parameter), len(dist.distributed_c10d._world.pg_map), used


def _mindspore_counted(device):
    """The same; MindSpore gives the same ranks the same group."""
    import mindspore

    from hyper_parallel.transport.base import active_transport

    transport, used = active_transport(), 0 if device == "cpu" else mindspore.runtime.memory_allocated()
    every = (ranks for count in (1, 2) for ranks in combinations(range(transport.world_size), count))
    known = sum(transport.known_group(ranks) is not None for ranks in every)
    return (mindspore.Tensor, mindspore.Parameter), known, used


_COUNTED = {"torch": _torch_counted, "mindspore": _mindspore_counted}


def _torch_loaded(model):
    """Copy, load, move and cast."""
    import copy

    other = copy.deepcopy(model)
    other.load_state_dict(model.state_dict())
    other.to(next(model.parameters()).device).double().float()


def _mindspore_loaded(model):
    """Copy, and load whole values; MindSpore moves values when an operator needs them."""
    import copy

    import mindspore

    whole = {path: mindspore.Parameter(array, name=path) for path, array in _data("float32")[0].items()}
    for each in (copy.deepcopy(model), model):
        assert mindspore.load_param_into_net(each, whole) == ([], [])


_LOADED = {"torch": _torch_loaded, "mindspore": _mindspore_loaded}


@pytest.mark.launch("simulated", "processes")
@pytest.mark.world_size(3)
def test_loading_and_moving_weights_starts_no_collective(mesh, device, rank):
    """One rank alone loads, moves and casts its weights: had it called the others, they would not have answered."""
    from hyper_parallel.platform.select import current_platform
    from hyper_parallel.transport.base import active_transport

    model, x, _ = _parallel(mesh, device)
    if rank == 0:
        _LOADED[current_platform().platform_type](model)
    active_transport().barrier((0, 1, 2))
    assert tuple(model(x).shape) == (6, 1, 5)


def _saved(folder, device):
    """Save on this world a tensor whose shards are uneven."""
    from hyper_parallel.core.checkpoint import save

    save(_state(device, 1.0), folder)


def _loaded(folder, device):
    """Load on this world what another one saved."""
    from hyper_parallel.core.checkpoint import load
    from hyper_parallel.platform.select import current_platform

    state = _state(device, 0.0)
    load(state, folder)
    assert not current_platform().differing_device(state["w"].to_local(), device)
    return _array(state["w"])


def _state(device, scale):
    from hyper_parallel import Shard, distribute_tensor, init_device_mesh
    from hyper_parallel.platform.select import current_platform
    from hyper_parallel.transport.base import active_transport

    platform, mesh = current_platform(), init_device_mesh(device, (active_transport().world_size,))
    whole = (scale * np.arange(35)).astype("float32").reshape(5, 7)
    return {"w": distribute_tensor(platform.to_device(platform.from_numpy(whole), device), mesh, [Shard(0)])}


def test_a_checkpoint_of_four_loads_on_two_on_one_and_on_the_host(on_ranks, suite_device, tmp_path):
    """What four ranks saved from devices, two and one load on devices and one on CPU, bit for bit."""
    on_ranks(_saved, 4, str(tmp_path), suite_device)
    for size, device in ((2, suite_device), (1, suite_device), (1, "cpu")):
        for array in on_ranks(_loaded, size, str(tmp_path), device, device=device):
            np.testing.assert_array_equal(array, np.arange(35, dtype="float32").reshape(5, 7))


@pytest.fixture
def _ended_teams():
    """The switch has no way back: ranks that took it serve no other test."""
    yield
    close_launched_teams()


def _repeated(seed, device):
    """Losses and weights, as bytes, of steps on a drawn batch, under the one switch."""
    from hyper_parallel import Replicate, init_device_mesh, randn, use_deterministic

    use_deterministic(seed)
    model, _, y = _parallel(mesh := init_device_mesh(device, (3,)), device)
    x = randn(6, 1, 7, device_mesh=mesh, placements=[Replicate()]).to_local()
    platform, optimizer = _optimizer_of(model, "adamw")
    losses = _train(model, x, y, optimizer, 3, device=device)
    return losses, [_array(weight).tobytes() for weight in harness_of(platform).trainable(model).values()]


@pytest.mark.usefixtures("_ended_teams")
def test_two_runs_under_the_switch_are_equal_bit_for_bit(on_ranks, suite_device):
    """After use_deterministic a second run gives the losses and weights of the first; with another seed, others."""
    first, second, other = (on_ranks(_repeated, 3, seed, suite_device) for seed in (3, 3, 4))
    assert first == second == first[:1] * 3
    assert all(each[0] != theirs[0] and each[1] != theirs[1] for each, theirs in zip(first, other, strict=True))
