"""Functions of local tensors called with DTensors of several meshes: values and gradients, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh, init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.shard.custom.function_map import local_map
from hyper_parallel.errors import MeshError, MeshLookupError, MeshMismatchError, PlacementError
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.simulate import simulate

torch_only = pytest.mark.platforms("torch")
S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()
SIZES = {"x": (7, 5), "w": (5, 9), "weights": (7, 9)}
SQUARE, LINE, TURNED = [[0, 1], [2, 3]], [0, 1, 2, 3], [[0, 2], [1, 3]]


def numbers(name):
    """Random numbers of both signs, the same on every rank."""
    return np.random.default_rng(len(name)).uniform(-2.0, 2.0, SIZES[name]).astype(np.float32)


def product_on_rank(platform_name, x_on, w_on, out_on, grads):
    """Value and gradients of `x @ w`, weighted by random numbers and summed, of operands on two meshes."""
    platform = platform_named(platform_name)

    def placed(name, on):
        return distribute_tensor(platform.from_numpy(numbers(name)), DeviceMesh("cpu", on[0]), on[1])

    x, w, weights = placed("x", x_on), placed("w", w_on), placed("weights", (out_on[0], [R] * np.ndim(out_on[0])))
    region = local_map(lambda x, w: x @ w, out_on[1], None, grads, DeviceMesh("cpu", out_on[0]))

    def loss(x, w):
        out = region(x, w)
        return (out * weights).sum(), out

    if platform_name == "torch":
        x.requires_grad_()
        w.requires_grad_()
        total, out = loss(x, w)
        total.backward()
        results = (out.detach(), x.grad, w.grad)
    else:
        from hyper_parallel import value_and_grad

        (_, out), (dx, dw) = value_and_grad(loss, (0, 1), has_aux=True)(x, w)
        results = (out, dx, dw)
    return [platform.tensor_to_numpy(result.full_tensor()) for result in results]


def assert_as_on_one_device(platform_name, x_on, w_on, out_on, grads=None, *, world=4):
    """Value and both gradients are those of one device, on every rank."""
    x, w, weights = numbers("x"), numbers("w"), numbers("weights")
    expected = (x @ w, weights @ w.T, x.T @ weights)
    arguments = (platform_name, x_on, w_on, out_on, grads)
    for results in simulate(product_on_rank, world, platform_name, arguments):
        for result, wanted in zip(results, expected, strict=True):
            np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-5)


CASES = [
    # rows over all ranks: weights that are replicated on a grid get the sum along both axes
    ((LINE, [S0]), (SQUARE, [R, R]), (LINE, [S0])),
    ((SQUARE, [S0, S0]), (LINE, [R]), (SQUARE, [S0, S0])),
    # each operand on axes of its own, in another order
    ((SQUARE, [S0, R]), (TURNED, [S1, R]), (SQUARE, [S0, S1])),
    ((SQUARE, [S0, S1]), (TURNED, [S0, R]), (SQUARE, [S0, P])),
    ((SQUARE, [S0, S1]), (TURNED, [S0, R]), (TURNED, [P, S0])),
    # nothing differs anywhere: no gradient is summed
    ((SQUARE, [R, R]), (LINE, [R]), (LINE, [R])),
]


@torch_only
@pytest.mark.parametrize("x_on, w_on, out_on", CASES)
def test_gradients_are_summed_where_ranks_differ(x_on, w_on, out_on):
    """Axes of the other mesh count as far as ranks of the own mesh differ along them, for uneven shards too."""
    assert_as_on_one_device("torch", x_on, w_on, out_on)


@pytest.mark.platforms("mindspore")
def test_on_mindspore():
    """The same function of placements: weights on a grid, rows over all ranks."""
    assert_as_on_one_device("mindspore", *CASES[0])


@torch_only
@pytest.mark.parametrize("world", [2, 3])
def test_two_names_of_the_same_ranks(world):
    """Meshes of the same ranks that differ only in the names of axes are several meshes."""
    ranks = list(range(world))
    assert_as_on_one_device(
        "torch", (ranks, [S0]), ([ranks], [R, R]), ([[rank] for rank in ranks], [S0, R]), world=world
    )


@torch_only
def test_outputs_are_on_the_mesh_of_the_first_tensor():
    """Without device_mesh=, the first DTensor's mesh is the outputs', as in PyTorch."""
    import torch

    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = distribute_tensor(torch.ones(6, 4), mesh, [S0, R])
        w = distribute_tensor(torch.ones(4, 6), mesh["tp"], [S1])
        assert local_map(lambda w, x: x @ w, [S1])(w, x).device_mesh is mesh["tp"]
        return local_map(lambda x, w: x @ w, [S0, S1])(x, w).device_mesh is mesh

    assert all(simulate(body, 4, platform="torch"))


@torch_only
def test_a_tensor_of_a_submesh_is_another_one_for_each_index_of_the_other_axes():
    """The gradient of a weight on `mesh["tp"]` is that of the rows of its index of dp; x, on both axes, gets all."""
    import torch

    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x, w, weights = (torch.from_numpy(numbers(name)) for name in SIZES)
        rows = distribute_tensor(x, mesh, [S0, R]).requires_grad_()
        weight = distribute_tensor(w, mesh["tp"], [S1]).requires_grad_()
        out = local_map(lambda x, w: x @ w, [S0, S1])(rows, weight)
        (out * distribute_tensor(weights, mesh)).sum().backward()
        torch.testing.assert_close(rows.grad.full_tensor(), weights @ w.T)
        own = slice(0, 4) if mesh.get_local_rank("dp") == 0 else slice(4, 7)
        torch.testing.assert_close(weight.grad.full_tensor(), x[own].T @ weights[own])
        return True

    assert all(simulate(body, 4, platform="torch"))


@torch_only
def test_a_replicated_weight_of_a_submesh_is_summed_along_its_own_axis():
    """Sequence rows over tp: a gain on `mesh["tp"]` gets the sum over tp, within its index of dp."""
    import torch

    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x, gain = torch.from_numpy(numbers("x")), torch.from_numpy(numbers("w")[0, :5].copy())
        rows = distribute_tensor(x, mesh, [S0, S0]).requires_grad_()
        weight = distribute_tensor(gain, mesh["tp"], [R]).requires_grad_()
        local_map(lambda x, g: x * g, [S0, S0])(rows, weight).sum().backward()
        own = slice(0, 4) if mesh.get_local_rank("dp") == 0 else slice(4, 7)
        torch.testing.assert_close(weight.grad.full_tensor(), x[own].sum(0))
        torch.testing.assert_close(rows.grad.full_tensor(), gain.expand(7, 5))
        return True

    assert all(simulate(body, 4, platform="torch"))


def refused(kind, body, world=4):
    """The message that every rank gets from `body(mesh)`, on a mesh of axes dp and tp; rank 0's."""

    def on_rank():
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(kind) as caught:
            body(mesh)
        return str(caught.value)

    return simulate(on_rank, world, platform="torch")[0]


