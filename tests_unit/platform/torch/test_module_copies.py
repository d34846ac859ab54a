"""Copies of parallel modules (deepcopy, pickle, files, averages) train by themselves, as copies on one device do."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    NoParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    distribute_module,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.data_parallel import fully_shard, no_sync, replicate
from hyper_parallel.errors import PlanError
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")


def numbers(*shape, seed=0):
    """Random values, equal on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Model(nn.Module):
    """Odd sizes, a norm, a tied weight, a frozen parameter and a buffer."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down, self.last = nn.LayerNorm(5), nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(5, 7)
        self.last.weight = self.up.weight
        self.last.bias.requires_grad_(False)
        self.register_buffer("offset", torch.ones(7))
        for seed, parameter in enumerate(self.double().parameters()):
            parameter.data.copy_(numbers(*parameter.shape, seed=10 + seed))

    def forward(self, x):
        """Compute."""
        return self.last(x + self.down(torch.tanh(self.up(self.norm(x))))) + self.offset


def whole_group(model, mesh):
    """One group over all ranks."""
    return fully_shard(model, mesh=mesh["dp"] if mesh.ndim > 1 else mesh)


def nested_groups(model, mesh):
    """Groups of submodules, which gather ahead of each other."""
    for part in (model.norm, model.down):
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh, reshard_after_forward=True)


def averaged(model, mesh):
    """Small buckets."""
    return replicate(model, mesh, bucket_cap_mb=0.0001)


def styles(model, mesh):
    """Styles of linear layers, of which two share a weight."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "last": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(model, mesh["tp"] if mesh.ndim > 1 else mesh, plan)


def prepared(model, mesh):
    """Replicated parameters, between styles that convert inputs and outputs."""
    parallelize_module(model, mesh, {name: NoParallel() for name in ("norm", "down", "up", "last")})
    inputs = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    outputs = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate())
    for style in (inputs, outputs):
        parallelize_module(model, mesh, {"down": style})
    return model


def enter(_, inputs, mesh):
    """Inputs are whole on every rank."""
    return tuple(DTensor.from_local(x, mesh, [Replicate()]) for x in inputs)


def leave(_, output, mesh):
    """Outputs are, too."""
    return output.redistribute(mesh, [Replicate()]).to_local()


def distributed(model, mesh):
    """DTensors everywhere, converted at the borders by functions of the user."""
    return distribute_module(model, mesh, None, enter, leave)


def two_axes(model, mesh):
    """Tensor-parallel styles, sharded over the other axis."""
    return whole_group(styles(model, mesh), mesh)


def by_file(model):
    """``torch.save`` of the module."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_pickle(model):
    """``pickle``."""
    return pickle.loads(pickle.dumps(model))  # noqa: S301 - what it wrote itself


def by_average(model):
    """The module inside of an average of one model."""
    average = AveragedModel(model)
    average.update_parameters(model)
    return average.module


KINDS = (whole_group, nested_groups, averaged, styles, prepared, distributed, two_axes)
WAYS = (copy.deepcopy, by_pickle, by_file, by_average)
SHAPES = {two_axes: (2, 2)}


def full(value):
    """Values on every rank."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def step(model, optimizer, batches, count):
    """Clear, accumulate, step; the gradients."""
    optimizer.zero_grad()
    for x, cotangent in batches:
        ((model(x) * cotangent).sum() / count).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    optimizer.step()
    return gradients


