from __future__ import annotations

import copy
import pickle
import threading

import numpy as np
import pytest

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh, get_current_mesh, init_device_mesh, shape_and_ranks
from hyper_parallel.errors import MeshError
from hyper_parallel.verify.simulate import simulate

GRID = DeviceMesh.abstract("cpu", (2, 3), (0, 1, 2, 3, 4, 5), ("dp", "tp"))


def refused(make):
    """Return the text of the MeshError, a ValueError, that ``make`` raises."""
    with pytest.raises(MeshError) as caught:
        make()
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def build(device="cpu", shape=(2,), ranks=(0, 1), names=("dp",)):
    """Return a function that builds a mesh with one wrong part."""
    return lambda: DeviceMesh.abstract(device, shape, ranks, names)


@pytest.mark.parametrize("make, text", [
    (build("tpu"), "DeviceMesh: device_type 'tpu' is not one of cpu, cuda, npu"),
    (build(shape=(), ranks=(), names=()), "DeviceMesh: mesh has no ranks or no axis"),
    (build(ranks=(1, 1)), "DeviceMesh: ranks repeat: [1, 1]"),
    (build(names=("a", "b")), "DeviceMesh: mesh_dim_names has 2 names ('a', 'b') for 1 axes of sizes (2,)"),
    (build(shape=(1, 2), names=("a", "a")), "DeviceMesh: mesh_dim_names repeat: ('a', 'a')"),
    (build(names=("None",)), "DeviceMesh: mesh_dim_names must be non-empty strings other than 'None', got ('None',)"),
    (build(names=("",)), "DeviceMesh: mesh_dim_names must be non-empty strings other than 'None', got ('',)"),
    (build(names=(3,)), "DeviceMesh: mesh_dim_names must be non-empty strings other than 'None', got (3,)"),
    (lambda: GRID.axis("pp"), "mesh has no axis 'pp'; its axes are ('dp', 'tp') of sizes (2, 3)"),
    (lambda: GRID["pp"], "mesh has no axis 'pp'; its axes are ('dp', 'tp') of sizes (2, 3)"),
    (lambda: GRID.axis(2), "mesh has no axis 2; its axes are ('dp', 'tp') of sizes (2, 3)"),
    (lambda: GRID.axis(True), "mesh has no axis True; its axes are ('dp', 'tp') of sizes (2, 3)"),
    (lambda: GRID["dp", "dp"], "mesh[('dp', 'dp')]: an axis is named twice"),
    (GRID.get_local_rank, "get_local_rank: the mesh has axes ('dp', 'tp'); name one of them"),
    (GRID.get_group, "get_group: the mesh has axes ('dp', 'tp'); name one of them"),
])  # fmt: skip
def test_a_mesh_that_cannot_be_says_why(make, text):
    """Every wrong mesh or axis raises a MeshError, which is a ValueError, with the facts."""
    assert refused(make) == text


def test_a_rank_outside_has_no_place():
    """A mesh may exclude the current rank, which then has no coordinate and no local rank."""
    mesh = DeviceMesh.abstract("cpu", (2,), (4, 5), ("tp",))
    assert mesh.coordinate is None
    assert mesh.get_coordinate() is None
    assert refused(lambda: mesh.get_local_rank("tp")) == (
        "rank 0 is not in DeviceMesh(cpu, tp=2, ranks=[4, 5]): it holds no shard of tensors on that mesh and takes no "
        "part in its collectives; leave it out with 'if mesh.get_coordinate() is not None:'"
    )


def test_a_grid_is_an_array_as_well():
    """Ranks may be an array as well as lists; rows of different lengths are refused."""
    assert (
        shape_and_ranks(np.arange(6).reshape(2, 3)[::-1])
        == shape_and_ranks([[3, 4, 5], [0, 1, 2]])
        == ((2, 3), (3, 4, 5, 0, 1, 2))
    )
    assert refused(lambda: shape_and_ranks([[0, 1], [2]])) == (
        "DeviceMesh: mesh must be a regular grid of ranks, got [[0, 1], [2]]"
    )


def test_equal_meshes_are_one_object():
    """Meshes are interned by device, shape, names, ranks and current rank."""
    assert DeviceMesh.abstract("cpu", (2, 3), tuple(range(6)), ("dp", "tp")) is GRID
    assert copy.copy(GRID) is GRID
    assert copy.deepcopy(GRID) is GRID


def test_everything_counts_in_the_hash():
    """to_hash differs when names, ranks, shape or device differ."""
    others = [
        DeviceMesh.abstract("cpu", (2, 3), tuple(range(6)), ("a", "b")),
        DeviceMesh.abstract("cpu", (3, 2), tuple(range(6)), ("dp", "tp")),
        DeviceMesh.abstract("cpu", (2, 3), (1, 0, 2, 3, 4, 5), ("dp", "tp")),
        DeviceMesh.abstract("npu", (2, 3), tuple(range(6)), ("dp", "tp")),
    ]
    assert len({mesh.to_hash() for mesh in [GRID, *others]}) == 5
    assert GRID.to_hash() == DeviceMesh.abstract("cpu", (2, 3), tuple(range(6)), ("dp", "tp")).to_hash()


def test_facts():
    """Sizes, names and positions are those of the constructor, and axes may be counted from the right."""
    assert (GRID.ndim, GRID.size(), GRID.size("tp"), GRID.size(-1)) == (2, 6, 3, 3)
    assert GRID.mesh == [[0, 1, 2], [3, 4, 5]]
    assert [GRID.coordinate_of(rank) for rank in (0, 4)] == [(0, 0), (1, 1)]
    assert repr(GRID) == "DeviceMesh(cpu, dp=2, tp=3, ranks=[0, 1, 2, 3, 4, 5])"
    unnamed = DeviceMesh.abstract("cpu", (2,), (0, 1), None)
    assert unnamed.mesh_dim_names is None
    assert unnamed.size("0") == 2


