"""A program in this process's threads neither ends nor forks it, and leaves its signals alone."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading

import pytest

from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.guards import guarded


def in_a_thread(program):
    """Run ``program`` as a rank runs it, guarded; return what it returns or how it exits."""
    results = []

    def body():
        try:
            results.append(program())
        except SystemExit as ended:
            results.append(("exit", ended.code))

    with guarded("train.py"):
        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
    return results[0]


def test_exits_end_the_thread():
    """``os._exit`` is the thread's end, and this process goes on; afterwards it is Python's own."""
    plain = os._exit
    assert in_a_thread(lambda: os._exit(5)) == ("exit", 5)
    assert os._exit is plain


def test_handlers_are_not_installed():
    """Only the main thread may install one: a rank's is left out, and it is told the present one."""
    before = signal.getsignal(signal.SIGTERM)
    assert in_a_thread(lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN)) == before
    with guarded("train.py"):
        assert signal.signal(signal.SIGTERM, before) == before


def test_children_that_work_for_themselves_are_left_alone():
    """Processes of multiprocessing and subprocess run as ever."""

    def program():
        queue = multiprocessing.get_context("fork").SimpleQueue()
        child = multiprocessing.get_context("fork").Process(target=queue.put, args=(7,))
        child.start()
        value = queue.get()
        child.join()
        return value, child.exitcode, subprocess.run([sys.executable, "-c", "pass"], check=False).returncode

    assert in_a_thread(program) == (7, 0, 0)


def test_a_child_that_never_ends_is_ended():
    """Nothing is left running."""
    pids = []

    def program():
        pids.append(os.fork())
        if not pids[0]:
            signal.pause()

    in_a_thread(program)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_child_that_goes_on_is_an_error():
    """It is ended when it returns to the simulation."""
    from hyper_parallel.transport.simulated import threads as simulated_threads

    def program():
        if not os.fork():
            simulated_threads._ThreadWorld.pause(None, 0)

    with pytest.raises(InputError, match=r"^train.py forks at .*test_guards.py:\d+, and the child goes on with the "):
        in_a_thread(program)


@pytest.mark.parametrize(
    "end",
    [
        lambda: os.kill(os.getpid(), signal.SIGTERM),
        lambda: os.kill(0, signal.SIGTERM),
        lambda: os.killpg(os.getpgid(0), signal.SIGTERM),
        lambda: signal.raise_signal(signal.SIGTERM),
    ],
)
def test_signals_to_oneself_end_the_thread(end):
    """A program that ends itself by a signal ends its rank, with the status that a shell would show."""
    assert in_a_thread(end) == ("exit", 128 + signal.SIGTERM)


def test_an_abort_ends_the_thread():
    """``os.abort`` ends the rank, not this process."""
    assert in_a_thread(lambda: os.abort()) == ("exit", 128 + signal.SIGABRT)  # noqa: PLW0108 - guarded when it is called


def test_signals_to_others_are_sent():
    """A program may end its children, and ask whether a process is there."""

    def program():
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        os.kill(os.getpid(), 0)
        os.kill(child.pid, signal.SIGKILL)
        return child.wait()

    assert in_a_thread(program) == -signal.SIGKILL


def test_timers_are_not_set():
    """The handler of a rank's timer is not installed, so the signal would end this process."""

    def program():
        signal.alarm(1000)
        return signal.setitimer(signal.ITIMER_REAL, 1000)

    assert in_a_thread(program) == (0.0, 0.0)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    with guarded("train.py"):
        assert signal.alarm(0) == 0