def assert_equal_models(mine, theirs, gradients=((), ())):
    """Equal weights, and gradients if there are some."""
    for (name, one), other in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(full(one), full(other), rtol=1e-9, atol=1e-11, msg=name)
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(full(one), full(other), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 3])
def test_a_copy_trains_by_itself(kind, way, world):
    """Copy and original take steps in turn, each with the gradients and weights of its counterpart on one device."""
    shape = SHAPES.get(kind, (world,))

    def rank():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
        shared = kind in {whole_group, nested_groups, averaged, two_axes}
        mine, dense = kind(Model(), mesh), Model()
        pairs = [(mine, dense)]
        optimizers = [[torch.optim.AdamW(model.parameters(), lr=0.1) for model in pair] for pair in pairs]

        def train(number, seed):
            batches = [(numbers(6, 5, seed=seed + r), numbers(6, 7, seed=seed + 50 + r)) for r in range(shape[0])]
            own = [batches[mesh.get_coordinate()[0]]] if shared else batches
            counts = 1 if shared else shape[0], shape[0]
            steps = zip(pairs[number], optimizers[number], (own, batches), counts, strict=True)
            assert_equal_models(*pairs[number], tuple(step(*each) for each in steps))

        train(0, 100)
        pairs.append((way(mine), way(dense)))
        assert_equal_models(*pairs[1])
        optimizers.append([torch.optim.AdamW(model.parameters(), lr=0.1) for model in pairs[1]])
        assert pairs[1][0].last.weight is pairs[1][0].up.weight
        for seed in (200, 300):
            train(1, seed)
            train(0, seed + 7)
        assert pairs[1][0].last.bias.requires_grad is False

    simulate(rank, 4 if kind is two_axes else world, "torch")


@pytest.mark.parametrize("kind", [whole_group, nested_groups, averaged])
def test_an_average_follows_the_model(kind):
    """Exponential averages of weights and buffers are those of one device, and evaluate alike."""

    def rank():
        mesh = init_device_mesh("cpu", (3,))
        mine, dense = kind(Model(), mesh), Model()
        averages = [AveragedModel(model, avg_fn=lambda a, p, _: 0.9 * a + 0.1 * p) for model in (mine, dense)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (mine, dense)]
        for seed in (100, 200, 300):
            batches = [(numbers(6, 5, seed=seed + r), numbers(6, 7, seed=seed + 50 + r)) for r in range(3)]
            step(mine, optimizers[0], [batches[mesh.rank]], 1)
            step(dense, optimizers[1], batches, 3)
            for average, model in zip(averages, (mine, dense), strict=True):
                average.update_parameters(model)
        assert_equal_models(*averages)
        with torch.no_grad():
            torch.testing.assert_close(*(average(numbers(2, 5)) for average in averages))

    simulate(rank, 3, "torch")


def test_a_copy_of_a_submodule_has_a_schedule_of_its_own():
    """Its collectives are ordered without those of the module around it, which stays as it was."""

    def rank():
        mesh = init_device_mesh("cpu", (2,))
        model, dense = nested_groups(Model(), mesh), Model()
        part = copy.deepcopy(model.down)
        (group,) = part._hyper_parallel_fully_sharded
        assert list(group.schedule.groups.values()) == [group]
        x = numbers(3, 7)
        for one in (part, dense.down):
            one(x).square().sum().backward()
        model(numbers(3, 5)).sum().backward()
        torch.testing.assert_close(full(part.weight.grad), dense.down.weight.grad)
        assert model.down.weight.grad is not part.weight.grad

    simulate(rank, 2, "torch")


@pytest.mark.parametrize("kind", [whole_group, averaged])
def test_a_copy_accumulates_as_its_original(kind):
    """A module that does not reduce is copied as one; gradients are not copied, as those of parameters are not."""

    def rank():
        mesh = init_device_mesh("cpu", (2,))
        model = kind(Model(), mesh)
        with no_sync(model):
            model(numbers(2, 5)).sum().backward()
            copied = copy.deepcopy(model)
            copied(numbers(2, 5)).sum().backward()
        model(numbers(2, 5)).sum().backward()
        assert all(parameter.grad is None for parameter in copied.parameters()) == (kind is whole_group)
        with no_sync(copied):
            pass
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
        with pytest.raises(PlanError, match="is not reduced: it was accumulated under no_sync"):
            optimizer.step()

    simulate(rank, 2, "torch")


def test_a_copy_in_the_middle_of_a_pass_is_refused():
    """Modules have whole parameters then."""

    def rank():
        mesh = init_device_mesh("cpu", (2,))
        model, messages = whole_group(Model(), mesh), []

        def action(*_):
            with pytest.raises(PlanError) as caught:
                copy.deepcopy(model)
            messages.append(str(caught.value))

        model.up.register_forward_hook(action)
        model.norm.register_full_backward_hook(action)
        model(numbers(2, 5)).sum().backward()
        assert (
            messages == ["fully_shard: module group 0 (Model) cannot be copied while its forward or backward runs"] * 2
        )

    simulate(rank, 2, "torch")
