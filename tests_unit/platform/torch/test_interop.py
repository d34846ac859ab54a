"""To PyTorch's own DTensor and back, on real processes; each launch holds many cases."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed import device_mesh as peer_mesh, tensor as peer

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh, init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard, own_placements
from hyper_parallel.core.shard import local_map
from hyper_parallel.core.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from hyper_parallel.errors import ArgumentTypeError, MeshError, UnsupportedOnBackend
from hyper_parallel.verify.launch import launch
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


def round_trips():
    """Storage, placements, shapes, gradients and files, on this rank of two."""
    import torch
    from torch.distributed import tensor as peer

    from hyper_parallel import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
    from hyper_parallel.errors import UnsupportedOperatorError

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = torch.arange(15.0).reshape(5, 3)
    checked = []
    for ours, theirs in (
        (Shard(0), peer.Shard(0)),
        (Shard(1), peer.Shard(1)),
        (Replicate(), peer.Replicate()),
        (Partial(), peer.Partial()),
        (Partial("prod"), peer.Partial("product")),
        (Partial("max"), peer.Partial("max")),
    ):
        tensor = distribute_tensor(x, mesh, [ours])
        other = tensor.to_torch()
        assert isinstance(other, peer.DTensor)
        assert other.placements == (theirs,)
        assert other.shape == x.shape
        assert other.to_local().data_ptr() == tensor.to_local().data_ptr()
        assert torch.equal(other.full_tensor(), tensor.full_tensor())
        back = DTensor.from_torch(other)
        assert back.layout is tensor.layout
        assert back.to_local().data_ptr() == tensor.to_local().data_ptr()
        checked.append(repr(ours))

    weight = distribute_tensor(torch.randn(5, 3, generator=torch.Generator().manual_seed(1)), mesh, [Shard(0)])
    weight.requires_grad_()
    seed = torch.randn(5, 3, generator=torch.Generator().manual_seed(2))
    (DTensor.from_torch((weight * 2).to_torch() * 3)).backward(distribute_tensor(seed, mesh, [Shard(0)]))
    assert torch.allclose(weight.grad.full_tensor(), 6 * seed)
    checked.append("gradient")

    for made, kind in ((torch.ones(2), ArgumentTypeError), (3, TypeError)):
        with pytest.raises(kind):
            DTensor.from_torch(made)
    with pytest.raises(UnsupportedOperatorError) as caught:
        distribute_tensor(x > 3, mesh, [Partial("any")]).to_torch()
    checked.append(str(caught.value))
    return checked


def saved(folder):
    """A state dict of ours, saved and loaded by PyTorch's distributed checkpoint as its own."""
    import torch
    from torch.distributed import checkpoint

    from hyper_parallel import DTensor, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    weight = distribute_tensor(torch.arange(15.0).reshape(5, 3), mesh, [Shard(0)])
    checkpoint.save({"weight": weight.to_torch()}, checkpoint_id=folder)
    fresh = distribute_tensor(torch.zeros(5, 3), mesh, [Shard(1)])
    checkpoint.load({"weight": fresh.to_torch()}, checkpoint_id=folder)
    assert isinstance(fresh, DTensor)
    return fresh.full_tensor().tolist()


def counted():
    """What PyTorch's CommDebugMode counts, and collectives over the slices of a mesh, on this rank of four."""
    import torch
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.tensor.debug import CommDebugMode

    from hyper_parallel import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    counts = []
    x = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh["tp"], [Shard(0)]).requires_grad_()
    for call in (
        lambda: x.redistribute(placements=[Replicate()]),
        lambda: x.redistribute(placements=[Shard(1)]),
        lambda: x * 2,
        lambda: (x.full_tensor() * 2).sum().backward(),
    ):
        with CommDebugMode() as mode:
            call()
        counts.append({str(op): count for op, count in mode.get_comm_counts().items()})
    with CommDebugMode() as mode:
        torch.distributed.all_reduce(torch.ones(2))  # its own function, which the dispatcher sees, is counted once
        work = torch.distributed.all_gather(list(torch.empty(4, 2)), torch.ones(2), async_op=True)
        torch.distributed.barrier()
    work.wait()
    assert "c10d.allgather_" in mode.generate_comm_debug_tracing_table(noise_level=3)
    counts.append({str(op): count for op, count in mode.get_comm_counts().items()})
    own = torch.tensor([float(mesh.rank)])
    sums = [functional.all_reduce(own, "sum", (mesh, axis)).item() for axis in (0, 1)]
    assert sums == [sum(mesh.get_rank_list_along_axis(axis)) for axis in (0, 1)]
    theirs = x.detach().to_torch()  # the mesh of PyTorch is made of the ranks of this slice alone
    assert torch.equal(theirs.full_tensor(), torch.arange(12.0).reshape(4, 3))
    return counts


