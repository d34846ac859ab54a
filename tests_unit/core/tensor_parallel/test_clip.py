from __future__ import annotations

import math

import pytest

from hyper_parallel import DTensor, Partial, Replicate, Shard, clip_grad_norm_, distribute_tensor

pytestmark = pytest.mark.platforms("torch")

SHAPES = {"a": (5, 3), "b": (7,), "c": (2, 3, 4), "d": (1,), "e": (3, 3)}


def gradients(twin):
    """Dense gradients by name."""
    return {name: twin.random(*shape, seed=index) for index, (name, shape) in enumerate(SHAPES.items())}


def parameters(twin, mesh):
    """Parameters of many layouts: DTensors on the mesh and on one of its axes, and a plain one."""
    import torch

    homes = {
        "a": (mesh, [Shard(0), Shard(1)]),
        "b": (mesh, [Replicate(), Shard(0)]),
        "c": (mesh, [Shard(1), Replicate()]),
        "d": (mesh["tp"], [Shard(0)]),
    }
    listed = {}
    for name, grad in gradients(twin).items():
        value = torch.zeros_like(grad)
        if name in homes:
            listed[name] = torch.nn.Parameter(distribute_tensor(value, *homes[name]))
            listed[name].grad = distribute_tensor(grad, *homes[name])
        else:
            listed[name] = torch.nn.Parameter(value)
            listed[name].grad = grad.clone()
    return listed


@pytest.mark.untraced
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf, "inf"])
@pytest.mark.parametrize("grid", [(2, 2), (2, 3)])
@pytest.mark.parametrize("bound", [0.5, 1e9])
@pytest.mark.parametrize("own", [True, False])
def test_the_norm_is_the_global_one_and_gradients_are_scaled(twin, order, grid, bound, own):
    """Every element counts once, whatever the layouts and meshes, for PyTorch's own function too."""
    import torch

    dense = [torch.nn.Parameter(torch.zeros_like(parameter)) for parameter in gradients(twin).values()]
    for parameter, grad in zip(dense, gradients(twin).values(), strict=True):
        parameter.grad = grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(dense, bound, norm_type=float(order))

    def rank(mesh):
        mine = parameters(twin, mesh)
        clip = clip_grad_norm_ if own else torch.nn.utils.clip_grad_norm_
        norm = clip(mine.values(), bound, norm_type=order)
        assert not isinstance(norm, DTensor)
        twin.same(norm, expected, "norm")
        for parameter, theirs in zip(mine.values(), dense, strict=True):
            twin.same(parameter.grad, theirs.grad, "gradient")

    twin.on_mesh(grid, rank, ("dp", "tp"))


@pytest.mark.parametrize("order", [1.0, 3.0, math.inf])
def test_pytorchs_norm_alone(twin, order):
    """`get_total_norm` is the norm of gradients on several meshes, partial ones too, and scales them by its partner."""
    import torch

    dense = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in gradients(twin).values()]
    for parameter, grad in zip(dense, gradients(twin).values(), strict=True):
        parameter.grad = grad.clone()
    expected = torch.nn.utils.get_total_norm([parameter.grad for parameter in dense], order)
    torch.nn.utils.clip_grads_with_norm_(dense, 0.5, expected)

    def rank(mesh):
        mine = list(parameters(twin, mesh).values())
        norm = torch.nn.utils.get_total_norm((parameter.grad for parameter in mine), order)
        twin.same(norm, expected, "norm")
        torch.nn.utils.clip_grads_with_norm_(mine, 0.5, norm)
        for parameter, theirs in zip(mine, dense, strict=True):
            twin.same(parameter.grad, theirs.grad, "gradient")
        mine[0].grad.fill_(math.inf)
        with pytest.raises(RuntimeError) as caught:
            torch.nn.utils.get_total_norm([parameter.grad for parameter in mine], order, error_if_nonfinite=True)
        assert str(caught.value) == f"get_total_norm: the {order:g}-norm of the gradients is inf"
        partial = DTensor.from_local(torch.ones(2), mesh, [Partial(), Partial()])
        other = distribute_tensor(torch.zeros(2), mesh["tp"])
        assert torch.nn.utils.get_total_norm([partial, other], math.inf) == 4.0

    twin.on_mesh((2, 2), rank, ("dp", "tp"))


