from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from hyper_parallel.core.dtensor import cheapest_steps
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.exchange import ReduceExchange
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.dtensor.redistribute import gathered_view, redistribute
from hyper_parallel.core.dtensor.transition import clear_transition_cache, plan_transition
from hyper_parallel.errors import LayoutError, MeshError, ShardMismatchError, UnsupportedOperatorError
from hyper_parallel.platform.select import get_torch_platform, platform_named
from hyper_parallel.transport.base import active_transport
from hyper_parallel.verify.checker.function import check_function
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")

S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()
WORLDS = [
    ((2,), (7, 5)), ((3,), (5, 3)), ((4,), (7, 5)), ((4,), (1, 4)), ((3,), (0, 3)), ((4,), ()),
    ((2, 2), (7, 5)), ((2, 3), (5, 3)), ((2, 2), (0, 3)), ((1, 2), (5, 3)), ((2, 2), (1, 4)),
]  # fmt: skip


class Case:
    """A plan with random values and a random cotangent, as NumPy arrays per rank."""

    def __init__(self, dense, source, target, varying=(), seed=0):
        rng = np.random.default_rng(seed)
        shape = source.shape
        self.dense, self.source, self.target, self.varying = dense, source, target, varying
        self.cotangent = Layout.of(target.mesh, target.dim_axes, [(axis, "sum") for axis in varying], shape)
        self.value, self.grad = rng.normal(size=shape), rng.normal(size=shape)
        self.locals = dense.scatter(self.value, source, rng)
        self.grads = dense.scatter(self.grad, self.cotangent, rng)

    def plan_of(self, rank):
        """The plan as ``rank`` makes it."""
        see = self.dense.for_rank
        return plan_transition(see(self.source, rank), see(self.target, rank), self.varying)


def run_cases(cases, world):
    """Return the ranks' outputs and gradients of each case."""
    import torch

    platform = get_torch_platform()

    def on_rank():
        rank = active_transport().rank
        results = []
        for case in cases:
            x = torch.from_numpy(case.locals[rank].copy()).requires_grad_()
            y = redistribute(x, case.plan_of(rank), platform)
            y.backward(torch.from_numpy(case.grads[rank]))
            results.append((y.detach().numpy(), x.grad.numpy()))
        return results

    ranks = simulate(on_rank, world, "torch")
    return [([value[i][0] for value in ranks], [value[i][1] for value in ranks]) for i in range(len(cases))]


def check(dense, cases, world):
    """Assert values, gradients and the adjoint identity of all cases."""
    for case, (outputs, grads) in zip(cases, run_cases(cases, world), strict=True):
        note = repr(case.plan_of(0))
        np.testing.assert_allclose(dense.assemble(outputs, case.target), case.value, atol=1e-10, err_msg=note)
        if not any(op == "avg" for _, op in case.source.partials + case.target.partials):
            back = dense.assemble(grads, dense.dual(case.source))
            np.testing.assert_allclose(back, case.grad, atol=1e-10, err_msg=note)
        paired = inner(outputs, case.grads, case.target, case.varying)
        np.testing.assert_allclose(paired, inner(case.locals, grads, case.source), atol=1e-8, err_msg=note)


def inner(values, grads, layout, varying=()):
    """<values, grads> over the independent numbers of a layout: replicas count once, every partial value counts."""
    used = {axis for axes in layout.dim_axes for axis in axes} | {axis for axis, _ in layout.partials} | set(varying)
    replicas = np.prod([size for axis, size in enumerate(layout.mesh.shape) if axis not in used])
    return sum(float((value * grad).sum()) for value, grad in zip(values, grads, strict=True)) / replicas


@pytest.mark.parametrize("mesh, shape", WORLDS)
@pytest.mark.untraced
def test_every_transition_forward_and_backward(dense, mesh, shape):
    """Redistribution between any two layouts keeps the value, and the true gradient arrives in the dual layout."""
    layouts = dense.every_layout(dense.grid(mesh), shape)
    cases = [Case(dense, value, other, seed=i) for i, (value, other) in enumerate(itertools.product(layouts, layouts))]
    check(dense, cases, int(np.prod(mesh)))


