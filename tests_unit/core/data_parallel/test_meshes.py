"""Data axes by name, several of them flattened, next to tensor parallelism: everything equals one device."""

from __future__ import annotations

import copy

import pytest

from hyper_parallel import (
    ColwiseParallel,
    DataParallelMeshDims,
    DTensor,
    Partial,
    Replicate,
    RowwiseParallel,
    Shard,
    StridedShard,
    clip_grad_norm_,
    distribute_module,
    distribute_tensor,
    fully_shard,
    init_device_mesh,
    load,
    parallelize_module,
    save,
)
from hyper_parallel.errors import ArgumentTypeError, MeshError, PlanError
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")


def random(*shape, seed=0):
    """Normal float64 values from a fresh generator."""
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_model():
    """Two layers around a norm, of odd sizes."""
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(5), nn.Linear(5, 7), nn.Linear(7, 5)

        def forward(self, x):
            return x + self.down(torch.tanh(self.up(self.norm(x))))

    model = Model().double()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(random(*parameter.shape, seed=50 + index) * 0.5)
    return model


def whole(value):
    """The values of all ranks."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def train_alike(dense, model, backward, parts, steps=3):
    """Train both, and compare gradients, clipped norms and weights; return the optimizers.

    Args:
        dense: the model on one device.
        model: the sharded one.
        backward: computes the gradients of ``model`` for inputs and cotangents of all parts.
        parts: how many parts of a batch, of which the losses are averaged.
        steps: how many.
    """
    import torch

    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (dense, model)]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x = [random(3, 5, seed=part + 10 * step) for part in range(parts)]
        cotangents = [random(3, 5, seed=99 + part + 10 * step) for part in range(parts)]
        for each, cotangent in zip(x, cotangents, strict=True):
            dense(each).backward(cotangent / parts)
        backward(x, cotangents)
        pairs = list(zip(dense.named_parameters(), model.parameters(), strict=True))
        for (name, theirs), mine in pairs:
            assert mine.grad.layout is mine.layout
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, msg=lambda t, n=name: f"{n}.grad: {t}")
        norms = [torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.5), clip_grad_norm_(model.parameters(), 0.5)]
        torch.testing.assert_close(*map(whole, norms))
        for optimizer in optimizers:
            optimizer.step()
        for (name, theirs), mine in pairs:
            torch.testing.assert_close(mine.full_tensor(), theirs.detach(), msg=lambda t, n=name: f"{n}: {t}")
    return optimizers


def tensor_parallel(model, mesh):
    """Column- and row-parallel; the norm stays plain."""
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


MESHES = [
    ({"dp": 2, "cp": 2}, {"shard": ("dp", "cp")}),
    ({"dp": 3, "cp": 1}, {"shard": ("cp", "dp")}),
    ({"dp": 2, "cp": 3, "tp": 1}, {"shard": ("dp", "cp")}),
    ({"dp": 2, "cp": 2, "tp": 2}, {"shard": ("dp", "cp")}),
    ({"cp": 2, "tp": 3, "dp": 2}, {"shard": ("dp", "cp")}),
    ({"dp": 2, "tp": 2}, {"shard": "dp"}),
    ({"dp": 3, "tp": 1}, {"replicate": "dp"}),
    ({"tp": 2, "dp": 2, "copies": 2}, {"shard": ["dp"], "replicate": "copies"}),
    ({"a": 2, "dp": 2, "b": 2}, {"shard": "dp", "replicate": ("a", "b")}),
    ({"a": 2, "tp": 2, "b": 2}, {"replicate": ("a", "b")}),
]


@pytest.mark.parametrize("sizes, dims", MESHES)
def test_named_data_axes_train_as_one_device(sizes, dims):
    """Weights of tensor parallelism on ``tp`` alone and plain ones: each rank of the data axes has a part."""
    import math

    def rank():
        grid = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        dense = make_model()
        model = copy.deepcopy(dense)
        if "tp" in sizes:
            tensor_parallel(model, grid["tp"])
        chosen = DataParallelMeshDims(**dims)
        fully_shard(model.up, mesh=grid, dp_mesh_dims=chosen, reshard_after_forward=True)
        fully_shard(model, mesh=grid, dp_mesh_dims=chosen)
        names = (*chosen.replicate_names, *chosen.shard_names)
        position = 0
        for name in names:
            position = position * sizes[name] + grid.get_local_rank(name)

        def backward(x, cotangents):
            model(x[position]).backward(cotangents[position])

        train_alike(dense, model, backward, math.prod(sizes[name] for name in names))

    simulate(rank, math.prod(sizes.values()), platform="torch")


SPREAD = [*MESHES[:1], *MESHES[3:5], *MESHES[7:]]


@pytest.mark.parametrize("form", ["sharded", "repeated"])
@pytest.mark.parametrize("sizes, dims", SPREAD)
def test_parameters_on_the_whole_mesh_train_as_one_device(sizes, dims, form):
    """DTensors on all axes: values sharded over the data axes, or each data rank's own as if they were replicated."""
    import math

    import torch

    def rank():
        grid = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        dense, chosen = make_model(), DataParallelMeshDims(**dims)

        def placed(name, module, mesh):
            for own, parameter in list(module.named_parameters(recurse=False)):
                split = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}.get(f"{name}.{own}")
                placements = [split if split and axis == "tp" else Replicate() for axis in mesh.names]
                module.register_parameter(
                    own, torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements))
                )

        model = distribute_module(copy.deepcopy(dense), grid, placed)
        model = fully_shard(model, mesh=grid, dp_mesh_dims=chosen)
        names = (*chosen.replicate_names, *chosen.shard_names)
        parts = math.prod(sizes[name] for name in names)
        order = [Shard(0) if name in names else Replicate() for name in grid.names]

        def sharded(x, cotangents):
            x, cotangent = (distribute_tensor(torch.cat(each), grid, order) for each in (x, cotangents))
            (model(x) * cotangent / parts).sum().backward()

        def repeated(x, cotangents):
            position = 0
            for name in names:
                position = position * sizes[name] + grid.get_local_rank(name)
            x, cotangent = (
                DTensor.from_local(each[position], grid, [Replicate()] * grid.ndim) for each in (x, cotangents)
            )
            (model(x) * cotangent).sum().backward()

        train_alike(dense, model, sharded if form == "sharded" else repeated, parts)

    simulate(rank, math.prod(sizes.values()), platform="torch")


