from __future__ import annotations

import itertools
import time

import pytest

from hyper_parallel.core.dtensor.cheapest_steps import Cost, _step_seconds
from hyper_parallel.core.dtensor.exchange import Exchange, ReduceExchange
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.dtensor.transition import plan_transition
from hyper_parallel.errors import LayoutError, MeshMismatchError

S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()


def between(dense, mesh, source, target, shape, varying=()):
    """The plan between two lists of placements."""
    grid = dense.grid(mesh)
    return plan_transition(Layout.place(grid, source, shape), Layout.place(grid, target, shape), varying)


def names(steps):
    """The names of a plan's steps, in order."""
    return [step.collective or type(step).__name__ for step in steps.steps]


@pytest.mark.parametrize(
    "source, target, varying, forward, backward",
    [
        ([S0], [R], (), ["all_gather"], ["Slice"]),
        ([S0], [R], (0,), ["all_gather"], ["reduce_scatter"]),
        ([R], [S0], (), ["Slice"], ["all_gather"]),
        ([P], [R], (), ["all_reduce"], []),
        ([P], [R], (0,), ["all_reduce"], ["all_reduce"]),
        ([P], [S0], (), ["reduce_scatter"], ["all_gather"]),
        ([S0], [S1], (), ["all_to_all"], ["all_to_all"]),
        ([R], [P], (), ["ToPartial"], []),
        ([R], [R], (0,), [], ["all_reduce"]),
        ([S0], [P], (), ["ToPartial"], ["Slice"]),
        ([Partial("avg")], [R], (), ["Scale", "all_reduce"], ["Scale"]),
        ([R], [Partial("avg")], (), ["ToPartial"], ["Scale"]),
        ([S0], [S0], (), [], []),
    ],
)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("shape", [(7, 5), (1024, 96)])
def test_every_row_of_the_gradient_contract(dense, source, target, varying, forward, backward, ranks, shape):
    """Each change of placement communicates as in the table of the algebra, forward and backward."""
    steps = between(dense, (ranks,), source, target, shape, varying)
    assert names(steps) == forward
    assert names(steps.adjoint) == backward


def test_a_slice_is_free_on_every_rank(dense):
    """Three ranks, one row: the ranks at the ends need no more than they hold, but the one between them does."""
    steps = between(dense, (3,), [S0], [S1], (1, 2))
    assert [step.received for step in steps.steps] == [1]


@pytest.mark.parametrize(
    "source, target, shape, chosen",
    [
        (S0, R, (1, 3), "exchange"),
        (S0, S1, (2, 3), "all_to_all"),
        (P, S0, (2, 3), "reduce_scatter"),
        (P, R, (1, 1), "all_reduce"),
    ],
)
def test_an_exchange_is_chosen_where_it_waits_for_fewer_messages(dense, source, target, shape, chosen):
    """On four ranks with one or two rows most shards are empty: gathers and reductions move them, others do not."""
    steps = between(dense, (4,), [source], [target], shape)
    assert names(steps) == [chosen]
    exchange = (ReduceExchange if source is P else Exchange)(steps.source, steps.target, (0,))
    assert _step_seconds(steps.steps[0]) <= _step_seconds(exchange)


def minimum(dense, source, target):
    """The number of elements that must be received in total, counted one by one; see the performance notes."""
    shape = source.mesh.shape
    kept = {axis for axis, _ in target.partials}
    reduced = [axis for axis, _ in source.partials if axis not in kept]
    total = 0
    for index in itertools.product(*map(range, source.shape)):
        holders = [
            position for position in itertools.product(*map(range, shape)) if inside(index, dense.box(source, position))
        ]
        wanted = [
            position for position in itertools.product(*map(range, shape)) if inside(index, dense.box(target, position))
        ]
        terms = {tuple(position[axis] for axis in reduced) for position in holders}
        if len(terms) > 1:
            total += len(terms) - 1 + len(wanted) - bool(set(wanted) & set(holders))
        else:
            total += len(set(wanted) - set(holders))
    return total


def inside(index, box):
    """Return True if the box holds the index."""
    return all(part.start <= i < part.stop for i, part in zip(index, box, strict=True))


