"""Runs tasks in forked workers, several at a time, and divides the remaining time among the waiting operators.

Every operator is checked with the first choice of sizes of each of its samples, even after the deadline. Whenever a
task starts, the time until the deadline is divided again: a costly operator leaves less time to all later ones, and the
last operators get as much time as the first.
"""

from __future__ import annotations

import itertools
import json
import os
import selectors
import subprocess
import time
from collections import deque
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hyper_parallel.transport.failures import starting
from hyper_parallel.transport.processes import end_session, python_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from typing_extensions import Self  # part of the standard library since Python 3.11

__all__ = ["TaskReport", "TimeBudget", "run_tasks"]

_TERM_SECONDS = 5.0


T = TypeVar("T", bound="TaskReport")


class TaskReport(Protocol):
    """The result of one operator of a task, or of one mutant."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Return the report that a worker sent."""

    @classmethod
    def lost(cls, op: str, platform: str, died: str) -> Self:
        """Return the report of an operator whose process died."""


class _ForkServer:
    """One fork server (``fork_server.py``): it forks a worker per task of one framework, one at a time."""

    def __init__(self, platform: str) -> None:
        self.platform = platform
        self.read, write = os.pipe()
        environment = {"MS_DEV_LAUNCH_BLOCKING": "1", "GLOG_v": "4", "OMP_NUM_THREADS": "1", **os.environ}
        with starting(f"the process that starts operators on {platform}"):
            self.process = subprocess.Popen(  # noqa: S603 - this interpreter, this package
                python_command("hyper_parallel.verify.ops.fork_server", platform, str(write)),
                stdin=subprocess.PIPE,
                pass_fds=[write],
                env=environment,
                start_new_session=True,
            )
        os.close(write)
        self.task: dict[str, Any] | None = None
        self.seat = 0
        self.current = ""
        self.done: list[str] = []
        self._rest = b""

    def start(self, task: dict[str, Any], seat: int) -> None:
        """Start a task.

        Args:
            task: from :func:`hyper_parallel.verify.ops.tasks.task_of`.
            seat: a number that no other running task has; it determines the task's CPU.
        """
        self.task, self.seat, self.current, self.done = task, seat, "", []
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the server ended while idle; reading its event pipe will detect that
            self.process.stdin.write((json.dumps({**task, "seat": seat}) + "\n").encode())
            self.process.stdin.flush()

    def events(self) -> list[dict[str, Any]] | None:
        """Return the events since the last call; None if the process has ended."""
        data = os.read(self.read, 1 << 20)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End the process and all processes that it started."""
        os.close(self.read)
        end_session(self.process, _TERM_SECONDS)
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # a task that the server never read
            self.process.stdin.close()


def run_tasks(
    report_type: type[T],
    tasks: Sequence[dict[str, Any]],
    started: Callable[[str, str], None],
    workers: int = 2,
    seconds: float = 0.0,
) -> Iterator[T]:
    """Yield one report per operator of every task as soon as it is ready, even if processes die.

    Args:
        report_type: class of the reports.
        tasks: from :func:`hyper_parallel.verify.ops.tasks.task_of`.
        started: called with framework and operator when an operator begins.
        workers: number of tasks that run at the same time.
        seconds: wall time for everything, divided among tasks that share time.

    Raises:
        ValueError: a task names an operator that the user's file does not have; only a worker can detect this.
    """
    waiting, budget = deque(tasks), TimeBudget(seconds, workers)
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        busy: set[_ForkServer] = set()
        idle: dict[str, list[_ForkServer]] = {}
        while waiting or busy:
            while waiting and len(busy) < workers:
                task = waiting.popleft()
                _start_next(budget.with_share(task, waiting), idle, busy, stack, selector)
            for key, _ in selector.select():
                server: _ForkServer = key.data
                events = server.events()
                yield from _handle_events(report_type, server, events, waiting, started)
                if events is None:
                    selector.unregister(server.read)
                    busy.discard(server)
                    if server in idle.get(server.platform, ()):  # it has ended and must not get a task
                        idle[server.platform].remove(server)
                elif server.task is None:
                    busy.discard(server)
                    idle.setdefault(server.platform, []).append(server)


def _start_next(
    task: dict[str, Any],
    idle: dict[str, list[_ForkServer]],
    busy: set[_ForkServer],
    stack: ExitStack,
    selector: selectors.DefaultSelector,
) -> None:
    ready = idle.setdefault(task["platform"], [])
    ready[:] = [server for server in ready if server.process.poll() is None]  # an idle server may have ended unnoticed
    if ready:
        server = ready.pop()
    else:
        server = _ForkServer(task["platform"])
        stack.callback(server.close)
        selector.register(server.read, selectors.EVENT_READ, server)
    taken = {busy_server.seat for busy_server in busy}
    server.start(task, next(seat for seat in itertools.count() if seat not in taken))
    busy.add(server)


def _handle_events(
    report_type: type[T],
    server: _ForkServer,
    events: list[dict[str, Any]] | None,
    waiting: deque[dict[str, Any]],
    started: Callable[[str, str], None],
) -> Iterator[T]:
    if events is None:
        events = [{"event": "end", "died": "the process that starts operators has gone"}]
    for event in events:
        task = server.task
        if task is None:
            continue
        if event["event"] == "start":
            server.current = event["op"]
            started(task["platform"], event["op"])
        elif event["event"] == "refused":
            raise ValueError(event["why"])
        elif event["event"] == "report":
            server.done.append(event["report"]["op"])
            yield report_type.from_json(event["report"])
        else:
            yield from _finish_task(report_type, server, task, event["died"], waiting)
            server.task = None


def _finish_task(
    report_type: type[T], server: _ForkServer, task: dict[str, Any], died: str, waiting: deque[dict[str, Any]]
) -> Iterator[T]:
    """If a worker died, report its current operator as lost; a new task runs the operators that it had not started."""
    left = [op for op in task["ops"] if op not in server.done]
    if task["ops"] == ["*"]:
        left = [server.current or task["file"]] if died else []  # only the worker knew which operators remain
    if not left:
        return
    lost = server.current if server.current in left else left[0]
    yield report_type.lost(lost, task["platform"], died or "ended without a report")
    rest = [op for op in left if op != lost]
    if rest:
        waiting.appendleft({**task, "ops": rest})


class TimeBudget:
    """Divides the time until a deadline among tasks.

    Args:
        seconds: wall time from now on.
        workers: number of tasks that run at the same time.
    """

    def __init__(self, seconds: float, workers: int) -> None:
        self._deadline, self._workers = time.monotonic() + seconds, workers

    def with_share(self, task: dict[str, Any], waiting: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Return ``task`` with its share of the remaining time; a task that shares no time is returned unchanged.

        Args:
            task: task that starts now.
            waiting: tasks that start later.
        """
        weight = _weight(task)
        if not weight:
            return task
        left = max(self._deadline - time.monotonic(), 0.0) * self._workers
        share = left * weight / (weight + sum(map(_weight, waiting))) / len(task["ops"])
        effort = task["effort"]
        return {**task, "effort": {**effort, "seconds": min(share, effort["seconds"])}}


def _weight(task: dict[str, Any]) -> float:
    """Return the sum of the shares of a task's operators."""
    return float(task["share"] * len(task["ops"]))
