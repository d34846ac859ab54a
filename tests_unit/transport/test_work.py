"""The handles of started collectives, over simulated ranks and on their own."""

import numpy as np
import pytest

from hyper_parallel.errors import CollectiveMismatchError, HandleError, RankFailedError
from hyper_parallel.transport.base import active_transport
from hyper_parallel.transport.host.numpy_ops import NumpyOps
from hyper_parallel.transport.simulated.threads import run_threads
from hyper_parallel.transport.work import Work


def run(body, world_size=3, timeout=240.0):
    """Run on numpy arrays; ``body`` gets its transport and all ranks."""
    return run_threads(lambda: body(active_transport(), tuple(range(world_size))), world_size, NumpyOps(), timeout)


def test_a_handle_is_waited_for_once():
    """The second wait is an error that names the collective, and the result is made once."""
    made = []
    pending = Work("all_reduce", lambda: made.append(1))
    assert not pending.waited
    pending.wait()
    with pytest.raises(HandleError) as caught:
        pending.wait()
    assert str(caught.value) == "all_reduce: this handle was waited for before; wait once and keep the result"
    assert (pending.waited, made) == (True, [1])


def test_a_follower_uses_up_the_handle():
    """A handle that another one follows counts as waited for."""
    first = Work("recv", lambda: 2)
    assert first.then(lambda value: value + 1).wait() == 3
    with pytest.raises(HandleError, match="recv: this handle"):
        first.wait()


def test_a_started_collective_returns_before_others_have_come():
    """Rank 0 goes on after starting, while nobody else has joined; what it writes afterwards changes nothing."""
    log = []

    def body(t, ranks):
        x = np.full(2, float(t.rank))
        log.append(("start", t.rank))
        pending = t.start("all_reduce", x, "sum", ranks)
        x[:] = 99
        log.append(("on", t.rank))
        return pending.wait().tolist()

    assert run(body) == [[3, 3]] * 3
    assert log[:2] == [("start", 0), ("on", 0)]


def test_blocking_collectives_may_overtake_started_ones():
    """Started collectives keep their place in their group's order while other groups go on."""

    def body(t, ranks):
        if t.rank == 2:
            first = t.all_reduce(np.array([1.0]), "sum", (0, 2))
            t.send(first, 1)
            return first[0]
        started = t.start("all_reduce", np.array([t.rank + 1.0]), "sum", (0, 1)) if t.rank == 0 else None
        if t.rank == 0:
            assert t.all_reduce(np.array([10.0]), "sum", (0, 2))[0] == 11
            return started.wait()[0]
        assert t.recv(np.zeros(1), 2)[0] == 11
        return t.all_reduce(np.array([2.0]), "sum", (0, 1))[0]

    assert run(body) == [3.0, 3.0, 11.0]


def test_disagreement_is_raised_in_wait():
    """Members that start different collectives all get the error in wait, with both call sites."""

    def body(t, ranks):
        pending = t.start("all_reduce", np.ones(2 + t.rank % 2), "sum", ranks)
        with pytest.raises(CollectiveMismatchError, match="disagree about the shape"):
            pending.wait()
        return True

    assert run(body, 2) == [True, True]


def test_a_member_that_never_comes_is_reported():
    """Waiting for a rank that has returned without joining is an error, not a hang."""

    def body(t, ranks):
        if t.rank:
            t.start("all_reduce", np.ones(2), "sum", ranks).wait()

    with pytest.raises(RankFailedError, match="rank 0 returned without joining"):
        run(body, 2)


def test_waiting_for_each_other_is_a_reported_deadlock():
    """Started collectives that wait for each other crosswise are an error that lists the waiting ranks."""

    def body(t, ranks):
        t.start("all_reduce", np.ones(1), "sum", ranks)
        t.recv(np.ones(1), 1 - t.rank)

    with pytest.raises(RankFailedError, match="deadlock, no rank can go on"):
        run(body, 2)


def test_a_rank_that_has_started_may_return():
    """A collective that one member never waits for is complete for the others."""

    def body(t, ranks):
        pending = t.start("all_reduce", np.array([t.rank + 1.0]), "sum", ranks)
        return None if t.rank == 0 else pending.wait()[0]

    assert run(body) == [None, 6.0, 6.0]