def received(steps):
    """The number of elements that all ranks together receive."""
    transition = 0
    for step in steps.steps:
        transition += sum(
            step.received_at(position) for position in itertools.product(*map(range, step.source.mesh.shape))
        )
    return transition


TABLE = [
    ((2,), [S0], [S1]),
    ((4,), [S0], [S1]),
    ((2, 2), [S0, S0], [S1, S0]),
    ((2, 2), [S0, S1], [S1, S0]),
    ((2, 2), [S0, R], [R, S0]),
    ((2, 2), [R, S0], [S0, S0]),
    ((2, 2), [P, P], [R, R]),
    ((2, 2), [P, S0], [S0, R]),
]


@pytest.mark.parametrize("mesh, source, target", TABLE)
@pytest.mark.parametrize("shape", [(8, 8), (24, 16)])
def test_bytes_reach_the_minimum(dense, mesh, source, target, shape):
    """Every row of the redistribution table moves exactly the fewest bytes that any algorithm could."""
    steps = between(dense, mesh, source, target, shape)
    assert received(steps) == minimum(dense, steps.source, steps.target)


@pytest.mark.parametrize("mesh", [(2,), (4,)])
def test_bytes_reach_the_minimum_uneven(dense, mesh):
    """Uneven shards are sent without padding: (7, 5) from rows to columns moves exactly the missing elements."""
    steps = between(dense, mesh, [S0], [S1], (7, 5))
    assert received(steps) == minimum(dense, steps.source, steps.target)


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3)])
@pytest.mark.untraced
def test_shard_to_shard_always_reaches_the_minimum(dense, mesh):
    """Changes between shard and replicate layouts of any order send no element that a rank already has."""
    layouts = dense.every_layout(dense.grid(mesh), (6, 24), partials=())
    for source, target in itertools.product(layouts, layouts):
        steps = plan_transition(source, target)
        assert received(steps) == minimum(dense, source, target), steps


@pytest.mark.untraced
def test_collectives_over_a_thousand_ranks_are_planned_at_once(dense):
    """Plans over a thousand ranks do not list the million pairs of senders and receivers."""
    started = time.process_time()
    for source, target, wanted in (
        ([S0], [R], "all_gather"), ([P], [S0], "reduce_scatter"), ([S0], [S1], "all_to_all"), ([P], [R], "all_reduce"),
    ):  # fmt: skip
        assert names(between(dense, (1024,), source, target, (2048, 2048))) == [wanted]
    assert time.process_time() - started < 5


def test_cost_is_the_worst_ranks(dense):
    """The cost of a plan is what its worst rank receives: rows to columns of (7, 5) over two ranks."""
    steps = between(dense, (2,), [S0], [S1], (7, 5))
    assert steps.cost(4) == Cost(bytes=36, messages=1, launches=1)
    assert steps.cost(4).seconds == pytest.approx(36e-10 + 3e-9)


def test_several_summed_axes_reduce_at_once(dense):
    """Partial(sum) along several axes becomes Replicate in one all-reduce over all of them."""
    steps = between(dense, (2, 3), [P, P], [R, R], (64, 8))
    (step,) = steps.steps
    assert (step.collective, step.axes) == ("all_reduce", (0, 1))


def test_order_of_axes_is_data(dense):
    """Swapping the order of two axes within a dim is a transition that communicates."""
    grid = dense.grid((2, 2))
    source, target = Layout.of(grid, [(0, 1)], (), (7,)), Layout.of(grid, [(1, 0)], (), (7,))
    assert plan_transition(source, target).communicates


def test_plans_are_cached_by_identity(dense):
    """Equal requests return the same plan object, and a plan is the adjoint of its adjoint."""
    first = between(dense, (2, 2), [S0, P], [R, S0], (7, 5))
    assert first is between(dense, (2, 2), [S0, P], [R, S0], (7, 5))
    assert first.adjoint.adjoint is first


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3)])
def test_gradients_live_in_dual_layouts(dense, mesh):
    """A plan's adjoint leads from the dual of its target to the dual of its source."""
    layouts = dense.every_layout(dense.grid(mesh), (5, 3))
    for source, target in itertools.product(layouts, layouts):
        back = plan_transition(source, target).adjoint
        assert back.source is dense.dual(target)
        assert back.target is dense.dual(source)
        assert back.varying == tuple(axis for axis, _ in source.partials)


