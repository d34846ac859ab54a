from __future__ import annotations

import numpy as np
import pytest
import torch

from hyper_parallel import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from hyper_parallel.core.dtensor import module
from hyper_parallel.errors import (
    ArgumentTypeError,
    LayoutError,
    MeshError,
    MeshMismatchError,
    MixedTensorError,
    ModuleError,
    ShardMismatchError,
)
from hyper_parallel.verify import launch, simulate

pytestmark = pytest.mark.platforms("torch")

GRIDS = [(2,), (3,), (4,), (2, 2), (2, 3)]


def on_mesh(shape, fn):
    """Run ``fn(mesh)`` on every rank of a simulated mesh."""
    size = 1
    for axis in shape:
        size *= axis
    return simulate(
        lambda: fn(init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])), size, "torch"
    )


def value(*shape, seed=0):
    """Normal float64 values from a fresh generator."""
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layouts(ndim):
    """All placements of a tensor, by the number of mesh axes."""
    places = [Replicate(), Partial(), *(Shard(dim) for dim in range(ndim))]
    one_axis = [[place] for place in places]
    two_axes = [[first, second] for first in places for second in places]
    return {1: one_axis, 2: two_axes}


@pytest.mark.untraced
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("shape", [(), (5,), (7, 5), (1, 4), (0, 3)])
@pytest.mark.parametrize("source", [0, 1, None])
def test_the_source_ranks_values_arrive_in_every_layout(grid, shape, source):
    """The global value is the source rank's; with None each rank uses its own and nothing is sent."""
    import torch

    def rank(mesh):
        mine = value(*shape, seed=0 if source is None else mesh.rank)
        for placements in layouts(len(shape))[mesh.ndim]:
            result = distribute_tensor(mine, mesh, placements, src_data_rank=source)
            assert result.placements == tuple(placements)
            assert torch.equal(result.full_tensor(), value(*shape, seed=source or 0)), placements

    on_mesh(grid, rank)


@pytest.mark.parametrize("placements", [[Shard(0)], [Replicate()], [Shard(1)]])
@pytest.mark.parametrize("source", [0, None])
def test_the_result_is_a_leaf_with_storage_of_its_own(placements, source):
    """``requires_grad`` is kept, and writing into the original changes nothing."""

    def rank(mesh):
        tensor = value(4, 6).requires_grad_()
        result = distribute_tensor(tensor, mesh, placements, src_data_rank=source)
        assert result.is_leaf
        assert result.requires_grad
        assert not distribute_tensor(value(4, 6), mesh, placements).requires_grad
        tensor.detach().zero_()
        assert result.full_tensor().abs().sum() > 0
        assert result.to_local().is_contiguous()

    on_mesh((2,), rank)


def test_aliases_strided_shards_and_the_default():
    """Every spelling of placements works, and without one everything is replicated on the current mesh."""

    def rank(mesh):
        whole = value(8, 4)
        aliased = distribute_tensor(whole, mesh, (("dp", "tp"), "None"))
        strided = distribute_tensor(whole, mesh, [StridedShard(0, 2), Shard(0)])
        with mesh:
            default = distribute_tensor(whole)
        assert default.placements == (Replicate(), Replicate())
        assert all(tensor.full_tensor().equal(whole) for tensor in (aliased, strided, default))
        return aliased.placements, strided.layout.alias_placements

    assert on_mesh((2, 2), rank)[0] == ((Shard(0), Shard(0)), (("tp", "dp"), "None"))


def test_a_tensor_without_values():
    """A meta tensor is sliced without communication."""
    import torch

    def rank(mesh):
        result = distribute_tensor(torch.empty(5, 3, device="meta"), mesh, [Shard(0)])
        return result.device.type, result.local_shape, tuple(result.shape)

    assert on_mesh((2,), rank) == [("meta", (3, 3), (5, 3)), ("meta", (2, 3), (5, 3))]


def test_a_dtensor_is_returned_or_refused():
    """distribute_tensor returns a DTensor of the same layout itself and refuses one of another layout."""

    def rank(mesh):
        result = distribute_tensor(value(4, 6), mesh, [Shard(0)])
        assert distribute_tensor(result, mesh, [Shard(0)]) is result
        with pytest.raises(ValueError, match="DTensor") as caught:
            distribute_tensor(result, mesh, [Shard(1)])
        return str(caught.value)

    assert on_mesh((2,), rank)[0] == (
        "distribute_tensor: the tensor is a DTensor f64[4@tp, 6] on DeviceMesh(cpu, tp=2, ranks=[0, 1]); "
        "to change its layout call tensor.redistribute(placements=[Shard(1)])"
    )


