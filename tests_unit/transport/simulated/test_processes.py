"""Simulated ranks as warm processes, on numpy arrays (MindSpore tensors: test_mindspore.py)."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from hyper_parallel.errors import CollectiveMismatchError, RankFailedError
from hyper_parallel.transport.base import active_transport
from hyper_parallel.transport.failures import WorldFailedError
from hyper_parallel.transport.simulated import rank_pool
from hyper_parallel.transport.simulated.processes import run_processes

pytestmark = pytest.mark.platforms("mindspore")

LIMIT = 3


class OopsError(Exception):
    """An exception type that only this module knows."""


def run(fn, world_size=2, args=(), timeout=240.0):
    """Run on numpy arrays."""
    return run_processes(fn, args, world_size, timeout, start=None)


def failure(fn, world_size=2, timeout=240.0):
    """The error with which the world fails."""
    with pytest.raises(RankFailedError) as caught:
        run(fn, world_size, timeout=timeout)
    assert isinstance(caught.value, WorldFailedError)
    return caught.value


def _uncounted(monkeypatch):
    """Leave the ranks that start from here on out of the coverage count: killed ranks leave no data, on purpose."""
    monkeypatch.delenv(rank_pool.LEDGER_VARIABLE, raising=False)
    rank_pool.close_workers()


def helper(x):
    """A function of this module that ranks call."""
    return x * LIMIT


def exchange():
    """Messages, a reduction and a gather, through every line of the protocol."""
    t = active_transport()
    ranks = tuple(range(t.world_size))
    total = t.all_reduce(np.ones(2) * t.rank, "sum", ranks)
    if t.rank == 0:
        t.send(np.arange(3), 1)
    received = t.recv(np.arange(3), 0).tolist() if t.rank == 1 else None
    return total.tolist(), received, t.all_gather_object(helper(t.rank), ranks)


def test_processes_are_ranks():
    """Process ranks reduce, send and gather, and call functions and globals of a module they cannot import."""
    assert run(exchange, 3) == [([3, 3], received, [0, 3, 6]) for received in (None, [0, 1, 2], None)]


def test_closures_and_lambdas_travel():
    """Lambdas and closures run in the ranks, with their arguments."""
    offset = 5
    assert run(lambda x, y: x + y + offset, args=(1, 2)) == [8, 8]


def test_processes_are_reused():
    """The same processes serve the next run, in the same order, also after a rank has raised."""
    first = run(os.getpid)
    assert len(set(first)) == 2
    failure(lambda: {}["gone"])
    assert run(os.getpid) == first
    assert os.getpid() not in first


def test_worlds_of_any_size_share_processes():
    """A process is any rank of any world: smaller worlds start none, and a larger one those that it lacks."""
    four = run(os.getpid, 4)
    assert run(os.getpid, 3) == four[:3]
    five = run(os.getpid, 5)
    assert (five[:4], len(set(five))) == (four, 5)
    assert run(os.getpid, 1) == four[:1]


def test_path_and_folder_travel(tmp_path, monkeypatch):
    """Ranks see the parent's sys.path and working directory."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert run(lambda: (sys.path[0], os.getcwd())) == [(str(tmp_path), str(tmp_path))] * 2  # noqa: PTH109


def test_random_state_is_fixed():
    """Every run starts from the same random state, whatever ran before in the same process."""
    assert run(np.random.rand) == run(np.random.rand)


def test_exception_comes_back_with_its_traceback():
    """A rank's exception comes back as its own type, with the rank's traceback in the text."""

    def body():
        t = active_transport()
        if t.rank == 1:
            raise OopsError("here")
        t.barrier((0, 1))

    error = failure(body)
    assert list(error.failures) == [1]
    assert isinstance(error.failures[1], OopsError)
    assert 'raise OopsError("here")' in str(error)
    assert "--- rank 0: waited in barrier()" in str(error)


def test_exception_that_cannot_travel_comes_back_as_text():
    """An exception that does not pickle comes back as a RuntimeError with its type and text."""

    class BadError(Exception):
        def __reduce__(self):
            raise TypeError("no")

    def body():
        raise BadError("what")

    error = failure(body)
    assert type(error.failures[0]) is RuntimeError
    assert str(error.failures[0]) == "BadError: what"


def test_mismatch_names_both():
    """Process ranks that diverge are named, with both call sites."""

    def body():
        t = active_transport()
        t.all_reduce(np.ones(t.rank + 1), "sum", (0, 1))

    error = failure(body)
    assert isinstance(error.failures[0], CollectiveMismatchError)
    assert set(error.failures) == {0, 1}
    assert str(error.failures[0]).count(f"at {__file__}:") == 2


