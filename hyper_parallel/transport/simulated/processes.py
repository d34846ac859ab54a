"""Simulated ranks as warm processes: the coordinator in this process runs one of them at a time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from hyper_parallel.errors import CollectiveMismatchError, RankFailedError
from hyper_parallel.transport.failures import WorldFailedError, world_failed, world_timed_out
from hyper_parallel.transport.frames import stack
from hyper_parallel.transport.measurement import current_measurement
from hyper_parallel.transport.processes import search_path
from hyper_parallel.transport.serialization import pack, unpack
from hyper_parallel.transport.simulated.coordinator import NOT_STARTED, NOT_WAITING, Coordinator
from hyper_parallel.transport.simulated.endpoint import RankAbortedError
from hyper_parallel.transport.simulated.rank_pool import Worker, check_in, check_out, stacks_of
from hyper_parallel.transport.simulated.rank_process import RankReport, RankTask

__all__ = ["run_processes"]


class _TimedOut(Exception):  # noqa: N818 - control flow, never seen outside
    """The running rank did not report before the deadline; ``rank`` is that rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank


class _WaitingRankDied(Exception):  # noqa: N818 - control flow, never seen outside
    """A waiting rank died while another one runs. The running rank cannot be stopped, so all processes are ended."""


class _ProcessWorld:
    """One run: its worker processes, the coordinator, and each rank's result or failure."""

    def __init__(self, team: list[Worker], tasks: list[RankTask], deadline: float) -> None:
        self.coordinator = Coordinator(len(team))
        self.results: list[bytes] = [b""] * len(team)
        self.failures: dict[int, BaseException] = {}
        self.traces: dict[int, str] = {}
        self.dead: set[int] = set()
        self._team = team
        self._tasks: list[RankTask | None] = list(tasks)
        self._running = set(range(len(team)))
        self._deadline = deadline

    def run(self) -> None:
        """Run ranks in turn until all have ended.

        Raises:
            _TimedOut: the deadline passed.
            _WaitingRankDied: a waiting rank died; the failure is recorded.
        """
        rank = self.coordinator.next_rank(-1)
        while rank is not None:
            if self._resume(rank):
                self._serve(rank)
            rank = self.coordinator.next_rank(rank)

    def _resume(self, rank: int) -> bool:
        """Let ``rank`` run; return False if it has ended instead."""
        resumption = self.coordinator.resumption(rank)
        task, self._tasks[rank] = self._tasks[rank], None
        if task is not None and isinstance(resumption.error, RankAbortedError):
            self._end(rank, "never started")
            return False
        try:
            self._team[rank].line.send(resumption if task is None else task)
        except OSError as error:
            self._died(rank, error)
            return False
        return True

    def _serve(self, rank: int) -> None:
        """Serve ``rank`` until it waits for others or ends."""
        waiting = True
        while waiting:
            message = self._next_message(rank)
            waiting = message is not None and self._handle(rank, *message)

    def _next_message(self, rank: int) -> tuple[str, Any] | None:
        """Return the next request of ``rank``, or None if it died.

        Raises:
            _TimedOut: the deadline passed.
            _WaitingRankDied: another rank died.
        """
        line = self._team[rank].line
        sentinels = {self._team[other].process.sentinel: other for other in self._running if other != rank}
        while not line.poll(0):
            readable = wait([line, *sentinels], max(0.0, self._deadline - time.monotonic()))
            if not readable:
                raise _TimedOut(rank)
            for sentinel in readable:
                other = sentinels.pop(sentinel, None) if isinstance(sentinel, int) else None
                if other is not None:
                    self._died(other)
                    raise _WaitingRankDied
        try:
            message: tuple[str, Any] = line.recv()
        except (EOFError, OSError) as error:
            self._died(rank, error)
            return None
        return message

    def _handle(self, rank: int, kind: str, content: Any) -> bool:
        """Forward a request to the coordinator; return True while the rank continues running."""
        if kind == "send":
            if not self.coordinator.aborted:
                self.coordinator.send(*content)
            return True
        if kind == "start":
            self.coordinator.start(rank, content)
            return True
        if kind == "join":
            self.coordinator.join(rank, content)
        elif kind == "await":
            self.coordinator.await_ticket(rank, content)
        elif kind == "receive":
            self.coordinator.receive(content)
        else:
            self._report(rank, content)
        return False

    def _report(self, rank: int, report: RankReport) -> None:
        self._running.discard(rank)
        if report.how == "returned":
            self.results[rank] = report.packed
            self.coordinator.finish(rank)
            return
        if report.how == "raised":
            self.failures[rank] = unpack(report.packed)
            self.traces[rank] = report.trace
        self._end(rank, report.how)

    def _died(self, rank: int, error: Exception | None = None) -> None:
        how = self._team[rank].how_it_died(error)
        self.dead.add(rank)
        text = f"rank {rank} {how}; it {self.coordinator.describe(rank)}"
        self.failures[rank] = RankFailedError(text)
        self.traces[rank] = "\n".join(filter(None, [text, self._team[rank].last_words()]))
        self._end(rank, how)

    def _end(self, rank: int, how: str) -> None:
        self._running.discard(rank)
        self.coordinator.fail(rank, how)

    def ended(self, rank: int) -> bool:
        """Whether ``rank`` has reported, or died."""
        return rank not in self._running

    def activities(self, hanging: int) -> dict[int, str]:
        """Return the activity of each rank with its stack; ``hanging`` is the running rank."""
        stacks = stacks_of({rank: worker for rank, worker in enumerate(self._team) if rank in self._running})
        descriptions = {rank: self.coordinator.describe(rank) for rank in range(len(self._team))}
        descriptions[hanging] = "was running in"
        # A rank that was never started has no stack of its own: its process is idle.
        started = {rank for rank, task in enumerate(self._tasks) if task is None}
        return {
            rank: f"{text}\n{stack(stacks.get(rank, ''))}" if rank in started or text != NOT_WAITING else NOT_STARTED
            for rank, text in descriptions.items()
        }


