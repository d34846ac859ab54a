"""How warm processes are ended."""

import multiprocessing
import os
import posix
import signal
import time
from pathlib import Path

import pytest

from hyper_parallel.transport.simulated import rank_pool
from hyper_parallel.transport.simulated.rank_pool import end_processes

pytestmark = pytest.mark.platforms("torch")


def _write_slowly(folder):
    """Run until SIGTERM; then write to the data file for longer than a rank may take to end, and say so at last."""
    folder, ended = Path(folder), []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    (folder / "ready").touch()
    while not ended:
        time.sleep(0.01)
    for _ in range(30):
        (folder / "data").touch()
        time.sleep(0.01)
    (folder / "whole").touch()
    posix._exit(0)  # an orderly end waits for threads that a fork does not copy; coverage wraps that of `os`


def _ignore_sigterm(folder):
    """Run on after SIGTERM and write nothing."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (Path(folder) / "ready").touch()
    while True:
        time.sleep(1)


@pytest.mark.parametrize("target, whole, code", [(_write_slowly, True, 0), (_ignore_sigterm, False, -signal.SIGKILL)])
def test_a_process_that_writes_its_data_is_not_killed(monkeypatch, tmp_path, target, whole, code):
    """After the time to end, a process that goes on writing may finish its file; any other is killed."""

    def wrote_data_at(pid):
        assert pid == process.pid
        data = tmp_path / "data"
        return data.stat().st_mtime if data.exists() else 0.0

    for name in ("_TERM_SECONDS", "_MEASURED_TERM_SECONDS"):
        monkeypatch.setattr(rank_pool, name, 0.1)
    monkeypatch.setattr(rank_pool, "_SAVE_SECONDS", 60.0)
    monkeypatch.setattr(rank_pool, "wrote_data_at", wrote_data_at)
    process = multiprocessing.get_context("fork").Process(target=target, args=(str(tmp_path),), daemon=True)
    process.start()
    while not (tmp_path / "ready").exists():
        assert process.is_alive()
        time.sleep(0.01)
    if whole:  # its first write, without which it is like one that writes nothing
        (tmp_path / "data").touch()
    end_processes([process])
    assert (process.exitcode, (tmp_path / "whole").exists()) == (code, whole)


def test_the_ledger_says_which_rank_was_killed(monkeypatch, tmp_path):
    """The ledger of started ranks names the test of each, and which of them SIGTERM did not end."""
    monkeypatch.setattr(rank_pool, "_MEASURED_TERM_SECONDS", 0.1)
    monkeypatch.setenv(rank_pool.LEDGER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "test_a")
    process = multiprocessing.get_context("fork").Process(target=_ignore_sigterm, args=(str(tmp_path),), daemon=True)
    process.start()
    while not (tmp_path / "ready").exists():
        assert process.is_alive()
        time.sleep(0.01)
    rank_pool.register_rank(process.pid, "stack-file", "rank-1")
    end_processes([process])
    text = (tmp_path / str(process.pid)).read_text()
    assert text == "rank-1, started in test_a, killed because it did not react to SIGTERM\nstack-file"


def _sleep(folder):
    """Sleep until a signal ends it; coverage's handler of SIGTERM, which the parent may have, would do other things."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    (Path(folder) / "ready").touch()
    while True:
        time.sleep(1)


class _Silent:
    """A worker that never writes down a stack."""

    def __init__(self, process):
        self.process, self.alive = process, process.is_alive

    def ask_for_stack(self):
        """Ask in vain."""

    def last_words(self):
        """Nothing."""
        return ""


def test_a_stopped_process_is_told_and_ended_by_sigterm(monkeypatch, tmp_path):
    """Nobody waits for the stack of a stopped process, which is continued to be ended; one that is gone is reported."""
    monkeypatch.setattr(rank_pool, "_STACK_SECONDS", 600.0)
    process = multiprocessing.get_context("fork").Process(target=_sleep, args=(str(tmp_path),), daemon=True)
    process.start()
    while not (tmp_path / "ready").exists():
        assert process.is_alive()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGSTOP)
    while not rank_pool._is_stopped(process.pid):
        time.sleep(0.01)
    assert rank_pool.stacks_of({3: _Silent(process)}) == {3: "(the process is stopped)"}
    end_processes([process])
    assert process.exitcode == -signal.SIGTERM
    assert rank_pool.stacks_of({3: _Silent(process)}) == {3: "(the process is gone)"}
    assert not rank_pool._is_stopped(process.pid)


def test_a_process_that_does_not_answer_is_told(monkeypatch):
    """A process that runs and writes nothing until the limit does not answer."""
    monkeypatch.setattr(rank_pool, "_STACK_SECONDS", 0.05)
    assert rank_pool.stacks_of({0: _Silent(multiprocessing.current_process())}) == {0: "(the process does not answer)"}


_SENDS_FRAMEWORKS = "import sys; line.send([name for name in ('torch', 'mindspore') if name in sys.modules])"


def test_a_fresh_process_has_imported_nothing():
    """It is an interpreter of its own, as msrun starts those of MindSpore on devices, and not one of a fork server."""
    ours, theirs = multiprocessing.Pipe()
    process = rank_pool.start_process(exec, (_SENDS_FRAMEWORKS, {"line": theirs}), "fresh", rank_pool.FRESH)
    theirs.close()  # a process that ends without an answer ends the test
    assert ours.recv() == []
    process.join()
    assert process.exitcode == 0


def test_a_process_that_took_a_device_serves_that_device_alone(monkeypatch):
    """Processes that compute on a device are fresh interpreters, and are used again for this device only."""
    made = []

    class Idle:
        """A process that waits for its next task."""

        def __init__(self, framework="mindspore", device=None):
            self.device = device
            made.append((framework, device))

        def alive(self):
            return True

    monkeypatch.setattr(rank_pool, "Worker", Idle)
    monkeypatch.setattr(rank_pool, "_IDLE", [])
    host, first = rank_pool.check_out(2), rank_pool.check_out(2, device=0)
    rank_pool.check_in(host)
    rank_pool.check_in(first)
    assert made == [("mindspore", None)] * 2 + [("fresh", 0)] * 2
    second = rank_pool.check_out(1, device=1)
    assert made[4:] == [("fresh", 1)]
    rank_pool.check_in(second)
    assert [rank_pool.check_out(2, device=0), rank_pool.check_out(2), rank_pool.check_out(1, device=1)] == [
        first, host, second,
    ]  # fmt: skip
    assert len(made) == 5


def test_a_server_whose_end_another_wait_has_seen_has_ended():
    """A program's own wait for any child may take the status of a server that was let go."""
    gone = multiprocessing.get_context("fork").Process(target=os.getpid)
    gone.start()
    gone.join()
    assert rank_pool._has_ended(gone.pid)
