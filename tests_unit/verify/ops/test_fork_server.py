"""Child processes that check operators: the parent learns how each one ended."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import pytest

from hyper_parallel.verify.ops import fork_server

pytestmark = pytest.mark.platforms("torch")


def ended(run, seconds=20.0, *, deaf=False):
    """Return how a child that does `run` ends, and its events; with `deaf`, nobody reads them."""
    read, write = os.pipe()
    if deaf:
        os.close(read)
    died = fork_server._run_in_worker({"ops": ["one"], "seconds": seconds, "seat": 1}, write, run)
    os.close(write)
    if deaf:
        return died, None
    with os.fdopen(read) as events:
        return died, [json.loads(line) for line in events]


def tell(task, say):
    """Report the operator's start."""
    say({"event": "start", "op": task["ops"][0]})


def throw(task, say):
    """Report the start, and raise."""
    sys.stderr = sys.__stderr__  # of this child, which has it to itself: not pytest's
    tell(task, say)
    raise ArithmeticError("oops")


def kill(task, say):
    """Report the start, and kill this process."""
    tell(task, say)
    os.kill(os.getpid(), signal.SIGKILL)


def stay(task, say):
    """Report the start, and never end."""
    tell(task, say)
    time.sleep(60)


def tell_cpus(_, say):
    """Report the CPUs on which this process may run."""
    say(sorted(os.sched_getaffinity(0)))


def test_a_child_stays_on_the_cpu_of_its_seat():
    """A child is bound to one CPU, another one than the seat before; its fork server stays unbound."""
    before = sorted(os.sched_getaffinity(0))
    assert ended(tell_cpus) == ("", [[before[1 % len(before)]]])
    assert sorted(os.sched_getaffinity(0)) == before


def test_a_child_that_succeeds_has_no_error():
    """A child that succeeds has sent its events, and has no error text."""
    assert ended(tell) == ("", [{"event": "start", "op": "one"}])


def test_a_child_that_fails_shows_its_traceback():
    """A child that raises is reported with its status and traceback."""
    died, events = ended(throw)
    assert died.startswith("left with status 1\nTraceback")
    assert died.rstrip().endswith("ArithmeticError: oops")
    assert events == [{"event": "start", "op": "one"}]


def test_a_killed_child_is_reported_by_its_signal():
    """A killed child is reported by its signal, like one that a native crash ends."""
    assert ended(kill) == ("killed by SIGKILL", [{"event": "start", "op": "one"}])


def test_a_child_that_does_not_end_is_ended():
    """A child is ended after the time of its operators and of one more."""
    assert ended(stay, 0.5) == ("did not finish within 0.5 s", [{"event": "start", "op": "one"}])


def test_a_child_without_a_parent_ends():
    """A child whose parent has gone ends instead of computing on."""
    assert ended(tell, deaf=True) == ("left with status 1", None)


def test_a_worker_of_mindspore_on_a_device_is_a_fresh_interpreter(monkeypatch):
    """Nobody knows whether CANN survives a fork, so the forked child becomes a new interpreter, which runs the task."""
    task = {"platform": "mindspore", "ops": ["one"], "effort": {"device": "npu"}, "seconds": 5.0, "seat": 0}
    called = []
    monkeypatch.setattr(os, "execv", lambda path, command: called.append((path, command)))
    ends = os.pipe(), os.pipe()
    fork_server._become_fresh(task, ends[0][1], ends[1][1])
    (path, (interpreter, _, code, *words)) = called[0]
    assert path == interpreter == sys.executable
    assert "hyper_parallel.verify.ops.fork_server" in code
    assert words == ["mindspore", str(ends[0][1]), json.dumps(task), str(ends[1][1])]
    assert all(os.get_inheritable(number) for number in (ends[0][1], ends[1][1]))
    for number in (*ends[0], *ends[1]):
        os.close(number)
    monkeypatch.setattr(fork_server, "_worker_main", lambda *arguments: called.append(arguments))
    fork_server._fresh_worker("torch", 3, json.dumps(task), 4)
    assert called[1][:3] == (task, 3, 4)


@pytest.mark.parametrize(
    "platform, device, fresh", [("mindspore", "npu", 1), ("mindspore", "cpu", 0), ("torch", "npu", 0)]
)
def test_other_workers_are_forked(monkeypatch, platform, device, fresh):
    """Only MindSpore on a device costs an import for each task."""
    mark = os.pipe()
    monkeypatch.setattr(fork_server, "_become_fresh", lambda *_: os.write(mark[1], b"fresh"))
    task = {"platform": platform, "ops": ["one"], "effort": {"device": device}, "seconds": 20.0, "seat": 0}
    read, write = os.pipe()
    assert fork_server._run_in_worker(task, write, tell) == ""
    os.close(mark[1])
    assert len(os.read(mark[0], 9)) == 5 * fresh
    for number in (read, write, mark[0]):
        os.close(number)
