"""Scenarios of gradients and events: what is kept, sent, recorded and forbidden."""

from __future__ import annotations

import numpy as np

from hyper_parallel.core.dtensor import transition
from hyper_parallel.core.dtensor.events import module_scope, record_events, strict
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placements import Partial
from hyper_parallel.core.dtensor.redistribute import gathered_view
from hyper_parallel.core.dtensor.transition import dual, plan_transition
from hyper_parallel.core.shard.rule import Row, Strategies
from hyper_parallel.errors import StrictModeError, UnsupportedOperatorError
from hyper_parallel.verify.ops.claims import mesh_of
from workshop.mutation.suite.fixture import S0, Fixture, R, raises, values

__all__ = [
    "gathered_values_send_gradients_straight_back",
    "gradients_are_differentiable",
    "kept_views_serve_until_written",
    "moves_are_recorded_and_forbidden",
    "plans_are_kept_and_bounded",
    "reductions_need_no_gradient",
    "views_of_a_framework_that_loses_writes",
    "what_gathers_is_known",
]

# -- gradients and events ----------------------------------------------------------------------------------------------


def moves_are_recorded_and_forbidden(fixture: Fixture) -> None:
    """Implicit redistributions are recorded with operator, argument and phase; strict() forbids only these."""
    array = values(4, 3)
    whole = fixture.entry(lambda x: x * 2, "x", lambda call: Strategies((Row((R,), (R,)),), (call["x"].shape,)))
    x = fixture.spread(array).requires_grad_()
    for _ in range(2):
        with record_events() as log:
            out = fixture.call(whole, x)
            out.sum().backward()
        facts = [(event.op, event.argument, event.phase, event.implicit, event.collective) for event in log]
        assert facts == [("probe", "x", "forward", True, "all_gather")], facts
        with strict():
            assert "probe" in raises(StrictModeError, lambda: fixture.call(whole, x))
            fixture.call(whole, x.redistribute(placements=[R]))
    for differentiated in (True, False):
        with record_events() as log:
            with module_scope("a.b"):
                out = fixture.call(whole, x if differentiated else x.detach())
            if differentiated:
                out.redistribute(placements=[S0]).sum().backward()
        assert {(event.module, event.phase) for event in log} <= {
            ("a.b", "forward"),
            ("", "backward"),
            ("a.b", "backward"),
        }
        assert [event.module for event in log if event.phase == "forward"] == ["a.b"]
    with record_events() as log:
        moved = x.redistribute(placements=[R])
    assert [(event.op, event.implicit, event.phase) for event in log] == [("redistribute", False, "forward")]
    (moved * fixture.spread(array, S0)).sum().backward()  # the gradient is varying
    assert len(log) == 1


def kept_views_serve_until_written(fixture: Fixture) -> None:
    """Consumers of one value share a collective in backward; after a write none sees the old value."""
    array = values(6, 3)
    entry = fixture.entry(lambda x, w: x * w, "x, w", lambda call: Strategies(
        (Row((S0, R), (S0,)),), (call["x"].shape,)
    ))  # fmt: skip
    x = fixture.spread(array)
    for steps in range(1, 4):
        weight = fixture.spread(values(3), R).requires_grad_()
        with record_events() as log:
            out = sum(fixture.call(entry, x, weight).sum().reduce_partial() for _ in range(steps))
            out.backward()
        fixture.same(weight.grad, array.sum(0) * steps)
        assert [event.collective for event in log if event.phase == "backward"] == ["all_reduce"], log
    weight = fixture.spread(values(3), R).requires_grad_()
    first = fixture.call(entry, x, weight)
    with fixture.platform.no_grad():
        assert not fixture.platform.needs_grad(fixture.call(entry, x, weight).to_local())
        fixture.call(fixture.entry(lambda x: x.mul_(3.0), "x", in_place=True), weight)
    fixture.same(first, array * values(3))
    second = fixture.call(entry, x, weight)
    fixture.same(second, array * values(3) * 3)
    second.sum().backward()
    fixture.same(weight.grad, array.sum(0))
    learned = fixture.spread(values(3), R).requires_grad_()
    weight = fixture.call(fixture.entry(lambda x: x * 1.0, "x"), learned)
    fixture.call(entry, x, weight)
    weight.to_local().mul_(3.0)  # behind the dispatcher's back
    fixture.call(entry, x, weight).sum().backward()
    fixture.same(learned.grad, 3 * array.sum(0))
    weight = fixture.spread(values(3), R).requires_grad_()
    fixture.call(entry, x, weight)  # nobody listens
    with record_events() as log:
        out = fixture.call(entry, x, weight)
    out.sum().backward()
    assert log.collectives("backward") == ["all_reduce"], "who listened in forward hears of backward"
    weight = fixture.spread(values(3), R).requires_grad_()
    with fixture.platform.no_grad():
        fixture.call(entry, x, weight)
    fixture.call(entry, x, weight).sum().backward()  # not through what was used without a gradient
    fixture.same(weight.grad, array.sum(0))
    whole = fixture.spread(np.arange(3), R)
    fixture.same(fixture.call(entry, x, whole), array * np.arange(3))


def gradients_are_differentiable(fixture: Fixture) -> None:
    """A gradient that passed a redistribution can be differentiated again, and passes the same way."""
    array = values(4, 3)
    entry = fixture.entry(lambda x: x**3, "x", lambda call: Strategies((Row((R,), (R,)),), (call["x"].shape,)))
    x = fixture.spread(array).requires_grad_()
    fixture.call(entry, x).sum().backward(create_graph=True)
    first = x.grad
    fixture.same(first, 3 * array**2)
    x.grad = None
    first.sum().backward()
    fixture.same(x.grad, 6 * array)