@pytest.mark.parametrize("mesh, shape", [((3,), (5, 3)), ((2, 2), (7, 5)), ((2, 3), (4,))])
@pytest.mark.untraced
def test_every_varying_consumer(dense, mesh, shape):
    """Gradients of consumers that differ along replicated axes are summed into the source: <Ax,y> = <x,A'y>."""
    layouts = dense.every_layout(dense.grid(mesh), shape)
    cases = []
    for source, target in itertools.product(layouts, layouts):
        used = {axis for axes in target.dim_axes for axis in axes} | {axis for axis, _ in target.partials}
        free = [axis for axis in range(len(mesh)) if axis not in used]
        for count in range(1, len(free) + 1):
            cases.extend(Case(dense, source, target, axes, len(cases)) for axes in itertools.combinations(free, count))
    check(dense, cases, int(np.prod(mesh)))


@pytest.mark.untraced
def test_plans_as_on_thousands_of_ranks(dense, monkeypatch):
    """Where no reduction straight to the target is considered, as on large meshes, other steps lead there."""
    layouts = dense.every_layout(dense.grid((2, 3)), (7, 5))
    pairs = itertools.islice(itertools.product(layouts, layouts), 0, None, 3)
    cases = [Case(dense, value, other, seed=i) for i, (value, other) in enumerate(pairs)]

    def straight():
        return sum(isinstance(step, ReduceExchange) for case in cases for step in case.plan_of(0).steps)

    assert straight() > 0
    monkeypatch.setattr(cheapest_steps, "MAX_SUMMED", 0)
    clear_transition_cache()
    assert straight() == 0
    check(dense, cases, 6)
    clear_transition_cache()


@pytest.mark.sweep
@pytest.mark.untraced
def test_transitions_on_three_axes(dense):
    """On a 2x2x2 mesh orders of axes, partial axes that stay and axes that move can be combined."""
    layouts = dense.every_layout(dense.grid((2, 2, 2)), (7, 5))
    rng = np.random.default_rng(3)
    pairs = [rng.integers(len(layouts), size=2) for _ in range(60)]
    check(dense, [Case(dense, layouts[i], layouts[j], seed=i) for i, j in pairs], 8)


@pytest.mark.untraced
def test_averages(dense):
    """Partial(avg) reduces to the mean and is made without scaling; its gradient is divided by the axis size."""
    layouts = dense.every_layout(dense.grid((2, 2)), (5, 3), partials=("sum", "avg"))
    pairs = itertools.islice(itertools.product(layouts, layouts), 0, None, 3)
    check(dense, [Case(dense, value, other, seed=i) for i, (value, other) in enumerate(pairs)], 4)


def test_an_average_moves_between_axes_of_unequal_size():
    """An average keeps its value when it moves from three ranks to two, where the scale is two thirds."""
    places = [(Replicate(), Partial("avg")), (Partial("avg"), Replicate()), (Partial("avg"), Partial("avg")),
              (Shard(0), Partial("avg")), (Partial("avg"), Shard(0)), (Replicate(), Replicate())]  # fmt: skip
    values = [np.random.default_rng(0).standard_normal((5, 3))]
    for mesh, target in itertools.product([(2, 3), (3, 2)], places):

        def moved(x, target=target):
            return x.redistribute(placements=target) if isinstance(x, DTensor) else x * 1

        report = check_function(moved, values, mesh, platform="torch", placements=[places])
        assert report.all_held, (mesh, target, report.wrong, report.rejected)
        assert report.backward == len(places)


