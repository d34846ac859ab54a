"""Tensor-parallel parameters that are sharded over a data axis as well, and replicas: everything equals one device."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    Partial,
    Replicate,
    RowwiseParallel,
    Shard,
    StridedShard,
    clip_grad_norm_,
    defer_grad_reduce,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.data_parallel import fully_shard
from hyper_parallel.core.dtensor.mesh import common_mesh
from hyper_parallel.errors import MeshError, PlanError
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")


def random(*shape, seed=0):
    """Normal float64 values from a fresh generator."""
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_model():
    """Two blocks with a norm, of odd sizes."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(5), nn.Linear(5, 7), nn.Linear(7, 5)

        def forward(self, x):
            return x + self.down(torch.tanh(self.up(self.norm(x))))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(5, 3)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    model = Model().double()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(random(*parameter.shape, seed=50 + index) * 0.5)
    return model


def train_alike(dense, model, position, count):
    """Train both for three steps and compare gradients, norms and weights; ``model`` has part ``position`` of a batch.

    Args:
        dense: the model on one device.
        model: the sharded one.
        position: of this rank's part.
        count: number of parts.
    """
    import torch

    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (dense, model)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part in range(count):
            dense(random(2, 5, seed=part + 10 * step)).backward(random(2, 3, seed=99 + part) / count)
        model(random(2, 5, seed=position + 10 * step)).backward(random(2, 3, seed=99 + position))
        pairs = list(zip(dense.named_parameters(), model.parameters(), strict=True))
        for (name, theirs), mine in pairs:
            assert mine.grad.layout is mine.layout
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, msg=lambda t, n=name: f"{n}.grad: {t}")
        clip = (clip_grad_norm_, torch.nn.utils.clip_grad_norm_)[step % 2]  # the weights are on several meshes
        norms = [torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.5), clip(model.parameters(), 0.5)]
        torch.testing.assert_close(*[n.full_tensor() if isinstance(n, DTensor) else n for n in norms])
        for optimizer in optimizers:
            optimizer.step()
        for (name, theirs), mine in pairs:
            torch.testing.assert_close(mine.full_tensor(), theirs.detach(), msg=lambda t, n=name: f"{n}: {t}")


def tensor_parallel(model, mesh):
    """The blocks column- and row-parallel; norms and the head stay plain."""
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


@pytest.mark.untraced
@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (3, 2), (4, 1), (1, 3)])
@pytest.mark.parametrize("names", [("dp", "tp"), ("tp", "dp")])
def test_tensor_parallel_training_equals_one_device(shape, names):
    """Gradients, norms and weights are those of one device, whichever axis of the mesh comes first."""

    def rank():
        grid = init_device_mesh("cpu", shape, mesh_dim_names=names)
        dense = make_model()
        model = tensor_parallel(copy.deepcopy(dense), grid["tp"])
        for block in model.blocks:
            fully_shard(block, mesh=grid["dp"], reshard_after_forward=True)
        fully_shard(model, mesh=grid["dp"])
        train_alike(dense, model, grid.get_local_rank("dp"), grid["dp"].size())

    simulate(rank, shape[0] * shape[1], platform="torch")


def test_placements_are_those_of_checkpoints():
    """The data axis splits what tensor parallelism leaves: StridedShard where both split dim 0, as PyTorch has it."""

    def rank():
        grid = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        model = tensor_parallel(make_model(), grid["tp"])
        fully_shard(model, mesh=grid["dp"])
        block = model.blocks[0]
        assert block.up.weight.device_mesh is grid
        assert block.up.weight.placements == (StridedShard(0, 3), Shard(0))
        assert block.down.weight.placements == (Shard(0), Shard(1))
        assert block.down.bias.placements == (Shard(0), Replicate())
        assert block.norm.weight.placements == (Shard(0),)
        assert block.norm.weight.device_mesh is grid["dp"]

    simulate(rank, 6, platform="torch")


@pytest.mark.untraced
@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (3, 1), (1, 4)])
def test_replicas_train_as_one_device(shape):
    """Over two axes parameters are replicated along the first, and gradients averaged over both."""

    def rank():
        grid = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        dense = make_model()
        model = copy.deepcopy(dense)
        for block in model.blocks:
            fully_shard(block, mesh=grid)
        fully_shard(model, mesh=grid)
        assert model.head.weight.placements == (Replicate(), Shard(0))
        train_alike(dense, model, grid.rank, shape[0] * shape[1])

    simulate(rank, shape[0] * shape[1], platform="torch")


def test_replicas_of_tensor_parallel_shards_train_as_one_device():
    """Three axes: replicas, data, tensor."""

    def rank():
        grid = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
        dense = make_model()
        model = tensor_parallel(copy.deepcopy(dense), grid["tp"])
        data = grid["replicate", "shard"]
        fully_shard(model.blocks[0], mesh=data)
        fully_shard(model, mesh=data)
        assert model.blocks[0].up.weight.device_mesh is grid
        train_alike(dense, model, data.ranks.index(grid.rank), 4)

    simulate(rank, 8, platform="torch")


def test_parameters_whose_mesh_does_not_fit_are_refused():
    """A partial parameter, one of the data axis itself, and one of a mesh that shares no mesh with the data axis."""
    import torch

    def rank():
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        lone = init_device_mesh("cpu", (2, 2), mesh_dim_names=("left", "right"))["left"]
        for mesh, placements, text in (
            (grid["tp"], [Partial()], r"reduce it first, with reduce_partial\(\)$"),
            (grid["dp"], [Shard(0)], "which is not a slice of one mesh with"),
            (grid, [Replicate(), Shard(0)], "which is not a slice of one mesh with"),
            (lone, [Shard(0)], "which is not a slice of one mesh with"),
        ):
            module = torch.nn.Module()
            value = distribute_tensor(torch.ones(4, 4), mesh, placements)
            module.weight = torch.nn.Parameter(value)
            with pytest.raises(PlanError, match=text):
                fully_shard(module, mesh=grid["dp"])
        assert common_mesh(grid["tp"], grid["dp"]) is grid
        with pytest.raises(MeshError, match=r"are slices of 0 common meshes; they must be of one$"):
            common_mesh(grid["tp"], lone)

    simulate(rank, 4, platform="torch")


def test_replicated_parameters_of_tensor_parallelism():
    """Gradients summed over tensor-parallel ranks are averaged over the data axis, in ``defer_grad_reduce`` too."""
    import torch

    def rank():
        grid = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        dense = torch.nn.Linear(5, 3).double()
        with torch.no_grad():
            dense.weight.copy_(random(3, 5)), dense.bias.copy_(random(3, seed=1))
        model = fully_shard(distribute_module(copy.deepcopy(dense), grid["tp"]), mesh=grid["dp"])
        x = random(2, 7, 5, seed=2)
        part = distribute_tensor(x[grid.get_local_rank("dp")], grid["tp"], [Shard(0)])
        for context in (nullcontext, defer_grad_reduce):
            with context():
                model(part).square().sum().backward()
            (dense(x).square().sum() / 2).backward()
        assert model.weight.placements == (Shard(0), Replicate())
        for mine, theirs in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)

    simulate(rank, 6, platform="torch")