@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("world", [2, 3])
def test_pytorchs_own_function_clips_plain_and_distributed_gradients(twin, order, world):
    """Norm and every gradient are those of one device; the norm is a DTensor, since PyTorch computes it from some."""
    import torch

    dense = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in gradients(twin).values()]
    for parameter, grad in zip(dense, gradients(twin).values(), strict=True):
        parameter.grad = grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(dense, 0.5, norm_type=order)

    def rank(mesh):
        listed = []
        placements = (Shard(0), Shard(0), Shard(1), None, Replicate())
        for grad, placement in zip(gradients(twin).values(), placements, strict=True):
            home = grad.clone() if placement is None else distribute_tensor(grad, mesh, [placement])
            listed.append(torch.nn.Parameter(torch.zeros_like(home)))
            listed[-1].grad = home
        twin.same(torch.nn.utils.clip_grad_norm_(listed, 0.5, norm_type=order), expected, "norm")
        for parameter, theirs in zip(listed, dense, strict=True):
            twin.same(parameter.grad, theirs.grad, "gradient")

    twin.on_mesh((world,), rank)


def test_a_partial_gradient_is_reduced_first(twin):
    """A partial gradient is reduced before its norm is taken."""

    def rank(mesh):
        from hyper_parallel.core.tensor_parallel import clip
        from hyper_parallel.platform.select import get_torch_platform

        grad = DTensor.from_local(twin.random(3, seed=mesh.rank), mesh, [Partial()])

        class Holder:
            pass

        holder = Holder()
        holder.grad = grad
        gradient = clip._reduced_gradient(get_torch_platform(), holder)
        assert gradient.placements == (Replicate(),)
        twin.same(gradient, twin.random(3, seed=0) + twin.random(3, seed=1), "gradient")

    twin.on_mesh((2,), rank)


def test_infinite_norms_are_refused_before_anything_is_scaled(twin):
    """``error_if_nonfinite`` raises and leaves gradients as they are."""
    import torch

    def rank(mesh):
        weight = torch.nn.Parameter(distribute_tensor(twin.random(4), mesh, [Shard(0)]))
        weight.grad = distribute_tensor(torch.tensor([1.0, 2.0, 3.0, math.inf], dtype=torch.float64), mesh, [Shard(0)])
        with pytest.raises(RuntimeError) as caught:
            clip_grad_norm_(weight, 1.0, error_if_nonfinite=True)
        assert weight.grad.full_tensor()[1] == 2
        return str(caught.value)

    assert twin.on_mesh((2,), rank)[0] == (
        "clip_grad_norm_: the 2-norm of the gradients is inf; nothing was scaled "
        "(error_if_nonfinite=False scales anyway)"
    )


def test_empty_shards_and_missing_gradients(twin):
    """Empty shards contribute nothing, and the norm of no gradients is zero."""
    import torch

    def rank(mesh):
        weight = torch.nn.Parameter(distribute_tensor(twin.random(2), mesh, [Shard(0)]))
        none = clip_grad_norm_([weight], 1.0)
        weight.grad = distribute_tensor(torch.tensor([3.0, 4.0], dtype=torch.float64), mesh, [Shard(0)])
        return none.item(), clip_grad_norm_([weight], 9.0).item(), clip_grad_norm_([weight], 9.0, math.inf).item()

    assert twin.on_mesh((4,), rank) == [(0.0, 5.0, 4.0)] * 4


@pytest.mark.parametrize("order", [0, -1.0])
def test_orders_that_are_no_norm(order):
    """Zero and negative orders are refused."""
    with pytest.raises(ValueError, match="norm_type must be positive"):
        clip_grad_norm_([], 1.0, norm_type=order)
