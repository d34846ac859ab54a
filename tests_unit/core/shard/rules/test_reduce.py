"""Reductions, softmaxes and running sums on PyTorch, every placement against the plain operator."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import distribute_tensor
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Partial, Shard
from hyper_parallel.errors import LayoutError
from hyper_parallel.verify.checker.function import check_function
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


def values(*shape, seed=0):
    """Distinct values of both signs."""
    return np.random.default_rng(seed).uniform(-2.0, 2.0, shape)


def whole(*shape, seed=0):
    """Small integers, with ties."""
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(float)


def holds(fn, arrays, mesh=(2,), **options):
    """Assert that `fn` means the same for all placements, and that none is refused."""
    report = check_function(fn, arrays, mesh, platform="torch", **options)
    assert report.ok, report.wrong[:5]
    assert not report.rejected, report.rejected[:3]


SUMS = [
    torch.sum, lambda x: x.sum(0), lambda x: x.sum(dim=(0, 2)), lambda x: x.sum(-1, keepdim=True),
    lambda x: torch.sum(x, 1, keepdim=True), torch.mean, lambda x: x.mean(0), lambda x: x.mean((0, 1), keepdim=True),
    lambda x: x.mean(dim=-1), lambda x: x.sum(dtype=torch.float64), lambda x: x.sum([]), torch.nansum,
    lambda x: x.mean(dim=0).sum() + x.mean(), lambda x: x.cumsum(1), lambda x: torch.cumsum(x, dim=-1),
]  # fmt: skip


@pytest.mark.parametrize("fn", SUMS)
def test_sums_and_means(fn):
    """A sum over a sharded dim is Partial; a mean divides by the global count, for uneven shards too."""
    holds(fn, [values(5, 1, 3)], (2,), partial=("sum", "avg", "max"))
    holds(fn, [values(5, 1, 3)], (3,))
    holds(fn, [values(5, 1, 3)], (2, 2), limit=20)


TRACE_IS_WRONG = torch.autograd.functional.jacobian(torch.trace, torch.ones(5, 3)).count_nonzero() != 3


def trace(x):
    """The trace; its gradient, where it is wrong in PyTorch, as in 2.10 for more rows than columns, is replaced."""
    return x.diagonal().sum() if TRACE_IS_WRONG and not isinstance(x, DTensor) else torch.trace(x)


WHOLE = [
    torch.prod, lambda x: x.prod(1), lambda x: x.prod(0, keepdim=True), torch.amax, lambda x: x.amax(0),
    lambda x: x.amin((0, 1), keepdim=True), torch.max, torch.min, lambda x: tuple(x.max(1)),
    lambda x: tuple(torch.min(x, dim=0, keepdim=True)),
    torch.argmax, lambda x: x.argmax(0), lambda x: x.argmin(-1, keepdim=True), torch.var, torch.std,
    lambda x: x.var(0), lambda x: x.var(0, unbiased=False), lambda x: x.std(1, correction=0, keepdim=True),
    lambda x: torch.var_mean(x, dim=1), torch.std_mean, lambda x: x.var(False),
    lambda x: torch.logsumexp(x, 1), lambda x: x.logsumexp((0, 1)), torch.norm, lambda x: x.norm(dim=0),
    lambda x: x.norm(p=1), lambda x: x.norm(float("inf"), dim=1), lambda x: torch.linalg.vector_norm(x, 3, dim=0),
    torch.linalg.vector_norm, torch.any, lambda x: (x > 0).all(0), lambda x: (x > 1).any(1, keepdim=True),
    lambda x: (x > 0).all(), torch.count_nonzero, lambda x: torch.count_nonzero(x, dim=0), lambda x: x.softmax(1),
    lambda x: F.softmax(x, dim=-1), lambda x: F.log_softmax(x, 0),
    lambda x: torch.log_softmax(x, 1, dtype=torch.float64),
    lambda x: torch.ops.aten._softmax_backward_data(x, x.detach().softmax(1), 1, torch.float64),
    lambda x: torch.norm(x, "nuc"), trace, lambda x: torch.dist(x, x * x, 3),
    lambda x: torch.renorm(x, 2, 1, 0.5),
    lambda x: F.softmin(x, 1), lambda x: x.cumprod(0), lambda x: torch.logcumsumexp(x, 0),
]  # fmt: skip


@pytest.mark.parametrize("fn", WHOLE)
@pytest.mark.untraced
def test_reductions_of_whole_dims(fn):
    """Reductions other than sums gather the reduced dims and have the plain gradient, at ties too."""
    holds(fn, [values(5, 3)], (2,), partial=("sum", "max"))
    holds(fn, [values(5, 3)], (3,))
    # Summands of ties do not add up to ties: extrema only.
    holds(fn, [whole(5, 3) + 0.5], (2, 2), partial=("max",), limit=10)


INTEGER = [torch.amax, lambda x: x.amin(0), lambda x: x.amax(1, keepdim=True), torch.sum, lambda x: x.any(0), torch.max]


@pytest.mark.parametrize("fn", INTEGER)
@pytest.mark.parametrize("mesh", [(2,), (3,), (4,), (2, 2)])
def test_integers(fn, mesh):
    """Extrema of integers may be Partial; no extremum of an empty shard is computed."""
    holds(fn, [np.random.default_rng(0).integers(-9, 9, (5, 3))], mesh)


@pytest.mark.parametrize("mesh", [(2,), (3,)])
def test_extrema_of_booleans(mesh):
    """The largest of booleans is computed of whole dims: PyTorch reduces no booleans by maximum."""
    holds(lambda x: (x.amax(0), x.amin(1)), [np.random.default_rng(0).integers(0, 2, (5, 3)) > 0], mesh)


def test_mean_of_nothing():
    """The mean over a dim of size zero is NaN on any number of ranks."""

    def means():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = distribute_tensor(torch.zeros(3, 0), mesh, [Shard(1)])
        return x.mean(1).full_tensor().numpy(), x.mean().full_tensor().numpy()

    for along, total in simulate(means, 2, platform="torch"):
        np.testing.assert_array_equal(along, np.full(3, np.nan, np.float32))
        assert np.isnan(total)


def test_extremum_of_two_tensors():
    """`torch.max` of two tensors is `maximum`, positionally and by name."""
    holds(lambda x, y: torch.max(x, y) + torch.min(x, other=y) + x.max(y), [values(4, 3), values(3, seed=1)])


def test_empty_shards():
    """With more ranks than rows, empty shards change neither sum nor mean."""
    holds(lambda x: (x.mean(0), x.sum(0), x.amax(0), x.mean()), [values(2, 3)], (4,))


def test_a_dim_that_does_not_exist():
    """A dim that does not exist is refused, naming the operator, the operand's layout and the dim."""

    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])
        x = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
        with pytest.raises(LayoutError) as caught:
            x.sum(2)
        return str(caught.value)

    assert simulate(run, 2, "torch")[0] == "sum(x=f32[4@tp, 3]): dim 2 does not exist in a tensor of 2 dims"