FIX = (
    "Give w an entry in in_grad_placements: Partial() for axes along which its gradient must be summed, Replicate() "
    "for other axes on which it is replicated; or move it to the mesh of the other operands with "
    "get_platform().get_tensor_transform().transform(tensor, layout)"
)


@torch_only
def test_ranks_of_one_axis_some_of_which_compute_the_same():
    """Rows that differ between two pairs of four ranks: a sum over the four would count each pair twice."""
    import torch

    def body(mesh):
        x = distribute_tensor(torch.ones(6, 4), mesh, [S0, R])
        w = distribute_tensor(torch.ones(4, 6, requires_grad=True), DeviceMesh("cpu", LINE), [R])
        local_map(lambda x, w: x @ w, [S0, R])(x, w)

    assert refused(MeshMismatchError, body) == (
        "local_map(<lambda>): the gradient of w on DeviceMesh(cpu, 4, ranks=[0, 1, 2, 3]) cannot be derived: of the "
        f"ranks [0, 1, 2, 3], on which it is replicated, some compute the same but others do not. {FIX}"
    )


@torch_only
def test_a_tensor_of_which_other_ranks_may_have_another():
    """Whether x, on `mesh["tp"]`, is the same for each index of dp is unknown, and decides about w's gradient."""
    import torch

    def body(mesh, grads=None):
        x = distribute_tensor(torch.ones(6, 4), mesh["tp"], [R])
        w = distribute_tensor(torch.ones(4, 6, requires_grad=True), mesh, [R, R])
        region = local_map(lambda x, w: x @ w, [R, R], None, grads, mesh)
        region(x, w).sum().backward()
        return w.grad.full_tensor()[0, 0].item()

    assert refused(MeshMismatchError, body) == (
        "local_map(<lambda>): the gradient of w on DeviceMesh(cpu, dp=2, tp=2, ranks=[0, 1, 2, 3]) "
        "cannot be derived: x is on a mesh without rank 2, which may or may not compute the same as this rank. " + FIX
    )

    def declared():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert body(mesh, {"w": [P, R]}) == 12.0
        return body(mesh, {"w": [R, R]}) == 6.0

    assert all(simulate(declared, 4, platform="torch"))


