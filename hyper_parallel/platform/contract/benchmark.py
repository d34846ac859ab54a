"""Measures calls in turns: the plain or hand-written one, that of a framework's own DTensor if it has one, and ours.

The implementations take turns, and medians of thread CPU time are compared, so that ratios hold on a busy machine.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import thread_time_ns
from typing import Any

from hyper_parallel._text import near_names
from hyper_parallel.platform.contract.call_profile import CallProfile, microseconds, profile_of

__all__ = ["BenchmarkCase", "BenchmarkRow", "measured", "profile"]

_WARM_UP = 20


@dataclass(frozen=True)
class BenchmarkRow:
    """One line of the report, in microseconds of thread CPU time.

    Attributes:
        name: what was measured.
        plain: the local operation on plain tensors, or, with ``by_hand``, the same written by hand.
        peer: PyTorch's DTensor; None on MindSpore, which has no distributed tensor.
        ours: this library's.
        budget: the ratio that is allowed.
        by_hand: whether ``plain`` communicates too, as a training step and redistributions do.
    """

    name: str
    plain: float
    peer: float | None
    ours: float
    budget: float
    by_hand: bool = False

    @property
    def ratio(self) -> float:
        """Our overhead divided by the peer's; with ``by_hand``, or without a peer, our time divided by ``plain``."""
        if self.by_hand or self.peer is None:
            return self.ours / self.plain
        return (self.ours - self.plain) / (self.peer - self.plain)


@dataclass(frozen=True)
class BenchmarkCase:
    """What a row measures.

    Attributes:
        name: of the row.
        budget: likewise.
        calls: plain or by hand, the peer's if there is one, ours.
        count: calls per measurement.
        by_hand: as for the row.
    """

    name: str
    budget: float
    calls: list[Callable[[], Any]]
    count: int
    by_hand: bool = False


def measured(case: BenchmarkCase, rounds: int, *, one_by_one: bool = False) -> BenchmarkRow:
    """Measure the calls in ``rounds`` rounds and take the medians.

    Args:
        case: what is measured.
        rounds: in each, every implementation is called ``case.count`` times.
        one_by_one: the implementations take turns call by call, rather than round by round: a call that follows
            itself finds its code in the processor's caches, which no program does.
    """
    for call in case.calls:
        _warm_up(call, case.count)
    gc.collect()
    gc.disable()
    try:
        times = [_one_by_one(case) if one_by_one else _in_loops(case) for _ in range(rounds)]
    finally:
        gc.enable()
    plain, *peers, ours = map(statistics.median, zip(*times, strict=True))
    return BenchmarkRow(case.name, plain, peers[0] if peers else None, ours, case.budget, case.by_hand)


def _in_loops(case: BenchmarkCase) -> list[float]:
    return [microseconds(call, case.count) for call in case.calls]


def _one_by_one(case: BenchmarkCase) -> list[float]:
    """Microseconds of each implementation's call, without those of reading the clock."""
    totals, empty = [0] * len(case.calls), 0
    for _ in range(case.count):
        before = thread_time_ns()
        empty += thread_time_ns() - before
        for index, call in enumerate(case.calls):
            before = thread_time_ns()
            call()
            totals[index] += thread_time_ns() - before
    return [max(total - empty, 1) / case.count / 1000 for total in totals]


def profile(name: str, cases: Iterable[BenchmarkCase]) -> CallProfile:
    """Profile this library's call of the row called ``name``.

    Raises:
        ValueError: there is no such row.
    """
    names = []
    for case in cases:
        if case.name == name:
            call = case.calls[-1]
            _warm_up(call, case.count)
            return profile_of(name, call, case.count)
        names.append(case.name)
    near = near_names(name, names, likeness=0.3)
    msg = f"no row of the benchmark is called {name!r}; near: {', '.join(map(repr, near or names[:3]))}"
    raise ValueError(msg)


def _warm_up(call: Callable[[], Any], count: int) -> None:
    for _ in range(min(_WARM_UP, count)):
        call()
