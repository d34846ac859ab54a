"""Replicated parameters: averaged gradients, in buckets, as on one device; what would not be averaged is refused."""

from __future__ import annotations

import copy

import pytest

from hyper_parallel import (
    ColwiseParallel,
    DeviceMesh,
    DTensor,
    RowwiseParallel,
    fully_shard,
    init_device_mesh,
    no_sync,
    parallelize_module,
    replicate,
)
from hyper_parallel.core.data_parallel.sharding import REPLICATED
from hyper_parallel.errors import MeshError, PlanError
from hyper_parallel.verify.launch import launch
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


def make_model():
    """Layers of odd sizes and two dtypes; one parameter is tied, one frozen, one used by some ranks, one by none."""
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(5, 7, bias=False)
            self.head.weight = self.first.weight
            self.extra, self.never = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
            self.wide = nn.Parameter(torch.ones(7).double())
            self.second.bias.requires_grad_(False)
            self.register_buffer("table", torch.arange(3.0))

        def forward(self, x, use_extra):
            y = self.head(self.second(torch.tanh(self.first(x)))) * self.wide
            return y * self.extra.sum() if use_extra else y

    return Model()


def batch(rank, part=0):
    """A batch of rank + 1 samples."""
    import torch

    return torch.randn(rank + 1, 5, generator=torch.Generator().manual_seed(10 * part + rank))


def rank_loss(model, rank, world, part=0):
    """The loss of a rank, scaled so that the average of all is the mean over all samples."""
    samples = world * (world + 1) // 2
    return model(batch(rank, part), rank == 0).square().sum() * world / samples


