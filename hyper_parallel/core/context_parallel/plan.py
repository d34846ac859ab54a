"""Which part of the sequence each rank of a ring holds, and which keys its queries see; integers, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from hyper_parallel._caches import register
from hyper_parallel.core.dtensor.layout import chunk_bounds
from hyper_parallel.errors import PlanError

__all__ = ["TILE", "RingPlan", "Run", "balanced_order", "ring_plan"]


TILE = 1024
"""Number of queries, and of keys, of a tile of scores; a few tiles [B, H, TILE, TILE] are in memory at once."""


@dataclass(frozen=True)
class Run:
    """Consecutive positions in a shard; a run longer than a tile is cut into tiles.

    Attributes:
        offset: index of its first element in the shard.
        length: number of its elements.
        position: position of its first element in the sequence.
    """

    offset: int
    length: int
    position: int

    def sees(self, keys: Run) -> bool:
        """Return whether the last query of this run may see the first key of ``keys``."""
        return keys.position < self.position + self.length

    def sees_all(self, keys: Run) -> bool:
        """Return whether the first query of this run may see every key of ``keys``."""
        return keys.position + keys.length <= self.position + 1


@dataclass(frozen=True)
class RingPlan:
    """What each rank of a ring holds.

    Attributes:
        ranks: ranks of the axis that shards the sequence, in order: each sends to the next, the last one to the first.
        index: index of this rank among them.
        runs: runs of each rank's shard.
        causal: whether a query sees only the keys up to its own position.
    """

    ranks: tuple[int, ...]
    index: int
    runs: tuple[tuple[Run, ...], ...]
    causal: bool

    @property
    def own(self) -> tuple[Run, ...]:
        """Return the runs of this rank's queries."""
        return self.runs[self.index]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Return the length of each rank's shard."""
        return tuple(sum(run.length for run in runs) for runs in self.runs)

    def start(self, member: int) -> int:
        """Return the index in the sharded sequence of the first element that ``member`` holds."""
        return sum(self.sizes[:member])

    def member_at(self, step: int) -> int:
        """Return the rank whose keys this rank has after ``step`` shifts."""
        return (self.index - step) % len(self.ranks)


@lru_cache(maxsize=256)
def ring_plan(
    ranks: tuple[int, ...], rank: int, length: int, causal: bool, positions: tuple[int, ...] | None, tile: int = TILE
) -> RingPlan:
    """Return the plan of ``rank`` for a sequence of ``length`` elements; without ``positions`` they are in order.

    No run is longer than ``tile``.
    """
    order = np.arange(length) if positions is None else np.asarray(positions)
    shards = [order[slice(*chunk_bounds(length, len(ranks), index))] for index in range(len(ranks))]
    return RingPlan(ranks, ranks.index(rank), tuple(_runs(shard, tile) for shard in shards), causal)


register("ring plans", ring_plan)


def _runs(positions: Any, tile: int) -> tuple[Run, ...]:
    if not len(positions):
        return ()
    starts = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]
    return tuple(
        Run(first, min(tile, end - first), int(positions[first]))
        for start, end in pairwise(starts)
        for first in range(start, end, tile)
    )


def balanced_order(length: int, parts: int) -> list[int]:
    """Return an order in which all shards have the same number of visible pairs of query and key under a causal mask.

    The sequence is cut into ``2 * parts`` chunks; shard ``i`` holds the chunks ``i`` and ``2 * parts - 1 - i``, one
    from the front and one from the back. Reorder tokens, position embeddings and labels by it, shard them, and give it
    to :func:`context_parallel_attention` as ``positions``.

    Args:
        length: length of the sequence; ``2 * parts`` divides it.
        parts: number of shards.

    Returns:
        a permutation of ``range(length)``: element ``j`` of the reordered sequence is position ``order[j]``.

    Raises:
        PlanError: (a ValueError) the length is not divisible by ``2 * parts``.
    """
    if parts < 1 or length < 1 or length % (2 * parts):
        padded = -(-max(length, 1) // (2 * max(parts, 1))) * 2 * max(parts, 1)
        msg = (
            f"balanced_order: a sequence of {length} in {parts} parts; the length must be a multiple of twice the "
            f"number of parts; pad the sequence to {padded}"
        )
        raise PlanError(msg)
    chunk = length // (2 * parts)
    order: list[int] = []
    for part in range(parts):
        for chosen in (part, 2 * parts - 1 - part):
            order.extend(range(chosen * chunk, (chosen + 1) * chunk))
    return order


def check_positions(positions: Sequence[int], length: int) -> tuple[int, ...]:
    """Return positions as a tuple.

    Raises:
        PlanError: they are not a permutation of ``range(length)``.
    """
    chosen = tuple(int(position) for position in positions)
    if sorted(chosen) != list(range(length)):
        msg = (
            f"context_parallel_attention: positions has {len(chosen)} numbers; it must be a permutation of "
            f"range({length}), such as balanced_order gives"
        )
        raise PlanError(msg)
    return chosen
