"""Waits of simulated ranks: collectives that some members have joined, and detection of deadlocks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel._text import ranked
from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.base import Ranks
from hyper_parallel.transport.checks.compare import joined_mismatch, joining_mismatch, odd_ranks, title
from hyper_parallel.transport.checks.fingerprint import CollectiveFingerprint, MessageFingerprint
from hyper_parallel.transport.simulated.endpoint import Contribution, Wait

__all__ = ["PendingCollective", "Waiting", "deadlock_text", "stuck_ranks"]


@dataclass(slots=True)
class PendingCollective:
    """A collective in progress: the ranks that have joined, and its error if it failed.

    ``differs`` means that members call it differently. Each later member helps to identify the ranks that are wrong,
    and errors that were delivered before are updated too.
    """

    ranks: Ranks
    number: int
    group: str = ""
    joined: dict[int, Contribution] = field(default_factory=dict)
    fingerprints: dict[int, CollectiveFingerprint] = field(default_factory=dict)
    failed: str | None = None
    differs: bool = False
    odd: tuple[int, ...] = ()
    errors: list[CollectiveMismatchError] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the collective in error messages."""
        return title(self.ranks, self.number, self.group)

    def add(self, rank: int, contribution: Contribution) -> str | None:
        """Let ``rank`` join; return the error text if calls differ or the collective has failed."""
        problem = self.failed or joining_mismatch(self.fingerprints, rank, contribution.fingerprint, self.number)
        self.differs = self.differs or (self.failed is None and problem is not None)
        self.joined[rank] = contribution
        self.fingerprints[rank] = contribution.fingerprint
        return (joined_mismatch(self.fingerprints, self.number) or problem) if self.differs else problem

    def fail(self, problem: str, gone: Sequence[int]) -> None:
        """Record the reason of the failure in all of its errors; ``gone`` are members that will not join."""
        self.failed = problem
        self.odd = odd_ranks(self.fingerprints) if self.differs else tuple(gone)
        for error in self.errors:
            error.args, error.odd_ranks = (problem,), self.odd

    def error(self) -> CollectiveMismatchError:
        """Return a new error with the reason of the failure."""
        error = CollectiveMismatchError(self.failed)
        error.odd_ranks = self.odd
        self.errors.append(error)
        return error


Waiting = tuple[PendingCollective, Contribution] | MessageFingerprint | Wait
"""Object of a wait: a collective with the rank's contribution, a message in a mailbox, or another wait."""


def stuck_ranks(waiting: Mapping[int, Waiting], running: Collection[int], world_size: int) -> list[int]:
    """Return the waiting ranks that no rank can release.

    A fixed-point iteration: it starts with the running ranks, and adds each waiting rank that they can release. To
    release a member of a collective, all members that have not joined are needed; for a message, its peer or one of
    several possible peers.

    Args:
        waiting: the object of each waiting rank's wait, by rank.
        running: the ranks that are not waiting.
        world_size: number of ranks.
    """
    free = set(running)
    left = {rank for rank in waiting if rank not in free}
    while True:
        freed = {rank for rank in left if _may_go_on(waiting[rank], free, world_size)}
        if not freed:
            return sorted(left)
        free |= freed
        left -= freed


def _may_go_on(wait: Waiting, free: Collection[int], world_size: int) -> bool:
    if isinstance(wait, MessageFingerprint):
        return wait.source in free
    if isinstance(wait, tuple):
        collective = wait[0]
        return all(rank in free for rank in collective.ranks if rank not in collective.joined)
    return any(rank in free for rank in wait.answering(world_size))


def deadlock_text(stuck: Collection[int], waiting: Mapping[int, Waiting], activities: Mapping[int, str]) -> str:
    """Return the error text of ranks that wait for each other.

    Args:
        stuck: the ranks in the deadlock.
        waiting: the object of each waiting rank's wait, by rank.
        activities: activity of each rank of the world.
    """
    waits: list[Any] = [waiting[rank] for rank in stuck]
    others = [wait for wait in waits if not isinstance(wait, (tuple, MessageFingerprint))]
    causes = dict.fromkeys(cause for wait in others for cause in wait.causes())
    unanswered = dict.fromkeys(line for wait in others for line in wait.unanswered())
    alone = len(stuck) < sum(text != "returned" for text in activities.values())
    who = f"{ranked(sorted(stuck))} cannot go on" if alone else "no rank can go on"
    lines = [f"  rank {rank} {text}" for rank, text in sorted(activities.items())]
    return "\n".join([f"deadlock, {'; '.join([who, *causes])}:", *lines, *unanswered])
