"""Reports of failed worlds."""

import errno
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import hyper_parallel
from hyper_parallel.errors import CollectiveMismatchError, RankFailedError
from hyper_parallel.pytest_plugin.ranks import require_transport
from hyper_parallel.transport.failures import (
    advice,
    exit_text,
    is_out_of_memory,
    starting,
    world_failed,
    world_timed_out,
)
from hyper_parallel.transport.real import launched_processes
from hyper_parallel.transport.serialization import pack
from hyper_parallel.transport.simulated import rank_pool


def test_equal_errors_are_reported_once():
    """An error that several ranks share is reported once; every other rank has one line."""
    failures = {1: CollectiveMismatchError("differ"), 0: CollectiveMismatchError("differ")}
    error = world_failed(3, failures, {2: "waited in barrier()"})
    assert str(error).splitlines() == [
        "ranks 0, 1 of 3 failed",
        "--- ranks 0, 1:",
        "hyper_parallel.errors.CollectiveMismatchError: differ",
        "--- rank 2: waited in barrier()",
    ]
    assert error.failures == failures
    assert error.__cause__ is failures[1]


def test_remote_traces_are_shown_as_they_came():
    """The traceback of another process is shown as that process wrote it."""
    assert "as it came" in str(world_failed(1, {0: ValueError("x")}, {}, {0: "as it came"}))


def test_equal_tracebacks_are_folded():
    """Ranks that failed in the same way share one traceback, whatever the addresses in it; others have their own."""
    same = "File train.py, line 3\nValueError: <object at 0x7f{}0>"
    failures = dict.fromkeys((2, 0, 1, 3), ValueError("x"))
    traces = {0: same.format(0), 1: "TypeError: y", 2: same.format("a"), 3: same.format("b")}
    assert str(world_failed(4, failures, {}, traces)).splitlines() == [
        "ranks 0, 1, 2, 3 of 4 failed",
        "--- ranks 0, 2, 3:",
        "File train.py, line 3",
        "ValueError: <object at 0x7fa0>",
        "--- rank 1:",
        "TypeError: y",
    ]


def test_the_odd_rank_comes_first():
    """A rank that differs from the majority is the first failure; the others have the same error."""
    failures = {rank: CollectiveMismatchError("rank 2 disagrees") for rank in (0, 1, 2)}
    for error in failures.values():
        error.odd_ranks = (2,)
    traces = {rank: f"line {rank}\nrank 2 disagrees" for rank in failures}
    error = world_failed(3, failures, {}, traces)
    assert list(error.failures) == [2, 0, 1]
    assert str(error).splitlines() == [
        "ranks 0, 1, 2 of 3 failed",
        "--- rank 2:",
        "line 2",
        "rank 2 disagrees",
        "--- ranks 0, 1: same error as rank 2",
    ]


def test_signals_have_names():
    """A process that a signal ended is described with the signal's name."""
    assert [exit_text(code) for code in (3, -9, -11, -65)] == [
        "with exit code 3",
        "of SIGKILL",
        "of SIGSEGV",
        "of signal 65",
    ]


def test_timeout_names_the_ranks_that_ran_on():
    """The ranks that hang are named, are the failures and come first; then the others in rank order."""
    error = world_timed_out(1.5, {2: "returned\n", 0: "returned\n", 1: "was running in\nb\n"}, [1])
    assert str(error).splitlines() == [
        "rank 1 of 3 did not finish within 1.5 s",
        "--- rank 1: was running in",
        "b",
        "--- rank 0: returned",
        "--- rank 2: returned",
    ]
    assert list(error.failures) == [1]


def test_timeout_shows_stacks_in_rank_order():
    """Where it is not known which ranks hang, all are named, in rank order."""
    text = str(world_timed_out(1.5, {1: "b\n", 0: "a\n"}))
    assert text.splitlines() == ["2 ranks did not finish within 1.5 s", "--- rank 0: a", "--- rank 1: b"]


LIMIT = """
import os, resource, sys

def allow(mib):
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (mib << 20), resource.RLIM_INFINITY))
"""
# A framework's libraries alone are larger.
CONFTEST = LIMIT + "allow(100)"
RANKED = """
import pytest

@pytest.mark.launch({launch!r})
@pytest.mark.world_size(2)
def test_ranks(rank): pass

def test_other(): pass
"""
THREADS = (
    LIMIT
    + """
import threading
from hyper_parallel.errors import RankFailedError
from hyper_parallel.transport.host.numpy_ops import NumpyOps
from hyper_parallel.transport.simulated.threads import run_threads

ran = []
threading.stack_size(16 << 20)
before = resource.getrlimit(resource.RLIMIT_AS)
allow(100)
try:
    run_threads(lambda: ran.append(1), 20, NumpyOps(), 30.0)
except RankFailedError as error:
    print(error)
assert not ran
for thread in threading.enumerate()[1:]:
    thread.join(60)
assert threading.active_count() == 1, threading.enumerate()
resource.setrlimit(resource.RLIMIT_AS, before)
assert run_threads(lambda: 5, 3, NumpyOps(), 30.0) == [5, 5, 5]
"""
)
COMMAND = (
    LIMIT
    + """
from hyper_parallel import cli

before = resource.getrlimit(resource.RLIMIT_AS)
allow(100)
status = cli.main(sys.argv[1:])
resource.setrlimit(resource.RLIMIT_AS, before)  # for what measures coverage
sys.exit(status)
"""
)
TOLD = (
    r"out of memory for this number of ranks: \d+ MiB available now, \d+ MiB allowed for a process \(ulimit -v\)\. "
    r"Run fewer at a time: a smaller world, a smaller model, or fewer pytest workers \(-n\)"
)


