"""The timeline of a step has every call of a rank, at the time at which the slowest member lets it go on."""

import numpy as np
import pytest

from hyper_parallel.platform.select import current_platform
from hyper_parallel.verify.simulate import simulate
from hyper_parallel.verify.step_timeline import StepCall, recorded_calls, replayed


def blocking(operation, ranks, started, ended):
    """Return a blocking call."""
    return StepCall(operation, ranks, "", started, started, ended)


def spans(calls):
    """Return begin and end of every call, rounded."""
    return [[(round(call.started, 3), round(call.waits, 3), call.ended) for call in rank] for rank in calls]


def test_a_collective_ends_when_its_slowest_member_calls_it():
    """Ranks that took turns compute at once: the first waits for the one that computes longer, and nobody else does."""
    both = (0, 1)
    first = [blocking("all_reduce", both, 1.0, 6.0), blocking("all_reduce", both, 7.0, 9.0)]  # 1 s between them
    second = [blocking("all_reduce", both, 5.0, 5.5), blocking("all_gather", both, 8.5, 8.75)]  # 3 s
    assert spans(replayed([first, second])) == [
        [(0.0, 0.0, 0.0), (1.0, 1.0, 3.0)],
        [(0.0, 0.0, 0.0), (3.0, 3.0, 3.0)],
    ]


def test_an_asynchronous_collective_costs_what_is_left_at_its_wait():
    """Compute between start and wait counts; the wait ends when the last member has started the collective."""
    ranks = (0, 1, 2)
    early = [StepCall("all_reduce", ranks, "", 1.0, 2.0, 9.0)]
    late = [blocking("barrier", (2,), 3.0, 3.5), StepCall("all_reduce", ranks, "", 8.5, 8.5, 9.0)]  # 5 s later
    never = [StepCall("all_reduce", ranks, "", 4.0, 4.0, None)]
    assert spans(replayed([early, never, late])) == [
        [(0.0, 1.0, 5.0)],
        [(0.0, 0.0, None)],
        [(0.0, 0.0, 0.0), (5.0, 5.0, 5.0)],
    ]


def test_messages_and_missing_members():
    """A receive waits for its send, a send for nobody; a call whose member is not known to call holds nobody up."""
    sender = [blocking("barrier", (0,), 1.0, 1.0), blocking("send", (0, 1), 3.0, 4.0)]
    receiver = [blocking("recv", (0, 1), 1.0, 4.0), blocking("all_reduce", (1, 2), 4.5, 5.0)]
    assert spans(replayed([sender, receiver, []])) == [
        [(0.0, 0.0, 0.0), (2.0, 2.0, 2.0)],
        [(0.0, 0.0, 2.0), (2.5, 2.5, 2.5)],
        [],
    ]


def on_rank():
    """Return what a rank calls, by name and members, and whether it waited."""
    platform = current_platform()
    transport = platform.transport()
    rank = platform.get_rank()
    value = platform.from_numpy(np.ones(3, np.float32))
    with recorded_calls(transport) as calls:
        platform.all_reduce(value)
        _, handle = platform.all_reduce(value, None, True)
        handle.wait()
        platform.all_reduce(value)
        transport.all_gather_object(rank, (0, 1, 2))
    before = len(calls)
    platform.all_reduce(value)
    assert len(calls) == before, "a call after the block was recorded"
    assert all(call.started <= call.waits <= call.ended for call in calls)
    return [(call.operation, call.ranks) for call in calls]


@pytest.mark.platforms("torch", "mindspore")
def test_calls_of_a_rank_are_recorded_once(platform_name):
    """A blocking call, an asynchronous one and its wait are one call each; nothing is recorded after the block."""
    everyone = (0, 1, 2)
    expected = [("all_reduce", everyone)] * 3 + [("all_gather_object", everyone)]
    assert simulate(on_rank, 3, platform_name) == [expected] * 3


def raising():
    """Leave the block by an error; the transport is as before."""
    platform = current_platform()
    transport = platform.transport()
    with pytest.raises(ZeroDivisionError), recorded_calls(transport):
        raise ZeroDivisionError
    return "all_reduce" in vars(transport)


def test_an_error_ends_the_recording():
    """A step that raises leaves the transport as it was."""
    assert simulate(raising, 2) == [False, False]
