"""The timeline of one training step: the times of each rank's calls into the transport, and its waiting times.

Simulated ranks share the processors of one machine, so their times are replayed: every rank computes for its measured
time, in parallel with the others, and a collective is complete as soon as its last member has called it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from hyper_parallel.core.dtensor.events import module_path
from hyper_parallel.transport.base import Transport
from hyper_parallel.transport.work import Work

__all__ = ["StepCall", "recorded_calls", "replayed"]

_RANKS_AT = {
    "all_reduce": 2, "all_gather": 1, "reduce_scatter": 2, "all_to_all": 1, "broadcast": 2, "all_gather_object": 1,
    "barrier": 0, "all_gather_rows": 1, "reduce_scatter_rows": 2, "all_to_all_rows": 1,
}  # fmt: skip
"""Position of the members among the arguments of a transport's collectives."""
_MESSAGES = ("send", "recv")


@dataclass(frozen=True)
class StepCall:
    """One call of a rank into its transport; times are in seconds, of one clock for all ranks.

    Attributes:
        operation: name of the call, such as ``all_gather``.
        ranks: the members; of a message, its source and its destination.
        module: path of the running module; empty outside modules.
        started: time of the call.
        waits: time when the rank began to wait for the result: ``started`` unless the call is asynchronous.
        ended: time when the rank had the result; None if it never waited for it.
    """

    operation: str
    ranks: tuple[int, ...]
    module: str
    started: float
    waits: float
    ended: float | None


@contextmanager
def recorded_calls(transport: Transport) -> Iterator[list[StepCall]]:
    """Record the calls of this rank inside the block, in their order."""
    recorder = _Recorder(transport)
    names = [*_RANKS_AT, *_MESSAGES, "start"]
    for name in names:
        method = recorder.starting if name == "start" else recorder.blocking(name)
        setattr(transport, name, method)
    try:
        yield recorder.calls
    finally:
        for name in names:
            delattr(transport, name)


class _Recorder:
    """Records calls by replacing the methods of a transport."""

    def __init__(self, transport: Transport) -> None:
        self.calls: list[StepCall] = []
        self._rank = transport.rank
        self._start = transport.start
        self._methods = {name: getattr(transport, name) for name in (*_RANKS_AT, *_MESSAGES)}
        self._inside = False  # blocking collectives of an engine call a start and a wait themselves

    def blocking(self, name: str) -> Callable[..., Any]:
        """Return a method that records a blocking call and runs it."""
        method = self._methods[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return method(*args, **kwargs)
            number = self._add(name, args)
            self._inside = True
            try:
                return method(*args, **kwargs)
            finally:
                self._inside = False
                self._ended(number, self.calls[number].started)

        return call

    def starting(self, operation: str, *args: Any) -> Work:
        """Record an asynchronous call and start it."""
        if self._inside:
            return self._start(operation, *args)
        number = self._add(operation, args)
        work = self._start(operation, *args)
        wait = work.wait

        def waiting() -> Any:
            begun = time.perf_counter()
            try:
                return wait()
            finally:
                self._ended(number, begun)

        work.wait = waiting  # type: ignore[method-assign]  # of this handle alone
        return work

    def _add(self, operation: str, args: Sequence[Any]) -> int:
        if operation in _MESSAGES:
            ranks = (self._rank, int(args[1])) if operation == "send" else (int(args[1]), self._rank)
        else:
            ranks = tuple(args[_RANKS_AT[operation]])
        now = time.perf_counter()
        self.calls.append(StepCall(operation.removesuffix("_rows"), ranks, module_path(), now, now, None))
        return len(self.calls) - 1

    def _ended(self, number: int, waits: float) -> None:
        self.calls[number] = replace(self.calls[number], waits=waits, ended=time.perf_counter())


def replayed(calls: Sequence[Sequence[StepCall]]) -> list[list[StepCall]]:
    """Return the calls at the times that they would have if every rank had its own processor.

    Transfers take no time. The computation between two calls takes its measured time. A collective without a recorded
    call of some member, and a message without its other side, do not delay other ranks.

    Args:
        calls: calls of every rank.
    """
    ranks = [_Replay(rank, own) for rank, own in enumerate(calls)]
    called: dict[Any, dict[int, float]] = defaultdict(dict)
    while unfinished := [replay for replay in ranks if not replay.finished]:
        if not any(replay.advance(called) for replay in unfinished):
            unfinished[0].give_up(called)
    return [replay.placed for replay in ranks]


class _Replay:
    """One rank's calls, on a clock that starts at 0 with its first call, without the computation before."""

    def __init__(self, rank: int, calls: Sequence[StepCall]) -> None:
        self.rank = rank
        self.placed = list(calls)
        begins = [(call.started, 0, number) for number, call in enumerate(calls)]
        waits = [(call.waits, 1, number) for number, call in enumerate(calls) if call.ended is not None]
        self._moments = sorted([*begins, *waits])
        self._keys = _keys(calls)
        self._calls = calls
        self._position, self._clock = 0, 0.0
        self._left = calls[0].started if calls else 0.0  # measured time when it last left the transport

    @property
    def finished(self) -> bool:
        """Whether the times of all calls are determined."""
        return self._position == len(self._moments)

    def advance(self, called: dict[Any, dict[int, float]]) -> bool:
        """Advance to a call that waits for members without a known time; return whether any call got a time."""
        before = self._position
        while not self.finished and self._step(called, must_end=False):
            pass
        return self._position > before

    def give_up(self, called: dict[Any, dict[int, float]]) -> None:
        """End the rank's current wait without the missing members."""
        self._step(called, must_end=True)

    def _step(self, called: dict[Any, dict[int, float]], *, must_end: bool) -> bool:
        moment, waits, number = self._moments[self._position]
        call, key = self._calls[number], self._keys[number]
        now = self._clock + max(0.0, moment - self._left)
        if not waits:
            called[key][self.rank] = now
            self.placed[number] = replace(call, started=now, waits=now, ended=None)
        else:
            members = call.ranks if call.operation != "send" else (self.rank,)
            if not must_end and any(member not in called[key] for member in members):
                return False
            complete = max([now, *called[key].values()] if call.operation != "send" else [now])
            self.placed[number] = replace(self.placed[number], waits=now, ended=complete)
            now = complete
        self._clock, self._left = now, max(self._left, moment if not waits else call.ended or moment)
        self._position += 1
        return True


def _keys(calls: Sequence[StepCall]) -> list[Any]:
    """Return a key for each call, equal on all of its members: the members, and the number of the call among theirs."""
    counts: dict[Any, int] = defaultdict(int)
    keys = []
    for call in calls:
        kind = "message" if call.operation in _MESSAGES else "collective"
        members = (kind, call.ranks if kind == "message" else tuple(sorted(call.ranks)))
        keys.append((members, counts[members]))
        counts[members] += 1
    return keys