def test_shards_are_on_the_mesh_with_the_data_axes_flattened():
    """Several axes become one, where the first of them is; one axis leaves the mesh as it is."""

    def rank():
        grid = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
        model = tensor_parallel(make_model(), grid["tp"])
        fully_shard(model, mesh=grid, dp_mesh_dims=DataParallelMeshDims(shard=("dp", "cp")))
        mesh = model.up.weight.device_mesh
        assert mesh is init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp_cp", "tp"))
        assert model.up.weight.placements == (StridedShard(0, 2), Shard(0))
        assert model.down.weight.placements == (Shard(0), Shard(1))
        assert model.norm.weight.device_mesh is mesh["dp_cp"]
        other = tensor_parallel(make_model(), grid["tp"])
        fully_shard(other, mesh=grid, dp_mesh_dims=DataParallelMeshDims(shard="cp", replicate="dp"))
        assert other.up.weight.device_mesh is grid
        assert other.up.weight.placements == (Replicate(), StridedShard(0, 2), Shard(0))
        assert grid.joined([("tp", "dp")]).mesh == [[0, 2], [4, 6], [1, 3], [5, 7]]

    simulate(rank, 8, platform="torch")


def test_a_checkpoint_loads_on_another_mesh(tmp_path):
    """Weights and optimizer states of flattened axes go on as on one device, over other axes and ranks."""
    import torch

    def sharded(grid, dims, model):
        if "tp" in grid.names:
            tensor_parallel(model, grid["tp"])
        return fully_shard(model, mesh=grid, dp_mesh_dims=DataParallelMeshDims(**dims))

    def first():
        grid = init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=("dp", "cp", "tp"))
        dense = make_model()
        model = sharded(grid, {"shard": ("dp", "cp")}, copy.deepcopy(dense))
        position = grid["dp", "cp"].ranks.index(grid.rank)

        def backward(x, cotangents):
            model(x[position]).backward(cotangents[position])

        _, optimizer = train_alike(dense, model, backward, 6)
        save({"model": model, "optimizer": optimizer}, tmp_path)
        return [parameter.detach() for parameter in dense.parameters()]

    expected = simulate(first, 12, platform="torch")[0]

    def second():
        grid = init_device_mesh("cpu", (3, 1), mesh_dim_names=("copies", "dp"))
        model = sharded(grid, {"shard": "dp", "replicate": "copies"}, make_model())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        load({"model": model, "optimizer": optimizer}, tmp_path)
        for mine, theirs in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs)
        assert all(state["step"] == 3 for state in optimizer.state.values())

    simulate(second, 3, platform="torch")


