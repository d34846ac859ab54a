"""Tasks and the processes that serve them: each operator is reported once, whatever happens to its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest

from hyper_parallel.core.shard import rules
from hyper_parallel.verify.ops import worker_pool
from hyper_parallel.verify.ops.selection import Effort
from hyper_parallel.verify.ops.tasks import task_of
from hyper_parallel.verify.ops.worker_pool import TimeBudget

pytestmark = pytest.mark.platforms("torch")

rules.load()

# What a zygote says of tasks, without a framework: operators are named after what becomes of them.
SCRIPT = """
import json, os, sys, time
out = int(sys.argv[2])
def say(event, **more):
    os.write(out, (json.dumps({"event": event, **more}) + "\\n").encode())
def gone(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
for line in sys.stdin:
    task = json.loads(line)
    died, leaves = "", False
    for op in task["script"] if task["ops"] == ["*"] else task["ops"]:
        if op == "unknown":
            say("refused", why="--op: there is no 'unknown'")
        if op in ("quiet", "before"):
            died = "killed by SIGSEGV" if op == "before" else ""
            break
        say("start", op=op)
        if op == "dies":
            died = "killed by SIGSEGV"
            break
        if op == "leaves":
            open("left", "w").write(str(os.getpid()))
            leaves = True
        if op == "follows":  # goes after the one that left has gone
            while not os.path.exists("left") or not open("left").read() or not gone(open("left").read()):
                time.sleep(0.001)
            os._exit(1)
        say("report", report={"op": op})
    say("end", died=died)
    if leaves:
        os._exit(0)
"""


@dataclass
class Result:
    """What is found of an operator."""

    op: str
    died: str = ""

    @classmethod
    def from_json(cls, data):
        """Of a report."""
        return cls(data["op"])

    @classmethod
    def lost(cls, op, platform, died):
        """Of a death."""
        assert platform == "fast"
        return cls(op, died)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run tasks, given as the names of their operators; what was found, and the processes that it took."""
    monkeypatch.chdir(tmp_path)
    made = []

    def command(_, platform, write):
        made.append(platform)
        return [sys.executable, "-I", "-S", "-c", SCRIPT, platform, write]

    monkeypatch.setattr(worker_pool, "python_command", command)

    def start(*tasks, workers=1, script=()):
        made.clear()
        own = [
            {"platform": "fast", "ops": list(ops), "share": 0.0, "file": "own.py", "script": script} for ops in tasks
        ]
        results = list(worker_pool.run_tasks(Result, own, lambda *_: None, workers))
        return [(result.op, result.died) for result in results], len(made)

    return start


def test_one_process_serves_tasks_one_after_the_other(run):
    """It is kept for the next task, and started once."""
    assert run(["a", "b"], ["c"]) == ([("a", ""), ("b", ""), ("c", "")], 1)


def test_what_a_death_leaves_is_done(run):
    """The operator at which the child died is lost, and so is one of which nothing was said; the others are done."""
    assert run(["a", "dies", "b"]) == ([("a", ""), ("dies", "killed by SIGSEGV"), ("b", "")], 1)
    assert run(["quiet", "b"]) == ([("quiet", "ended without a report"), ("b", "")], 1)
    assert run(["b", "before"]) == ([("b", ""), ("before", "killed by SIGSEGV")], 1)


@pytest.mark.parametrize(
    "script, results",
    [
        (["a", "b"], [("a", ""), ("b", "")]),
        (["a", "dies", "b"], [("a", ""), ("dies", "killed by SIGSEGV")]),
        (["before"], [("own.py", "killed by SIGSEGV")]),
        ([], []),
    ],
)
def test_a_file_says_itself_what_comes(run, script, results):
    """A file that is done has left nothing; one that died costs the operator that it was at, or stands for all."""
    assert run(["*"], script=script) == (results, 1)


def test_what_a_task_refuses_ends_the_run(run):
    """Input that only a child can judge is an error here."""
    with pytest.raises(ValueError, match="--op: there is no 'unknown'"):
        run(["a", "unknown"])


def test_an_idle_process_that_goes_is_given_nothing(run):
    """It went after its task, and another after it: what that one left is done by a third."""
    results, processes = run(["leaves"], ["follows", "b"], workers=2)
    gone = "the process that starts operators has gone"
    assert sorted(results) == [("b", ""), ("follows", gone), ("leaves", "")]
    assert processes == 3


def test_a_process_that_goes_before_its_task_costs_one_operator(run, monkeypatch):
    """A task that is handed to a process which has just gone is no error of ours: the rest is done by another."""
    start = worker_pool._ForkServer.start
    ended = []

    def late(zygote, task, seat):
        if not ended:
            zygote.process.kill()
            ended.append(zygote.process.wait())
        start(zygote, task, seat)

    monkeypatch.setattr(worker_pool._ForkServer, "start", late)
    gone = "the process that starts operators has gone"
    assert run(["a", "b"]) == ([("a", gone), ("b", "")], 2)


@pytest.fixture
def clock(monkeypatch):
    """The time, which the test moves."""
    now = [100.0]
    monkeypatch.setattr(worker_pool.time, "monotonic", lambda: now[0])
    return now


def shared(ops="a", share=1.0, platform="torch"):
    """A task that shares time."""
    return task_of(platform, list(ops), Effort(), share=share)


def seconds(task):
    """What each of its operators gets."""
    return task["effort"]["seconds"]


def test_what_is_left_is_shared_among_those_that_wait(clock):
    """Two workers have twice the time; each operator gets its parts of it, whatever was used before it."""
    budget = TimeBudget(40.0, 2)
    waiting = [shared("bc"), shared("d", 5.0)]
    assert seconds(budget.with_share(shared(), waiting)) == 10.0
    clock[0] += 36.0  # a costly one
    assert seconds(budget.with_share(waiting[0], waiting[1:])) == pytest.approx(8.0 / 7)
    clock[0] += 1.0
    assert seconds(budget.with_share(waiting[1], [])) == 6.0


def test_no_operator_gets_more_than_its_effort_says(clock):
    """A few operators do not last as long as all."""
    assert clock[0] == 100.0
    assert seconds(TimeBudget(1000.0, 2).with_share(shared(), [])) == Effort().seconds


def test_late_operators_get_their_first_sizes(clock):
    """When the time is over nothing is left to share, and nobody is left out."""
    budget = TimeBudget(10.0, 2)
    clock[0] += 11.0
    assert seconds(budget.with_share(shared(), [shared()])) == 0.0


def test_a_task_that_shares_nothing_is_as_it_was():
    """Quick sweeps, files of users and mutants take what they need."""
    alone = task_of("torch", ["a"], Effort())
    assert TimeBudget(0.0, 2).with_share(alone, [shared()]) is alone


def test_a_process_that_does_not_hear_is_killed(monkeypatch):
    """One that takes no notice of SIGTERM is gone all the same when it is closed."""
    monkeypatch.setattr(worker_pool, "_TERM_SECONDS", 0.3)
    fork_server = worker_pool._ForkServer.__new__(worker_pool._ForkServer)
    fork_server.read, write = os.pipe()
    deaf = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.write({}, b'x'); time.sleep(60)"
    command = [sys.executable, "-c", deaf.format(write)]
    fork_server.process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[write], start_new_session=True)
    os.close(write)
    assert os.read(fork_server.read, 1) == b"x"
    fork_server.close()
    assert fork_server.process.wait(5) == -signal.SIGKILL