def test_killed_rank_is_reported_at_once(monkeypatch):
    """A killed rank is reported by name and exit code, with the collective that each other rank waits in."""
    _uncounted(monkeypatch)

    def body():
        t = active_transport()
        if t.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        t.barrier((0, 1))

    error = failure(body)
    assert "did not finish within" not in str(error)
    assert "rank 1 died of SIGKILL" in str(error)
    assert "--- rank 0: waited in barrier()" in str(error)
    assert run(lambda: active_transport().rank) == [0, 1]


def test_a_rank_that_fails_outside_its_function_says_why(monkeypatch, tmp_path):
    """An error between two tasks, here a folder that is gone, is reported with its traceback."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def body():
        folder.rmdir()
        active_transport().barrier((0, 1))

    error = failure(body)
    assert "--- rank 1:\nrank 1 died with exit code 1; it was not in a communication call\nTraceback" in str(error)
    assert f"FileNotFoundError: [Errno 2] No such file or directory: {str(folder)!r}" in str(error)


def test_waiting_rank_that_dies_is_noticed(monkeypatch):
    """A rank that dies while another one runs is noticed while it waits."""
    _uncounted(monkeypatch)

    def body():
        t = active_transport()
        victim = t.all_gather_object(os.getpid(), (0, 1))[0]
        if t.rank == 0:
            t.barrier((0, 1))
        os.kill(victim, signal.SIGKILL)
        while True:  # until the death of the other is noticed
            time.sleep(0.01)

    error = failure(body, timeout=120)
    assert "did not finish within" not in str(error)
    assert "rank 0 died of SIGKILL" in str(error)


def test_timeout_shows_stacks_and_ends_the_processes():
    """A run beyond its time shows every rank's stack, and its processes are ended."""

    def body():
        t = active_transport()
        while t.rank == 1:
            time.sleep(0.01)
        t.barrier((0, 1, 2))

    before = set(multiprocessing.active_children())
    error = failure(body, 3, timeout=10.0)
    assert str(error).splitlines()[:2] == ["rank 1 of 3 did not finish within 10 s", "--- rank 1: was running in"]
    assert "rank 0: waited in barrier()" in str(error)
    assert "in body" in str(error)
    assert str(error).endswith("--- rank 2: had not started")
    assert "rank_process.py" not in str(error)
    assert set(error.failures) == {1}
    assert set(multiprocessing.active_children()) <= before


def test_lost_messages_are_told():
    """A message that nobody receives fails the run."""

    def body():
        t = active_transport()
        if t.rank == 0:
            t.send(np.ones(1), 1)

    assert "was never received" in str(failure(body))


def test_close_all_ends_idle_processes():
    """Idle processes end on request, and the next run starts new ones."""
    first = run(os.getpid)
    rank_pool.close_workers()
    assert not {child.pid for child in multiprocessing.active_children()} & set(first)
    assert not set(run(os.getpid)) & set(first)


def test_dead_idle_process_is_replaced(monkeypatch):
    """A process that died between two runs is replaced."""
    _uncounted(monkeypatch)
    first = run(os.getpid)
    os.kill(first[0], signal.SIGKILL)
    for child in multiprocessing.active_children():
        if child.pid == first[0]:
            child.join()
    assert first[0] not in run(os.getpid)


def test_a_rank_is_traced_while_its_parent_is():
    """A rank's own tracer pauses in a run that starts without one, and goes on after it."""

    def watched(*_):
        return None

    def start(tracer):
        sys.settrace(tracer)

    def tracer():
        return getattr(sys.gettrace(), "__name__", None)

    before = sys.gettrace()
    try:
        sys.settrace(watched)
        tracers = [run(start, args=(watched,)), run(tracer)]
        sys.settrace(None)
        tracers.append(run(tracer))
        sys.settrace(watched)
        tracers += [run(tracer), run(start, args=(None,))]
    finally:
        sys.settrace(before)
        rank_pool.close_workers()
    assert tracers == [[None, None], ["watched", "watched"], [None, None], ["watched", "watched"], [None, None]]


SCRIPT = """
import inspect
from hyper_parallel.transport.simulated.processes import run_processes

class Named:
    pass

def rank():
    return inspect.getsource(Named)

if __name__ == "__main__":
    print(run_processes(rank, (), 2, 240, start=None))
"""


def test_the_source_of_a_scripts_classes_is_found(tmp_path):
    """A class of ``__main__`` has its source in a rank."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    source = "class Named:\n    pass\n"
    assert (done.returncode, done.stdout) == (0, f"{[source] * 2}\n"), done.stderr
