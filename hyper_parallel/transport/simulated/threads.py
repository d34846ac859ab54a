"""Simulated ranks as threads of this process. A baton passes from rank to rank, and only its holder runs."""

from __future__ import annotations

import contextvars
import ctypes
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, Protocol

from hyper_parallel.errors import CollectiveMismatchError, RankFailedError
from hyper_parallel.transport.base import HostOps, use_transport
from hyper_parallel.transport.checks.fingerprint import MessageFingerprint
from hyper_parallel.transport.failures import WorldFailedError, starting, world_failed, world_timed_out
from hyper_parallel.transport.frames import stack
from hyper_parallel.transport.simulated.coordinator import NOT_STARTED, NOT_WAITING, Coordinator
from hyper_parallel.transport.simulated.endpoint import Contribution, RankAbortedError, Resumption, Wait, unwinding
from hyper_parallel.transport.simulated.message_board import MessageBoard, Posted
from hyper_parallel.transport.simulated.transport import SimulatedTransport

__all__ = ["Elsewhere", "ThreadEndpoint", "run_threads"]

_UNWIND_SECONDS = 2.0


class ThreadEndpoint:
    """The endpoint of a thread rank: calls the coordinator, passes the baton, and sleeps until the baton returns."""

    own_process = False

    def __init__(self, world: _ThreadWorld, rank: int) -> None:
        self._world = world
        self._rank = rank

    def exchange(self, contribution: Contribution) -> list[Any]:
        """See :class:`Endpoint`."""
        self._world.coordinator.join(self._rank, contribution)
        result: list[Any] = self._world.pause(self._rank)
        return result

    def start(self, contribution: Contribution) -> None:
        """See :class:`Endpoint`."""
        if self._world.coordinator.aborted:
            raise RankAbortedError
        self._world.coordinator.start(self._rank, contribution)
        if not contribution.awaited and self._rank in self._world.coordinator.unreported:
            raise self._world.coordinator.unreported[self._rank]

    def ready(self, ticket: int) -> bool:
        """See :class:`Endpoint`."""
        coordinator = self._world.coordinator
        if not coordinator.is_complete(self._rank, ticket):
            self.give_way()
        return coordinator.is_complete(self._rank, ticket)

    def wait(self, ticket: int) -> list[Any]:
        """See :class:`Endpoint`."""
        self._world.coordinator.await_ticket(self._rank, ticket)
        result: list[Any] = self._world.pause(self._rank)
        return result

    def post(self, message: MessageFingerprint, payload: Any = None, *, sending: bool) -> Posted:
        """Post one side of a message on the world's board."""
        return self._world.board.post(message, payload, sending=sending)

    def matched(self, posted: Posted) -> Any:
        """Wait for the other side of a message; return the sender's payload."""
        if not posted.matched:
            self._world.board.wait(posted)
            self._world.pause(self._rank)
        return self._world.board.take(posted)

    def wait_until(self, wait: Wait) -> None:
        """Wait until another rank unblocks this one."""
        self._world.coordinator.block(self._rank, wait)
        self._world.pause(self._rank)

    def unblock(self, rank: int) -> None:
        """Let another rank that waits in :meth:`wait_until` continue."""
        self._world.coordinator.unblock(rank, Resumption())

    def give_way(self) -> None:
        """Let the other ranks run first."""
        self._world.coordinator.give_way(self._rank)
        self._world.pause(self._rank)

    def send(self, message: MessageFingerprint, payload: Any) -> None:
        """See :class:`Endpoint`."""
        self._world.coordinator.send(message, payload)

    def receive(self, posted: MessageFingerprint) -> Any:
        """See :class:`Endpoint`."""
        self._world.coordinator.receive(posted)
        return self._world.pause(self._rank)


