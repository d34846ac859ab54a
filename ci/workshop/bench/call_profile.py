"""Who takes which microsecond of a call: its functions, by the time that each takes itself."""

from __future__ import annotations

import cProfile
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

__all__ = ["CallProfile", "FunctionTime", "microseconds", "profile_of"]


_ROUNDS = 7


@dataclass(frozen=True)
class FunctionTime:
    """A function's share of one call.

    Attributes:
        function: file, line and name; of a function in C its name.
        calls: how often it runs.
        own: microseconds in the function itself.
        total: microseconds in it and in what it calls.
    """

    function: str
    calls: float
    own: float
    total: float


@dataclass(frozen=True)
class CallProfile:
    """Where the time of one call goes.

    Attributes:
        name: what is called.
        microseconds: of thread CPU time that a call takes.
        profiled: the sum of the functions' own times, which are measured slower than they are.
        functions: those that run, the one that takes the most itself first.
    """

    name: str
    microseconds: float
    profiled: float
    functions: tuple[FunctionTime, ...]


def microseconds(call: Callable[[], Any], count: int) -> float:
    """Return the thread CPU time of a call, the mean of ``count`` calls."""
    start = time.thread_time_ns()
    for _ in range(count):
        call()
    return (time.thread_time_ns() - start) / count / 1000


def profile_of(name: str, call: Callable[[], Any], count: int) -> CallProfile:
    """Profile a call in seven rounds; the medians of a function's times count, since another process may interrupt it.

    Args:
        name: for the result.
        call: what is profiled; it has run before.
        count: calls of a round.
    """
    unprofiled = microseconds(call, count)
    rounds = [_times(call, count) for _ in range(_ROUNDS)]
    never = (0.0, 0.0, 0.0)
    functions = []
    for code in {code: None for times in rounds for code in times}:
        calls, own, total = map(statistics.median, zip(*(times.get(code, never) for times in rounds), strict=True))
        functions.append(FunctionTime(_place(code), calls, own, total))
    functions.sort(key=lambda function: -function.own)
    return CallProfile(name, unprofiled, sum(function.own for function in functions), tuple(functions))


def _times(call: Callable[[], Any], count: int) -> dict[CodeType | str, tuple[float, float, float]]:
    """Of each function in one round: calls, own and total microseconds per call."""
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        for _ in range(count):
            call()
    finally:
        profiler.disable()
    scale = 1e6 / count
    return {
        entry.code: (entry.callcount / count, entry.inlinetime * scale, entry.totaltime * scale)
        for entry in profiler.getstats()
        if "_lsprof.Profiler" not in str(entry.code)
    }


def _place(code: CodeType | str) -> str:
    """File, line and name, the file from the package on."""
    if isinstance(code, str):
        return code
    file = code.co_filename.replace("\\", "/").rpartition("site-packages/")[2]
    package = file.find("/hyper_parallel/") + 1
    return f"{file[package:]}:{code.co_firstlineno} {code.co_name}"
