from __future__ import annotations

import copy
import gc
import itertools

import pytest

from hyper_parallel.core.dtensor import layout as layout_module, transition
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard, StridedShard
from hyper_parallel.errors import LayoutError, MeshError

MESH = DeviceMesh.abstract("cpu", (2, 3), tuple(range(6)), ("dp", "tp"))
R, S0, S1 = Replicate(), Shard(0), Shard(1)


@pytest.mark.parametrize("placements, text", [
    ([S0], "placements: 1 given (Shard(0)) for the 2 axes ('dp', 'tp') of the mesh; give one per axis"),
    (S0, "placements: 1 given (Shard(0)) for the 2 axes ('dp', 'tp') of the mesh; give one per axis"),
    ([S0, R, R], ("placements: 3 given (Shard(0), Replicate(), Replicate()) for the 2 axes ('dp', 'tp') of the mesh; "
                  "give one per axis")),
    ([Shard(2), R], "placements: Shard(2) names dim 2, the tensor has 2 dims"),
    ([Shard(-3), R], "placements: Shard(-3) names dim -3, the tensor has 2 dims"),
    ([StridedShard(0, 2), S0], ("placements: StridedShard(0, split_factor=2) needs axes to its right that split "
                                "dim 0 first by 2; found: {'tp': 3}")),
    (("dp",), "placements: 1 aliases ('dp',) given for a tensor of 2 dims; give one per dim"),
    (("dp", "None", "None"), ("placements: 3 aliases ('dp', 'None', 'None') given for a tensor of 2 dims; "
                              "give one per dim")),
    (("dp", "dp"), "placements: aliases ('dp', 'dp') use an axis twice"),
    ((("dp", "dp"), None), "placements: aliases (('dp', 'dp'), None) use an axis twice"),
    ((1, None), "placements: 1 is neither an axis name, a tuple of axis names nor 'None'"),
    (((["dp"],), None), "placements: (['dp'],) is neither an axis name, a tuple of axis names nor 'None'"),
])  # fmt: skip
def test_placements_that_do_not_fit_say_why(placements, text):
    """Wrong counts, missing dims and axes used twice raise a LayoutError, which is a ValueError, with the facts."""
    with pytest.raises(LayoutError) as caught:
        Layout.place(MESH, placements, (4, 6))
    assert isinstance(caught.value, ValueError)
    assert str(caught.value) == text


def test_an_alias_that_is_no_axis():
    """An unknown alias raises the mesh's own error."""
    with pytest.raises(MeshError) as caught:
        Layout.place(MESH, ("pp", None), (4, 6))
    assert str(caught.value) == "mesh has no axis 'pp'; its axes are ('dp', 'tp') of sizes (2, 3)"


def test_negative_dims_are_the_same_layout():
    """Shard(-1) of a 2-D tensor is Shard(1): one interned object."""
    assert Layout.place(MESH, [Shard(-1), R], (4, 6)) is Layout.place(MESH, [S1, R], (4, 6))


@pytest.mark.parametrize("placements", list(itertools.product((R, S0, S1, Partial(), Partial("max")), repeat=2)))
def test_placements_round_trip(placements):
    """Placements read back from a layout build the same layout."""
    layout = Layout.place(MESH, placements, (5, 7))
    assert layout.placements == placements
    assert Layout.place(MESH, layout.placements, (5, 7)) is layout


@pytest.mark.parametrize("aliases", [
    (("dp", "tp"), "None"), (("tp", "dp"), "None"), ("tp", "dp"), ("None", "None"), ("None", ("tp", "dp")),
])  # fmt: skip
def test_aliases_round_trip_in_order(aliases):
    """Aliases, and placements with strides, keep the order of axes through a round trip."""
    layout = Layout.place(MESH, aliases, (12, 12))
    assert layout.alias_placements == aliases
    assert Layout.place(MESH, layout.placements, (12, 12)) is layout


def test_order_is_another_layout_with_other_boxes():
    """The two orders of two shards of one dim differ, and a strided shard spells the second."""
    first, second = (Layout.place(MESH, (names, None), (12, 2)) for names in (("dp", "tp"), ("tp", "dp")))
    assert first.placements == (S0, S0)
    assert second.placements == (StridedShard(0, 3), S0)
    assert first.local_box(1) == ((2, 4), (0, 2))
    assert second.local_box(1) == ((4, 6), (0, 2))


