"""The report of a failed world: the failing rank's own traceback first, with advice if memory ran out."""

from __future__ import annotations

import errno
import re
import resource
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hyper_parallel._text import ranked
from hyper_parallel.errors import CollectiveMismatchError, RankFailedError
from hyper_parallel.transport.frames import trace

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "NEEDS_GLOO",
    "WorldFailedError",
    "advice",
    "exit_text",
    "gave_up",
    "is_out_of_memory",
    "lost_peer",
    "starting",
    "world_failed",
    "world_timed_out",
]


# Messages of Python, the dynamic loader, the C library, threads, C++ and the frameworks' allocators.
_SIGNS = re.compile(
    r"\bMemoryError\b|Cannot allocate memory|failed to map segment|can't start new thread|bad_alloc|not enough memory"
)
# Errors of PyTorch's checkpoint writer on a full disk, which hide the system's error.
_CUT_SHORT = re.compile(r"inline_container\.cc:\d+\] \. unexpected pos \d+ vs \d+|PytorchStreamWriter failed writing")
_ERRNOS = (errno.ENOMEM, errno.EAGAIN)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` means out of memory, or that no other process or thread could be started."""
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return True
    return bool(_SIGNS.search(f"{type(error).__name__}: {error}"))


def advice(report: str) -> str:
    """A line with the facts and the fix if ``report`` shows that memory or a disk ran out; else an empty string."""
    if _CUT_SHORT.search(report):
        return (
            "PyTorch could not write all of a checkpoint's file: is the disk full? An earlier checkpoint is unchanged"
        )
    return f"out of memory for this number of ranks: {_facts_and_fix()}" if _SIGNS.search(report) else ""


def _facts_and_fix() -> str:
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    available = re.search(r"^MemAvailable: +(\d+) kB$", meminfo, re.MULTILINE)
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    facts = [
        f"{int(available[1]) // 1024} MiB available now" if available else "",
        f"{limit >> 20} MiB allowed for a process (ulimit -v)" if limit != resource.RLIM_INFINITY else "",
    ]
    fix = "Run fewer at a time: a smaller world, a smaller model, or fewer pytest workers (-n)"
    return f"{', '.join(filter(None, facts))}. {fix}"


@contextmanager
def starting(what: str) -> Iterator[None]:
    """Replace out-of-memory errors by an error with advice, if a process or thread is started inside this context.

    Args:
        what: name of the process or thread, for the message.

    Raises:
        RankFailedError: no memory is left for the process or thread, or the fork server has ended.
    """
    try:
        yield
    except (EOFError, ConnectionError) as error:
        reason = "the fork server of the ranks has ended, and stderr has the reason. If memory ran out"
        msg = f"{what} could not be started: {reason}: {_facts_and_fix()}"
        raise RankFailedError(msg) from error
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {error}"
        msg = f"{what} could not be started: {reason}\nout of memory for this number of ranks: {_facts_and_fix()}"
        raise RankFailedError(msg) from error


NEEDS_GLOO = (
    "on CPU, real processes of MindSpore communicate over PyTorch's gloo: pip install torch (a CPU build will do)"
)
"""Why a real world of MindSpore cannot be started, and the fix."""


class WorldFailedError(RankFailedError):
    """A simulated or launched world failed.

    Attributes:
        failures: per failed rank the exception that it raised, in the order in which they failed.
        activities: per rank its activity, with its stack or traceback, if known.
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

    The rank that differs from the majority is listed first; a failure shared by several ranks is listed once.

    Args:
        world_size: number of ranks.
        failures: per failed rank its exception, first failure first.
        activities: per other rank its activity.
        traces: per rank that failed in another process, its traceback as text.
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
        timeout: time limit of the world in seconds.
        activities: per rank of the world its activity, with its stack.
        hanging: the ranks that did not end, which are named first; empty if unknown, and then all ranks are named.
    """
    named = list(hanging) or sorted(activities)
    who = f"{ranked(named)} of {len(activities)}" if hanging else f"{len(activities)} ranks"
    lines = [f"{who} did not finish within {timeout:g} s"]
    order = [*named, *(rank for rank in sorted(activities) if rank not in named)]
    lines += [f"--- rank {rank}: {activities[rank].rstrip()}" for rank in order]
    failures = {rank: TimeoutError(f"rank {rank} did not finish within {timeout:g} s") for rank in named}
    return WorldFailedError("\n".join(lines), failures, activities)
