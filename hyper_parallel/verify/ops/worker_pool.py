"""Two zygotes per framework at most, tasks handed out as they fall idle, events as they come."""

from __future__ import annotations

import itertools
import json
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hyper_parallel.transport.out_of_memory import starting
from hyper_parallel.transport.processes import python_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from typing_extensions import Self  # of the standard library from Python 3.11 on

__all__ = ["TaskReport", "TimeBudget", "run_tasks"]

_TERM_SECONDS = 5.0


T = TypeVar("T", bound="TaskReport")


class TaskReport(Protocol):
    """What tasks find, one per entry of their ``ops``."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """What the child reported."""

    @classmethod
    def lost(cls, op: str, platform: str, died: str) -> Self:
        """What becomes of an entry whose process died."""


class _ForkServer:
    """One process that serves tasks of one framework, one at a time."""

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
        """Hand over a task.

        Args:
            task: what to do.
            seat: a number that no other task has meanwhile; each has a CPU to itself where there are enough.
        """
        self.task, self.seat, self.current, self.done = task, seat, "", []
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it went while it was idle, which its end of the other pipe tells
            self.process.stdin.write((json.dumps({**task, "seat": seat}) + "\n").encode())
            self.process.stdin.flush()

    def events(self) -> list[dict[str, Any]] | None:
        """What it has said since; None when it has gone."""
        data = os.read(self.read, 1 << 20)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End it, and what it runs."""
        os.close(self.read)
        for stop in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                os.killpg(self.process.pid, stop)
                try:
                    self.process.wait(_TERM_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # a task that nobody took
            self.process.stdin.close()


def run_tasks(
    kind: type[T],
    tasks: Sequence[dict[str, Any]],
    started: Callable[[str, str], None],
    workers: int = 2,
    seconds: float = 0.0,
) -> Iterator[T]:
    """Reports in the order in which they are ready; one per operator of every task, whatever happens to its process.

    Args:
        kind: of the reports.
        tasks: from :func:`hyper_parallel.verify.ops.tasks.task_of`.
        started: called with the framework and the operator that begins.
        workers: tasks that run at the same time.
        seconds: of wall time in which all are to be done: tasks that share time get their parts of it.

    Raises:
        ValueError: a task asks for what a child, who alone knows the user's file, finds not to be there.
    """
    waiting, time_left = deque(tasks), TimeBudget(seconds, workers)
    with ExitStack() as stack, selectors.DefaultSelector() as chosen:
        busy: set[_ForkServer] = set()
        idle: dict[str, list[_ForkServer]] = {}
        while waiting or busy:
            while waiting and len(busy) < workers:
                task = waiting.popleft()
                _begin(time_left.given(task, waiting), idle, busy, stack, chosen)
            for key, _ in chosen.select():
                zygote: _ForkServer = key.data
                events = zygote.events()
                yield from _hear(kind, zygote, events, waiting, started)
                if events is None:
                    chosen.unregister(zygote.read)
                    busy.discard(zygote)
                    if zygote in idle.get(zygote.platform, ()):  # it must not be handed another task
                        idle[zygote.platform].remove(zygote)
                elif zygote.task is None:
                    busy.discard(zygote)
                    idle.setdefault(zygote.platform, []).append(zygote)


def _begin(
    task: dict[str, Any],
    idle: dict[str, list[_ForkServer]],
    busy: set[_ForkServer],
    stack: ExitStack,
    chosen: selectors.DefaultSelector,
) -> None:
    ready = idle.setdefault(task["platform"], [])
    if ready:
        zygote = ready.pop()
    else:
        zygote = _ForkServer(task["platform"])
        stack.callback(zygote.close)
        chosen.register(zygote.read, selectors.EVENT_READ, zygote)
    taken = {one.seat for one in busy}
    zygote.start(task, next(seat for seat in itertools.count() if seat not in taken))
    busy.add(zygote)


def _hear(
    kind: type[T],
    zygote: _ForkServer,
    events: list[dict[str, Any]] | None,
    waiting: deque[dict[str, Any]],
    started: Callable[[str, str], None],
) -> Iterator[T]:
    if events is None:
        events = [{"event": "end", "died": "the process that starts operators has gone"}]
    for event in events:
        task = zygote.task
        if task is None:
            continue
        if event["event"] == "start":
            zygote.current = event["op"]
            started(task["platform"], event["op"])
        elif event["event"] == "refused":
            raise ValueError(event["why"])
        elif event["event"] == "report":
            zygote.done.append(event["report"]["op"])
            yield kind.from_json(event["report"])
        else:
            yield from _ended(kind, zygote, task, event["died"], waiting)
            zygote.task = None


def _ended(
    kind: type[T], zygote: _ForkServer, task: dict[str, Any], died: str, waiting: deque[dict[str, Any]]
) -> Iterator[T]:
    """A child that died costs the operator that it was at; what it had not begun is given to another one."""
    left = [op for op in task["ops"] if op not in zygote.done]
    if task["ops"] == ["*"]:
        left = (
            [zygote.current or task["file"]] if died else []
        )  # the file says what comes next, and it is not asked again
    if not left:
        return
    lost = zygote.current if zygote.current in left else left[0]
    yield kind.lost(lost, task["platform"], died or "ended without a report")
    rest = [op for op in left if op != lost]
    if rest:
        waiting.appendleft({**task, "ops": rest})


class TimeBudget:
    """Time that tasks share.

    Args:
        seconds: of wall time from now on.
        workers: tasks that run at the same time.
    """

    def __init__(self, seconds: float, workers: int) -> None:
        self._until, self._workers = time.monotonic() + seconds, workers

    def given(self, task: dict[str, Any], waiting: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """``task`` with its part of the time that is left; one that shares nothing is as it was.

        Args:
            task: is handed out now.
            waiting: come after it.
        """
        mine = _weight(task)
        if not mine:
            return task
        left = max(self._until - time.monotonic(), 0.0) * self._workers
        part = left * mine / (mine + sum(map(_weight, waiting))) / len(task["ops"])
        effort = task["effort"]
        return {**task, "effort": {**effort, "seconds": min(part, effort["seconds"])}}


def _weight(task: dict[str, Any]) -> float:
    """As many parts as it has operators."""
    return float(task["share"] * len(task["ops"]))
