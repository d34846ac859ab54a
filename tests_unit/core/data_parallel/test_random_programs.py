"""Random programs: fully-sharded training with every option against one device, and compiled modules against eager.

``HP_PROGRAMS=first:count`` chooses the seeds; a sweep runs more than a plain run.
"""

from __future__ import annotations

import copy
import os
from random import Random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hyper_parallel
from hyper_parallel import (
    ColwiseParallel,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPMeshInfo,
    HSDPMeshInfo,
    MixedPrecisionPolicy,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    ShardPlacementResult,
    clip_grad_norm_,
    distribute_tensor,
    fully_shard,
    init_device_mesh,
    load,
    manual_seed,
    parallelize_module,
    save,
)
from hyper_parallel.verify import simulate

pytestmark = [pytest.mark.platforms("torch"), pytest.mark.sweep]


def seeds(default):
    """The seeds of this run."""
    first, count = map(int, os.environ.get("HP_PROGRAMS", f"0:{default}").split(":"))
    return range(first, first + count)


def chooser(seed):
    """What makes the choices of one program; ranks that ask alike get the same."""
    return Random(seed)  # noqa: S311 - no secrets


class Layer(nn.Module):
    """One of several kinds of layers, with a residual."""

    def __init__(self, kind, width, hidden, p=0.0):
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden, bias=kind != "gated"), nn.Linear(hidden, width)
        self.gate = nn.Linear(width, hidden) if kind == "gated" else None
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.drop = nn.Dropout(p)

    def forward(self, x):
        """Like ``x``."""
        normed = self.norm(x)
        inner = self.up(normed)
        inner = torch.tanh(inner) if self.gate is None else inner * torch.sigmoid(self.gate(normed))
        return x + self.drop(self.down(inner)) * self.scale


class Model(nn.Module):
    """An embedding that the head may share, and layers of which one may be called twice."""

    def __init__(self, choose, p=0.0):
        super().__init__()
        width = choose.choice([3, 4, 6])
        self.embed, self.head = nn.Embedding(7, width), nn.Linear(width, 7)
        self.layers = nn.ModuleList(
            Layer(choose.choice(["plain", "gated"]), width, choose.choice([2, 5, 8]), p)
            for _ in range(choose.choice([1, 2, 3]))
        )
        self.twice = choose.random() < 0.3
        if choose.random() < 0.3:
            self.head.weight = self.embed.weight
        if choose.random() < 0.3:
            self.layers[0].scale.requires_grad_(requires_grad=False)

    def forward(self, ids):
        """Logits of ``ids``."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.layers[0](x) if self.twice else x)


def own_axes(mesh, choose):
    """Axes for some parameters: all of them repeat, or share, or the first shares and the second repeats."""
    whole = FSDPMeshInfo(mesh, dp_mesh_dims=DataParallelMeshDims(replicate=mesh.names))
    shared = FSDPMeshInfo(mesh, dp_mesh_dims=DataParallelMeshDims(shard=mesh.names))
    choices = [ShardPlacementResult(None, whole), ShardPlacementResult(Shard(-1), shared)]
    if mesh.ndim > 1:
        choices.append(ShardPlacementResult(Shard(0), HSDPMeshInfo(mesh, shard_mesh_dim=0, replicate_mesh_dim=1)))
    return choose.choice(choices)


def sharded_at_random(model, mesh, choose):
    """Apply fully_shard with options that the seed chooses."""
    size = mesh.shape[-1]

    def options():
        chosen = {
            "reshard_after_forward": choose.choice([None, True, False, 1, size]),
            "shard_placement_fn": choose.choice([None, lambda parameter: Shard(parameter.ndim - 1)]),
            "offload_policy": choose.choice([None, CPUOffloadPolicy()]),
            "mp_policy": choose.choice([None, MixedPrecisionPolicy(reduce_dtype=torch.float64)]),
            "dp_mesh_dims": choose.choice([None, DataParallelMeshDims(shard=mesh.names[::-1])]),
        }
        if choose.random() < 0.3:  # parameters of odd and of even numbers of elements on different axes
            own = own_axes(mesh, choose)
            chosen["shard_placement_fn"] = lambda parameter: own if parameter.numel() % 2 else None
            chosen["reshard_after_forward"] = choose.choice([None, True, False, 1])
        return {"mesh": mesh, **{name: value for name, value in chosen.items() if value is not None}}

    layers, form = list(model.layers), choose.choice(["each", "list", "some", "none"])
    if form == "list" and not model.twice:
        fully_shard(layers, **options())
    elif form != "none":
        for layer in layers if form == "each" else layers[:1]:
            fully_shard(layer, **options())
    fully_shard(model, **options())
    for module in model.modules():
        if isinstance(module, hyper_parallel.FSDPModule) and choose.random() < 0.3:
            module.set_reshard_after_backward(choose.random() < 0.5, recurse=False)
            module.set_modules_to_forward_prefetch([model])
    return model


def data(step, rank):
    """Tokens and cotangent of one rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 7, (2, 3), generator=generator), torch.randn(2, 3, 7, generator=generator).double()


def clipped(dense, model):
    """Clip the gradients of both, and assert that their norms are equal."""
    expected = torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.5)
    norm = clip_grad_norm_(model.parameters(), 0.5)
    torch.testing.assert_close(norm.full_tensor() if hasattr(norm, "full_tensor") else norm, expected)