@torch_only
def test_without_gradient_nothing_is_open():
    """Tensors that receive no gradient enter from any mesh."""
    import torch

    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = distribute_tensor(torch.ones(6, 4), mesh, [S0, R])
        w = distribute_tensor(torch.ones(4, 6, requires_grad=True), DeviceMesh("cpu", LINE), [R])
        with torch.no_grad():
            out = local_map(lambda x, w: x @ w, [S0, R])(x, w)
        frozen = local_map(lambda x, w: x @ w, [S0, R])(x, w.detach())
        return bool((out.full_tensor() == 4).all() and (frozen.full_tensor() == 4).all())

    assert all(simulate(body, 4, platform="torch"))


@torch_only
def test_entries_are_placements_on_the_mesh_of_their_tensor():
    """Each entry of in_placements is about its tensor's own mesh; a layout of another mesh is refused."""
    import torch

    def on_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x, w = torch.from_numpy(numbers("x")), torch.from_numpy(numbers("w"))
        rows, weight = distribute_tensor(x, mesh), distribute_tensor(w, mesh["tp"])
        options = {"in_placements": ([S0, R], [S1]), "redistribute_inputs": True}
        out = local_map(lambda x, w: x @ w, [S0, S1], **options)(rows, weight)
        torch.testing.assert_close(out.full_tensor(), x @ w)
        layouts = {"w": Layout.place(mesh, [R, S1], w.shape)}
        with pytest.raises(MeshMismatchError, match="mesh"):
            local_map(lambda x, w: x @ w, [S0, S1], layouts)(rows, weight)
        return True

    assert all(simulate(on_rank, 4, platform="torch"))


@torch_only
def test_placements_that_do_not_fit_name_the_tensor_and_its_mesh():
    """With several meshes, the number of axes alone does not say which entry is wrong."""
    import torch

    def body():
        mesh = init_device_mesh("cpu", (3, 1), mesh_dim_names=("dp", "tp"))
        x, w = distribute_tensor(torch.ones(6, 4), mesh), distribute_tensor(torch.ones(4, 6), mesh["tp"])
        messages = []
        for declared in (([R, R], ([R, R], [R, R])), ([R], None), ([S0, Shard(2)], None), ({"y": [R, R, R]}, None)):
            with pytest.raises(PlacementError) as caught:
                local_map(lambda x, w: x @ w, *declared)(x, w)
            messages.append(str(caught.value))
        return mesh.rank, messages

    one, both = "DeviceMesh(cpu, tp=1, ranks=[{}])", "DeviceMesh(cpu, dp=3, tp=1, ranks=[0, 1, 2])"
    twice, thrice = "2 given (Replicate(), Replicate())", "3 given (Replicate(), Replicate(), Replicate())"
    count = "for the 2 axes ('dp', 'tp') of the mesh; give one per axis"
    for rank, messages in simulate(body, 3, platform="torch"):
        expected = [
            f"w on {one.format(rank)}: placements: {twice} for the 1 axes ('tp',) of the mesh; give one per axis",
            f"output on {both}: placements: 1 given (Replicate()) {count}",
            f"output on {both}: placements: Shard(2) names dim 2, the tensor has 2 dims",
            f"output on {both}: placements: {thrice} {count}",
        ]
        assert messages == [f"local_map(<lambda>): {text}" for text in expected]


@torch_only
def test_a_rank_outside_of_one_of_the_meshes():
    """A rank that one operand's mesh leaves out has nothing to call the function with."""
    import torch

    def body():
        mesh, part = DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [0, 1])
        x, w = distribute_tensor(torch.ones(6, 4), mesh), distribute_tensor(torch.ones(4, 6), part)
        if part.get_coordinate() is not None:
            return "inside"
        with pytest.raises(MeshLookupError) as caught:
            local_map(lambda x, w: x @ w, [R])(x, w)
        assert isinstance(caught.value, MeshError)
        return str(caught.value)

    assert simulate(body, 3, platform="torch")[2] == (
        "rank 2 is not in DeviceMesh(cpu, 2, ranks=[0, 1]): it holds no shard of tensors on that mesh and takes no "
        "part in its collectives; leave it out with 'if mesh.get_coordinate() is not None:'"
    )
