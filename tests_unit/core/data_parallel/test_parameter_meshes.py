"""Parameters of one ``fully_shard`` that are sharded over different meshes: everything equals one device."""

from __future__ import annotations

import copy

import pytest

from hyper_parallel import (
    DataParallelMeshDims,
    DTensor,
    FSDPMeshInfo,
    HSDPMeshInfo,
    Replicate,
    Shard,
    ShardPlacementResult,
    clip_grad_norm_,
    fully_shard,
    init_device_mesh,
    load,
    save,
)
from hyper_parallel.errors import MeshError, MeshLookupError, PlanError
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")


def random(*shape, seed=0):
    """Normal float64 values from a fresh generator."""
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_model():
    """Two layers of odd sizes; the weights of the first and the last bias are those with another mesh."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(random(*parameter.shape, seed=50 + index) * 0.5)
    return model


def whole(value):
    """The values of all ranks."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def shard_by(model, special, info, dim, mesh, **options):
    """Apply fully_shard, with other data axes for the parameters in ``special``."""
    chosen = {id(parameter) for parameter in special}

    def place(parameter):
        return ShardPlacementResult(dim, info) if id(parameter) in chosen else None

    return fully_shard(model, mesh=mesh, shard_placement_fn=place, **options)


def infos(grid):
    """Meshes for some parameters, and how many of the 4 ranks of ``grid`` share each of them."""
    return {
        "replicas": (HSDPMeshInfo(grid, shard_mesh_dim=1, replicate_mesh_dim=0), 2),
        "reversed": (HSDPMeshInfo(grid, shard_mesh_dim=0, replicate_mesh_dim=1), 2),
        "by name": (FSDPMeshInfo(grid, dp_mesh_dims=DataParallelMeshDims(shard="a", replicate="b")), 2),
        "whole": (FSDPMeshInfo(grid, dp_mesh_dims=DataParallelMeshDims(replicate=("a", "b"))), 1),
        "flattened": (FSDPMeshInfo(grid, dp_mesh_dims=DataParallelMeshDims(shard=("b", "a"))), 4),
    }