@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (1, 3), (4,)])
@pytest.mark.parametrize("size", [0, 1, 5, 7, 12])
def test_boxes_tile_the_index_space_once(shape, size):
    """On every mesh and size, in every order, the boxes of shards cover each index exactly once."""
    count = 1
    for axis in shape:
        count *= axis
    names = tuple("abc"[: len(shape)])
    mesh = DeviceMesh.abstract("cpu", shape, tuple(range(count)), names)
    for order in itertools.permutations(names):
        layout = Layout.place(mesh, (order,), (size,))
        layouts = [index for rank in range(count) for index in range(*layout.local_box(rank)[0])]
        assert sorted(layouts) == list(range(size))


def test_a_layout_built_by_its_own_spelling():
    """Layout(mesh_shape, names) called with aliases, placements or nothing places a tensor."""
    layout = Layout((2, 3), ("dp", "tp"))
    assert layout("dp", "tp") is Layout.from_device_mesh(MESH)("dp", "tp")
    assert layout([S0, S1]).with_shape((4, 6)) is layout("dp", "tp").with_shape((4, 6))
    assert layout().ndim == 0
    assert layout(("dp", "tp"), "None").tensor_map == ((1, 0), -1)
    assert layout("tp", "None").tensor_map == (0, -1)
    assert layout("dp", ("tp",)).get_global_shape((4, 5)) == (8, 15)


@pytest.mark.parametrize("make, text", [
    (lambda: Layout((2, 3), ("dp", "tp"), [0, 1]), "Layout: mesh_shape (2, 3) needs 6 ranks, rank_list has 2"),
    (lambda: Layout((2, 3), ("dp", "tp"))([S0]),
     "placements: 1 given (Shard(0)) for the 2 axes ('dp', 'tp') of the mesh; give one per axis"),
    (lambda: Layout((2, 3), ("dp", "tp"))([Shard(2), R]).with_shape((4, 6)),
     "placements: Shard(2) names dim 2, the tensor has 2 dims"),
    (lambda: Layout((2, 3), ("dp", "tp"))("dp").local_box(), "layout has no global shape; use with_shape(...) first"),
    (lambda: Layout.place(MESH, Layout.place(MESH, [S0, R], (4,)), (4, 6)),
     ("layout Layout([4@dp] on DeviceMesh(cpu, dp=2, tp=3, ranks=[0, 1, 2, 3, 4, 5])) does not place a tensor of "
      "2 dims")),
])  # fmt: skip
def test_a_layout_that_cannot_be_says_why(make, text):
    """A layout of the wrong ranks, dims or shape raises a LayoutError with the facts."""
    with pytest.raises(LayoutError) as caught:
        make()
    assert str(caught.value) == text


def test_a_list_of_placements_waits_for_the_dims_of_its_tensor():
    """A list of placements is resolved when a shape or tensor gives the number of dims, negative dims included."""
    layout = Layout((2, 3), ("dp", "tp"))
    first, last = layout([S0, Partial()]), layout([Shard(-1), R])
    assert first is layout((S0, Partial()))
    assert first.with_shape((4, 6, 5)).dim_axes == ((0,), (), ())
    assert last.with_shape((4, 6)) is layout("None", "dp").with_shape((4, 6))
    assert last.with_shape(None) is last
    assert last.get_global_shape((4, 6, 5)) == (4, 6, 10)
    assert Layout.place(MESH, last, (4, 6)) is Layout.place(MESH, [Shard(-1), R], (4, 6))
    assert first.placements == (S0, Partial())
    assert first.is_partial("tp")
    remake, parts = first.__reduce__()
    assert remake(*parts) is first
    assert repr(last) == "Layout([Shard(-1), Replicate()] on DeviceMesh(cpu, dp=2, tp=3, ranks=[0, 1, 2, 3, 4, 5]))"


@pytest.mark.parametrize("read", [
    lambda layout: layout.ndim,
    lambda layout: layout.dim_axes,
    lambda layout: layout.tensor_map,
    lambda layout: layout.alias_placements,
    lambda layout: layout.local_shape,
    lambda layout: layout.local_box(0),
    lambda layout: layout.shard_count(0),
    lambda layout: layout.notation(),
    lambda layout: layout.placement_on(0),
    lambda layout: layout.with_placement(0, R),
    lambda layout: layout.is_replicated,
    lambda layout: layout.get_global_shape((2, 2)),
    lambda layout: layout.with_shape((2, 2)),
    lambda layout: layout.placements,
    lambda layout: layout.is_partial(),
    lambda layout: layout.get_partial_by_dev_id("dp"),
    lambda layout: Layout.place(MESH, layout, (2, 2)),
])  # fmt: skip
def test_an_unplaced_layout_says_to_call_it(read):
    """Everything that depends on placements raises a LayoutError with the fix before the layout is placed."""
    mesh = "DeviceMesh(cpu, dp=2, tp=3, ranks=[0, 1, 2, 3, 4, 5])"
    blank = Layout((2, 3), ("dp", "tp"))
    remake, parts = blank.__reduce__()
    assert remake(*parts) is blank
    with pytest.raises(LayoutError) as caught:
        read(blank)
    assert str(caught.value) == (
        f"layout Layout({mesh}) describes only a mesh; call it first to place a tensor: "
        'layout("None", ...), an alias per dim'
    )
    try:
        read(blank([S0, R]))
    except LayoutError as error:
        assert str(error) == (  # noqa: PT017 - several of them know enough
            f"layout Layout([Shard(0), Replicate()] on {mesh}) does not know the number of dims of its tensor; "
            "call layout.with_shape(...) first"
        )