def gathered_values_send_gradients_straight_back(fixture: Fixture) -> None:
    """A gathered value used by each rank in its own way: one collective reduces and scatters its gradient."""
    array = values(6, 5)
    entry = fixture.entry(lambda x, w: x * w, "x, w", lambda call: Strategies(
        (Row((S0, R), (S0,)),), (call["x"].shape,)
    ))  # fmt: skip
    x = fixture.spread(array)
    for written in (False, True):
        for _ in range(2):
            weight = fixture.spread(values(5), S0).requires_grad_()
            gathered = weight.redistribute(placements=[R])
            if written:
                gathered = gathered.mul_(1.0)
            with record_events() as log:
                fixture.call(entry, x, gathered).sum().backward()
            fixture.same(weight.grad, array.sum(0))
            straight = log.collectives("backward")
            assert straight == (["all_reduce"] if written else ["reduce_scatter"]), straight
    with fixture.platform.no_grad():
        assert not fixture.platform.needs_grad(fixture.call(entry, x, gathered).to_local())
    steps = plan_transition(Layout.place(fixture.mesh, [S0], (5,)), Layout.place(fixture.mesh, [R], (5,)))
    whole = fixture.plain(values(5))
    assert gathered_view(fixture.spread(values(5)).to_local(), whole, steps, (0,), fixture.platform) is whole


def plans_are_kept_and_bounded(fixture: Fixture) -> None:
    """Equal requests share a plan; a full cache is cleared."""
    layouts = [Layout.place(fixture.mesh, [S0], (size,)) for size in range(3, 9)]
    whole = [Layout.place(fixture.mesh, [R], (size,)) for size in range(3, 9)]
    sizes: list[int] = []
    duals: list[int] = []
    most = transition._MAX_CACHED  # noqa: SLF001 - made small; no collective, hence no other rank, meanwhile
    transition._MAX_CACHED = 4  # noqa: SLF001 - as above
    try:
        transition.clear_transition_cache()
        for source, other in zip(layouts, whole, strict=True):
            steps, gradient = plan_transition(source, other), dual(source)
            assert (plan_transition(source, other), dual(source)) == (steps, gradient)
            assert plan_transition(source, other) is steps
            assert steps.adjoint is steps.adjoint
            assert steps.cost(4) is steps.cost(4)
            sizes.append(len(transition._TRANSITIONS))  # noqa: SLF001 - as above
        transition.clear_transition_cache()
        for source in layouts:
            dual(source)
            duals.append(len(transition._DUALS))  # noqa: SLF001 - as above
    finally:
        transition._MAX_CACHED = most  # noqa: SLF001 - as above
        transition.clear_transition_cache()
    assert sizes == duals == [1, 2, 3, 4, 1, 2]


def what_gathers_is_known(_: Fixture) -> None:
    """A gradient goes straight to the source if any axis along which it varies was gathered, and nothing is masked."""
    mesh = mesh_of((2, 3))
    whole, cut, largest = (Layout.place(mesh, places, (6, 5)) for places in ([R, R], [S0, R], [S0, Partial("max")]))
    steps, masked = plan_transition(cut, whole), plan_transition(largest, whole)
    assert [steps.gathers_along(axes) for axes in ((), (0,), (1,), (0, 1))] == [False, True, False, True]
    assert [masked.gathers_along(axes) for axes in ((), (0,), (1,), (0, 1))] == [False] * 4
    assert steps.is_trivial is masked.is_trivial is plan_transition(whole, whole, (1,)).is_trivial is False
    assert plan_transition(whole, whole).is_trivial is plan_transition(whole, whole).is_identity is True
    average = Layout.place(mesh, [R, Partial("avg")], (6, 5))
    assert [plan_transition(source, whole).communicates for source in (average, cut, whole)] == [True, True, False]
    assert not plan_transition(whole, cut).communicates
    line = mesh_of((1, 3))
    alone = Layout.place(line, [R, R], (6, 5))
    assert all(
        plan_transition(Layout.place(line, [placement, R], (6, 5)), alone).is_identity
        for placement in (S0, Partial(), Partial("max"))
    )
    assert plan_transition(alone, alone, (0,)).is_trivial


def reductions_need_no_gradient(fixture: Fixture) -> None:
    """Reductions without gradient run if no gradient is needed, and raise otherwise."""
    size = fixture.mesh.size()
    for op, wanted in (("prod", 2.0**size), ("max", 2.0), ("sum", 2.0 * size)):
        layout = Layout.place(fixture.mesh, [Partial(op)], (3,))
        pending = fixture.platform.wrap(fixture.plain(np.full(3, 2.0)), layout)
        fixture.same(pending.redistribute(placements=[R]), np.full(3, wanted))
        assert not fixture.platform.needs_grad(pending.redistribute(placements=[R]).to_local())
        learned = fixture.platform.wrap(fixture.plain(np.full(3, 2.0)), layout).requires_grad_()
        if op == "prod":
            raises(UnsupportedOperatorError, lambda learned=learned: learned.redistribute(placements=[R]))  # type: ignore[misc] # a default
        with fixture.platform.no_grad():
            fixture.same(learned.redistribute(placements=[R]), np.full(3, wanted))


def views_of_a_framework_that_loses_writes(fixture: Fixture) -> None:
    """On a framework whose views lose writes, every view is read-only."""
    x = fixture.spread(values(4, 3))
    entry = fixture.entry(lambda x: x.view(-1, 3), "x", rule={"view": True})
    fixture.platform.loses_writes_through_views = True  # no collective, hence no other rank, before it is gone again
    try:
        views = [fixture.call(entry, x) for _ in range(2)]
    finally:
        del fixture.platform.loses_writes_through_views
    for view in views:
        assert "this framework loses writes to views" in str(view._readonly)
