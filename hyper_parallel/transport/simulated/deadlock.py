"""Which ranks can never go on, since they wait for each other, and the text of their error."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from hyper_parallel._text import ranked
from hyper_parallel.transport.checks.fingerprint import MessageFingerprint
from hyper_parallel.transport.simulated.endpoint import Contribution, Wait
from hyper_parallel.transport.simulated.pending_collective import PendingCollective

__all__ = ["Waiting", "deadlock_text", "stuck_ranks"]

Waiting = tuple[PendingCollective, Contribution] | MessageFingerprint | Wait
"""What a rank waits for: a collective with its own part in it, a message in a mailbox, or another thing."""


def stuck_ranks(waiting: Mapping[int, Waiting], running: Collection[int], world_size: int) -> list[int]:
    """The waiting ranks that no rank can release any more: a fixed point over who may still answer whom.

    A member of a collective needs all others that have not joined; a message needs its one peer, or any of several.

    Args:
        waiting: per waiting rank what it waits for.
        running: the ranks that may still do anything.
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
    """The error of the ranks that wait for each other.

    Args:
        stuck: those ranks.
        waiting: per waiting rank what it waits for.
        activities: per rank of the world what it is doing.
    """
    waits: list[Any] = [waiting[rank] for rank in stuck]
    others = [wait for wait in waits if not isinstance(wait, (tuple, MessageFingerprint))]
    causes = dict.fromkeys(cause for wait in others for cause in wait.causes())
    unanswered = dict.fromkeys(line for wait in others for line in wait.unanswered())
    alone = len(stuck) < sum(text != "returned" for text in activities.values())
    who = f"{ranked(sorted(stuck))} cannot go on" if alone else "no rank can go on"
    lines = [f"  rank {rank} {text}" for rank, text in sorted(activities.items())]
    return "\n".join([f"deadlock, {'; '.join([who, *causes])}:", *lines, *unanswered])