@pytest.mark.parametrize("call, kind, message", [
    (lambda x, mesh: distribute_tensor(x, mesh, [Shard(2)]), LayoutError,
     "placements: Shard(2) names dim 2, the tensor has 2 dims"),
    (lambda x, mesh: distribute_tensor(x, mesh, [Shard(0), Shard(1)]), LayoutError,
     "placements: 2 given (Shard(0), Shard(1)) for the 1 axes ('tp',) of the mesh; give one per axis"),
    (lambda x, mesh: distribute_tensor(x, mesh, ("tp",)), LayoutError,
     "placements: 1 aliases ('tp',) given for a tensor of 2 dims; give one per dim"),
    (lambda x, mesh: distribute_tensor(x, mesh, ("ep", "None")), MeshError,
     "mesh has no axis 'ep'; its axes are ('tp',) of sizes (2,)"),
    (lambda x, mesh: distribute_tensor(x, mesh, [Shard(0)], src_data_rank=2), MeshError,
     "src_data_rank 2 is out of range for DeviceMesh(cpu, tp=2, ranks=[0, 1]), which has 2 ranks"),
    (lambda x, mesh: DTensor.from_local(x[: mesh.rank + 1], mesh, [Shard(0)], run_check=True), ShardMismatchError,
     ("from_local: the local tensors do not make one tensor of [2, 6] under (Shard(0),): rank 1 should hold [1, 6] "
     "(rank 0: [1, 6] torch.float64, rank 1: [2, 6] torch.float64); pass shape=, the global shape")),
    (lambda x, mesh: DTensor.from_local(x, mesh, [Shard(0)], shape=(5, 6)), ShardMismatchError,
     "from_local: rank 0 holds [3, 6] of [5@tp, 6], but local has [4, 6]"),
    (lambda x, mesh: distribute_tensor(x, mesh, [Shard(0)]) + x, MixedTensorError,
     ("argument y is a plain tensor [4, 6], but other operands are DTensors on DeviceMesh(cpu, tp=2, ranks=[0, 1]); "
     "y = hyper_parallel.DTensor.from_local(y, mesh, [Replicate()]) if every rank holds the same values; if it is a "
     "local shard that a parallel style returned, give that style use_local_output=False")),
    (lambda x, mesh: distribute_tensor(x, mesh, [Shard(0)])
     + distribute_tensor(x, init_device_mesh("cpu", (2,), mesh_dim_names=("x",)), [Shard(0)]), MeshMismatchError,
     ("add__: operands are on different meshes, DeviceMesh(cpu, tp=2, ranks=[0, 1]) and DeviceMesh(cpu, x=2, "
     "ranks=[0, 1]); bring them to one mesh first")),
    (lambda *_: init_device_mesh("cpu", (3,)), MeshError,
     "init_device_mesh: mesh_shape (3,) needs 3 ranks, the world has 2"),
    (lambda _, mesh: distribute_tensor([1, 2, 3], mesh, [Shard(0)]), ArgumentTypeError,
     ("distribute_tensor: tensor must be a tensor of torch or mindspore, got list; convert it first, as in "
     "torch.tensor(data) or mindspore.Tensor(data)")),
    (lambda _, mesh: distribute_tensor(np.ones(3), mesh, [Shard(0)]), ArgumentTypeError,
     ("distribute_tensor: tensor must be a tensor of torch or mindspore, got ndarray; convert it first, as in "
     "torch.tensor(data) or mindspore.Tensor(data)")),
    (lambda _, mesh: DTensor.from_local(3.0, mesh, [Shard(0)]), ArgumentTypeError,
     ("from_local: local must be a tensor of torch or mindspore, got float; convert it first, as in "
     "torch.tensor(data) or mindspore.Tensor(data)")),
    (distribute_module, ArgumentTypeError,
     "distribute_module: module must be a torch.nn.Module or a mindspore.nn.Cell, got Tensor"),
    (lambda x, _: distribute_tensor(x, [0, 1], [Shard(0)]), ArgumentTypeError,
     "device_mesh must be a DeviceMesh, got list; init_device_mesh makes one"),
    (lambda x, mesh: x.mul_(distribute_tensor(x, mesh, [Shard(0)])), MixedTensorError,
     ("mul_: a plain tensor [4, 6] can be written only with DTensors of one element that are replicated and need no "
     "gradient; write the result of full_tensor()")),
])  # fmt: skip
def test_bad_input_is_refused_in_these_words(call, kind, message):
    """Each mistake raises a type that PyTorch's handlers catch, with the fault and the fix."""

    def rank(mesh):
        with pytest.raises(kind) as caught:
            call(value(4, 6), mesh)
        return str(caught.value)

    text = on_mesh((2,), rank)[0]
    assert text.startswith(message) or message in text


