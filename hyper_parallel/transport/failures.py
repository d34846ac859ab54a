"""The report of a failed world: the failing rank's own traceback first, one line for each other rank."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence

from hyper_parallel.errors import CollectiveMismatchError, RankFailedError
from hyper_parallel.transport.out_of_memory import advice

__all__ = ["NEEDS_GLOO", "WorldFailedError", "lost_peer", "trace", "world_failed", "world_timed_out"]

NEEDS_GLOO = "on CPU, real processes of MindSpore talk over PyTorch's gloo: pip install torch (a CPU build will do)"
"""Why a real world of MindSpore cannot be started, and the fix."""

_OWN = (
    "transport/simulated_threads.py",
    "transport/simulated.py",
    "transport/coordinator.py",
    "transport/c10d/simulated_world.py",
    "transport/c10d/simulated_work.py",
    "transport/c10d/simulated_group.py",
    "transport/simulated_processes.py",
    "transport/rank_process.py",
    "transport/launched_rank.py",
    "transport/checks/guarded.py",
    "pytest_plugin/ranks.py",
    "verify/launch_worker.py",
)


class WorldFailedError(RankFailedError):
    """A simulated or launched world failed.

    Attributes:
        failures: per failed rank the exception that it raised, in the order in which they failed.
    """

    def __init__(self, text: str, failures: Mapping[int, BaseException]) -> None:
        super().__init__(text)
        self.failures: dict[int, BaseException] = dict(failures)


def trace(error: BaseException) -> str:
    """The traceback without the frames of the modules that run ranks."""
    shown = traceback.TracebackException.from_exception(error)
    kept = [frame for frame in shown.stack if not frame.filename.replace("\\", "/").endswith(_OWN)]
    if kept:
        shown.stack = traceback.StackSummary.from_list(kept)
    return "".join(shown.format()).rstrip()


def lost_peer(error: BaseException) -> bool:
    """Whether gloo raised ``error`` because another rank closed its connection: a consequence, never the cause."""
    text = str(error)
    return isinstance(error, RuntimeError) and "gloo" in text and ("onnection" in text or "Read error" in text)


def world_failed(
    world_size: int,
    failures: Mapping[int, BaseException],
    activities: Mapping[int, str],
    traces: Mapping[int, str] | None = None,
) -> WorldFailedError:
    """The error for ranks that raised or died, chained to the first of their exceptions.

    Args:
        world_size: number of ranks.
        failures: per failed rank its exception, first failure first.
        activities: per other rank what it was doing.
        traces: per failed rank its traceback as text, where it was raised in another process.
    """
    cause = next(iter(failures.values()))
    names = ", ".join(str(rank) for rank in sorted(failures))
    first_with: dict[str, int] = {}
    lines = [f"rank{'s' if len(failures) > 1 else ''} {names} of {world_size} failed"]
    for rank, error in failures.items():
        if isinstance(error, CollectiveMismatchError) and str(error) in first_with:
            lines.append(f"--- rank {rank}: same error as rank {first_with[str(error)]}")
            continue
        first_with.setdefault(str(error), rank)
        lines += [f"--- rank {rank}:", (traces or {}).get(rank) or trace(error)]
    lines += [
        f"--- rank {rank}: {activities.get(rank, 'unknown')}" for rank in range(world_size) if rank not in failures
    ]
    text = "\n".join(lines)
    failed = WorldFailedError("\n".join(filter(None, [text, advice(text)])), failures)
    failed.__cause__ = cause
    return failed


def world_timed_out(
    timeout: float, world_size: int, stacks: Mapping[int, str], first: Sequence[int] = ()
) -> WorldFailedError:
    """The error for a world that did not end in time, with every rank's stack; ``first`` those of these ranks."""
    lines = [f"{world_size} ranks did not finish within {timeout:g} s"]
    order = [*first, *(rank for rank in sorted(stacks) if rank not in first)]
    for rank, stack in ((rank, stacks[rank]) for rank in order):
        lines += [f"--- rank {rank}: {stack.rstrip()}"]
    failures = {rank: TimeoutError(f"rank {rank} did not finish within {timeout:g} s") for rank in order}
    return WorldFailedError("\n".join(lines), failures)