def test_other_attributes_are_missing_as_ever():
    """An unplaced layout raises AttributeError for attributes that no layout has."""
    with pytest.raises(AttributeError, match="'Layout' object has no attribute 'nope'"):
        _ = Layout((2, 3), ("dp", "tp")).nope


def test_a_copy_is_not_a_draft():
    """A method of earlier releases that changes a copy of a layout is missing, and the error names what to call."""
    for name in ("placement_to_tensor_map", "reset_partial", "set_placements"):
        with pytest.raises(AttributeError) as caught:
            getattr(copy.deepcopy(Layout.place(MESH, [S0, R], (12, 5))), name)
        assert str(caught.value) == (
            f"'Layout' object has no attribute '{name}'; layouts are immutable: layout(placements) returns a new one"
        )


def test_a_copy_is_the_layout_itself():
    """Layouts are immutable and compared by identity: copies, shallow, deep or pickled, are one object."""
    layout = Layout.place(MESH, [S0, R], (12, 5))
    assert copy.copy(layout) is copy.deepcopy({"weight": layout})["weight"] is layout


def test_the_global_shape_of_what_a_rank_holds():
    """The global shape is the attached one; without one, shards are taken to be even."""
    assert Layout.place(MESH, [S0, R], (5, 7)).get_global_shape((3, 7)) == (5, 7)
    assert Layout.place(MESH, [S0, R], (5, 7)).with_shape(None).get_global_shape((3, 7)) == (6, 7)


def test_partial_queries():
    """A layout reports which axes are partial, and by which reduction."""
    layout = Layout.place(MESH, [Partial("avg"), S0], (6,))
    assert layout.is_partial()
    assert layout.is_partial("dp")
    assert not layout.is_partial("tp")
    assert layout.get_partial_by_dev_id("dp") == "avg"
    assert layout.get_partial_by_dev_id("tp") is None
    assert layout.notation("float32") == "f32[6@tp] + Partial(avg)@dp"
    assert [layout.placement_on(axis) for axis in (0, 1)] == [Partial("avg"), S0]


def test_a_changed_layout_is_a_new_one():
    """with_placement and with_shape leave the layout as it is."""
    layout = Layout.place(MESH, [S0, R], (12, 5))
    assert layout.with_placement(1, S0).dim_axes == ((0, 1), ())
    assert layout.with_placement(0, Partial()).partials == ((0, "sum"),)
    assert layout.with_placement(0, R).is_replicated
    assert layout.with_shape((4, 4)).shape == (4, 4)
    assert layout.placements == (S0, R)
    assert layout.shape == (12, 5)


def test_layouts_that_nobody_holds_are_forgotten(monkeypatch):
    """Unused layouts are freed; equal layouts are one object as long as it is referenced."""
    monkeypatch.setattr(layout_module, "_MAX_PLACED", 8)
    monkeypatch.setattr(transition, "_MAX_CACHED", 8)
    for kept in (layout_module._PLACED, transition._TRANSITIONS, transition._DUALS):
        kept.clear()
    mesh = DeviceMesh.abstract("cpu", (2,), (0, 1), ("tp",))
    layouts = Layout.place(mesh, [Shard(0)], (1_000_003,))
    gc.collect()
    before = len(layout_module._INTERNED)
    for size in range(1_000_010, 1_000_110):
        rows, whole = (Layout.place(mesh, [layout], (size,)) for layout in (Shard(0), Replicate()))
        transition.dual(rows)
        assert transition.plan_transition(rows, whole).adjoint.adjoint is transition.plan_transition(rows, whole)
    assert max(len(layout_module._PLACED), len(transition._TRANSITIONS), len(transition._DUALS)) <= 8
    gc.collect()
    assert len(layout_module._INTERNED) - before < 50
    assert Layout.place(mesh, [Shard(0)], (1_000_003,)) is layouts
