"""Call forms of MindFormers 2.1.0 on meshes, layouts and micro-batches."""

from __future__ import annotations

import pytest

from hyper_parallel import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    ShardingPlan,
    distribute_tensor,
    init_device_mesh,
    shard_module,
)
from hyper_parallel.compat.layouts import (
    DevMat,
    RedistributionOperatorInfer,
    _infer_slice_area_by_rank,
    get_current_layout,
    get_global_layout,
)
from hyper_parallel.compat.pipeline import _MicroBatch
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.errors import LayoutError, MeshError, PlacementError, PlanError, UnsupportedOnBackend
from hyper_parallel.platform.select import get_platform
from hyper_parallel.verify.simulate import simulate


def mesh_of(*sizes, names):
    """A mesh for planning, as rank 0 sees it."""
    ranks = 1
    for size in sizes:
        ranks *= size
    return DeviceMesh.abstract("npu", sizes, tuple(range(ranks)), names)


def test_one_world_has_several_views():
    """``_unflatten`` splits an axis, slices of the views have common meshes, and ``_flatten`` names the joint axis."""
    world = mesh_of(6, names=("world",))
    dense = world._unflatten(0, (1, 3, 2), ("pp", "fsdp", "tp"), backend_override={"pp": "fake"})
    assert (dense.mesh_shape, dense.rank_list, dense.mesh_dim_names) == (
        (1, 3, 2),
        tuple(range(6)),
        ("pp", "fsdp", "tp"),
    )
    assert dense["fsdp"].for_rank(3).ranks == (0, 2, 4)
    assert dense["fsdp", "tp"]._flatten("loss_mesh").mesh_dim_names == ("loss_mesh",)
    split = dense.unflatten("tp", (2, 1), ("a", "b"))
    assert (split.names, split.shape) == (("pp", "fsdp", "a", "b"), (1, 3, 2, 1))
    assert dense.mesh.numel() == 6
    assert dense.mesh == [[[0, 1], [2, 3], [4, 5]]]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0, (4, 2), ("a", "b")), r"^unflatten: sizes \(4, 2\) do not multiply to 6, the size of axis world$"),
        ((0, (True, 6), ("a", "b")), r"^unflatten: sizes \(True, 6\) do not multiply to 6, the size of axis world$"),
        ((0, (3, 2), ("a",)), r"^unflatten: mesh_dim_names has 1 names \('a',\) for 2 axes of sizes \(3, 2\)$"),
        ((0, (3, 2), ("a", "a")), r"^DeviceMesh: mesh_dim_names repeat: \('a', 'a'\)$"),
        (("tp", (3, 2), ("a", "b")), r"^mesh has no axis 'tp'"),
    ],
)
def test_a_wrong_split_is_refused(arguments, message):
    """Sizes and names that do not fit the axis are refused."""
    with pytest.raises(MeshError, match=message):
        mesh_of(6, names=("world",))._unflatten(*arguments)


def test_another_engine_is_refused():
    """An engine for a new axis is refused: groups are those of the world."""
    with pytest.raises(MeshError, match=r"^unflatten: backend_override \{'a': 'gloo'\} chooses an engine; all groups "):
        mesh_of(6, names=("world",))._unflatten(0, (3, 2), ("a", "b"), backend_override={"a": "gloo", "b": "fake"})


def test_facts_of_a_layout():
    """A layout tells its mesh's sizes, names and ranks, this rank's piece of a dim, and how often a shard repeats."""
    from hyper_parallel.core.dtensor.layout import Layout

    mesh = mesh_of(2, 3, names=("dp", "tp"))
    for rank in range(6):
        layout = Layout.of(mesh.for_rank(rank), [(0, 1), ()], (), (12, 5))
        assert (layout.mesh_shape, layout.alias_name, layout.rank_list) == ((2, 3), ("dp", "tp"), tuple(range(6)))
        assert (layout.get_split_id(0), layout.get_split_id(1), layout.repeat_num()) == (rank, 0, 1)
        assert layout.tensor_map == ((1, 0), -1)
        swapped = Layout.of(mesh.for_rank(rank), [(1,), ()], ((0, "sum"),), (12, 5))
        assert (swapped.get_split_id(0), swapped.repeat_num()) == (rank % 3, 2)


def test_areas_of_ranks_on_a_grid():
    """``_infer_slice_area_by_rank`` gives the range of each dim, for single and joint axes; it refuses uneven ones."""
    assert _infer_slice_area_by_rank((2, 3), (0, -1), 4, (6, 5)) == ((2, 4), (0, 5))
    assert _infer_slice_area_by_rank((2, 3), [(1, 0), -1], 4, [12, 5]) == ((8, 10), (0, 5))
    assert _infer_slice_area_by_rank((2, 3), (1, 0), 5, (4, 3)) == ((2, 4), (2, 3))
    with pytest.raises(LayoutError, match=r"^dim 0 of \[5, 5\] is not divisible by 3$"):
        _infer_slice_area_by_rank((2, 3), (0, -1), 4, (5, 5))


def test_steps_to_the_whole_tensor():
    """``infer_ops_list`` gathers each split dim over the ranks that hold its shards; other targets are refused."""
    ranks = [10, 11, 12, 13, 14, 15]
    assert DevMat([2, 3]).get_devices_along_dim(14, ranks, [1]) == [13, 14, 15]
    assert DevMat([2, 3]).get_devices_along_dim(14, ranks, 0) == [11, 14]
    steps = RedistributionOperatorInfer(dev_mat=(2, 3), in_tensor_map=[0, 1], out_tensor_map=[-1, -1])
    assert steps.infer_ops_list(14, ranks) == [("all_concat", (0, 3, [13, 14, 15])), ("all_concat", (1, 2, [11, 14]))]
    joint = RedistributionOperatorInfer(dev_mat=(2, 3), in_tensor_map=[-1, (1, 0)], out_tensor_map=[-1, -1])
    assert joint.infer_ops_list(14, ranks) == [("all_concat", (1, 6, ranks))]
    with pytest.raises(UnsupportedOnBackend, match=r"^RedistributionOperatorInfer: out_tensor_map \[0, -1\] is not re"):
        RedistributionOperatorInfer(dev_mat=(2, 3), in_tensor_map=[-1, -1], out_tensor_map=[0, -1])