def test_flatten_keeps_the_ranks():
    """Flattening makes one axis over the same ranks, named by the argument or by joined names."""
    assert GRID.flatten().names == ("dp_tp",)
    assert GRID.flatten("all").ranks == GRID.ranks


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("shape", [(2, 2), (2, 3)])
def test_submeshes_pass_through_the_rank(shape):
    """A submesh holds the ranks that differ from the current one along the named axes only, in the order asked."""

    def on_rank():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        assert mesh["dp", "tp"] is mesh
        turned = mesh["tp", "dp"]
        return mesh.get_rank(), mesh.coordinate, mesh["tp"].ranks, mesh["dp"].ranks, turned.shape, turned.coordinate

    for rank, (seen, at, tp, dp, turned, turned_at) in enumerate(simulate(on_rank, shape[0] * shape[1], "torch")):
        row, column = divmod(rank, shape[1])
        assert (seen, at) == (rank, (row, column))
        assert tp == tuple(row * shape[1] + step for step in range(shape[1]))
        assert dp == tuple(column + step * shape[1] for step in range(shape[0]))
        assert (turned, turned_at) == (shape[::-1], (column, row))


@pytest.mark.platforms("torch")
def test_a_grid_that_does_not_fit_the_world():
    """Invalid sizes, irregular grids and ranks outside the world are refused."""

    def on_rank():
        return [
            refused(lambda: init_device_mesh("cpu", (3,))),
            refused(lambda: init_device_mesh("cpu", (2,), rank_list=[0])),
            refused(lambda: init_device_mesh("cpu", (0, 2))),
            refused(lambda: init_device_mesh("cpu", ())),
            refused(lambda: DeviceMesh("cpu", [0, 7])),
            refused(lambda: DeviceMesh("cpu", [[0], [0, 1]])),
        ]

    assert simulate(on_rank, 2, "torch")[1] == [
        "init_device_mesh: mesh_shape (3,) needs 3 ranks, the world has 2",
        "init_device_mesh: mesh_shape (2,) needs 2 ranks, rank_list has 1",
        "init_device_mesh: mesh_shape must be positive ints, got (0, 2)",
        "init_device_mesh: mesh_shape must be positive ints, got ()",
        "DeviceMesh: ranks [7] are outside the world of 2",
        "DeviceMesh: mesh must be a regular grid of ranks, got [[0], [0, 1]]",
    ]


@pytest.mark.platforms("torch")
def test_a_mesh_from_groups():
    """from_group rebuilds the mesh of a group, and refuses groups that are not the grid's axes."""

    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        groups = mesh.get_all_groups()
        assert DeviceMesh.from_group(groups[1], "cpu").ranks == mesh["tp"].ranks
        assert DeviceMesh.from_group(groups, "cpu", mesh.mesh, mesh_dim_names=("dp", "tp")) is mesh
        return [
            refused(lambda: DeviceMesh.from_group(groups, "cpu")),
            refused(lambda: DeviceMesh.from_group(groups[::-1], "cpu", mesh.mesh)),
        ]

    assert simulate(on_rank, 4, "torch")[0] == [
        "from_group: 2 groups were given; also pass mesh=, the grid of ranks whose axes they are",
        "from_group: group 0 has ranks (0, 1), axis 0 of mesh has (0, 2)",
    ]


@pytest.mark.platforms("torch")
def test_pickles_look_from_the_rank_that_reads_them():
    """A mesh is pickled by value and unpickled with the coordinates of the rank that reads it."""

    def on_rank():
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        assert pickle.loads(pickle.dumps(mesh)) is mesh  # noqa: S301 - our own bytes
        layout = Layout.from_device_mesh(mesh)("tp")
        assert pickle.loads(pickle.dumps(layout)) is layout  # noqa: S301 - the same
        return mesh.get_local_rank()

    assert simulate(on_rank, 3, "torch") == [0, 1, 2]


def test_the_current_mesh_belongs_to_the_thread():
    """Entering a mesh nests, is undone by exceptions, and is invisible to other threads."""
    inner, seen = GRID.flatten(), []
    with GRID:
        with pytest.raises(ZeroDivisionError), inner:
            seen.append(get_current_mesh() is inner and 1 // 0)
        assert get_current_mesh() is GRID
        other = threading.Thread(target=lambda: seen.append(get_current_mesh()))
        other.start()
        other.join()
    assert seen == [None]
    assert get_current_mesh() is None


@pytest.mark.parametrize("choice", [0, -1, slice(1), None, (), "", ["dp"]])
def test_what_is_no_name_chooses_no_axis(choice):
    """A mesh is sliced by names only; anything else raises a ValueError that is not an IndexError."""
    with pytest.raises(MeshError) as caught:
        GRID[choice]
    assert str(caught.value) == (
        f"mesh[{choice!r}]: axes are chosen by name, as in mesh['dp']; the mesh has the axes {GRID.names} of sizes "
        f"{GRID.shape}"
    )
    assert isinstance(caught.value, ValueError)
    assert not isinstance(caught.value, IndexError)


@pytest.mark.parametrize("name", ["None", "", 3])
def test_a_flattened_mesh_has_a_name(name):
    """The name of a flattened mesh follows the rules of all names of axes."""
    with pytest.raises(MeshError) as caught:
        GRID.flatten(name)
    assert str(caught.value) == (
        f"DeviceMesh: mesh_dim_names must be non-empty strings other than 'None', got ({name!r},)"
    )