def whole(value):
    """The whole tensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def compare(model, dense):
    """Gradients are equal, and absent in both or in none."""
    import torch

    for (name, mine), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            torch.testing.assert_close(whole(mine.grad), theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


def train(world, bucket=25.0):
    """Steps on uneven batches, with accumulation, have the gradients and weights of one device."""
    import torch

    torch.manual_seed(3)
    dense = make_model()
    model = copy.deepcopy(dense)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    if mesh.rank:
        with torch.no_grad():
            for value in (*model.parameters(), *model.buffers()):
                value.add_(mesh.rank)
    assert replicate(model, mesh, bucket_cap_mb=bucket) is model
    assert torch.equal(model.table, dense.table)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, dense)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part in range(2):
            for rank in range(world):
                (rank_loss(dense, rank, world, part) / world).backward()
        if step == 1:  # two passes that both reduce
            rank_loss(model, mesh.rank, world, 0).backward()
        else:
            with no_sync(model):
                rank_loss(model, mesh.rank, world, 0).backward()
        rank_loss(model, mesh.rank, world, 1).backward()
        compare(model, dense)
        for optimizer in optimizers:
            optimizer.step()
    return len(getattr(model, REPLICATED).buckets)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("bucket", [25.0, 0.0001])
def test_gradients_are_those_of_one_device(world, bucket):
    """Uneven batches, tied, frozen and unused parameters, one bucket per dtype run or many, accumulation."""
    (count,) = set(simulate(lambda: train(world, bucket), world, platform="torch"))
    assert count == (3 if bucket == 25.0 else 5)


@pytest.mark.slow
def test_real_processes():
    """Over real processes as well."""
    assert launch(train, 2, "torch", (2, 0.0001)) == [5, 5]


@pytest.mark.parametrize("shape", [(2, 2), (3, 1), (2, 1)])
def test_over_tensor_parallel_modules(shape):
    """Gradients that are DTensors are averaged shard by shard."""
    import torch
    from torch import nn

    def rank():
        grid = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        torch.manual_seed(1)
        dense = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        model = copy.deepcopy(dense)
        parallelize_module(model, grid["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        replicate(model, grid["dp"])
        for each in range(shape[0]):
            (dense(batch(each)).square().sum() / shape[0]).backward()
        for _ in range(2):
            model.zero_grad()
            model(batch(grid["dp"].get_local_rank())).square().sum().backward()
            compare(model, dense)

    simulate(rank, shape[0] * shape[1], platform="torch")


def test_buckets_are_reduced_while_backward_computes():
    """The bucket of the last layer has begun before the first layer has its gradient."""
    from torch import nn

    def rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        replicate(model, mesh, bucket_cap_mb=0.0001)
        group = getattr(model, REPLICATED)
        begun = []
        model[0].weight.register_hook(lambda _: begun.append(group._next))
        for _ in range(2):
            model(batch(mesh.rank)).sum().backward()
        assert len(group.buckets) == 3
        return begun

    assert all(min(begun) >= 1 for begun in simulate(rank, 2, platform="torch"))


def test_a_step_before_the_reduction_is_refused():
    """Accumulated gradients, and those of a backward that has raised, differ between ranks; then all goes on."""
    import torch
    from torch import nn

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return x.clone()

        @staticmethod
        def backward(_ctx, _gradient):
            raise ValueError("stop")

    def rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        replicate(model, mesh, bucket_cap_mb=0.0001)
        optimizer = torch.optim.SGD(model.parameters())
        with no_sync(model):
            model(batch(mesh.rank)).sum().backward()
        with pytest.raises(PlanError) as info:
            optimizer.step()
        assert str(info.value) == (
            "optimizer step: the gradient of parameter 0 of group 0 is not reduced: it was accumulated under "
            "no_sync(); before the step, run the last backward outside of no_sync()"
        )
        optimizer.zero_grad()
        optimizer.step()
        for _ in range(2):
            with pytest.raises(ValueError, match=r"^stop$"):
                model[1](Fails.apply(model[0](batch(mesh.rank)))).sum().backward()
            with pytest.raises(PlanError, match=r"is not reduced: a backward has raised; run zero_grad\(\)"):
                optimizer.step()
            optimizer.zero_grad()
            model(batch(mesh.rank)).sum().backward()
            optimizer.step()
        return model[0].weight.grad.tolist()

    first, second = simulate(rank, 2, platform="torch")
    assert first == second


def test_what_would_not_be_averaged_is_refused():
    """Replaced, added and unfrozen parameters, and a second gradient in one backward."""
    import torch
    from torch import nn

    def rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        model[1].bias.requires_grad_(False)
        replicate(model, mesh)
        model[1].bias.requires_grad_(True)
        model[0].weight = nn.Parameter(torch.ones(7, 5))
        with pytest.raises(PlanError) as info:
            model(batch(mesh.rank))
        assert str(info.value) == (
            "replicate: parameters 0.weight, 1.bias were replaced, added or unfrozen after replicate; their gradients "
            "would not be averaged; call replicate once the model is complete"
        )
        model = replicate(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), mesh)
        group = getattr(model, REPLICATED)
        group._sequence.open("backward")
        group._open = True
        leaf = model[0].weight
        group.buckets[0].ready.add(id(leaf))
        with pytest.raises(PlanError, match=r"^replicate: a parameter got a second gradient in one backward"):
            group._ready(group.buckets[0], leaf, leaf)
        group._sequence.close()

    simulate(rank, 2, platform="torch")


def test_wrong_arguments_are_refused():
    """Applied twice or together with ``fully_shard``, over tensor-parallel ranks, with wrong sizes and ranks."""
    from torch import nn

    def rank():
        grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        mesh = grid["dp"]
        replicate(model := nn.Linear(5, 3), mesh, src_data_rank=None)
        for act, kind, text in (
            (lambda: replicate(model, mesh), PlanError, "replicate was applied to this Linear before; apply it once"),
            (
                lambda: fully_shard(nn.Sequential(model), mesh=mesh),
                PlanError,
                "fully_shard: replicate was applied to this Sequential or a submodule of it; use only one of the two",
            ),
            (
                lambda: replicate(nn.Sequential(fully_shard(nn.Linear(2, 2), mesh=mesh)), mesh),
                PlanError,
                "replicate: fully_shard was applied to this Sequential and reduces its gradients",
            ),
            (
                lambda: replicate(nn.Linear(2, 2), mesh, bucket_cap_mb=0),
                PlanError,
                "replicate: bucket_cap_mb must be positive, got 0",
            ),
            (
                lambda: replicate(nn.Linear(2, 2), mesh, src_data_rank=2),
                MeshError,
                f"replicate: src_data_rank 2 is not a position in {mesh!r}, which has 2 ranks",
            ),
        ):
            with pytest.raises(kind) as info:
                act()
            assert str(info.value) == text
        sharded = parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel())
        with pytest.raises(PlanError, match=r"its gradient is reduced over them already; pass the data axis alone$"):
            replicate(sharded, mesh)

        apart = DeviceMesh("cpu", [1], mesh_dim_names=("dp",))
        if grid.rank == 0:
            with pytest.raises(MeshError) as info:
                replicate(nn.Linear(2, 2), apart)
            assert str(info.value) == f"replicate: rank 0 is not in {apart!r}"

    simulate(rank, 2, platform="torch")