@pytest.mark.slow
def test_pytorch_counts_our_collectives():
    """CommDebugMode sees the collectives of redistributions, and no others, on simulated ranks as on real ones."""
    gather, exchange = {"c10d._allgather_base_": 1}, {"c10d.alltoall_base_": 1}
    expected = [gather, exchange, {}, gather, {"c10d.allreduce_": 1, "c10d.allgather_": 1}]
    assert launch(counted, 4, "torch") == [expected] * 4
    assert simulate(counted, 4, "torch") == [expected] * 4


@pytest.mark.slow
def test_there_and_back():
    """Conversions keep storage, placements and graph; placements that PyTorch lacks are refused by name."""
    results = launch(round_trips, 2, "torch")
    assert results[0] == results[1]
    assert results[0][:7] == ["Shard(0)", "Shard(1)", "Replicate()", "Partial(sum)", "Partial(prod)", "Partial(max)",
                            "gradient"]  # fmt: skip
    assert results[0][7] == "to_torch: PyTorch's DTensor has no Partial(any); use x = x.reduce_partial() first"


@pytest.mark.slow
def test_distributed_checkpoint(tmp_path):
    """PyTorch's distributed checkpoint loads a tensor in another layout than it was saved, into our storage."""
    import torch

    assert launch(saved, 2, "torch", (str(tmp_path),)) == [torch.arange(15.0).reshape(5, 3).tolist()] * 2


def test_simulated_ranks_convert_as_well():
    """On simulated ranks, each rank gets its own shard as PyTorch's DTensor, whose collectives work."""
    import torch

    from hyper_parallel import Shard, distribute_tensor, init_device_mesh

    full = torch.randn(5, 2)

    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        converted = distribute_tensor(full, mesh, [Shard(0)]).to_torch()
        return torch.equal(converted.full_tensor(), full)

    assert simulate(body, 2, platform="torch") == [True, True]


@pytest.mark.parametrize(
    "ranks, axis, shown",
    [([2, 0, 1], "a", "a=3, ranks=[2, 0, 1]"), ([[0, 1], [3, 2]], "b", "a=2, b=2, ranks=[0, 1, 3, 2]")],
)
def test_meshes_whose_ranks_descend_have_no_mesh_of_pytorch(ranks, axis, shown):
    """PyTorch's groups order ranks, so every rank refuses a mesh in which they descend, if only on another's line."""

    def body():
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b")[: 1 + isinstance(ranks[0], list)])
        x = distribute_tensor(torch.arange(12.0), mesh, [Shard(0)] * mesh.ndim)
        assert torch.equal(x.full_tensor(), torch.arange(12.0))
        with pytest.raises(MeshError) as caught:
            x.to_torch()
        return str(caught.value)

    world = torch.tensor(ranks).numel()
    expected = (
        f"PyTorch's groups order their ranks, and along axis {axis} of DeviceMesh(cpu, {shown}) ranks descend, so that "
        "its collectives would take shards for those of other ranks; make the mesh with ranks that ascend along every "
        "axis, or use this library's own functions, such as redistribute() and full_tensor()"
    )
    assert simulate(body, world, platform="torch") == [expected] * world


def test_a_world_is_needed():
    """Without an initialised world, conversion to PyTorch's DTensor is refused with the fix."""
    import torch

    from hyper_parallel import Shard, distribute_tensor, init_device_mesh

    def body():
        torch.distributed.destroy_process_group()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(UnsupportedOnBackend) as caught:
            distribute_tensor(torch.zeros(2), mesh, [Shard(0)]).to_torch()
        return str(caught.value)

    assert simulate(body, 2, platform="torch")[0] == (
        "to_torch: PyTorch's DTensor needs an initialised world; call torch.distributed.init_process_group() first"
    )


