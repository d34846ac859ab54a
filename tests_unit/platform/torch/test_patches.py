"""Patches of PyTorch: each is installed and needed; recomputation and masked functions have plain values."""

from __future__ import annotations

import ast
import copy
import importlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint as ways

from hyper_parallel.core.data_parallel import fully_shard, replicate
from hyper_parallel.core.dtensor import random
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import DeviceMesh, init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.core.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from hyper_parallel.errors import MeshError, MixedTensorError, PlanError, UnsupportedOperatorError
from hyper_parallel.platform.select import platform_named
from hyper_parallel.platform.torch.patches import LATE_PATCHES, PATCHES, install
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


# -- the list ----------------------------------------------------------------------------------------------------------


def test_every_patch_names_its_reason_and_the_installed_version():
    """An upgrade of PyTorch fails here until the reason of each patch has been checked and its version renewed."""
    platform_named("torch")
    for patch in [*PATCHES, *(late(importlib.import_module(name)) for name, late in LATE_PATCHES.items())]:
        assert torch.__version__.startswith(f"{patch.version}."), patch.reason
        assert patch.reason
        assert patch.places, patch.reason


def test_every_patch_is_installed_once():
    """Each place of each patch has the replacement, which is not replaced again."""
    platform_named("torch")
    before = [getattr(owner, name) for patch in PATCHES for owner, name in patch.places]
    install()
    assert [getattr(owner, name) for patch in PATCHES for owner, name in patch.places] == before
    assert all(hasattr(function, "_hyper_parallel_original") for function in before)
    patched = {f"{owner.__name__}.{name}" for patch in PATCHES for owner, name in patch.places}
    assert {"Function.apply", "CheckpointFunction.forward", "_CheckpointFrame.__init__", "torch.masked.sum"} < patched


def test_modules_that_are_imported_later_are_patched():
    """What PyTorch imports only with its ``fully_shard`` or its compiler has its replacements once it is there."""
    platform_named("torch")
    for name, late in LATE_PATCHES.items():
        for owner, attribute in late(importlib.import_module(name)).places:
            assert hasattr(getattr(owner, attribute), "_hyper_parallel_original"), attribute


def test_pytorch_is_patched_in_one_file_only():
    """No other file of the room sets attributes of PyTorch's classes and modules, but the recorder's while it runs.

    Switches that PyTorch documents as attributes are no patches.
    """
    switches = {"torch.backends.cudnn.benchmark", "torch.backends.cudnn.deterministic"}
    room = Path(find_spec("hyper_parallel.platform.torch").origin).parent
    for path in sorted(set(room.rglob("*.py")) - {room / "patches.py", room / "recording.py"}):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        foreign = {
            (alias.asname or alias.name).partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            and (getattr(node, "module", None) or node.names[0].name).partition(".")[0] == "torch"
            for alias in node.names
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node) not in switches
            ):
                root = node.value
                while isinstance(root, ast.Attribute):
                    root = root.value
                assert not (isinstance(root, ast.Name) and root.id in foreign), (path.name, node.lineno)


# -- gradients ---------------------------------------------------------------------------------------------------------


def test_gradients_of_every_form_of_inputs():
    """torch.autograd.grad of DTensors by one input, several, a dict and positions, and under a function mode."""

    class Watching(torch.overrides.TorchFunctionMode):
        """Notes the functions that are called."""

        def __torch_function__(self, func, types, args=(), kwargs=None):
            """Note it and call it."""
            seen.append(func)
            return func(*args, **(kwargs or {}))

    draw = torch.Generator().manual_seed(3)
    a, b, seed = (torch.randn(4, 3, generator=draw) for _ in range(3))
    seen = []

    def run():
        mesh = init_device_mesh("cpu", (2,))
        x, y = (distribute_tensor(value, mesh, [Shard(0)]).requires_grad_() for value in (a, b))
        cotangent = distribute_tensor(seed, mesh, [Shard(0)])
        (one,) = torch.autograd.grad(x * y, x, cotangent)
        both = torch.autograd.grad(x * y, [x, y], cotangent, retain_graph=True)
        (by_position,) = torch.autograd.grad(x * y, (x,), cotangent, True)
        named = torch.autograd.grad(x * y, {"y": y}, cotangent)
        with Watching():
            (watched,) = torch.autograd.grad(x * y, x, cotangent)
        grads = [one, *both, by_position, named["y"], watched]
        return [grad.full_tensor() for grad in grads]

    for grads in simulate(run, 2, "torch"):
        for value, expected in zip(grads, [seed * b, seed * b, seed * a, seed * b, seed * a, seed * b], strict=True):
            torch.testing.assert_close(value, expected)
    assert torch.autograd.grad in seen