@pytest.mark.parametrize("op", ["max", "min", "prod"])
@pytest.mark.untraced
def test_other_reductions(dense, op):
    """Partial(max), (min) and (prod) become any layout, and are made from any, with the value unchanged."""
    import torch

    layouts = dense.every_layout(dense.grid((2, 2)), (5, 3), partials=(op,))
    cases = [Case(dense, value, other, seed=i) for i, (value, other) in enumerate(itertools.product(layouts, layouts))]

    def on_rank():
        rank = active_transport().rank
        platform = get_torch_platform()
        return [redistribute(torch.from_numpy(c.locals[rank]), c.plan_of(rank), platform).numpy() for c in cases]

    ranks = simulate(on_rank, 4, "torch")
    for index, case in enumerate(cases):
        whole = dense.assemble([value[index] for value in ranks], case.target)
        np.testing.assert_allclose(whole, case.value, atol=1e-10, err_msg=repr(case.plan_of(0)))


def on_ranks(dense, mesh, body):
    """Run ``body(torch, platform, rank, place)`` on every rank; ``place`` makes layouts as the rank sees them."""
    import torch

    def on_rank():
        rank = active_transport().rank
        grid = dense.grid(mesh, rank)
        return body(torch, get_torch_platform(), rank, lambda places, shape: Layout.place(grid, places, shape))

    return simulate(on_rank, int(np.prod(mesh)), "torch")


@pytest.mark.parametrize("op, sign", [("max", 1), ("min", -1)])
def test_the_gradient_of_an_extremum_goes_to_the_ranks_that_attained_it(dense, op, sign):
    """Partial(max/min): the gradient is masked to the ranks that attained the extremum, and ties share evenly."""
    locals_ = sign * np.array([[1.0, 5.0, 3.0], [2.0, 5.0, 1.0], [2.0, 0.0, 0.0]])

    def body(torch, platform, rank, place):
        x = torch.tensor(locals_[rank], requires_grad=True)
        steps = plan_transition(place([Partial(op)], (3,)), place([R], (3,)))
        y = redistribute(x, steps, platform)
        y.backward(torch.tensor([10.0, 20.0, 30.0], dtype=torch.float64))
        return y.tolist(), x.grad.tolist()

    expected = [[0, 10, 30], [5, 10, 0], [5, 0, 0]]
    for (value, grad), wanted in zip(on_ranks(dense, (3,), body), expected, strict=True):
        assert value == (sign * np.array([2.0, 5.0, 3.0])).tolist()
        assert grad == wanted