def micro_batches():
    """Two micro-batches: dim 0 and a named dim are split, -1 gives everything."""
    platform = get_platform()
    rows = platform.arange(0, 12).reshape(4, 3)
    args, kwargs = _MicroBatch(2, (0, -1), {"labels": 0, "mask": -1})([rows, rows], {"labels": rows, "mask": rows})
    return [[tuple(x.shape) for x in (*batch, *named.values())] for batch, named in zip(args, kwargs, strict=True)]


def test_micro_batches(platform_name):
    """``_MicroBatch`` splits dim 0 evenly; -1 gives every micro-batch all of an argument."""
    assert simulate(micro_batches, 1, platform=platform_name) == [[[(2, 3), (4, 3), (2, 3), (4, 3)]] * 2]


def reports():
    """Layout reports of a sharded and of a plain parameter."""
    platform = get_platform()
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    weight = distribute_tensor(platform.zeros((5, 2)), mesh, [Shard(0)])
    module = platform.Module()
    module.weight = platform.new_parameter(weight, requires_grad=True)
    module.bias = platform.new_parameter(platform.zeros((3,)), requires_grad=True)
    return get_current_layout([module]), get_global_layout(module)


def test_layout_reports(platform_name):
    """``get_current_layout`` reports this rank's parameters, ``get_global_layout`` those of all ranks."""
    results = simulate(reports, 3, platform=platform_name)
    for rank, (own, everyone) in enumerate(results):
        assert list(own) == [str(rank)]
        facts = dict(own[str(rank)]["weight"])
        assert facts.pop("type")
        assert facts == {
            "full_shape": (5, 2),
            "device_matrix": (3,),
            "alias_name": ("tp",),
            "rank_list": (0, 1, 2),
            "tensor_map": (0, -1),
        }
        assert set(own[str(rank)]["bias"]) == {"type", "full_shape"}
        assert everyone == {str(each): results[each][0][str(each)] for each in range(3)}


def test_partial_is_a_sum_by_default():
    """``Partial()`` sums, as gradients that no one has reduced are declared."""
    assert (Partial().reduce_op, Replicate()) == ("sum", Replicate())


WEIGHT = "fc.weight [7, 6]: placements:"
PLANS = {  # as distribute_module of MindFormers writes them: a tuple of one placement by path
    "fc.weihgt": ((Shard(0),), "'fc.weihgt' matches no parameter; children of fc: weight, bias"),
    "fc": ((Shard(0),), "'fc' matches no parameter; children of the module: fc"),
    "fc.bias": ((Shard(1),), "fc.bias [7]: placements: Shard(1) names dim 1, the tensor has 1 dims"),
    "fc.weight": ((Shard(2),), f"{WEIGHT} Shard(2) names dim 2, the tensor has 2 dims"),
    "*.weight": (
        (Shard(0), Shard(1)),
        f"{WEIGHT} 2 given (Shard(0), Shard(1)) for the 1 axes ('tp',) of the mesh; give one per axis",
    ),
    "fc.w*": (("Shard(0)",), f"{WEIGHT} 1 aliases ('Shard(0)',) given for a tensor of 2 dims; give one per dim"),
    "fc.weigh?": (
        None,
        f"{WEIGHT} got None; give one placement per mesh axis, such as [Replicate()], or one alias per dim",
    ),
}


def wrong_plans():
    """The errors of plans and of placements that do not fit."""
    from mindspore import Tensor, nn

    class Layer(nn.Cell):
        def __init__(self):
            super().__init__()
            self.fc = nn.Dense(6, 7)

    mesh = init_device_mesh("npu", (3,), mesh_dim_names=("world",))._unflatten(0, (1, 3), ("dp", "tp"))["tp"]
    messages, x = [], Tensor([[1.0, 2.0]])
    for path, (placements, _) in PLANS.items():
        with pytest.raises(PlanError) as caught:
            shard_module(Layer(), mesh, ShardingPlan(plan={path: placements}))
        messages.append(str(caught.value))
    for wrong in ((Shard(2),), (Shard(0), Replicate()), (None,)):
        with pytest.raises(PlacementError) as local:
            DTensor.from_local(x, mesh, wrong)
        with pytest.raises(PlacementError) as other:
            DTensor.from_local(x, mesh, (Replicate(),)).redistribute(device_mesh=mesh, placements=wrong)
        assert str(local.value) == str(other.value)
        messages.append(str(local.value))
    return messages


@pytest.mark.platforms("mindspore")
def test_wrong_entries_of_a_plan_are_named():
    """A path that names nothing and placements that do not fit are refused by name, in plans and of activations."""
    (*plans, dim, count, nothing), *_ = simulate(wrong_plans, 3, platform="mindspore")
    head = "shard_module: the plan does not match the module (1 problem); no parameter was changed:\n  - plan: "
    assert plans == [head + text for _, text in PLANS.values()]
    assert dim == "placements: Shard(2) names dim 2, the tensor has 2 dims"
    assert count == (
        "placements: 2 given (Shard(0), Replicate()) for the 1 axes ('tp',) of the mesh; give one per axis"
    )
    assert nothing == "placements: 1 aliases (None,) given for a tensor of 2 dims; give one per dim"