# -- recomputation -----------------------------------------------------------------------------------------------------


class Dropping(torch.nn.Module):
    """A module with two dropouts, so that a mask sampled out of order shows."""

    def forward(self, x):
        """Apply dropout twice and multiply by the sine."""
        return F.dropout(F.dropout(x, 0.3) * x.sin(), 0.4)


def selected():
    """A policy that keeps products and recomputes the rest."""
    return ways.create_selective_checkpoint_contexts([torch.ops.aten.mul.Tensor])


def composed(fn, x):
    """A module under PyTorch's composable checkpoint."""
    return composable(fn)(x)


WAYS = {
    "not reentrant": lambda fn, x: ways.checkpoint(fn, x, use_reentrant=False),
    "reentrant": lambda fn, x: ways.checkpoint(fn, x, use_reentrant=True),
    "without PyTorch's generators": lambda fn, x: ways.checkpoint(fn, x, use_reentrant=False, preserve_rng_state=False),
    "reentrant without PyTorch's generators": lambda fn, x: ways.checkpoint(
        fn, x, use_reentrant=True, preserve_rng_state=False
    ),
    "to the end": lambda fn, x: ways.checkpoint(fn, x, use_reentrant=False, early_stop=False),
    "selective": lambda fn, x: ways.checkpoint(fn, x, use_reentrant=False, context_fn=selected),
    "function": lambda fn, x: ways.CheckpointFunction.apply(fn, True, x),
    "sequential": lambda fn, x: ways.checkpoint_sequential([fn, torch.sin, fn], 2, x, use_reentrant=False),
    "sequential, reentrant": lambda fn, x: ways.checkpoint_sequential([fn, torch.sin, fn], 2, x, use_reentrant=True),
    "wrapper": lambda fn, x: wrappers.checkpoint_wrapper(fn)(x),
    "wrapper, reentrant": lambda fn, x: wrappers.checkpoint_wrapper(fn, wrappers.CheckpointImpl.REENTRANT)(x),
    "composable": composed,
    "nested": lambda fn, x: ways.checkpoint(
        lambda y: ways.checkpoint(fn, fn(y), use_reentrant=False), x, use_reentrant=True
    ),
    "nested, reentrant": lambda fn, x: ways.checkpoint(
        lambda y: ways.checkpoint(fn, fn(y), use_reentrant=True), x, use_reentrant=True
    ),
    "platform": lambda fn, x: platform_named("torch").checkpoint(fn, x),
    "platform, reentrant": lambda fn, x: platform_named("torch").checkpoint(fn, x, use_reentrant=True),
}
PLAIN = {
    "sequential": lambda fn, x: fn(torch.sin(fn(x))),
    "sequential, reentrant": lambda fn, x: fn(torch.sin(fn(x))),
    "nested": lambda fn, x: fn(fn(x)),
    "nested, reentrant": lambda fn, x: fn(fn(x)),
}


def gradients(way, place, mesh_shape):
    """Value, gradient, and the state of the stream after forward and after backward of two applications."""
    mesh = init_device_mesh("cpu", mesh_shape)
    draw = torch.Generator().manual_seed(1)
    whole, seed = (torch.randn(7, 5, generator=draw, dtype=torch.float64) for _ in range(2))
    places = [place] * len(mesh_shape)
    x = distribute_tensor(whole, mesh, places).requires_grad_()
    random.manual_seed(11)
    y = way(Dropping(), x) + way(Dropping(), x * 2)
    after = random.get_rng_state()
    y.backward(distribute_tensor(seed, mesh, places))
    assert random.get_rng_state() == after
    return [y.full_tensor().detach().tolist(), x.grad.full_tensor().tolist(), after]