def check_on_three_ranks(folder, expected):
    """The checkpoint in ``folder`` has the ``expected`` weights, also where other parameters have another mesh."""
    import torch

    def rank():
        mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("b", "a"))
        model = make_model()
        shard_by(model, [model[0].bias], FSDPMeshInfo(mesh, 1), Shard(0), mesh["b"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        load({"model": model, "optimizer": optimizer}, folder)
        for mine, theirs in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs)

    simulate(rank, 3, platform="torch")


@pytest.mark.parametrize("reshard", [None, True, 1])
@pytest.mark.parametrize("kind", ["replicas", "reversed", "by name", "whole", "flattened"])
def test_training_equals_one_device(kind, reshard, tmp_path):
    """Weights, norms and checkpoints are those of one device, whichever axes share and repeat each parameter."""
    import torch

    def rank():
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        info, count = infos(grid)[kind]
        dim = None if kind == "whole" else Shard(-1)

        def sharded(model):
            special = [model[0].weight, model[2].bias]
            return shard_by(model, special, info, dim, grid.flatten(), reshard_after_forward=reshard)

        dense = make_model()
        model = sharded(copy.deepcopy(dense))
        assert len(model._hyper_parallel_fully_sharded) == 2
        assert model[0].weight.local_shape == (7, -(-5 // count)) or grid.rank
        assert model[2].weight.local_shape == ((1, 7) if grid.rank < 3 else (0, 7))
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (dense, model)]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            parts = [(random(2, 5, seed=part + 10 * step), random(2, 3, seed=99 + part)) for part in range(4)]
            for x, cotangent in parts:
                dense(x).backward(cotangent / 4)
            x, cotangent = parts[grid.rank]
            model.set_requires_gradient_sync(False)
            model(x).backward(cotangent * 0.25)
            model.set_requires_gradient_sync(True)
            model(x).backward(cotangent * 0.75)
            for theirs, mine in zip(dense.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
            norms = [torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.5), clip_grad_norm_(model.parameters(), 0.5)]
            torch.testing.assert_close(*map(whole, norms))
            for optimizer in optimizers:
                optimizer.step()
            for theirs, mine in zip(dense.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(mine.full_tensor(), theirs.detach())
        save({"model": model, "optimizer": optimizers[1]}, tmp_path)
        return [parameter.detach() for parameter in dense.parameters()]

    check_on_three_ranks(tmp_path, simulate(rank, 4, platform="torch")[0])


@pytest.mark.parametrize("world, shape", [(2, (1, 2)), (3, (3, 1)), (4, (2, 2))])
def test_gradients_are_averaged_over_the_axes_of_the_parameter_alone(world, shape):
    """As those of experts: ranks of the other axis have other values, and other gradients."""
    import torch

    def rank():
        grid = init_device_mesh("cpu", shape, mesh_dim_names=("own", "data"))
        model = make_model()
        shard_by(model, [model[0].weight], FSDPMeshInfo(grid, shard_mesh_dim=1), Shard(0), grid.flatten())
        model(random(2, 5, seed=grid.rank)).backward(random(2, 3, seed=9 + grid.rank))
        for name, ranks in (("0.weight", grid["data"].ranks), ("0.bias", range(world)), ("2.weight", range(world))):
            dense = make_model()
            for each in ranks:
                dense(random(2, 5, seed=each)).backward(random(2, 3, seed=9 + each) / len(ranks))
            mine = model.get_parameter(name)
            torch.testing.assert_close(mine.grad.full_tensor(), dense.get_parameter(name).grad)
        assert model[0].weight.device_mesh is grid["data"]

    simulate(rank, world, platform="torch")


def refused(error, message, fn):
    """``fn`` raises this."""
    with pytest.raises(error) as info:
        fn()
    assert str(info.value) == message


def test_meshes_that_do_not_fit_are_refused():
    """Axes that are missing, unknown, repeated, or of other ranks, and results of another kind."""
    import torch

    def rank():
        grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
        dims = DataParallelMeshDims(shard="a")
        text = "FSDPMeshInfo: pass shard_mesh_dim, the index of an axis of DeviceMesh(cpu, a=2, b=1, ranks=[0, 1]), or "
        refused(PlanError, f"{text}dp_mesh_dims", lambda: FSDPMeshInfo(grid))
        refused(PlanError, f"{text}dp_mesh_dims", lambda: FSDPMeshInfo(grid, replicate_mesh_dim=0))
        refused(PlanError, f"{text}dp_mesh_dims", lambda: FSDPMeshInfo(grid, 0, dp_mesh_dims=dims))
        given = "device_mesh: none was given and there is no current mesh; pass one, or use 'with mesh:'"
        refused(MeshError, given, lambda: FSDPMeshInfo(None, 0))
        unknown = "mesh has no axis 2; its axes are ('a', 'b') of sizes (2, 1)"
        refused(MeshLookupError, unknown, lambda: FSDPMeshInfo(grid, 2))
        refused(MeshError, "mesh[('a', 'a')]: an axis is named twice", lambda: HSDPMeshInfo(grid, 0, 0))
        one = "HSDPMeshInfo: no axis of replicas is given; pass replicate_mesh_dim too, or FSDPMeshInfo"
        refused(PlanError, one, lambda: HSDPMeshInfo(grid, 0))
        refused(PlanError, one, lambda: HSDPMeshInfo(grid, dp_mesh_dims=dims))

        layer = torch.nn.Linear(5, 3)

        def place(result, **options):
            fully_shard(layer, mesh=grid, shard_placement_fn=lambda _: result, **options)

        must = (
            "for a parameter of shape [3, 5]; it must be Shard(dim) of one of its dims, None, or "
            "ShardPlacementResult(placement, FSDPMeshInfo(...))"
        )
        info = FSDPMeshInfo(grid, 0)
        for result in (
            ShardPlacementResult(Shard(2), info),
            ShardPlacementResult(Replicate(), info),
            ShardPlacementResult(Shard(0), grid),
            info,
        ):
            refused(PlanError, f"fully_shard: shard_placement_fn returned {result!r} {must}", lambda r=result: place(r))
        whole_dims = DataParallelMeshDims(replicate="a")
        refused(
            PlanError,
            "fully_shard: shard_placement_fn returned Shard(0) for a parameter of shape [3, 5]; dp_mesh_dims has no "
            "axis to shard over, so shard_placement_fn must return None",
            lambda: place(Shard(0), dp_mesh_dims=whole_dims),
        )
        refused(
            PlanError,
            "fully_shard: reshard_after_forward=2 must be true, false or a divisor of the 1 ranks of b",
            lambda: place(ShardPlacementResult(None, FSDPMeshInfo(grid, 1)), reshard_after_forward=2),
        )
        alone = FSDPMeshInfo(init_device_mesh("cpu", (1,), mesh_dim_names=("one",), rank_list=[0]), 0)
        if grid.rank == 1:
            with pytest.raises(MeshLookupError, match=r"^rank 1 is not in DeviceMesh\(cpu, one=1, ranks=\[0\]\)"):
                place(ShardPlacementResult(None, alone))
        assert type(layer) is torch.nn.Linear
        assert not isinstance(layer.weight, DTensor)

    simulate(rank, 2, platform="torch")
