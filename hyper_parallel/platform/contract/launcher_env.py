"""Rank, world size and rendezvous from the environment variables that launchers set."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hyper_parallel.errors import MeshError, WorldNotJoinedError

if TYPE_CHECKING:
    from hyper_parallel.transport.base import Transport

__all__ = ["LaunchedRank", "launched_rank", "unlaunched"]

# Variables that torchrun, srun or a script sets for each rank.
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Variables that msrun sets for each worker and for its scheduler. Workers of several machines have no RANK_ID without
# --node_rank: MindSpore numbers them when they join.
_MSRUN = ("MS_ROLE", "MS_WORKER_NUM", "MS_SCHED_HOST", "MS_SCHED_PORT")


@dataclass(frozen=True, slots=True)
class LaunchedRank:
    """A rank as numbered by its launcher.

    Attributes:
        rank: rank of this process; None if the launcher leaves the number to the framework.
        world_size: number of ranks that the launcher started.
        variables: the environment variables that contain these facts.
        init_method: URL where the ranks meet; None if the framework reads it from the environment.
        scheduler: True for msrun's scheduler, a process next to the ranks that runs the script until ranks would join.
    """

    rank: int | None
    world_size: int
    variables: str
    init_method: str | None = None
    scheduler: bool = False

    def __str__(self) -> str:
        """Return the role of the process, for messages."""
        if self.scheduler:
            return f"the scheduler of {self.world_size} ranks (MS_ROLE)"
        what = f"one of {self.world_size} ranks" if self.rank is None else f"rank {self.rank} of {self.world_size}"
        return f"{what} ({self.variables})"


def launched_rank() -> LaunchedRank | None:
    """Return the rank that a launcher such as torchrun or msrun gave this process; None if it is the only rank.

    Raises:
        MeshError: the rank or the number of ranks is not a number.
    """
    launched = _of_torchrun() or _of_msrun()
    return None if launched is None or (launched.world_size == 1 and not launched.scheduler) else launched


def unlaunched(alone: Transport) -> Transport:
    """Return ``alone``, the transport of a world of one, for a process that is in no other world.

    Raises:
        WorldNotJoinedError: (a MeshError) a launcher started this process as one of several ranks.
    """
    launched = launched_rank()
    if launched is not None:
        raise WorldNotJoinedError(str(launched), launched.rank, launched.world_size)
    return alone


def _of_torchrun() -> LaunchedRank | None:
    if any(name not in os.environ for name in _TORCHRUN):
        return None
    return LaunchedRank(_number("RANK"), _number("WORLD_SIZE"), "RANK, WORLD_SIZE")


def _of_msrun() -> LaunchedRank | None:
    if any(name not in os.environ for name in _MSRUN):
        return None
    rank = _number("RANK_ID") if "RANK_ID" in os.environ else None
    address = f"tcp://{os.environ['MS_SCHED_HOST']}:{os.environ['MS_SCHED_PORT']}"
    scheduler = os.environ["MS_ROLE"] == "MS_SCHED"
    return LaunchedRank(rank, _number("MS_WORKER_NUM"), "RANK_ID, MS_WORKER_NUM", address, scheduler)


def _number(variable: str) -> int:
    try:
        return int(os.environ[variable])
    except ValueError:
        msg = f"{variable} is {os.environ[variable]!r}: a launcher sets it to an integer"
        raise MeshError(msg) from None