@pytest.mark.parametrize(
    "world, mesh_shape, place", [(2, (2,), Shard(0)), (3, (3,), Replicate()), (4, (2, 2), Shard(1))]
)
@pytest.mark.parametrize("name", WAYS)
def test_gradients_are_those_without_recomputation(name, world, mesh_shape, place):
    """Under every kind of PyTorch's checkpoint dropout has its plain values, and gradients up to rounding."""
    plain = PLAIN.get(name, lambda fn, x: fn(x))
    expected = simulate(gradients, world, "torch", (plain, place, mesh_shape))
    results = simulate(gradients, world, "torch", (WAYS[name], place, mesh_shape))
    for mine, other in zip(results, expected, strict=True):
        assert (mine[0], mine[2]) == (other[0], other[2])
        np.testing.assert_allclose(mine[1], other[1], rtol=1e-13, atol=1e-14)  # summed in another order
    assert any(0.0 in row for row in expected[0][0])


def test_backward_twice_samples_the_same_twice():
    """A retained graph that is differentiated again is recomputed with the random numbers of its forward."""

    def rank():
        mesh = init_device_mesh("cpu", (2,))
        local = torch.linspace(1, 2, 32, requires_grad=True)
        x = DTensor.from_local(local, mesh, [Shard(0)])
        y = ways.checkpoint(Dropping(), x, use_reentrant=False)
        F.dropout(x)  # the stream goes on
        results = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0].to_local() for _ in range(2)]
        return torch.equal(*results)

    assert simulate(rank, 2, "torch") == [True, True]


class Foreign(torch.autograd.Function):
    """A recomputation as third parties implement it."""

    @staticmethod
    def forward(ctx, fn, x, state):
        """Run the function without a graph."""
        ctx.fn, ctx.state = fn, state
        ctx.save_for_backward(x)
        with torch.no_grad():
            return fn(x)

    @staticmethod
    def backward(ctx, grad):
        """Run the function again with a graph."""
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad(), random.preserve_state() if ctx.state is None else random.replay(ctx.state):
            y = ctx.fn(x)
        y.backward(grad)
        return None, x.grad, None


def test_recomputation_by_others_is_refused_unless_it_replays():
    """A third-party recomputation raises if it would sample anew, and is right if it replays the stream."""

    def rank():
        mesh = init_device_mesh("cpu", (2,))
        local = torch.linspace(1, 2, 32, requires_grad=True)
        x = DTensor.from_local(local, mesh, [Shard(0)])
        with pytest.raises(UnsupportedOperatorError) as raised:
            Foreign.apply(lambda t: F.dropout(t, 0.5), x, None).sum().backward()
        y = Foreign.apply(lambda t: F.dropout(t, 0.5), x, random.get_rng_state())
        y.sum().backward()
        return str(raised.value), torch.equal(local.grad * local.detach(), y.to_local())

    for message, right in simulate(rank, 2, "torch"):
        assert right
        assert message == (
            "backward recomputes a forward that samples random numbers of DTensors, without restoring their stream; "
            "the numbers would differ from those of the forward, and the gradients would be wrong; recompute by "
            "torch.utils.checkpoint.checkpoint, or take state = hyper_parallel.core.dtensor.random.get_rng_state() "
            "before the first run and run again `with hyper_parallel.core.dtensor.random.replay(state):`"
        )


# -- torch.masked, which PyTorch composes of other functions -----------------------------------------------------------

VALUES = torch.linspace(-1, 1, 15).reshape(5, 3)
MASK = VALUES.abs() > 0.3


@pytest.mark.parametrize("name", ["sum", "mean", "std", "softmax", "normalize"])
def test_masked_functions_mean_the_same(name):
    """Masked sums, means, deviations, softmaxes and norms are the plain ones."""

    def rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x, mask = distribute_tensor(VALUES, mesh, [Shard(0)]), distribute_tensor(MASK, mesh, [Replicate()])
        args = (2.0, 1) if name == "normalize" else (1,)
        results = getattr(torch.masked, name)(x, *args, mask=mask).full_tensor()
        plain = getattr(torch.masked, name)(VALUES, *args, mask=MASK)
        return torch.allclose(results, plain, equal_nan=True), x.layout is x._layout

    assert simulate(rank, 2, "torch") == [(True, True)] * 2


