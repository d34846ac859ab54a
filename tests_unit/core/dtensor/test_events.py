from __future__ import annotations

import pytest

from hyper_parallel.core.dtensor.events import (
    Cause,
    Event,
    implicit_budget,
    module_path,
    module_scope,
    record_events,
    strict,
)
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.dtensor.redistribute import gathered_view, redistribute
from hyper_parallel.core.dtensor.transition import plan_transition
from hyper_parallel.errors import StrictModeError
from hyper_parallel.platform.select import get_torch_platform
from hyper_parallel.transport.base import active_transport
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")

S0, R, P = Shard(0), Replicate(), Partial()
UNASKED = Cause("matmul", "other", implicit=True)


def on_ranks(dense, body, world=2):
    """Run ``body(torch, move)`` on every rank; ``move(x, source, target, …)`` redistributes a (7, 5) tensor."""
    import torch

    def on_rank():
        grid = dense.grid((world,), active_transport().rank)

        def steps(source, target, varying=()):
            return plan_transition(Layout.place(grid, [source], (7, 5)), Layout.place(grid, [target], (7, 5)), varying)

        def move(x, source, target, cause=None, varying=()):
            return redistribute(x, steps(source, target, varying), get_torch_platform(), cause)

        move.plan, move.rows = steps, (4, 3)[grid.rank]
        return body(torch, move)

    return simulate(on_rank, world, "torch")


def test_every_collective_is_an_event(dense):
    """The log records step, module, operator, argument, layouts, collective, bytes, axes, phase and initiator."""

    def body(torch, move):
        x = torch.ones(move.rows, 5, requires_grad=True)
        with record_events() as log:
            with module_scope("block.attn"):
                y = move(x, S0, R, UNASKED, varying=(0,))
            log.next_step()
            y.sum().backward()
        return list(log), log.total_bytes("backward"), log.collectives("forward")

    gathered = Event(
        step=0, module="block.attn", op="matmul", argument="other", source="f32[7@a, 5]", target="f32[7, 5]",
        collective="all_gather", bytes=80, axes=("a",), phase="forward", implicit=True,
    )  # fmt: skip
    scattered = Event(
        step=1, module="block.attn", op="matmul", argument="other", source="f32[7, 5] + Partial(sum)@a",
        target="f32[7@a, 5]", collective="reduce_scatter", bytes=80, axes=("a",), phase="backward", implicit=True,
    )  # fmt: skip
    # The last rank holds 3 of 7 rows, so it receives 4 rows of 5 floats; scattering gives 4 rows to the first.
    assert on_ranks(dense, body) == [([gathered, scattered], 80, ["all_gather"])] * 2


def test_the_log_is_a_tree_of_modules(dense):
    """A printed log shows its events below the modules that caused them, and the total."""

    def body(torch, move):
        with record_events() as log:
            with module_scope("model.mlp"):
                move(torch.ones(7, 5), P, R)
            with module_scope("model.attn"):
                move(torch.ones(move.rows, 5), S0, R, UNASKED)
            move(torch.ones(7, 5), P, S0)
        return str(log)

    assert on_ranks(dense, body)[0] == (
        "forward redistribute(self): reduce_scatter over a, 80 bytes: f32[7, 5] + Partial(sum)@a -> f32[7@a, 5]\n"
        "model\n"
        "  attn\n"
        "    forward matmul(other): all_gather over a, 80 bytes implicit: f32[7@a, 5] -> f32[7, 5]\n"
        "  mlp\n"
        "    forward redistribute(self): all_reduce over a, 140 bytes: f32[7, 5] + Partial(sum)@a -> f32[7, 5]\n"
        "3 collectives, 300 bytes"
    )


def test_a_log_that_opens_late_sees_backward(dense):
    """A log that is opened after forward records the backward alone."""

    def body(torch, move):
        x = torch.ones(7, 5, requires_grad=True)
        with module_scope("head"):
            y = move(x, R, R, UNASKED, varying=(0,))
        with record_events() as log:
            y.sum().backward()
        return [(event.module, event.collective, event.phase) for event in log]

    assert on_ranks(dense, body) == [[("head", "all_reduce", "backward")]] * 2