def test_the_gradient_of_an_extremum_is_differentiable(dense):
    """The second derivative through Partial(max) sums over what each rank computes from its masked gradient."""

    def body(torch, platform, rank, place):
        x = torch.tensor([float(rank), -float(rank)], dtype=torch.float64, requires_grad=True)
        top = redistribute(x, plan_transition(place([Partial("max")], (2,)), place([R], (2,))), platform)
        (first,) = torch.autograd.grad((top**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return first.tolist(), second.tolist()

    # top = (1, 0): the first element was attained on rank 1, the second on rank 0.
    assert on_ranks(dense, (2,), body) == [([0, 0], [0, 0]), ([3, 0], [6, 0])]


def test_tied_extrema_are_differentiable(dense):
    """If two ranks tie, each rank's second derivative is half of the dense one."""

    def body(torch, platform, _rank, place):
        x = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
        top = redistribute(x, plan_transition(place([Partial("max")], (1,)), place([R], (1,))), platform)
        (first,) = torch.autograd.grad((top**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return first.item(), second.item()

    # Together the ranks' shares are 3 * 2**2 and its derivative 6 * 2.
    assert on_ranks(dense, (2,), body) == [(6, 6), (6, 6)]


def test_an_extremum_to_shards(dense):
    """Partial(max) to Shard masks after the gather, and mixes with other axes that move."""

    def body(torch, platform, rank, place):
        x = torch.tensor([1.0, 2.0, 3.0, 4.0]) * (1 if rank % 2 else -1)
        x.requires_grad_()
        y = redistribute(x, plan_transition(place([Partial("max"), R], (4,)), place([S0, R], (4,))), platform)
        y.sum().backward()
        return y.tolist(), x.grad.tolist()

    results = on_ranks(dense, (2, 2), body)
    assert [grad for _, grad in results] == [[0.5] * 4, [0.5] * 4, [0.5] * 4, [0.5] * 4]


def test_a_product_has_no_gradient(dense):
    """A gradient through Partial(prod) is refused with a clear message; without one the value is reduced."""

    def body(torch, platform, _rank, place):
        steps = plan_transition(place([Partial("prod")], (2,)), place([R], (2,)))
        with pytest.raises(UnsupportedOperatorError) as caught:
            redistribute(torch.ones(2, requires_grad=True), steps, platform)
        with torch.no_grad():
            value = redistribute(torch.full((2,), 3.0, requires_grad=True), steps, platform)
        return str(caught.value), value.tolist()

    assert on_ranks(dense, (2,), body)[0] == (
        "redistribute: no gradient is defined for the reduction of f32[2] + Partial(prod)@a; detach() the tensor first",
        [9.0, 9.0],
    )


def test_double_backward(dense):
    """Each backward is itself differentiable: second derivatives through every transition equal the dense ones."""
    grid = dense.grid((2, 2))
    layouts = dense.every_layout(grid, (3, 4))[::3]
    pairs = list(itertools.product(layouts, layouts))
    cases = [Case(dense, value, other, seed=i) for i, (value, other) in enumerate(pairs)]

    def on_rank():
        import torch

        rank, results = active_transport().rank, []
        for case in cases:
            x = torch.from_numpy(case.locals[rank].copy()).requires_grad_()
            g = torch.from_numpy(case.grads[rank].copy()).requires_grad_()
            y = redistribute(x, case.plan_of(rank), get_torch_platform())
            (back,) = torch.autograd.grad(y, x, g, create_graph=True)
            # back is linear in g; its gradient at the direction x is the forward plan applied to x.
            (again,) = torch.autograd.grad(back, g, torch.from_numpy(case.locals[rank]))
            results.append((y.detach().numpy(), again.numpy()))
        return results

    for ranks in simulate(on_rank, 4, "torch"):
        for (y, again), case in zip(ranks, cases, strict=True):
            np.testing.assert_allclose(again, y, atol=1e-10, err_msg=repr(case.plan_of(0)))


def test_a_nonlinear_chain_has_dense_second_derivatives(dense):
    """A matmul split over its inner dim, cubed and summed: gradient and Hessian product equal the dense ones."""
    import torch

    rng = np.random.default_rng(5)
    a, b, v = (torch.tensor(rng.normal(size=shape)) for shape in ((4, 6), (6, 3), (4, 6)))

    def second(a_whole, product):
        (first,) = torch.autograd.grad((product**3).sum(), a_whole, create_graph=True)
        return first

    whole = a.clone().requires_grad_()
    first = second(whole, whole @ b)
    (hessian,) = torch.autograd.grad((first * v).sum(), whole)

    def body(torch, platform, _rank, place):
        cut = place([S1], (4, 6)).local_box()[1]
        mine = a[:, slice(*cut)].clone().requires_grad_()
        partial = mine @ b[slice(*cut)]
        product = redistribute(partial, plan_transition(place([P], (4, 3)), place([R], (4, 3))), platform)
        back = second(mine, product)
        # The partial values of <first, v> are summed by an all-reduce, as the loss of a real program would.
        total = redistribute(
            (back * v[:, slice(*cut)]).sum(), plan_transition(place([P], ()), place([R], ())), platform
        )
        (bent,) = torch.autograd.grad(total, mine)
        return cut, back.detach(), bent

    for cut, back, bent in on_ranks(dense, (2,), body):
        torch.testing.assert_close(back, first.detach()[:, slice(*cut)])
        torch.testing.assert_close(bent, hessian[:, slice(*cut)])


def test_a_gathered_value_serves_a_varying_consumer(dense):
    """gathered_view reuses a gather, and its gradient is reduced and scattered in one collective."""
    from hyper_parallel.core.dtensor.events import record_events

    def body(torch, platform, rank, place):
        x = torch.arange(2.0, dtype=torch.float64) + 2 * rank
        x.requires_grad_()
        steps = plan_transition(place([S0], (6,)), place([R], (6,)))
        with record_events() as log:
            whole = redistribute(x, steps, platform)
            view = gathered_view(x, whole, steps, (0,), platform)
            ((rank + 1) * view * torch.arange(6.0)).sum().backward()
        return view.tolist(), x.grad.tolist(), log.collectives()

    for rank, (value, grad, collectives) in enumerate(on_ranks(dense, (3,), body)):
        assert value == [0, 1, 2, 3, 4, 5]
        assert grad == [6 * (2 * rank), 6 * (2 * rank + 1)]
        assert collectives == ["all_gather", "reduce_scatter"]


def test_a_gathered_value_without_gradient_is_itself(dense):
    """Without a gradient to send, gathered_view hands the gathered tensor back."""

    def body(torch, platform, _rank, place):
        x = torch.ones(1)
        steps = plan_transition(place([S0], (2,)), place([R], (2,)))
        whole = redistribute(x, steps, platform)
        return gathered_view(x, whole, steps, (0,), platform) is whole

    assert on_ranks(dense, (2,), body) == [True, True]


def test_nothing_to_do_returns_the_tensor_itself(dense):
    """An identity plan returns its argument, as does a varying view without gradient."""

    def body(torch, platform, _rank, place):
        same = plan_transition(place([S0], (4,)), place([S0], (4,)))
        view = plan_transition(place([R], (4,)), place([R], (4,)), (0,))
        x, whole = torch.ones(2, requires_grad=True), torch.ones(4)
        counted = torch.arange(4)
        return (
            redistribute(x, same, platform) is x,
            redistribute(whole, view, platform) is whole,
            redistribute(counted, view, platform) is counted,
        )

    assert on_ranks(dense, (2,), body) == [(True, True, True)] * 2


def test_without_gradient_there_is_no_node(dense):
    """Integers, detached tensors and no-grad mode leave no autograd node behind."""

    def body(torch, platform, _rank, place):
        steps = plan_transition(place([S0], (4,)), place([R], (4,)))
        with torch.no_grad():
            quiet = redistribute(torch.ones(2, requires_grad=True), steps, platform)
        return quiet.requires_grad, redistribute(torch.arange(2), steps, platform).tolist()

    assert on_ranks(dense, (2,), body) == [(False, [0, 1, 0, 1])] * 2


@pytest.mark.untraced
def test_results_share_no_storage_with_the_source(dense):
    """A write into the result of a redistribution does not change its source."""
    grid = dense.grid((2, 2))
    layouts = dense.every_layout(grid, (5, 3))
    pairs = [pair for pair in itertools.product(layouts, layouts) if pair[0] is not pair[1]]
    cases = [Case(dense, value, other, seed=i) for i, (value, other) in enumerate(pairs)]

    def on_rank():
        import torch

        rank, shared = active_transport().rank, []
        for case in cases:
            x = torch.from_numpy(case.locals[rank].copy())
            redistribute(x, case.plan_of(rank), get_torch_platform()).fill_(99.0)
            if not np.array_equal(x.numpy(), case.locals[rank]):
                shared.append(repr(case.plan_of(0)))
        return shared

    assert simulate(on_rank, 4, "torch") == [[], [], [], []]


def test_a_wrong_shard_is_refused_before_anything_is_sent(dense):
    """A local tensor without the shape of this rank's shard is refused; the message has the rank and both shapes."""

    def body(torch, platform, rank, place):
        steps = plan_transition(place([S0], (7, 5)), place([R], (7, 5)))
        with pytest.raises(ShardMismatchError) as caught:
            redistribute(torch.ones(2, 5), steps, platform)
        return rank, str(caught.value)

    for rank, message in on_ranks(dense, (2,), body):
        assert message == (
            f"redistribute: rank {rank} holds a local tensor of shape (2, 5), but f32[7@a, 5] says it should be "
            f"({4 - rank}, 5)"
        )


def test_a_transition_belongs_to_its_rank(dense):
    """A transition that was planned on another rank is refused."""
    steps = plan_transition(Layout.place(dense.grid((2,)), [R], (4,)), Layout.place(dense.grid((2,)), [S0], (4,)))

    def body(torch, platform, rank, _place):
        if rank == 0:
            return ""
        with pytest.raises(MeshError) as caught:
            redistribute(torch.ones(4), steps, platform)
        return str(caught.value)

    assert on_ranks(dense, (2,), body)[1] == (
        "redistribute: rank 1 runs a transition that was planned on rank 0; build the mesh on rank 1"
    )


def test_integers_have_no_average(dense):
    """Partial(avg) of integers is refused, not rounded."""

    def body(torch, platform, _rank, place):
        steps = plan_transition(place([Partial("avg")], (2,)), place([R], (2,)))
        with pytest.raises(LayoutError) as caught:
            redistribute(torch.arange(2), steps, platform)
        return str(caught.value)

    assert on_ranks(dense, (2,), body)[0] == (
        "Partial(avg) of torch.int64: an average of integers is not an integer; cast to a floating dtype first"
    )


@pytest.mark.parametrize("shape", [(4, 1), (1, 4), (2, 5), (7, 2)])
def test_results_may_be_written_in_place_on_every_rank(shape):
    """A redistributed tensor may be written on the tape, also where a rank receives it in a part of a buffer."""
    import torch

    def on_rank():
        mesh, gradients = init_device_mesh("cpu", (3,)), []
        for source, target in itertools.permutations([Replicate(), Shard(0), Shard(1), Partial()], 2):
            if isinstance(target, Partial):
                continue
            whole = torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)
            leaf = distribute_tensor(whole, mesh, [Replicate()]).requires_grad_()
            y = (leaf * 1).redistribute(mesh, [source]).redistribute(mesh, [target])
            y.mul_(2)
            (y * y).sum().backward()
            gradients.append(torch.equal(leaf.grad.full_tensor(), 8 * whole))
        return gradients

    assert simulate(on_rank, 3, platform="torch") == [[True] * 9] * 3


@pytest.mark.parametrize("sizes", [(2, 7), (3, 10), (1, 5), (4, 3), (7, 2)])
@pytest.mark.parametrize("world", [3, 5])
def test_dims_shorter_than_the_axis_move_in_rows(platform_name, sizes, world):
    """Between sharded dims, and from partial values, one padded collective gives each rank its part, or nothing."""
    platform = platform_named(platform_name)
    values = np.arange(np.prod(sizes), dtype=np.float32).reshape(sizes)

    def rank():
        mesh = init_device_mesh("cpu", (world,))
        whole = distribute_tensor(platform.from_numpy(values), mesh)
        partial = DTensor.from_local(platform.from_numpy(values), mesh, [Partial()], shape=sizes)
        for first, second in ((0, 1), (1, 0)):
            moved = whole.redistribute(placements=[Shard(first)]).redistribute(placements=[Shard(second)])
            assert tuple(moved.to_local().shape) == moved.layout.local_shape
            np.testing.assert_array_equal(platform.tensor_to_numpy(moved.full_tensor()), values)
            summed = partial.redistribute(placements=[Shard(first)])
            assert tuple(summed.to_local().shape) == summed.layout.local_shape
            np.testing.assert_array_equal(platform.tensor_to_numpy(summed.full_tensor()), values * world)

    simulate(rank, world, platform_name)
