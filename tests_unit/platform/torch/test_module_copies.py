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
    ExpertParallel,
    NoParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    Shard,
    context_parallel_attention,
    distribute_module,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.compat.context_parallel import AsyncContextParallel, ContextParallel
from hyper_parallel.core.data_parallel import fully_shard, no_sync, replicate
from hyper_parallel.errors import PlanError
from hyper_parallel.verify import simulate
from hyper_parallel.verify.launch import launch

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


class Experts(nn.Module):
    """Three packed experts, called as those of Transformers are."""

    def __init__(self):
        super().__init__()
        self.num_experts = 3
        self.gate_up, self.down = nn.Parameter(torch.empty(3, 6, 5)), nn.Parameter(torch.empty(3, 5, 3))

    def forward(self, x, index, weights):
        """Compute."""
        result = torch.zeros_like(x)
        for expert in range(len(self.gate_up)):
            token, choice = torch.where(index == expert)
            gate, up = (x[token] @ self.gate_up[expert].T).chunk(2, -1)
            y = (torch.tanh(gate) * up) @ self.down[expert].T * weights[token, choice, None]
            result = result.index_add(0, token, y)
        return result


class Routed(Model):
    """Experts that a router chooses."""

    def __init__(self):
        nn.Module.__init__(self)
        self.up, self.last, self.router, self.experts = nn.Linear(5, 7), nn.Linear(5, 7), nn.Linear(5, 3), Experts()
        self.last.weight = self.up.weight
        self.last.bias.requires_grad_(False)
        for seed, parameter in enumerate(self.double().parameters()):
            parameter.data.copy_(numbers(*parameter.shape, seed=10 + seed))

    def forward(self, x):
        """Compute."""
        weights, index = self.router(x).softmax(-1).topk(2)
        return self.up(x) + self.last(self.experts(x, index, weights))


class Product(nn.Module):
    """Attention of one device: ``[B, H, S, E]``."""

    def forward(self, query, key, value):
        """Compute."""
        return (query @ key.transpose(2, 3) * query.shape[-1] ** -0.5).softmax(-1) @ value


class Attending(Model):
    """Attention over a sequence, of which ``take`` and ``give`` are the borders of what is sharded."""

    def __init__(self):
        nn.Module.__init__(self)
        self.up, self.key, self.last, self.product = nn.Linear(5, 12), nn.Linear(5, 12), nn.Linear(12, 7), Product()
        self.up.weight = self.key.weight
        self.mesh = self.form = None
        for seed, parameter in enumerate(self.double().parameters()):
            parameter.data.copy_(numbers(*parameter.shape, seed=10 + seed))

    def forward(self, x):
        """Compute."""
        query, key = (part(x).unflatten(-1, (6, 2)).transpose(0, 1).unsqueeze(0) for part in (self.up, self.key))
        if self.form is None:
            y = self.product(query, key, key)
        else:
            query, key = (each.redistribute(placements=[Shard(2)]) for each in (query, key))
            y = context_parallel_attention(query, key, key, axis=self.mesh.mesh_dim_names[0], form=self.form)
        return self.last(y.squeeze(0).transpose(0, 1).flatten(1))


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


def experts(model, mesh):
    """Experts over all ranks, of which the last may have none."""
    return parallelize_module(model, mesh["tp"] if mesh.ndim > 1 else mesh, {"experts": ExpertParallel()})


def sharded_experts(model, mesh):
    """Experts over one axis, and everything sharded over the other."""
    return whole_group(experts(model, mesh), mesh)


def ring(model, mesh, form="ring"):
    """Keys and values go around."""
    model.mesh, model.form = mesh, form
    return distributed(model, mesh)


def exchanged(model, mesh):
    """The sequence is exchanged for heads."""
    return ring(model, mesh, "all_to_all")


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


KINDS = (
    whole_group, nested_groups, averaged, styles, prepared, distributed, two_axes, experts, sharded_experts, ring,
    exchanged,
)  # fmt: skip
MODELS = {experts: Routed, sharded_experts: Routed, ring: Attending, exchanged: Attending}
WAYS = (copy.deepcopy, by_pickle, by_file, by_average)
SHAPES = {two_axes: (2, 2), sharded_experts: (2, 2)}


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


def train_copies(kind, way, shape):
    """On a rank: copy and original take steps in turn, and each is compared with its counterpart on one device."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    shared, make = kind in {whole_group, nested_groups, averaged, two_axes, sharded_experts}, MODELS.get(kind, Model)
    mine, dense = kind(make(), mesh), make()
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
    for seed in (200, 300):
        train(1, seed)
        train(0, seed + 7)
    copied = pairs[1][0]
    assert copied.up.weight is (copied.key if make is Attending else copied.last).weight
    assert copied.last.bias.requires_grad is (make is Attending)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 3])
def test_a_copy_trains_by_itself(kind, way, world):
    """Copy and original take steps in turn, each with the gradients and weights of its counterpart on one device."""
    shape = SHAPES.get(kind, (world,))
    if world == 2 or len(shape) == 1:
        simulate(train_copies, 4 if len(shape) > 1 else world, "torch", (kind, way, shape))


def by_value(model):
    """A file with the classes of the model, which cannot be imported on a rank that got this module by value."""
    import cloudpickle

    file = io.BytesIO()
    torch.save(model, file, pickle_module=cloudpickle)
    file.seek(0)
    return torch.load(file, weights_only=False)


def train_every_copy():
    """On a real rank: every kind and way that two ranks can have."""
    for kind in KINDS:
        for way in (copy.deepcopy, by_value, by_average):
            if kind not in SHAPES:
                train_copies(kind, way, (2,))
    return True


@pytest.mark.slow
def test_copies_on_real_processes():
    """Process groups, which nothing can copy, are found again by a copy."""
    assert launch(train_every_copy, 2, "torch") == [True, True]


@pytest.mark.parametrize("way", [copy.deepcopy, by_pickle, by_file])
@pytest.mark.parametrize("style", [ContextParallel, AsyncContextParallel])
def test_copies_of_modules_with_context_parallel_styles(style, way):
    """Hooks of a copy belong to the copy: it computes this rank's part of what one device has."""

    def rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        operands = [numbers(1, 2, 6, 3, seed=seed).requires_grad_() for seed in range(3)]
        wanted = Product()(*operands)[:, :, 3 * mesh.rank :][:, :, :3]
        model = nn.Sequential()
        model.product, model.handoff = Product(), nn.ModuleList(nn.Identity() for _ in operands)
        names = dict(zip(("q_proj", "k_proj", "v_proj"), model.handoff, strict=True))
        made = style(seq_dim=2, head_dim=1, ulysses_degree=2)
        made.apply(model.product, mesh, **(names if style is AsyncContextParallel else {}))
        copied = way(model)
        for hook in copied.product._forward_hooks.values():
            assert hook.__self__.module is copied.product
        for each in (model, copied, model):
            mine = [x[:, :, 3 * mesh.rank :][:, :, :3].contiguous() for x in operands]
            torch.testing.assert_close(
                each.product(*(hand(x) for hand, x in zip(each.handoff, mine, strict=True))), wanted
            )

    simulate(rank, 2, "torch")


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