def refused(error, message, fn):
    """``fn`` raises this."""
    with pytest.raises(error) as info:
        fn()
    assert str(info.value) == message


def test_names_that_do_not_fit_are_refused():
    """Names that are unknown, repeated, missing or not names, and meshes without names."""
    import torch

    def rank():
        grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))

        def shard(mesh=grid, **dims):
            fully_shard(torch.nn.Linear(3, 2), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims))

        nothing = "DataParallelMeshDims: shard and replicate name no axis; name the data axes of the mesh"
        refused(PlanError, nothing, DataParallelMeshDims)
        refused(PlanError, nothing, lambda: DataParallelMeshDims(shard=()))
        wrong = "DataParallelMeshDims: shard=0 must be the name of an axis, or a tuple of names"
        refused(ArgumentTypeError, wrong, lambda: DataParallelMeshDims(shard=0))
        unknown = "fully_shard: dp_mesh_dims names the axis 'cp'; the mesh has the axes ('dp', 'tp')"
        refused(MeshError, unknown, lambda: shard(shard=("dp", "cp")))
        twice = "fully_shard: dp_mesh_dims names the axis 'dp' twice; name it in shard or in replicate, once"
        refused(MeshError, twice, lambda: shard(shard="dp", replicate=("tp", "dp")))
        refused(MeshError, twice, lambda: shard(shard=("dp", "dp")))
        unnamed = init_device_mesh("cpu", (2, 1))
        text = (
            "fully_shard: DeviceMesh(cpu, 2x1, ranks=[0, 1]) has axes without names; pass mesh_dim_names= where it is "
            "made"
        )
        refused(MeshError, text, lambda: shard(unnamed, shard="0"))
        refused(
            ArgumentTypeError,
            "fully_shard: dp_mesh_dims='dp' must be DataParallelMeshDims(shard=..., replicate=...)",
            lambda: fully_shard(torch.nn.Linear(3, 2), mesh=grid, dp_mesh_dims="dp"),
        )
        reserved = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("a", "b", "a_b"))
        with pytest.raises(MeshError, match=r"^DeviceMesh: mesh_dim_names repeat: \('a_b', 'a_b'\)$"):
            shard(reserved, shard=("a", "b"))
        with pytest.raises(PlanError, match=r"reshard_after_forward=2 must be true, false or a divisor of 1$"):
            fully_shard(
                torch.nn.Linear(3, 2),
                mesh=grid,
                reshard_after_forward=2,
                dp_mesh_dims=DataParallelMeshDims(replicate="dp"),
            )

    simulate(rank, 2, platform="torch")