def test_every_rank_makes_the_same_plan(dense):
    """Plans depend on layouts only: all ranks choose the same steps."""
    layouts = dense.every_layout(dense.grid((2, 3)), (5, 3))
    for source, target in itertools.islice(itertools.product(layouts, layouts), 0, None, 7):
        mine = plan_transition(source, target)
        theirs = plan_transition(dense.for_rank(source, 4), dense.for_rank(target, 4))
        assert list(map(str, mine.steps)) == list(map(str, theirs.steps))


def test_an_axis_of_size_one_costs_nothing(dense):
    """Along a mesh axis of size 1 nothing is split, reduced or sent."""
    layouts = dense.every_layout(dense.grid((1,)), (5, 3))
    for source, target in itertools.product(layouts, layouts):
        assert plan_transition(source, target).is_trivial


def test_a_partial_axis_that_stays_is_not_touched(dense):
    """A partial axis stays partial while another axis moves."""
    steps = between(dense, (2, 2), [P, S0], [P, S1], (8, 8))
    assert steps.steps
    assert all(step.source.is_partial(0) and step.target.is_partial(0) and step.axes == (1,) for step in steps.steps)


def test_repr_shows_the_steps(dense):
    """The repr of a plan shows its steps in layout notation."""
    assert repr(between(dense, (2,), [S0], [R], (7, 5))) == (
        "Transition([7@a, 5] -> [7, 5]: all_gather over a: [7@a, 5] -> [7, 5])"
    )
    assert repr(between(dense, (2,), [R], [R], (7, 5))) == "Transition([7, 5] -> [7, 5]: identity)"


def test_gathers_along_tells_whether_a_gradient_may_skip_a_gather(dense):
    """gathers_along is true exactly where a varying axis was sharded in the source."""
    steps = between(dense, (2, 2), [S0, P], [R, R], (8, 8))
    assert steps.gathers_along((0,))
    assert not steps.gathers_along((1,))
    assert not steps.gathers_along(())


class TestErrors:
    """Transitions that cannot be planned raise an error with the reason."""

    def test_meshes_differ(self, dense):
        """Layouts on two meshes have no transition."""
        step = Layout.place(dense.grid((2,)), [R], (4,))
        other = Layout.place(dense.grid((4,)), [R], (4,))
        with pytest.raises(MeshMismatchError) as caught:
            plan_transition(step, other)
        assert str(caught.value) == (
            "redistribute: source is on DeviceMesh(cpu, a=2, ranks=[0, 1]), "
            "target on DeviceMesh(cpu, a=4, ranks=[0, 1, 2, 3])"
        )

    def test_shapes_differ(self, dense):
        """Layouts of two shapes have no transition."""
        grid = dense.grid((2,))
        with pytest.raises(LayoutError) as caught:
            plan_transition(Layout.place(grid, [S0], (4,)), Layout.place(grid, [R], (5,)))
        assert str(caught.value) == ("redistribute: shapes of source [4@a] and target [5] must be known and equal")

    def test_varying_axis_is_not_replicated(self, dense):
        """A varying axis must be replicated in the target."""
        with pytest.raises(LayoutError) as caught:
            between(dense, (2,), [R], [S0], (4,), (0,))
        assert str(caught.value) == "redistribute: varying axis a must be replicated in the target [4@a]"

    def test_reductions_that_do_not_commute(self, dense):
        """Sums and maxima along two axes do not commute, so reducing both is refused."""
        with pytest.raises(LayoutError) as caught:
            between(dense, (2, 2), [P, Partial("max")], [R, R], (4,))
        assert str(caught.value) == (
            "redistribute: the reductions of [4] + Partial(sum)@a + Partial(max)@b do not commute, "
            "and their order is not known"
        )

    def test_nonlinear_plans_have_no_adjoint(self, dense):
        """A plan through Partial(max) has no adjoint, since its gradient depends on values."""
        steps = between(dense, (2,), [Partial("max")], [S0], (4,))
        assert steps.linear.adjoint.target.is_replicated
        with pytest.raises(LayoutError, match="is not linear and has no adjoint"):
            _ = steps.adjoint