def test_an_operator_without_a_rule_is_refused():
    """A NotImplementedError names the operator, the layouts and the fix."""
    import torch

    def rank(mesh):
        with pytest.raises(NotImplementedError) as caught:
            torch.ops.aten._chunk_cat.default([distribute_tensor(value(4, 4), mesh, [Shard(0)])], 0, 2)
        return str(caught.value)

    message = on_mesh((2,), rank)[0]
    assert "aten._chunk_cat.default" in message
    assert "f64[4@tp, 4]" in message
    assert "hyper_parallel.DistributedOp" in message


# -- distribute_module ---------------------------------------------------------------------------------------------


def net():
    """A linear layer with a frozen bias, and a norm with buffers."""
    from torch import nn

    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).double()
    model[0].bias.requires_grad_(False)
    return model


def test_without_a_partition_everything_is_replicated():
    """Parameters and buffers become DTensors; frozen parameters stay frozen."""

    def rank(mesh):
        model = distribute_module(net(), mesh)
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        assert all(isinstance(tensor, DTensor) and tensor.layout.is_replicated for tensor in state.values())
        return model[0].bias.requires_grad, model[0].weight.requires_grad, len(state)

    assert on_mesh((2,), rank)[0] == (False, True, 7)


def test_a_partition_sees_every_submodule_and_keeps_ties():
    """What the partition function replaces stays, the rest is replicated, and a tied weight stays one object."""
    from torch import nn

    def rank(mesh):
        model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4)})
        model["b"].weight = model["a"].weight
        seen = []

        def partition(name, module, device_mesh):
            seen.append(name)
            if name == "a":
                module.weight = nn.Parameter(distribute_tensor(module.weight, device_mesh, [Shard(0)]))

        distribute_module(model, mesh, partition)
        assert model["b"].weight is model["a"].weight
        return seen, model["a"].weight.placements, model["b"].bias.placements

    assert on_mesh((2,), rank)[0] == (["", "a", "b"], (Shard(0),), (Replicate(),))


def hooked(mesh, input_fn, output_fn):
    """The output of a distributed linear layer with hooks."""
    model = distribute_module(net()[0], mesh, None, input_fn, output_fn)
    return model(value(3, 4))


def test_hooks_convert_inputs_and_outputs():
    """Hooks of three arguments (module, values, mesh) convert inputs and outputs."""

    def rank(mesh):
        out = hooked(
            mesh,
            lambda _, inputs, on: (DTensor.from_local(inputs[0], on),),
            lambda _, output, on: output.redistribute(on, [Shard(0)]),
        )
        return out.placements

    assert on_mesh((2,), rank)[0] == (Shard(0),)


def test_hooks_of_two_arguments_still_work():
    """Hooks of two arguments work, with a FutureWarning that shows the new signature."""

    def rank(mesh):
        with pytest.warns(FutureWarning, match="with two arguments is deprecated") as caught:
            out = hooked(
                mesh,
                lambda inputs, on: (DTensor.from_local(inputs[0], on),),
                lambda output, on: output.redistribute(on, [Shard(0)]),
            )
        return out.placements, len([warning for warning in caught if warning.category is FutureWarning])

    assert on_mesh((1,), rank)[0] == ((Shard(0),), 2)


def test_hooks_of_another_arity_are_refused():
    """A hook that takes neither two nor three arguments is refused."""

    def rank(mesh):
        with pytest.raises(ValueError, match="takes 1 arguments") as caught:
            distribute_module(net(), mesh, input_fn=lambda inputs: inputs)
        return str(caught.value)

    assert on_mesh((1,), rank)[0] == (
        "input_fn takes 1 arguments, it must take 3: (module, inputs_or_outputs, device_mesh)"
    )


