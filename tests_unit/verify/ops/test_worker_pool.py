"""Tasks and their worker processes: each operator is reported once, whatever happens to its process."""

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

# A fork server without a framework: operators are named after what happens to them.
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
    """The result of an operator."""

    op: str
    died: str = ""

    @classmethod
    def from_json(cls, data):
        """Return the result in a report."""
        return cls(data["op"])

    @classmethod
    def lost(cls, op, platform, died):
        """Return the result of an operator whose process died."""
        assert platform == "fast"
        return cls(op, died)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run tasks, given as names of operators; return the results and the number of processes."""
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
    """One process is started, and serves all tasks one after the other."""
    assert run(["a", "b"], ["c"]) == ([("a", ""), ("b", ""), ("c", "")], 1)


def test_operators_after_a_death_are_checked(run):
    """An operator whose process died, or that left no report, is lost; the operators after it are checked."""
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
def test_a_file_reports_its_own_operators(run, script, results):
    """A user's file reports its own operators; if its process dies, the running operator or the file is lost."""
    assert run(["*"], script=script) == (results, 1)


def test_a_refused_task_ends_the_run(run):
    """Input that only a child process can check raises the error here."""
    with pytest.raises(ValueError, match="--op: there is no 'unknown'"):
        run(["a", "unknown"])


def test_an_idle_process_that_ended_gets_no_task(run):
    """An idle process that ended gets no task; a new process checks what a dead one left."""
    results, processes = run(["leaves"], ["follows", "b"], workers=2)
    gone = "the process that starts operators has gone"
    assert sorted(results) == [("b", ""), ("follows", gone), ("leaves", "")]
    assert processes == 3


def test_a_process_that_goes_before_its_task_costs_one_operator(run, monkeypatch):
    """A process that ends just before its task loses one operator; another process checks the rest."""
    start = worker_pool._ForkServer.start
    ended = []

    def late(fork_server, task, seat):
        if not ended:
            fork_server.process.kill()
            ended.append(fork_server.process.wait())
        start(fork_server, task, seat)

    monkeypatch.setattr(worker_pool._ForkServer, "start", late)
    gone = "the process that starts operators has gone"
    assert run(["a", "b"]) == ([("a", gone), ("b", "")], 2)


@pytest.fixture
def clock(monkeypatch):
    """The time, which the test sets."""
    now = [100.0]
    monkeypatch.setattr(worker_pool.time, "monotonic", lambda: now[0])
    return now


def shared(ops="a", share=1.0, platform="torch"):
    """Return a task that shares time."""
    return task_of(platform, list(ops), Effort(), share=share)


def seconds(task):
    """Return the time of each of its operators."""
    return task["effort"]["seconds"]


def test_the_remaining_time_is_shared_among_waiting_operators(clock):
    """The remaining time of all workers is shared among the waiting operators in proportion to their shares."""
    budget = TimeBudget(40.0, 2)
    waiting = [shared("bc"), shared("d", 5.0)]
    assert seconds(budget.with_share(shared(), waiting)) == 10.0
    clock[0] += 36.0  # a slow operator
    assert seconds(budget.with_share(waiting[0], waiting[1:])) == pytest.approx(8.0 / 7)
    clock[0] += 1.0
    assert seconds(budget.with_share(waiting[1], [])) == 6.0


def test_no_operator_gets_more_than_its_effort_allows(clock):
    """An operator never gets more time than its effort allows."""
    assert clock[0] == 100.0
    assert seconds(TimeBudget(1000.0, 2).with_share(shared(), [])) == Effort().seconds


def test_late_operators_get_their_first_sizes(clock):
    """After the total time is over an operator gets none, which leaves it its first sizes."""
    budget = TimeBudget(10.0, 2)
    clock[0] += 11.0
    assert seconds(budget.with_share(shared(), [shared()])) == 0.0


def test_a_task_that_shares_nothing_is_as_it_was():
    """A task without a share, of a quick sweep, a user's file or a mutant, is not changed."""
    alone = task_of("torch", ["a"], Effort())
    assert TimeBudget(0.0, 2).with_share(alone, [shared()]) is alone


def test_a_process_that_ignores_sigterm_is_killed(monkeypatch):
    """A process that ignores SIGTERM is killed when it is closed."""
    monkeypatch.setattr(worker_pool, "_TERM_SECONDS", 0.3)
    fork_server = worker_pool._ForkServer.__new__(worker_pool._ForkServer)
    fork_server.read, write = os.pipe()
    deaf = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.write({}, b'x'); time.sleep(60)"
    command = [sys.executable, "-c", deaf.format(write)]
    fork_server.process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[write], start_new_session=True)
    os.close(write)
    assert os.read(fork_server.read, 1) == b"x"
    fork_server.close()
    assert fork_server.process.wait(60) == -signal.SIGKILL