def test_communication_of_the_family():
    """Sums and means over a sharded dim are free until read; an extremum moves its operand once; backward is free."""

    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=["dp"])
        x = DTensor.from_local(torch.ones(2, 3, requires_grad=True), mesh, [Shard(0)])
        with record_events() as log:
            loss = x.mean() + x.sum()
            loss.backward()
        assert log.collectives() == []
        assert loss.placements == (Partial(),)
        with record_events() as log:
            x.softmax(1).amax(1)
        assert log.collectives() == []
        with record_events() as log:
            x.amax(0)
        with record_events() as integers:
            DTensor.from_local(torch.ones(2, 3, dtype=torch.int64), mesh, [Shard(0)]).amax(0)
        assert integers.collectives() == []
        return log.collectives()

    assert simulate(run, 2, "torch") == [["all_to_all"]] * 2


RUNNING = [
    torch.logcumsumexp, torch.cumprod, lambda x, dim: torch.cummax(x, dim)[0], lambda x, dim: torch.cummin(x, dim)[0],
]  # fmt: skip


@pytest.mark.parametrize("fn", RUNNING)
def test_second_derivatives_of_running_operators_reach_empty_shards(fn):
    """Second derivatives of running operators are the plain ones, and ranks with empty shards join all collectives."""

    def second(x, rows):
        (first,) = torch.autograd.grad(fn(rows(x.sin()), 1).sum(), x, create_graph=True)
        return torch.autograd.grad((first * first).sum(), x)[0]

    def on_rank():
        x = distribute_tensor(torch.from_numpy(array), init_device_mesh("cpu", (3,)), [Shard(1)]).requires_grad_()
        return second(x, lambda tensor: tensor.redistribute(placements=[Shard(0)])).full_tensor().numpy()

    array = values(2, 5)
    wanted = second(torch.from_numpy(array).requires_grad_(), lambda tensor: tensor).numpy()
    for result in simulate(on_rank, 3, "torch"):
        np.testing.assert_allclose(result, wanted, rtol=1e-9)


@pytest.mark.parametrize("fn", [F.softmin, lambda x: F.softmax(x[:, None].expand(5, 3, 4))])
@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
def test_softmax_by_its_old_default(holds, fn):
    """Without a dim, softmax and softmin choose the one that PyTorch chooses."""
    holds(fn, (5, 4), limits={(2,): 8, (3,): 4, (4,): 3, (2, 2): 3})


MISFITS = {
    "a dim twice": (lambda x: x.sum((0, -2)), (4, 3), "sum(x=f64[4@tp, 3]): dim (0, -2) names a dim twice"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_a_call_that_does_not_fit_is_refused(refuses, name):
    """A call that fails on one device fails on every rank with its reason, before anything moves."""
    refuses(*MISFITS[name])