def test_a_second_time_is_refused():
    """A second distribute_module of one module is refused, since hooks would run twice."""

    def rank(mesh):
        model = distribute_module(net(), mesh)
        with pytest.raises(
            RuntimeError, match="distribute_module was applied to this Sequential before; apply it once"
        ):
            distribute_module(model, mesh)

    on_mesh((1,), rank)


def test_a_tensor_on_the_graph_is_refused():
    """distribute_tensor refuses a tensor with a graph, as PyTorch does; from_local keeps the graph."""

    def rank(mesh):
        w = value(4, 6).requires_grad_()
        with pytest.raises(RuntimeError) as caught:
            distribute_tensor(w * 2, mesh, [Shard(0)])
        DTensor.from_local(w * 2, mesh, [Replicate()]).redistribute(placements=[Shard(0)]).sum().backward()
        assert (w.grad == 2).all()
        assert not distribute_tensor((w * 2).detach(), mesh, [Shard(0)]).requires_grad
        return type(caught.value), str(caught.value)

    kind, text = on_mesh((3,), rank)[0]
    assert kind is ArgumentTypeError
    assert text == (
        "distribute_tensor: the tensor [4, 6] is part of a graph, and the result would be a leaf, so no gradient "
        "would come back; hyper_parallel.DTensor.from_local(tensor, mesh, [Replicate()])"
        ".redistribute(placements=[Shard(0)]) keeps the gradient if every rank holds the same values; detach the "
        "tensor if no gradient is needed"
    )


def outside():
    """The error with which a rank outside of a mesh reads a sum, and the sum that the two ranks of the mesh compute."""
    import torch

    mesh = init_device_mesh("cpu", (2,), rank_list=[0, 1])
    total = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]).sum()
    if mesh.get_coordinate() is not None:
        return total.full_tensor().item()
    with pytest.raises(MeshError) as caught:
        total.full_tensor()
    return str(caught.value)


@pytest.mark.parametrize("run", [simulate, launch], ids=["simulated", "processes"])
def test_a_rank_outside_of_the_mesh(run):
    """A rank outside of the mesh gets an error where it reads values, and the ranks of the mesh do not wait for it."""
    assert run(outside, 3, "torch") == [10.0, 10.0, NOT_IN_MESH]


NOT_IN_MESH = (
    "rank 2 is not in DeviceMesh(cpu, 2, ranks=[0, 1]): it holds no shard of tensors on that mesh and takes no part in "
    "its collectives; leave it out with 'if mesh.get_coordinate() is not None:'"
)


def test_each_piece_leaves_the_source_once(monkeypatch):
    """On 3 x 2 ranks the source cuts one piece per shard, not one per rank; every rank gets its shard of the values."""
    cuts, plain = [], module.narrow_box

    def counting(whole, box, part, platform):
        cuts.append((platform.transport().rank, part))
        return plain(whole, box, part, platform)

    monkeypatch.setattr(module, "narrow_box", counting)
    values = torch.randn(5, 3)

    def on_rank():
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
        tensor = values if mesh.rank == 4 else torch.zeros(5, 3)
        return distribute_tensor(tensor, mesh, [Replicate(), Shard(1)], src_data_rank=4).to_local()

    for rank, shard in enumerate(simulate(on_rank, 6, "torch")):
        assert torch.equal(shard, values[:, 2:] if rank % 2 else values[:, :2])
    assert sorted(box for rank, box in cuts if rank == 4) == [((0, 5), (0, 2)), ((0, 5), (2, 3))]


def test_a_tie_with_an_earlier_call_is_not_cut():
    """A module with a weight that is tied to a distributed one of another module is refused before any change."""
    from torch import nn

    def rank(mesh):
        model = nn.ModuleDict({"tok": nn.Embedding(11, 6), "head": nn.Linear(6, 11, bias=False)})
        model["head"].weight = model["tok"].weight
        distribute_module(model["tok"], mesh)
        with pytest.raises(ModuleError) as caught:
            distribute_module(model, mesh)
        assert not isinstance(model["head"].weight, DTensor)
        return str(caught.value)

    assert on_mesh((2,), rank)[0] == (
        "distribute_module: parameters would no longer be tied:\n  - head.weight is tied to the weight of Embedding, "
        "which an earlier call has placed and this call would not replace; give both modules their styles in one "
        "call, or give each module its own parameter before the first call"
    )
