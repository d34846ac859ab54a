"""Measures calls in turns: the plain or hand-written one, that of a framework's own DTensor if it has one, and ours.

The implementations take turns of milliseconds at most. Each turn's thread CPU time is divided by that of the plain turn
next to it, and the median of these ratios counts: a busy machine that changes its speed changes both. A turn goes
through the implementations forward and backward, so that the plain one and ours follow the peer, which leaves nothing
of theirs in the processor's caches, equally often.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from time import thread_time_ns
from typing import Any

from hyper_parallel._text import near_names
from workshop.bench.call_profile import CallProfile, profile_of

__all__ = ["MEDIAN", "BenchmarkCase", "BenchmarkRow", "in_tenths", "measured", "median_operator", "profile"]

MEDIAN = "median operator: "
"""How the name of a row begins that repeats the operator with the median ratio: another one from run to run."""
_WARM_UP = 20
_TURNS = 25
"""Turns of each implementation in a round."""


@dataclass(frozen=True)
class BenchmarkRow:
    """One line of the report, in microseconds of thread CPU time.

    Attributes:
        name: what was measured.
        plain: the local operation on plain tensors, or, with ``by_hand``, the same written by hand.
        peer: PyTorch's DTensor; None on MindSpore, which has no distributed tensor.
        ours: this library's.
        budget: the ratio that is allowed.
        by_hand: whether ``plain`` communicates too, as a training step and redistributions do. In the rows of
            ``--training`` it is PyTorch's own parallelism, or one file, and all are wall time.
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


def in_tenths(microseconds: float | None) -> str:
    """A time of a row for a table; what was not measured is a dash."""
    return "-" if microseconds is None else f"{microseconds:.1f}"


@dataclass(frozen=True)
class BenchmarkCase:
    """What a row measures.

    Attributes:
        name: of the row.
        budget: likewise.
        calls: plain or by hand, the peer's if there is one, ours.
        count: calls of each implementation in a round.
        by_hand: as for the row.
    """

    name: str
    budget: float
    calls: list[Callable[[], Any]]
    count: int
    by_hand: bool = False


def measured(case: BenchmarkCase, rounds: int, *, one_by_one: bool = False) -> BenchmarkRow:
    """Measure the calls in turns.

    Args:
        case: what is measured.
        rounds: in each, every implementation is called ``case.count`` times, in 25 turns if it can be divided so.
        one_by_one: a turn is one call: a call that follows itself finds its code in the processor's caches, which no
            program does.
    """
    for call in case.calls:
        _warm_up(call, case.count)
    length = 1 if one_by_one else max(case.count // _TURNS, 1)
    gc.collect()
    gc.disable()
    try:
        turns = [_turn(case.calls, length) for _ in range(max(rounds * case.count // (2 * length), 1))]
    finally:
        gc.enable()
    plain = statistics.median(times[0] for times in turns)
    *peers, ours = (
        plain * statistics.median(times[index] / times[0] for times in turns) for index in range(1, len(case.calls))
    )
    return BenchmarkRow(case.name, plain, peers[0] if peers else None, ours, case.budget, case.by_hand)


def _turn(calls: list[Callable[[], Any]], length: int) -> list[float]:
    """Microseconds of each implementation's call, the mean of ``2 * length``, without those of reading the clock."""
    before = thread_time_ns()
    reading = thread_time_ns() - before
    times = [0.0] * len(calls)
    for index in (*range(len(calls)), *reversed(range(len(calls)))):
        call = calls[index]
        before = thread_time_ns()
        for _ in range(length):
            call()
        times[index] += max(thread_time_ns() - before - reading, 1) / (2 * length) / 1000
    return times


def median_operator(rows: Sequence[BenchmarkRow], budget: float) -> BenchmarkRow:
    """Return the row of the operator with the median ratio, of two in the middle the lower one, with ``budget``."""
    ratio = statistics.median_low(row.ratio for row in rows)
    row = next(row for row in rows if row.ratio == ratio)
    return replace(row, name=f"{MEDIAN}{row.name}", budget=budget)


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
    msg = f"no row of the benchmark is called {name!r}; did you mean {' or '.join(map(repr, near or names[:3]))}?"
    raise ValueError(msg)


def _warm_up(call: Callable[[], Any], count: int) -> None:
    for _ in range(min(_WARM_UP, count)):
        call()