def test_a_plain_mask_is_refused():
    """A plain mask is refused, although the function makes constants of its own."""

    def rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = distribute_tensor(VALUES, mesh, [Shard(0)])
        with pytest.raises(MixedTensorError) as raised:
            torch.masked.sum(x, 1, mask=MASK)
        return str(raised.value)

    (message, _) = simulate(rank, 2, "torch")
    assert message.startswith(
        "argument condition is a plain tensor [5, 3], but other operands are DTensors on DeviceMesh(cpu, tp=2"
    )


# -- meshes and modules of this library in PyTorch's own functions -----------------------------------------------------


@pytest.mark.parametrize("world", [2, 3])
def test_functional_collectives_take_our_mesh(world):
    """A mesh, or a mesh and an axis, is the group of that axis, in forward and in backward."""

    def rank():
        from torch.distributed import _functional_collectives as functional

        mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
        own = torch.arange(6.0).reshape(2, 3) * (mesh.rank + 1)
        total = torch.arange(6.0).reshape(2, 3) * sum(range(1, world + 1))
        groups = (mesh["tp"], (mesh, 1), (mesh, "tp"), (mesh, -1), mesh.get_group("tp"))
        for group in groups:
            assert torch.equal(functional.all_reduce(own, "sum", group), total)
        assert torch.equal(functional.all_reduce(own, "sum", (mesh, 0)), own)
        rows = functional.all_gather_tensor(own, 0, mesh["tp"])
        assert rows.shape == (2 * world, 3)
        assert torch.equal(functional.reduce_scatter_tensor(rows, "sum", 0, (mesh, 1)), own * world)
        x = own.clone().requires_grad_()
        functional.all_gather_tensor_autograd(x, 0, mesh["tp"]).mul(rows).sum().backward()
        assert torch.equal(x.grad, own * world)
        with pytest.raises(MeshError) as caught:
            functional.all_reduce(own, "sum", mesh)
        return str(caught.value)

    assert simulate(rank, world, "torch")[0] == "get_group: the mesh has axes ('dp', 'tp'); name one of them"


def test_functional_collectives_refuse_a_mesh_whose_ranks_descend():
    """Their results would be in the order of ranks, which is not that of the mesh; an axis that ascends is taken."""

    def rank():
        from torch.distributed import _functional_collectives as functional

        mesh = DeviceMesh("cpu", [[1, 0], [3, 2]], mesh_dim_names=("dp", "tp"))
        own = torch.tensor([float(mesh.rank)])
        assert functional.all_gather_tensor(own, 0, (mesh, "dp")).tolist() == mesh.get_rank_list_along_axis("dp")
        texts = []
        for group in ((mesh, "tp"), mesh["tp"]):
            with pytest.raises(MeshError) as caught:
                functional.all_gather_tensor(own, 0, group)
            texts.append(str(caught.value))
        return texts

    assert simulate(rank, 4, "torch")[0] == [
        f"PyTorch's groups order their ranks, and along axis tp of DeviceMesh(cpu, {shown}) ranks descend, so that its "
        "collectives would take shards for those of other ranks; make the mesh with ranks that ascend along every "
        "axis, or use this library's own functions, such as redistribute() and full_tensor()"
        for shown in ("dp=2, tp=2, ranks=[1, 0, 3, 2]", "tp=2, ranks=[1, 0]")
    ]


