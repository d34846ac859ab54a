"""The part of a rank process that runs here: its connection to the coordinator, its reports and its ways to end."""

import io
import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.base import active_transport
from hyper_parallel.transport.checks.fingerprint import CollectiveFingerprint, MessageFingerprint, Site
from hyper_parallel.transport.host.numpy_ops import NumpyOps
from hyper_parallel.transport.serialization import pack, unpack
from hyper_parallel.transport.simulated import rank_process
from hyper_parallel.transport.simulated.endpoint import Contribution, RankAbortedError, Resumption
from hyper_parallel.transport.simulated.rank_process import (
    PipeEndpoint,
    RankTask,
    end_by_sigterm,
    leave_after,
    next_task,
    run_rank,
)
from hyper_parallel.transport.simulated.transport import SimulatedTransport

SITE = Site(("train.py", 1))


def report(fn, start=None, *, traced=True):
    """Return how a rank that runs ``fn`` ends."""
    line, _ = multiprocessing.Pipe()
    transport = SimulatedTransport(1, 2, NumpyOps(), PipeEndpoint(line))
    return run_rank(RankTask(1, 2, pack((fn, ()), fn), start, [], "", traced), transport)


def test_a_rank_reports_how_it_ended():
    """A rank reports a result, an error with its traceback, or that it was unwound."""

    def raises():
        raise ArithmeticError("own")

    def unwinds():
        raise RankAbortedError

    def stumbles():
        try:
            unwinds()
        except RankAbortedError:
            raises()

    returned = report(lambda: active_transport().rank)
    assert (returned.how, unpack(returned.packed)) == ("returned", 1)
    raised = report(raises)
    assert (raised.how, repr(unpack(raised.packed))) == ("raised", "ArithmeticError('own')")
    assert "in raises" in raised.trace
    assert [report(fn).how for fn in (unwinds, stumbles)] == ["unwound", "unwound"]


def test_a_rank_wraps_its_transport_and_pauses_a_tracer():
    """The function that a task names wraps the transport; without tracer in the parent the rank's own pauses."""
    tracer = sys.gettrace()
    done = report(lambda: (sys.gettrace(), str(active_transport())), "builtins:str", traced=False)
    tracer_in_rank, transport = unpack(done.packed)
    assert tracer_in_rank is None
    assert "SimulatedTransport" in transport
    assert sys.gettrace() is tracer


def test_a_rank_asks_its_coordinator():
    """A rank waits for the answer to a request, a value or an error; it does not wait after an announcement."""
    ours, theirs = multiprocessing.Pipe()
    rank = PipeEndpoint(ours)
    call = Contribution(CollectiveFingerprint("barrier", (0, 1), (), SITE), [None, None])
    message = MessageFingerprint(0, 1, 0, (), SITE)
    for answer in ([1], [2], "payload"):
        theirs.send(Resumption(answer))
    theirs.send(Resumption(error=CollectiveMismatchError("strayed")))
    assert (rank.exchange(call), rank.wait(3), rank.receive(message)) == ([1], [2], "payload")
    with pytest.raises(CollectiveMismatchError, match="strayed"):
        rank.exchange(call)
    rank.start(call)
    rank.send(message, None)
    heard = [theirs.recv() for _ in range(6)]
    assert [kind for kind, _ in heard] == ["join", "await", "receive", "join", "start", "send"]
    assert heard[1][1] == 3
    assert heard[5][1][0].key == message.key


@pytest.fixture(name="own_signals")
def _own_signals():
    """Restore the signal handlers afterwards."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    "error, status, written",
    [(EOFError(), 0, ""), (BrokenPipeError(), 0, ""), (OSError("full"), 1, "OSError: full")],
)
def test_a_rank_leaves_when_its_line_closes(own_signals, error, status, written):
    """A closed connection is not a failure; any other error is written down. SIGTERM is ignored from then on."""

    def serve():
        raise error

    stack, left = io.StringIO(), []
    leave_after(serve, stack, left.append)
    assert left == [status]
    assert written in stack.getvalue()
    assert bool(written) == bool(stack.getvalue())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_sigterm_ends_a_rank_whose_handler_raises(own_signals, monkeypatch):
    """If a handler of SIGTERM raises, the signal is sent again, to the default handler."""
    sent = []
    monkeypatch.setattr(os, "kill", lambda *what: sent.append((*what, signal.getsignal(signal.SIGTERM))))

    def raises(*_):
        raise AssertionError

    signal.signal(signal.SIGTERM, raises)
    end_by_sigterm()
    with pytest.raises(AssertionError):
        signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)
    assert sent == [(os.getpid(), signal.SIGTERM, signal.SIG_DFL)]
    end_by_sigterm()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_process_that_a_rank_forks_ends_at_once(own_signals):
    """SIGTERM of a rank's child does not run the rank's handler, which may wait for a lock taken at the fork."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
    end_by_sigterm()
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(4)
    assert os.waitpid(child, 0)[1] == signal.SIGTERM


def test_a_process_that_is_ended_while_it_is_forked_ends(own_signals):
    """SIGTERM that comes before Python has set up a new process, as from a pool that is done, is not lost."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
    end_by_sigterm()
    for _ in range(20):  # without a mask around the fork, about two in three would be lost
        child = os.fork()
        if not child:
            time.sleep(20)
            os._exit(4)
        os.kill(child, signal.SIGTERM)
        assert os.waitpid(child, 0)[1] == signal.SIGTERM
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, set())


def test_a_rank_waits_for_its_next_task_in_turns(monkeypatch):
    """An idle rank wakes up regularly, so that Python can run pending signal handlers."""
    monkeypatch.setattr(rank_process, "_SIGNAL_SECONDS", 0.001)
    ours, theirs = multiprocessing.Pipe()
    late = threading.Timer(0.05, theirs.send, ["task"])
    late.start()
    assert next_task(ours) == "task"
    late.join()