def changed(model, optimizer, folder, fresh, choose):
    """Return model and optimizer, at random copied, or saved and loaded into what ``fresh`` makes."""
    change = choose.choice(["none", "none", "copy", "checkpoint"])
    if change == "none":
        return model, optimizer
    other = copy.deepcopy(model) if change == "copy" else fresh()
    rebuilt = torch.optim.AdamW(other.parameters(), lr=0.05)
    if change == "copy":
        rebuilt.load_state_dict(optimizer.state_dict())
        return other, rebuilt
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    save({"model": model, "optimizer": optimizer}, folder)
    load({"model": other, "optimizer": rebuilt}, folder)
    return other, rebuilt


def accumulated(dense, model, step, world, rank, choose):
    """Compute the gradients of a step, in one pass or several; at random look at the gathered parameters before."""
    for each in range(world):
        ids, cotangent = data(step, each)
        dense(ids).backward(cotangent / world)
    ids, cotangent = data(step, rank)
    if choose.random() < 0.3:
        model.unshard()
        model.reshard()
    parts = choose.choice([(1.0,), (0.25, 0.75)])
    for index, part in enumerate(parts):
        model.set_requires_gradient_sync(index == len(parts) - 1)
        model(ids).backward(cotangent * part)


@pytest.mark.parametrize("seed", seeds(3))
def test_fully_sharded_training_is_that_of_one_device(seed, tmp_path):
    """Accumulation, clipping, freezing, unshard, copies and checkpoints on another shape leave weights right."""

    def rank():
        choose = chooser(seed)
        dims = choose.choice([(2,), (3,), (4,), (2, 2)])
        world = 2 * 2 if dims == (2, 2) else dims[0]
        names = ("replicas", "dp")[-len(dims) :]
        torch.manual_seed(seed)
        dense = Model(choose).double()
        mesh = init_device_mesh("cpu", dims, mesh_dim_names=names)
        again = choose.getrandbits(32)
        model = sharded_at_random(copy.deepcopy(dense), mesh, chooser(again))
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (dense, model)]
        frozen = choose.choice([0, 1, 3])

        def fresh():
            return sharded_at_random(copy.deepcopy(dense), mesh, chooser(again + 1))

        for step in range(4):
            for each, optimizer in zip((dense, model), optimizers, strict=True):
                optimizer.zero_grad()
                each.head.bias.requires_grad_(step % 3 != frozen)
            accumulated(dense, model, step, world, mesh.rank, choose)
            if choose.random() < 0.5:
                clipped(dense, model)
            for optimizer in optimizers:
                optimizer.step()
            for (name, theirs), mine in zip(dense.named_parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(mine.full_tensor(), theirs, msg=lambda t, n=name: f"{n}: {t}")
            model, optimizers[1] = changed(model, optimizers[1], tmp_path / str(step), fresh, choose)

    choose = chooser(seed)
    dims = choose.choice([(2,), (3,), (4,), (2, 2)])
    simulate(rank, 4 if dims == (2, 2) else dims[0], platform="torch")


def styled(model, mesh, choose):
    """Apply a random plan of tensor and sequence parallelism to each layer."""
    kept = {"use_local_output": False}
    for layer in model.layers:
        between = choose.choice([Shard(1), Replicate()])
        plan = {
            "up": ColwiseParallel(input_layouts=between, **kept),
            "down": RowwiseParallel(output_layouts=between, **kept),
        }
        if layer.gate is not None:
            plan["gate"] = ColwiseParallel(input_layouts=between, **kept)
        if between == Shard(1):
            plan["norm"] = SequenceParallel(**kept)
            plan[""] = hyper_parallel.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1))
        parallelize_module(layer, mesh, plan)
        hyper_parallel.distribute_module(layer, mesh)
    return model


@pytest.mark.parametrize("seed", seeds(3))
def test_compiled_layers_have_the_bits_of_eager_ones(seed):
    """Output, gradients, dropout and the random stream are equal, with batches that change and recomputation around."""

    def rank():
        choose = chooser(seed)
        world = choose.choice([2, 3, 4])
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        torch.manual_seed(seed)
        eager = styled(Model(choose, p=choose.choice([0.0, 0.3])), mesh, choose)
        compiled = copy.deepcopy(eager)
        for layer in compiled.layers:
            hyper_parallel.compile(layer)
        recomputes, width = choose.random() < 0.3, eager.head.in_features
        for step in range(3):
            batch = choose.choice([1, 2, 3])
            training = choose.random() < 0.8
            generator = torch.Generator().manual_seed(step)
            x, cotangent = (
                distribute_tensor(torch.randn(batch, 5, width, generator=generator), mesh, [placement])
                for placement in [choose.choice([Shard(1), Replicate()])] * 2
            )
            results = []
            for model in (eager, compiled):
                model.train(training)
                manual_seed(step)
                value = x.detach().clone().requires_grad_()
                y = value
                for layer in model.layers:
                    y = checkpoint(layer, y, use_reentrant=False) if recomputes else layer(y)
                y.redistribute(placements=x.placements).backward(cotangent)
                gradients = [value.grad, *(parameter.grad for parameter in model.layers.parameters())]
                results.append(([y, *gradients], hyper_parallel.get_rng_state()))
                model.zero_grad()
            assert results[0][1] == results[1][1]
            for mine, theirs in zip(results[1][0], results[0][0], strict=True):
                assert (mine is None) == (theirs is None)
                if mine is not None:
                    assert mine.layout is theirs.layout
                    assert torch.equal(mine.to_local(), theirs.to_local())

    simulate(rank, chooser(seed).choice([2, 3, 4]), platform="torch")
