"""The report of a failed world: the failing rank's own traceback first, one line for each other rank."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping, Sequence

from hyper_parallel._text import ranked
from hyper_parallel.errors import CollectiveMismatchError, RankFailedError
from hyper_parallel.transport.out_of_memory import advice
from hyper_parallel.transport.shown_traceback import trace

__all__ = [
    "NEEDS_GLOO",
    "WorldFailedError",
    "exit_text",
    "gave_up",
    "lost_peer",
    "world_failed",
    "world_timed_out",
]

NEEDS_GLOO = "on CPU, real processes of MindSpore talk over PyTorch's gloo: pip install torch (a CPU build will do)"
"""Why a real world of MindSpore cannot be started, and the fix."""


class WorldFailedError(RankFailedError):
    """A simulated or launched world failed.

    Attributes:
        failures: per failed rank the exception that it raised, in the order in which they failed.
        activities: per rank what it was doing, with its stack or traceback, where that is known.
    """

    def __init__(
        self, text: str, failures: Mapping[int, BaseException], activities: Mapping[int, str] | None = None
    ) -> None:
        super().__init__(text)
        self.failures: dict[int, BaseException] = dict(failures)
        self.activities: dict[int, str] = dict(activities or {})


def lost_peer(error: BaseException) -> bool:
    """Whether gloo raised ``error`` because another rank closed its connection: a consequence, never the cause."""
    text = str(error)
    return isinstance(error, RuntimeError) and "gloo" in text and ("onnection" in text or "Read error" in text)


def gave_up(error: BaseException) -> bool:
    """Whether gloo raised ``error`` because a peer kept it waiting until its time limit."""
    text = str(error)
    return isinstance(error, RuntimeError) and "gloo" in text and "Timed out waiting" in text


def exit_text(code: int) -> str:
    """How a process with this exit code ended: ``with exit code 3``, ``of SIGSEGV``."""
    if code >= 0:
        return f"with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"of {names.get(-code, f'signal {-code}')}"


def world_failed(
    world_size: int,
    failures: Mapping[int, BaseException],
    activities: Mapping[int, str],
    traces: Mapping[int, str] | None = None,
) -> WorldFailedError:
    """The error for ranks that raised or died, chained to the first of their exceptions.

    A rank that differs from the majority comes first, and a failure that several ranks share is shown once.

    Args:
        world_size: number of ranks.
        failures: per failed rank its exception, first failure first.
        activities: per other rank what it was doing.
        traces: per failed rank its traceback as text, where it was raised in another process.
    """
    odd = getattr(next(iter(failures.values())), "odd_ranks", ())
    failures = {rank: failures[rank] for rank in sorted(failures, key=lambda rank: rank not in odd)}
    cause = next(iter(failures.values()))
    texts = {rank: (traces or {}).get(rank) or trace(error) for rank, error in failures.items()}
    lines = [f"{ranked(list(failures))} of {world_size} failed", *_folded(failures, texts)]
    lines += [
        f"--- rank {rank}: {activities.get(rank, 'unknown')}" for rank in range(world_size) if rank not in failures
    ]
    text = "\n".join(lines)
    failed = WorldFailedError("\n".join(filter(None, [text, advice(text)])), failures, {**activities, **texts})
    failed.__cause__ = cause
    return failed


def _folded(failures: Mapping[int, BaseException], texts: Mapping[int, str]) -> Iterator[str]:
    """The parts of the report for each failure; ranks with the same traceback, or the same mismatch, share one."""
    same: dict[str, list[int]] = {}
    for rank, error in failures.items():
        key = str(error) if isinstance(error, CollectiveMismatchError) else _ADDRESS.sub("0x", texts[rank])
        same.setdefault(key, []).append(rank)
    for ranks in same.values():
        alike = [rank for rank in ranks if _ADDRESS.sub("0x", texts[rank]) == _ADDRESS.sub("0x", texts[ranks[0]])]
        yield f"--- {ranked(alike)}:\n{texts[ranks[0]]}"
        others = [rank for rank in ranks if rank not in alike]
        if others:
            yield f"--- {ranked(others)}: same error as {ranked(alike)}"


_ADDRESS = re.compile(r"\b0x[0-9a-f]+\b")


def world_timed_out(timeout: float, activities: Mapping[int, str], hanging: Sequence[int] = ()) -> WorldFailedError:
    """The error for a world that did not end in time.

    Args:
        timeout: its time limit in seconds.
        activities: per rank of the world what it was doing, with its stack.
        hanging: the ranks that ran on, which are named and come first; by default it is not known, and all are named.
    """
    named = list(hanging) or sorted(activities)
    who = f"{ranked(named)} of {len(activities)}" if hanging else f"{len(activities)} ranks"
    lines = [f"{who} did not finish within {timeout:g} s"]
    order = [*named, *(rank for rank in sorted(activities) if rank not in named)]
    lines += [f"--- rank {rank}: {activities[rank].rstrip()}" for rank in order]
    failures = {rank: TimeoutError(f"rank {rank} did not finish within {timeout:g} s") for rank in named}
    return WorldFailedError("\n".join(lines), failures, activities)