class _ThreadWorld:
    """One run: its threads, their locks (a rank sleeps while its lock is locked), results and failures."""

    def __init__(self, world_size: int, ops: HostOps, body: Callable[[], Any]) -> None:
        self.coordinator = Coordinator(world_size)
        self.board = MessageBoard(self.coordinator)
        self.results: list[Any] = [None] * world_size
        self.failures: dict[int, BaseException] = {}
        self._ops = ops
        self._body = body
        self._states: list[Any] = [ops.save_state()] * world_size
        self._left: Any = None  # the state of the rank that has passed the baton, unless it has ended
        self._batons = [_locked() for _ in range(world_size)]
        self._done = _locked()
        self.holder = 0
        self._abandoned = self._not_started = False
        self._transports: list[SimulatedTransport] = []
        self.threads = [
            threading.Thread(target=self._rank_main, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(world_size)
        ]

    def run(self, timeout: float) -> bool:
        """Run all ranks to their end; return False if ``timeout`` seconds are exceeded."""
        self._start()
        self._pass_on(-1)
        finished = self._done.acquire(timeout=timeout)
        if finished:
            for thread in self.threads:
                thread.join()
        return finished

    def _start(self) -> None:
        try:
            for thread in self.threads:
                with starting(f"{thread.name} of {len(self.threads)}"):
                    thread.start()
        except RankFailedError:
            self._not_started = True
            for thread, baton in zip(self.threads, self._batons, strict=True):
                if thread.ident is not None:
                    baton.release()
            raise

    def pause(self, rank: int) -> Any:
        """Let other ranks run until ``rank`` is scheduled again; return the result of its call."""
        chosen = self.coordinator.next_rank(rank)
        if chosen != rank:
            self._states[rank] = self._left = self._ops.save_state()
            self._wake(chosen)
            self._batons[rank].acquire()
            self._restore(rank, self._left)
        return self.coordinator.take(rank)

    def kill(self) -> None:
        """Unwind all ranks: raise an error in the baton's holder, and in each other rank when it gets the baton."""
        if self._not_started:
            return
        self._abandoned = True
        self.coordinator.abort()
        holder = self.threads[self.holder]
        raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
        raise_in(ctypes.c_ulong(holder.ident or 0), ctypes.py_object(RankAbortedError))
        self._done.acquire(timeout=_UNWIND_SECONDS)

    def end(self) -> None:
        """Undo the ranks' changes to the process, including those of ranks whose threads are still running."""
        for transport in self._transports:
            transport.end()

    def _restore(self, rank: int, now: Any = None) -> None:
        """Restore the state of ``rank`` in the process, unless the world has ended; ``now`` is the current state."""
        if not self._abandoned:
            self._ops.restore_state(self._states[rank], now)

    def _pass_on(self, rank: int) -> None:
        self._left = None
        self._wake(self.coordinator.next_rank(rank))

    def _wake(self, rank: int | None) -> None:
        if rank is None:
            self._done.release()
        else:
            self.holder = rank
            self._batons[rank].release()

    def _rank_main(self, rank: int) -> None:
        self._batons[rank].acquire()
        if self._not_started:
            return
        try:
            self._restore(rank)
            self.coordinator.take(rank)
            # An empty context: a rank starts like a fresh process, without surrounding "with" blocks.
            self.results[rank] = contextvars.Context().run(self._call, rank)
            self.coordinator.finish(rank)
        except RankAbortedError:
            self.coordinator.fail(rank, "unwound")
        except BaseException as error:  # noqa: BLE001 - SystemExit of a rank is a failure of that rank as well
            if not unwinding(error):
                self.failures[rank] = error
            self.coordinator.fail(rank, f"raised {type(error).__name__}")
        finally:
            self._pass_on(rank)

    def _call(self, rank: int) -> Any:
        transport = SimulatedTransport(rank, self.coordinator.world_size, self._ops, ThreadEndpoint(self, rank))
        self._transports.append(transport)
        with use_transport(transport):
            return self._body()


def _locked() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


class Elsewhere(Protocol):
    """Rank processes, for each of which one thread of this process calls the coordinator.

    Attributes:
        traces: traceback of each failed rank.
    """

    traces: dict[int, str]

    def stacks(self) -> dict[int, str]:
        """Return the stack of each running rank's process."""


def run_threads(
    body: Callable[[], Any], world_size: int, ops: HostOps, timeout: float, elsewhere: Elsewhere | None = None
) -> list[Any]:
    """Run ``body`` on ``world_size`` thread ranks with active transports; return results in rank order.

    Args:
        body: function that every rank runs.
        world_size: number of ranks, at least one.
        ops: the framework's :class:`HostOps`; its state is saved here and restored at the end.
        timeout: time limit in seconds; the error then shows every rank's stack.
        elsewhere: processes in which ``body`` runs the ranks; None for these threads.

    Raises:
        WorldFailedError: a rank raised, never finished, or left messages undelivered.
    """
    world = _ThreadWorld(world_size, ops, body)
    state = ops.save_state()
    finished = False
    try:
        finished = world.run(timeout)
        activities, hanging = ({}, 0) if finished else (_activities(world, elsewhere), world.holder)
    finally:
        if not finished:
            world.kill()
        world.end()
        ops.restore_state(state)
    if not finished:
        raise world_timed_out(timeout, activities, [hanging])
    if world.failures:
        traces = None if elsewhere is None else elsewhere.traces
        raise world_failed(world_size, world.failures, world.coordinator.aborted_in, traces)
    unreported = {**world.coordinator.forgotten(), **world.coordinator.unreported}
    if unreported:
        raise world_failed(world_size, unreported, world.coordinator.aborted_in)
    lost = world.board.forgotten() or world.coordinator.undelivered(world.board.undelivered())
    if lost is not None:
        raise WorldFailedError(lost, {}) from CollectiveMismatchError(lost)
    return world.results


def _activities(world: _ThreadWorld, elsewhere: Elsewhere | None) -> dict[int, str]:
    """Return the activity of each rank with its stack."""
    if elsewhere is not None:
        stacks = elsewhere.stacks()
        texts = {rank: world.coordinator.describe(rank) for rank in range(len(world.threads))}
        texts[world.holder] = "was running in"
        return {rank: f"{text}\n{stack(stacks.get(rank, ''))}" for rank, text in texts.items()}
    frames = sys._current_frames()  # noqa: SLF001 - the documented way to another thread's stack
    activities = {}
    for rank, thread in enumerate(world.threads):
        frame = frames.get(thread.ident or 0)
        every = "" if frame is None else "".join(traceback.format_stack(frame)).rstrip()
        shown = stack(every)
        if rank == world.holder:
            # If only this library's frames remain, they are shown, as the only sign of the rank's activity.
            activities[rank] = f"was running in\n{shown or every}" if every else "had ended without a result"
            continue
        text = world.coordinator.describe(rank)
        activities[rank] = f"{text}\n{shown}" if shown or text != NOT_WAITING else NOT_STARTED
    return activities