def python(folder, *arguments, ranks=True):
    """Run Python in a new process that finds this package; ranks that have no memory for it leave no coverage."""
    path = os.pathsep.join([str(Path(hyper_parallel.__file__).parents[1]), *filter(None, sys.path)])
    unmeasured = {name: value for name, value in os.environ.items() if not name.startswith(("COVERAGE", "HP_RANK"))}
    environment = unmeasured if ranks else dict(os.environ)
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env={**environment, "PYTHONPATH": path},
        text=True, capture_output=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.fault
def test_ranks_without_memory_fail_their_test_and_no_other(platform_name, tmp_path):
    """If ranks run out of memory, their test fails with the figures, the other tests run, and the status is 1."""
    real = importlib.util.find_spec("torch") is not None  # carries real worlds of both
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_memory.py").write_text(RANKED.format(launch="processes" if real else "simulated"))
    options = ("-p", "no:cacheprovider", "-p", "hyper_parallel.pytest_plugin", "--hp-platforms", platform_name)
    done = python(tmp_path, "-m", "pytest", *options)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    assert re.search(TOLD, done.stdout), done.stdout
    assert "launched_processes.py" not in done.stdout  # the failure is reported, not the plugin's own frames


@pytest.mark.fault
def test_threads_without_memory_end():
    """If one thread of a world cannot be started, none runs, all end, and the process can start smaller worlds."""
    done = python(None, "-c", THREADS, ranks=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"rank-\d+ of 20 could not be started: RuntimeError: can't start new thread\n" + TOLD, done.stdout)


@pytest.mark.fault
def test_the_command_without_memory(platform_name):
    """If the command runs out of memory, it reports that, and exits with status 1 because nothing was checked."""
    done = python(None, "-c", COMMAND, "verify", "model", "--platform", platform_name, "--launch", "simulated",
                  ranks=platform_name != "torch")  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(TOLD, done.stdout + done.stderr), done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "message", ["MemoryError: ", "libx.so: failed to map segment from shared object", "std::bad_alloc"]
)
def test_messages_that_mean_out_of_memory(message):
    """Every message that means out of memory is recognised, and gets the figures and the fix."""
    assert advice(message).startswith("out of memory for this number of ranks: ")
    assert is_out_of_memory(RuntimeError(message))


def test_other_failures_are_passed_on():
    """No other failure gets advice about memory; a start that fails for another reason keeps its exception."""
    assert advice("RuntimeError: shapes differ") == ""
    with pytest.raises(FileNotFoundError), starting("rank 0"):
        Path("/nowhere/at/all").read_text()
    assert is_out_of_memory(OSError(errno.ENOMEM, "fork"))
    assert not is_out_of_memory(OSError(errno.ENOENT, "fork"))


def _second_fails(monkeypatch, tmp_path, start):
    """Let the second start of a worker run out of memory; the value lists the processes that were started."""
    started = []

    def limited(*args, **kwargs):
        if started:
            raise RankFailedError("no memory")
        started.append(start(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(rank_pool, "start_process", limited)
    return started


@pytest.mark.platforms("mindspore")
def test_simulated_ranks_that_were_started_are_let_go(monkeypatch, tmp_path):
    """If memory suffices for one process of two, the started one ends, and no file of either is left."""
    rank_pool.close_workers()
    started = _second_fails(monkeypatch, tmp_path, rank_pool.start_process)
    with pytest.raises(RankFailedError, match="no memory"):
        rank_pool.check_out(2)
    assert [process.exitcode for process in started] == [0]
    assert not list(tmp_path.glob("hyper_parallel_*"))


def test_real_ranks_that_were_started_are_ended(platform_name, monkeypatch, tmp_path):
    """If memory suffices for one of two real ranks, the first, which waits for the others, is ended with its files."""
    require_transport(platform_name)
    launched_processes.close_launched_teams()
    started = _second_fails(monkeypatch, tmp_path, rank_pool.start_process)
    monkeypatch.delenv(rank_pool.LEDGER_VARIABLE, raising=False)  # it is ended wherever it is
    with pytest.raises(RankFailedError, match="no memory"):
        launched_processes.run_launched(pack((int, ())), 2, platform_name, 240.0)
    assert not started[0].is_alive()
    assert not list(tmp_path.glob("hyper_parallel_*"))


def test_a_fork_server_that_ends_is_reported():
    """If the process that forks ranks has ended, the message points to stderr and names the likely cause."""
    message = (
        r"rank 0 could not be started: the fork server of the ranks has ended, and stderr has the reason\. If memory"
    )
    with pytest.raises(RankFailedError, match=message), starting("rank 0"):
        raise EOFError


def test_advice_on_a_full_disk():
    """PyTorch's writer hides the system's error; what it says instead gets a hint."""
    hint = "PyTorch could not write all of a checkpoint's file: is the disk full? An earlier checkpoint is unchanged"
    assert advice("RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598") == hint
    assert advice("RuntimeError: PytorchStreamWriter failed writing file data/0: file write failed") == hint