def test_groups_of_a_mesh_are_pytorchs():
    """``dist`` takes the group of a mesh, and this library takes it back; equal ranks have one group."""

    def rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        platform = platform_named("torch")
        for axis in ("tp", "dp"):
            group = mesh.get_group(axis)
            assert group is mesh[axis].get_group()
            assert torch.distributed.get_process_group_ranks(group) == mesh.get_rank_list_along_axis(axis)
            x = torch.tensor([float(mesh.rank)])
            torch.distributed.all_reduce(x, group=group)
            assert x.item() == sum(mesh.get_rank_list_along_axis(axis))
            assert platform.all_reduce(torch.ones(2), group).tolist() == [2.0, 2.0]
            assert DeviceMesh.from_group(group, "cpu", mesh_dim_names=(axis,)) is mesh[axis]
            platform.mark_created_groups(group)
            assert platform.get_created_group(mesh.get_rank_list_along_axis(axis)) is not None
            platform.destroy_process_group(group)
        assert mesh.flatten().get_group() is torch.distributed.group.WORLD
        return platform.get_created_group(mesh.get_rank_list_along_axis("tp"))

    assert simulate(rank, 4, "torch") == [None] * 4


def _trained(model, rank, world):
    """Gradients of the mean over all ranks' unequal batches' sums, by name."""
    generator = torch.Generator().manual_seed(7)
    batches = [torch.randn(2, 4, generator=generator) for _ in range(world)]
    for batch in batches if rank is None else [batches[rank]]:
        (model(batch).square().sum() / (world if rank is None else 1)).backward()
    return {
        name.removeprefix("module."): value.grad.full_tensor() if hasattr(value.grad, "full_tensor") else value.grad
        for name, value in model.named_parameters()
    }


@pytest.mark.parametrize("world", [2, 3])
def test_pytorchs_data_parallelism_takes_our_mesh(world):
    """``fully_shard`` over one axis and over replicas, and DDP, train plain modules as one device does."""
    torch.manual_seed(0)
    dense = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    expected = _trained(copy.deepcopy(dense), None, world)

    def rank():
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("replica", "dp"))
        wrapped = [
            fully_shard(copy.deepcopy(dense), mesh=mesh["dp"]),
            fully_shard(copy.deepcopy(dense), mesh=mesh),
            DistributedDataParallel(copy.deepcopy(dense), device_mesh=mesh["dp"]),
            DistributedDataParallel(copy.deepcopy(dense), process_group=mesh.get_group("dp")),
        ]
        for model in wrapped:
            for name, gradient in _trained(model, mesh.rank, world).items():
                torch.testing.assert_close(gradient, expected[name])

    simulate(rank, world, "torch")


def test_pytorchs_data_parallelism_refuses_our_dtensors():
    """PyTorch's wrappers over a tensor-parallel module say what to use; the module is as before, and that works."""
    torch.manual_seed(0)
    dense = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    expected = _trained(copy.deepcopy(dense), None, 2)

    def rank():
        from torch.distributed import fsdp

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        messages = []
        for ours in (replicate, lambda model, axis: fully_shard(model, mesh=axis)):
            model = copy.deepcopy(dense)
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            for wrap in (
                lambda: DistributedDataParallel(model, process_group=mesh.get_group("dp")),  # noqa: B023 - called here
                lambda: fsdp.fully_shard(model, mesh=mesh["dp"]),  # noqa: B023 - as above
                lambda: fsdp.FullyShardedDataParallel(model, process_group=mesh.get_group("dp")),  # noqa: B023
            ):
                with pytest.raises(PlanError) as caught:
                    wrap()
                messages.append(str(caught.value))
            ours(model, mesh["dp"])
            for name, gradient in _trained(model, mesh.coordinate[0], 2).items():
                torch.testing.assert_close(gradient, expected[name])
        assert messages[:3] == messages[3:]
        return messages[:3]

    rest = (
        "of hyper_parallel; use {} of hyper_parallel, with the data axis of one mesh whose other axes are those of "
        "tensor parallelism"
    )
    sharded = "a DTensor f32[5@tp, 4] " + rest.format("fully_shard(module, mesh=mesh)")
    assert simulate(rank, 4, "torch")[0] == [
        "PyTorch's DistributedDataParallel does not know parameter 0.weight, a DTensor f32[5@tp, 4] "
        + rest.format("replicate(module, mesh)"),
        f"PyTorch's fully_shard does not know parameter weight, {sharded}",
        f"PyTorch's FullyShardedDataParallel does not know parameter 0.weight, {sharded}",
    ]