@pytest.mark.parametrize("sizes, dims", [((2, 2), {"replicate": ("a", "b")}), ((3, 1), {"replicate": "a"})])
def test_a_parameter_without_dims_stays_whole(sizes, dims):
    """Where no axis shares parameters, one that has no dim to shard is trained as the others are."""
    import math

    import torch

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.factor, self.inner = torch.nn.Parameter(torch.tensor(0.7).double()), make_model()

        def forward(self, x):
            return self.inner(x) * self.factor

    def rank():
        grid = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b"))
        dense = Scaled()
        model = fully_shard(copy.deepcopy(dense), mesh=grid, dp_mesh_dims=DataParallelMeshDims(**dims))
        assert model.factor.shape == ()

        def backward(x, cotangents):
            model(x[grid.rank]).backward(cotangents[grid.rank])

        train_alike(dense, model, backward, math.prod(sizes))

    simulate(rank, math.prod(sizes), platform="torch")


@pytest.mark.parametrize("nested", [False, True])
def test_dtensors_on_the_data_axes_among_other_parameters_are_refused(nested):
    """Gradients that reach the others by from_local are shares of a sum, of which the average would be too small."""
    import torch

    def rank():
        grid = init_device_mesh("cpu", (3, 1), mesh_dim_names=("dp", "tp"))
        model, dims = make_model(), DataParallelMeshDims(shard="dp")
        for name, parameter in list(model.up.named_parameters()):
            on_all = distribute_tensor(parameter.detach(), grid, [Replicate(), Shard(0)])
            model.up.register_parameter(name, torch.nn.Parameter(on_all))
        if nested:
            fully_shard(model.up, mesh=grid, dp_mesh_dims=dims)
        refused(
            PlanError,
            f"fully_shard: parameter {'weight of the Linear inside' if nested else 'up.bias'} is a DTensor on the data "
            "axes, but parameter down.bias is not: gradients of values that are sharded over those axes are summed for "
            "the first and averaged for the second; make all parameters DTensors on the complete mesh, as "
            "distribute_module(module, mesh) does, or none of them",
            lambda: fully_shard(model, mesh=grid, dp_mesh_dims=dims),
        )
        assert type(model.down) is torch.nn.Linear
        assert not isinstance(model.down.weight, DTensor)

    simulate(rank, 3, platform="torch")


def test_parameters_that_do_not_fit_are_refused():
    """Split along a data axis, partial, or on a mesh of other axes; a factor where gradients are sums already."""
    import torch

    def rank():
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        dims = DataParallelMeshDims(shard="dp")

        def module(mesh, *placements):
            made = torch.nn.Module()
            made.weight = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, placements))
            return made

        def shard(*where):
            return fully_shard(module(*where), mesh=grid, dp_mesh_dims=dims)

        refused(
            PlanError,
            "fully_shard: parameter weight is a DTensor f32[4, 4@dp], whose dim 1 is sharded over the data axis 'dp' "
            "already; replicate it along the data axes, and fully_shard shards it over them",
            lambda: shard(grid, Shard(1), Replicate()),
        )
        with pytest.raises(PlanError, match=r"whose dim 0 is sharded over the data axis 'dp' already"):
            shard(grid["dp"], Shard(0))
        with pytest.raises(PlanError, match=r"reduce it first, with reduce_partial\(\)$"):
            shard(grid, Partial(), Replicate())
        lone = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "other"))
        for mesh, placements in ((lone, [Replicate(), Shard(0)]), (lone["other"], [Shard(0)])):
            with pytest.raises(PlanError, match=r"which is not a slice of one mesh with DeviceMesh\(cpu, dp=2, tp=2"):
                shard(mesh, *placements)
        refused(
            PlanError,
            "set_gradient_divide_factor: parameters are DTensors on the data axes, where gradients of sharded values "
            "are sums already; multiply the loss instead",
            lambda: shard(grid, Replicate(), Shard(0)).set_gradient_divide_factor(1.0),
        )
        shard(grid["tp"], Shard(0)).set_gradient_divide_factor(1.0)

    simulate(rank, 4, platform="torch")