def test_backward_elsewhere_reports_to_the_log_of_its_forward(dense):
    """A backward that sees no log (an engine's own thread) reports to the one that was open in its forward."""
    import contextvars

    def body(torch, move):
        x = torch.ones(7, 5, requires_grad=True)
        outside = contextvars.copy_context()
        with record_events() as log:
            y = move(x, R, R, UNASKED, varying=(0,))
            outside.run(y.sum().backward)
        return log.collectives("backward")

    assert on_ranks(dense, body) == [["all_reduce"]] * 2


def test_local_steps_are_no_events(dense):
    """Steps without communication are not logged."""

    def body(torch, move):
        with record_events() as log:
            move(torch.ones(7, 5), R, S0)
            move(torch.ones(7, 5), R, P)
        return len(log)

    assert on_ranks(dense, body) == [0, 0]


def test_an_extremum_is_logged_once_per_collective(dense):
    """Partial(max): one all-reduce forward, one to count ties backward."""

    def body(torch, move):
        x = torch.ones(7, 5, requires_grad=True)
        with record_events() as log:
            move(x, Partial("max"), S0).sum().backward()
        return [(event.collective, event.phase) for event in log]

    both = [("all_reduce", "forward"), ("all_gather", "backward"), ("all_reduce", "backward")]
    assert on_ranks(dense, body) == [both, both]


def test_gathered_views_are_logged_in_backward(dense):
    """A gathered view has no forward event, and its backward is one reduce-scatter."""

    def body(torch, move):
        x = torch.ones(move.rows, 5, requires_grad=True)
        whole = move(x, S0, R)
        with record_events() as log:
            gathered_view(x, whole, move.plan(S0, R), (0,), get_torch_platform()).sum().backward()
        return log.collectives()

    assert on_ranks(dense, body) == [["reduce_scatter"]] * 2


def test_strict_refuses_what_nobody_asked_for(dense):
    """Inside strict() an implicit redistribution raises, and the message has the line that makes it explicit."""

    def body(torch, move):
        with module_scope("block.attn"), strict(), pytest.raises(StrictModeError) as caught:
            move(torch.ones(move.rows, 5), S0, R, UNASKED)
        return str(caught.value)

    assert on_ranks(dense, body)[0] == (
        "strict(): implicit redistribution in block.attn: matmul(other): f32[7@a, 5] -> f32[7, 5], 80 bytes "
        "(all_gather over a); make it explicit: other = other.redistribute(placements=[Replicate()])"
    )


def test_strict_allows_what_was_asked_for_and_what_is_local(dense):
    """Inside strict() explicit redistributions, local steps and any backward pass; outside of it all do."""

    def body(torch, move):
        x = torch.ones(7, 5, requires_grad=True)
        with strict():
            move(torch.ones(move.rows, 5), S0, R)
            move(torch.ones(7, 5), R, S0, UNASKED)
            move(x, R, R, UNASKED, varying=(0,)).sum().backward()
        move(torch.ones(move.rows, 5), S0, R, UNASKED)
        return x.grad.sum().item()

    assert on_ranks(dense, body) == [70.0, 70.0]


def test_what_strict_refused_is_not_logged(dense):
    """The log does not hold a collective that strict() refused."""

    def body(torch, move):
        with record_events() as log, strict(), pytest.raises(StrictModeError):
            move(torch.ones(move.rows, 5), S0, R, UNASKED)
        with strict(), record_events() as inner, pytest.raises(StrictModeError):
            move(torch.ones(move.rows, 5), S0, R, UNASKED)
        return len(log), len(inner)

    assert on_ranks(dense, body) == [(0, 0)] * 2


def test_a_budget_adds_up(dense):
    """Inside implicit_budget(n) implicit redistributions pass until they have received more than n bytes."""

    def body(torch, move):
        shard = torch.ones(move.rows, 5)
        with implicit_budget(160):
            move(shard, S0, R, UNASKED)
            move(shard, S0, R)
            move(shard, S0, R, UNASKED)
            with pytest.raises(StrictModeError) as caught:
                move(shard, S0, R, UNASKED)
        return str(caught.value)

    assert on_ranks(dense, body)[1] == (
        "implicit_budget(160): 240 bytes with the implicit redistribution in matmul(other): f32[7@a, 5] -> f32[7, 5], "
        "80 bytes (all_gather over a); make it explicit: other = other.redistribute(placements=[Replicate()])"
    )


def test_module_scopes_nest():
    """The innermost scope names the module, and leaving it restores the outer one."""
    with module_scope("a"):
        with module_scope("a.b"):
            assert module_path() == "a.b"
        assert module_path() == "a"
    assert module_path() == ""
