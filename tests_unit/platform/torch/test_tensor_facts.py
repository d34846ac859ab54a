"""What a DTensor says of itself beside its values, and methods that change that alone."""

from __future__ import annotations

import math

import pytest

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.errors import ShardMismatchError
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def on_ranks(function, *shape):
    """``function(mesh)`` on every rank of a mesh of ``shape``."""
    return simulate(lambda: function(init_device_mesh("cpu", shape)), math.prod(shape), "torch")


def whole_of(value):
    """A plain tensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("placement", [R, S0, S1])
def test_a_tensor_detached_in_place_passes_no_gradient(world, placement):
    """detach_() cuts the tensor itself off the graph, views and later uses included, by method and by function."""
    import torch

    values = torch.randn(2, 5, generator=torch.Generator().manual_seed(1))

    def gradients(x):
        results = []
        for detach in (torch.Tensor.detach_, torch.detach_, lambda y: y.detach_()):
            y = x * 2
            y.sum()  # whatever was kept for other uses of y must not survive
            assert detach(y) is y
            assert (y.requires_grad, y.is_leaf, y.grad_fn) == (False, True, None)
            results.append(torch.autograd.grad((y**2 * x + y[1:].sum()).sum(), x)[0])
        return results

    expected = gradients(values.clone().requires_grad_())
    for actual in on_ranks(
        lambda mesh: [whole_of(g) for g in gradients(distribute_tensor(values, mesh, [placement]).requires_grad_())],
        world,
    ):
        for one_device, distributed in zip(expected, actual, strict=True):
            torch.testing.assert_close(distributed, one_device)


@pytest.mark.parametrize("shape, places", [((2,), [S0]), ((3,), [S1]), ((2, 3), [R, S0]), ((2, 3), [S1, S0])])
def test_strides_are_those_of_the_values(shape, places):
    """stride() and is_contiguous() of permuted and expanded tensors are those on one device, uneven shards included."""
    import torch

    values = torch.arange(140.0).reshape(7, 5, 4)
    views = [
        lambda x: x, lambda x: x.transpose(0, 1), lambda x: x.permute(2, 0, 1), lambda x: x.permute(2, 1, 0),
        lambda x: x.transpose(0, 2).contiguous(), lambda x: x.mT, lambda x: x[:, :, ::2], lambda x: x.unsqueeze(1).mT,
        lambda x: x.expand(3, 7, 5, 4), lambda x: x.transpose(1, 2) * 2, lambda x: x.movedim(0, -1).clone(),
    ]  # fmt: skip

    def facts(x):
        made = [view(x) for view in views]
        formats = (torch.contiguous_format, torch.channels_last)
        return [
            (
                y.stride(), torch.Tensor.stride(y), y.stride(-1), y.is_contiguous(), torch.Tensor.is_contiguous(y),
                [y.is_contiguous(memory_format=kind) for kind in formats if y.ndim == 4 or kind is formats[0]],
            )
            for y in made
        ]  # fmt: skip

    expected = facts(values)
    for actual in on_ranks(lambda mesh: facts(distribute_tensor(values, mesh, places)), *shape):
        assert actual == expected


@pytest.mark.parametrize("world", [2, 3])
def test_no_function_turns_a_dtensor_into_a_plain_tensor(world):
    """What PyTorch's own code makes of sizes alone is replicated, with the values of one device."""
    import torch

    def results(x):
        return [
            torch.trapezoid(x, dim=0), torch.trapz(x, dim=0), torch.trapezoid(x, dim=1),
            torch.trapezoid(x.mT, dim=-1),
        ]  # fmt: skip

    expected = results(torch.ones(0, 5))

    def on_rank(mesh):
        made = results(distribute_tensor(torch.ones(0, 5), mesh, [S1]))
        assert all(isinstance(y, DTensor) for y in made)
        return [y.full_tensor() for y in made]

    for actual in on_ranks(on_rank, world):
        assert [y.tolist() for y in actual] == [y.tolist() for y in expected]


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 3)])
def test_checked_replicas_get_the_first_rank_s_values(shape):
    """from_local(run_check=True) makes replicas equal to the first rank's; each rank's tensor gets its gradient."""
    import torch

    def on_rank(mesh):
        local = torch.full((2,), float(mesh.rank + 1)).requires_grad_()
        places = [S0, R] if mesh.ndim == 2 else [R]
        x = DTensor.from_local(local * 1, mesh, places, run_check=True)
        (x**2).sum().backward()
        return x.detach().to_local().tolist(), local.grad.tolist()

    for rank, (held, gradient) in enumerate(on_ranks(on_rank, *shape)):
        first = float(1 + (rank // 3 * 3 if len(shape) == 2 else 0))
        assert (held, gradient) == ([first] * 2, [2 * first] * 2)


def test_checked_replicas_that_agree_are_the_tensors_themselves():
    """Equal replicas, NaN among them, shards and partial values are left as they are."""
    import torch

    def on_rank(mesh):
        equal, own = torch.tensor([1.0, float("nan")]), torch.full((2,), float(mesh.rank))
        given = [(equal, R), (own, S0), (own, Partial())]
        return [DTensor.from_local(local, mesh, [place], run_check=True).to_local() is local for local, place in given]

    assert on_ranks(on_rank, 3) == [[True] * 3] * 3


def test_ranks_that_need_gradients_differently_are_refused():
    """run_check=True raises on every rank where some need a gradient and others do not."""
    import torch

    def on_rank(mesh):
        with pytest.raises(ShardMismatchError) as caught:
            DTensor.from_local(torch.ones(2, requires_grad=mesh.rank == 1), mesh, [S0], run_check=True)
        return str(caught.value)

    message = (
        "from_local: local requires grad on ranks [1] of [0, 1, 2] only, so backward would wait for the others; call "
        "local.requires_grad_() on every rank, or on none"
    )
    assert on_ranks(on_rank, 3) == [message] * 3