def test_placements_of_each_library_in_the_others_words():
    """Strided shards convert both ways; what the other library lacks is refused by name."""
    from torch.distributed.tensor import Partial as TheirPartial
    from torch.distributed.tensor.placement_types import _StridedShard

    from hyper_parallel.core.dtensor.placements import Partial, StridedShard
    from hyper_parallel.errors import UnsupportedOperatorError
    from hyper_parallel.platform.torch import interop

    assert interop._theirs(StridedShard(1, 2)) == _StridedShard(1, split_factor=2)
    assert interop.own_placement(_StridedShard(1, split_factor=3)) == StridedShard(1, 3)
    with pytest.raises(UnsupportedOperatorError) as caught:
        interop.own_placement(TheirPartial("norm"))
    assert str(caught.value).endswith("has no counterpart here; redistribute the tensor to Shard or Replicate first")
    with pytest.raises(UnsupportedOperatorError) as caught:
        interop._theirs(Partial("all"))
    assert str(caught.value) == "to_torch: PyTorch's DTensor has no Partial(all); use x = x.reduce_partial() first"


@pytest.mark.parametrize("world", [2, 3])
def test_meshes_and_placements_of_pytorch_are_those_of_this_library(world):
    """Wherever a mesh or a placement is taken, PyTorch's own stand for ours: the same mesh, layouts and values."""

    def on_rank():
        theirs = peer_mesh.init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        ours = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        x = distribute_tensor(torch.arange(10.0).reshape(5, 2), theirs, [peer.Shard(0)])
        pending = DTensor.from_local(torch.ones(2, 3), theirs, [peer.Partial("max")])
        whole = x.redistribute(placements=[peer.Replicate()])
        return [
            x.device_mesh is ours,
            x.layout is distribute_tensor(torch.arange(10.0).reshape(5, 2), ours, [Shard(0)]).layout,
            pending.placements == (Partial("max"),),
            torch.equal(whole.to_local(), torch.arange(10.0).reshape(5, 2)),
            x.to_local(grad_placements=[peer.Shard(-2)]).shape == x.to_local().shape,
            Layout((world,), ("tp",))([peer.Replicate()]).placements == (Replicate(),),
        ]

    assert simulate(on_rank, world, "torch") == [[True] * 6] * world


@pytest.mark.parametrize("world", [2, 3])
def test_a_plan_in_pytorchs_words_trains_as_on_one_device(world):
    """Styles and local_map take PyTorch's mesh and placements; outputs and every gradient are those of one device."""
    plain = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    x, cotangent = torch.randn(4, 3), torch.randn(4, 2)

    def train(model, function, inputs, cotangent):
        inputs = inputs.clone().requires_grad_()
        output = function(model(inputs))
        output.backward(cotangent)
        return [output.detach(), inputs.grad, *(parameter.grad for parameter in model.parameters())]

    def on_rank():
        mesh = peer_mesh.init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        model = copy.deepcopy(plain)
        plan = {
            "0": ColwiseParallel(input_layouts=peer.Replicate()),
            "2": RowwiseParallel(output_layouts=peer.Replicate(), use_local_output=False),
        }
        parallelize_module(model, mesh, plan)
        function = local_map(
            lambda y: y * 3.0, out_placements=[peer.Replicate()], in_placements=([peer.Replicate()],), device_mesh=mesh
        )
        results = train(model, function, x, distribute_tensor(cotangent, mesh, [peer.Replicate()]))
        return [value.full_tensor() if isinstance(value, DTensor) else value for value in results]

    expected = train(copy.deepcopy(plain), lambda y: y * 3.0, x, cotangent)
    for results in simulate(on_rank, world, "torch"):
        for result, value in zip(results, expected, strict=True):
            torch.testing.assert_close(result, value)


def test_placements_in_nested_declarations_are_converted():
    """Lists, tuples and dicts keep their form; what is not a placement of PyTorch stays as it is."""
    declared = {"a": [peer.Shard(1)], "b": (None, "tp", peer.Partial("product")), "c": Replicate()}
    assert own_placements(declared) == {"a": [Shard(1)], "b": (None, "tp", Partial("prod")), "c": Replicate()}
    assert own_placements(7) == 7