def run_processes(
    fn: Callable[..., Any],
    args: Sequence[Any],
    world_size: int,
    timeout: float,
    start: str | None = "hyper_parallel.transport.real.mindspore.transport:start_rank",
    device: int | None = None,
) -> list[Any]:
    """Run ``fn(*args)`` on ``world_size`` process ranks; return results in rank order.

    Args:
        fn: function that every rank runs; it is pickled by value unless its module is installed.
        args: arguments of ``fn``, picklable.
        world_size: number of ranks, at least one.
        timeout: time limit in seconds, after which the processes are ended.
        start: ``module:function`` that wraps the numpy transport in the rank; None keeps numpy arrays.
        device: number of the device that all ranks share, and a second argument of ``start``; None for the CPU.

    Raises:
        WorldFailedError: a rank raised, died, never finished, or left messages undelivered.
    """
    body = pack((fn, tuple(args)), fn)
    traced, measurement = sys.gettrace() is not None, current_measurement()
    path, folder, main = search_path(), str(Path.cwd()), getattr(sys.modules["__main__"], "__file__", None)
    tasks = [
        RankTask(rank, world_size, body, start, path, folder, traced, measurement, device, main)
        for rank in range(world_size)
    ]
    team = check_out(world_size, device)
    world = _ProcessWorld(team, tasks, time.monotonic() + timeout)
    healthy = False
    try:
        world.run()
        # An exception during a backward leaves MindSpore's process unreliable for later runs.
        healthy = not world.dead and not (start is not None and world.failures)
    except _WaitingRankDied:
        pass
    except _TimedOut as hanging:
        raise world_timed_out(timeout, world.activities(hanging.rank), [hanging.rank]) from None
    finally:
        if healthy:
            check_in(team)
        else:
            for rank, worker in enumerate(team):
                worker.close(idle=world.ended(rank))
    return _results(world, world_size)


def _results(world: _ProcessWorld, world_size: int) -> list[Any]:
    if world.failures:
        raise world_failed(world_size, world.failures, world.coordinator.aborted_in, world.traces)
    lost = world.coordinator.undelivered()
    if lost is not None:
        raise WorldFailedError(lost, {}) from CollectiveMismatchError(lost)
    return [unpack(packed) for packed in world.results]
