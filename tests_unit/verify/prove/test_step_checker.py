"""The checker of steps: its laws on every small case, all changes of placement, and plans with a fault."""

import itertools
import json
from fractions import Fraction

import pytest

from hyper_parallel.cli import main
from hyper_parallel.core.dtensor.boxes import BoxTransfer, coordinates
from hyper_parallel.core.dtensor.exchange import Exchange, ReduceExchange
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    ReduceScatter,
    Scale,
    Slice,
    Step,
    ToPartial,
)
from hyper_parallel.core.dtensor.transition import Transition, plan_transition
from hyper_parallel.verify.ops.claims import mesh_of
from hyper_parallel.verify.prove import redistributions
from hyper_parallel.verify.prove.laws import UnprovenError
from hyper_parallel.verify.prove.step_checker import (
    AT_SIZES,
    BY_LAW,
    TooManyRanksError,
    check_steps,
    check_transition,
    interval,
)

pytestmark = pytest.mark.platforms("torch")

MESH = mesh_of((2, 3))


def layout(*dims, partials=(), shape=(7, 5), mesh=MESH):
    """Return a layout by the axes of each dim."""
    return Layout.of(mesh, dims, partials, shape)


@pytest.mark.parametrize("counts", [(1,), (2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (2, 2, 2)])
def test_nested_splits_are_a_partition(counts):
    """In the row-major order of the axes, ranges follow each other from 0 to the size, for every small size."""
    for size in range(20):
        ranges = [interval(size, counts, at) for at in itertools.product(*map(range, counts))]
        edges = [0, *(stop for _, stop in ranges)]
        assert edges[-1] == size
        assert all(start in (stop, edge) for (start, stop), edge in zip(ranges, edges, strict=False))
        for at in itertools.product(*map(range, counts[:-1])):
            inner = [interval(size, counts, (*at, last)) for last in range(counts[-1])]
            outer = interval(size, counts[:-1], at)
            assert sum(stop - start for start, stop in inner) == outer[1] - outer[0]
            assert all(outer[0] <= start <= stop <= outer[1] for start, stop in inner)


def test_ranges_are_those_of_layouts():
    """The checker's own ranges are those that the library places, with the axes of a dim in both orders."""
    for size, axes in itertools.product(range(14), ((0, 1), (1, 0), (1,), ())):
        placed = layout(axes, shape=(size,))
        for at in coordinates(MESH):
            own = interval(size, [MESH.shape[axis] for axis in axes], [at[axis] for axis in axes])
            assert placed.box_at(at) == (own,)


def test_every_change_of_placement():
    """No step between any two layouts of a small mesh is wrong; collectives need no sizes."""
    report = redistributions.prove_redistributions([((2, 2), [(3,), (5, 4), (0, 2)], ("sum", "avg", "max"))])
    assert (report.ok, report.wrong) == (True, [])
    assert report.changes > 1000
    for kind in ("AllGather", "AllReduce", "AllToAll", "ReduceScatter", "Scale", "ToPartial"):
        assert report.steps[kind, BY_LAW] > 0
        assert report.steps[kind, AT_SIZES] == 0
    assert report.steps["Exchange", AT_SIZES] > 0
    assert report.steps["ReduceExchange", AT_SIZES] > 0
    assert "mesh 2x2, sum, avg, max: [3], [5, 4], [0, 2]" in report.text()


def test_of_the_command(monkeypatch, capsys, tmp_path):
    """The command prints the counts, and exits with 1 if a step is wrong, which it names."""
    monkeypatch.setattr(redistributions, "CASES", [((2,), [(3,)], ("sum",))])
    assert main(["prove", "redistributions", "--report", str(tmp_path / "report.json")]) == 0
    assert "AllGather" in capsys.readouterr().out
    assert json.loads((tmp_path / "report.json").read_text())["ok"]

    def wrong(_):
        msg = "nobody has it"
        raise UnprovenError(msg)

    monkeypatch.setattr(redistributions, "check_transition", wrong)
    assert main(["prove", "redistributions"]) == 1
    assert "wrong: [3] -> [3@m0]: nobody has it" in capsys.readouterr().out


def fault(why, *steps, source=None, target=None):
    """Check steps that are wrong, for the reason ``why``."""
    with pytest.raises(UnprovenError, match=why):
        check_steps(source or steps[0].source, target or steps[-1].target, steps)


SPLIT, SWAPPED, WHOLE = layout((0, 1), ()), layout((1, 0), ()), layout((), ())
SUM = layout((), (), partials=[(0, "sum"), (1, "sum")])


@pytest.mark.parametrize(
    "why, step",
    [
        ("shards are joined in another order", AllGather(SWAPPED, WHOLE, (0, 1))),
        ("shards are joined in another order", AllGather(SPLIT, layout((1,), ()), (0,))),
        ("more than one dim changes", AllGather(layout((0,), (1,)), WHOLE, (0, 1))),
        ("a gather reduces nothing", AllGather(layout((0,), (), partials=[(1, "sum")]), WHOLE, (0,))),
        ("another share of the sum", ReduceScatter(SUM, layout((1, 0), ()), (0, 1))),
        ("only sums are scattered", ReduceScatter(layout((), (), partials=[(0, "max")]), layout((0,), ()), (0,))),
        ("it reduces along other axes", ReduceScatter(layout((), ()), layout((0,), ()), (0,))),
        ("it reduces along other axes", AllReduce(SUM, WHOLE, (0,))),
        ("it reduces by several operations", AllReduce(SUM, SUM, ())),
        ("a reduction moves nothing", AllReduce(SUM, layout((0,), ()), (0, 1))),
        ("the axis is not the innermost of both dims", AllToAll(SPLIT, layout((1,), (0,)), (0,))),
        ("it moves one axis between two dims", AllToAll(SPLIT, layout((0,), ()), (1,))),
        ("it reduces nothing", AllToAll(layout((0,), (), partials=[(1, "sum")]), layout((), (0,)), (0,))),
        (r"rank at \(0, 1\) lacks elements", Slice(layout((0, 1), ()), layout((1, 0), ()), ())),
        ("a slice reduces nothing", Slice(layout((), (), partials=[(0, "sum")]), layout((0,), ()), ())),
        ("a factor changes no layout", Scale(SUM, WHOLE, (), Fraction(1, 6))),
        ("the result is 2 of the value", Scale(WHOLE, WHOLE, (), Fraction(2))),
        ("it makes other partial values", ToPartial(WHOLE, SUM, (0,))),
        ("dim 0 is embedded at another place", ToPartial(SPLIT, layout((1,), (), partials=[(0, "sum")]), (0,))),
        ("zeros are neutral in sums only", ToPartial(layout((0,), ()), layout((), (), partials=[(0, "max")]), (0,))),
        ("it reduces nothing", Exchange(SUM, SPLIT, (0, 1))),
        ("only sums are exchanged", ReduceExchange(layout((), (), partials=[(0, "max")]), SPLIT, (0, 1))),
        ("partial values are in other slices", ReduceExchange(SUM, SPLIT, (0,))),
        ("it crosses partial values", Exchange(*[layout((0,), (), partials=[(1, "max")])] * 2, (0, 1))),
        ("nobody who has", Exchange(layout((0,), ()), layout((1,), ()), (1,))),
        (
            "reductions that do not commute",
            AllReduce(layout((), (), partials=[(0, "max"), (1, "sum")]), layout((), (), partials=[(1, "sum")]), (0,)),
        ),
    ],
    ids=str,
)
def test_a_wrong_step(why, step):
    """A step whose axes, order, reduction or factor are wrong is refused with the reason."""
    fault(why, step)


def test_steps_that_do_not_fit_together():
    """Steps begin at the source, follow each other, and end at the target."""
    gather = AllGather(layout((0,), ()), WHOLE, (0,))
    fault("starts elsewhere", gather, source=layout((1,), ()))
    fault("the steps do not lead to", gather, target=layout((1,), ()))

    class Other(Step):
        def apply(self, local, platform):
            raise NotImplementedError

    fault("no law of such a step", Other(WHOLE, WHOLE, ()))


def test_the_gradient_of_a_change():
    """The gradient's steps begin at the target's dual, partial along varying axes, and end at the source's dual."""
    forward = plan_transition(layout((0,), ()), WHOLE, (0,))
    assert ("ReduceScatter", BY_LAW) in check_transition(forward)
    other = Transition(forward.source, WHOLE, (0,), forward.steps, adjoint=plan_transition(WHOLE, forward.source))
    with pytest.raises(UnprovenError, match=r"^the gradient starts as \[7, 5\]$"):
        check_transition(other)
    unmoved = Transition(forward.adjoint.source, WHOLE, (), ())
    other = Transition(forward.source, WHOLE, (0,), forward.steps, adjoint=unmoved)
    with pytest.raises(UnprovenError, match=r"^the gradient ends as \[7, 5\]$"):
        check_transition(other)


class Planned(Exchange):
    """An exchange with other transfers."""

    change = staticmethod(lambda transfers: transfers)

    def transfers(self, origin):
        """Return the transfers of the plan, changed."""
        return self.change(list(super().transfers(origin)))


@pytest.mark.parametrize(
    "why, change",
    [
        ("nobody who has", lambda sent: sent[1:]),
        ("comes 2 times", lambda sent: [*sent, sent[0]]),
        ("nobody who has", lambda sent: [sent[0]._replace(sender=sent[0].receiver), *sent[1:]]),
        ("receives what it does not need", lambda sent: [*sent, BoxTransfer(((0, 7), (0, 5)), 0, 5)]),
    ],
)
def test_an_exchange_with_a_fault(why, change):
    """A box that is missing, comes twice, comes from a rank without it, or is not needed is found."""
    step = Planned(SPLIT, SWAPPED, (0, 1))
    assert check_steps(SPLIT, SWAPPED, [step]) == [("Planned", AT_SIZES)]
    Planned.change = staticmethod(change)
    try:
        fault(why, step)
    finally:
        Planned.change = staticmethod(lambda transfers: transfers)


class PlannedSums(ReduceExchange):
    """A reduction to boxes with other sums."""

    change = staticmethod(lambda boxes: boxes)

    def reduced_boxes(self, origin):
        """Return the sums of the plan, changed."""
        return self.change(list(super().reduced_boxes(origin)))


@pytest.mark.parametrize(
    "why, change",
    [
        ("do not fill it", lambda sums: sums[1:]),
        ("a sum comes twice", lambda sums: [*sums, sums[0]]),
        ("is not one sum", lambda sums: [sums[0]._replace(holders=sums[0].holders[:1]), *sums[1:]]),
        ("without a partial value", lambda sums: [sums[0]._replace(reducer=5), *sums[1:]]),
        ("receives what it does not need", lambda sums: [*sums, sums[0]._replace(receivers=(5,))]),
        ("lacks a partial value", lambda sums: [sums[0]._replace(box=((0, 7), (0, 5))), *sums[1:]]),
        ("do not fill it", lambda sums: [sums[0]._replace(box=((0, 1), (0, 1))), *sums[1:]]),
    ],
)
def test_a_reduction_with_a_fault(why, change):
    """A partial value that is missing or counted twice, and a sum that is missing, doubled or not needed, are found."""
    source, target = layout((1,), (), partials=[(0, "sum")]), layout((), (0, 1))
    step = PlannedSums(source, target, (0, 1))
    assert check_steps(source, target, [step]) == [("PlannedSums", AT_SIZES)]
    PlannedSums.change = staticmethod(change)
    try:
        fault(why, step)
    finally:
        PlannedSums.change = staticmethod(lambda boxes: boxes)


def test_more_ranks_than_are_looked_at():
    """Boxes of more than 4096 ranks are not looked at, which is an error of its own; a law needs no ranks."""
    mesh = mesh_of((64, 128))
    split, other = (layout(axes, shape=(9000,), mesh=mesh) for axes in ((0, 1), (1, 0)))
    with pytest.raises(TooManyRanksError, match="too many ranks to look at"):
        check_steps(split, other, [Exchange(split, other, (0, 1))])
    whole = layout((), shape=(9000,), mesh=mesh)
    assert check_steps(split, whole, [AllGather(split, whole, (0, 1))]) == [("AllGather", BY_LAW)]
