"""Processes in which operators are checked: however one ends, the parent hears of it and goes on."""

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
    """How a child that does `run` ends, and the events that it told; `deaf` if nobody listens to those."""
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
    """Tell of the operator."""
    say({"event": "start", "op": task["ops"][0]})


def throw(task, say):
    """Tell, and fail."""
    sys.stderr = sys.__stderr__  # of this child, which has it to itself: not pytest's
    tell(task, say)
    raise ArithmeticError("oops")


def kill(task, say):
    """Tell, and be killed."""
    tell(task, say)
    os.kill(os.getpid(), signal.SIGKILL)


def stay(task, say):
    """Tell, and never end."""
    tell(task, say)
    time.sleep(60)


def tell_cpus(_, say):
    """Tell where it may run."""
    say(sorted(os.sched_getaffinity(0)))


def test_a_child_stays_on_the_cpu_of_its_seat():
    """A child keeps what it starts on one CPU, another one than that of the seat before; its zygote stays free."""
    before = sorted(os.sched_getaffinity(0))
    assert ended(tell_cpus) == ("", [[before[1 % len(before)]]])
    assert sorted(os.sched_getaffinity(0)) == before


def test_a_child_that_ends_well_says_nothing():
    """Its events have arrived."""
    assert ended(tell) == ("", [{"event": "start", "op": "one"}])


def test_a_child_that_fails_shows_its_traceback():
    """An exception in the machinery is told with the status and the traceback."""
    died, events = ended(throw)
    assert died.startswith("left with status 1\nTraceback")
    assert died.rstrip().endswith("ArithmeticError: oops")
    assert events == [{"event": "start", "op": "one"}]


def test_a_child_that_is_killed_is_told_by_the_signal():
    """So is one that a native crash ends."""
    assert ended(kill) == ("killed by SIGKILL", [{"event": "start", "op": "one"}])


def test_a_child_that_does_not_end_is_ended():
    """Its time is that of its operators and one more."""
    assert ended(stay, 0.5) == ("did not finish within 0.5 s", [{"event": "start", "op": "one"}])


def test_a_child_that_nobody_listens_to_leaves():
    """It does not go on computing for a parent that has gone."""
    assert ended(tell, deaf=True) == ("left with status 1", None)
