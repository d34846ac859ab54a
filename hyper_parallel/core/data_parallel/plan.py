"""The flat buffer of a group of sharded parameters: where each shard lies. Uses no tensors and no framework.

Every rank contributes a row of equal length. A row holds, one parameter after another, this rank's shard on dim 0,
padded to the size of the largest shard. So one all-gather of rows gathers all parameters of the group, and one
reduce-scatter of rows reduces all their gradients, however uneven the parameters are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FlatPlan", "Slot", "plan_flat"]


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in every rank's row.

    Attributes:
        shape: global shape, at least one dim.
        ranks: number of ranks that share dim 0.
        offset: first element in the row.
    """

    shape: tuple[int, ...]
    ranks: int
    offset: int

    @cached_property
    def chunk(self) -> int:
        """Rows of dim 0 per rank, rounded up."""
        return -(-self.shape[0] // self.ranks)

    @cached_property
    def inner(self) -> int:
        """Elements per row of dim 0."""
        return math.prod(self.shape[1:])

    @cached_property
    def size(self) -> int:
        """Elements in every rank's row, padding included."""
        return self.chunk * self.inner

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements in each rank's row, without padding."""
        return tuple(self.length(rank) * self.inner for rank in range(self.ranks))

    def length(self, rank: int) -> int:
        """Return how many rows of dim 0 the rank at position ``rank`` holds; 0 if its shard is empty."""
        start = min(rank * self.chunk, self.shape[0])
        return min(start + self.chunk, self.shape[0]) - start


@dataclass(frozen=True)
class FlatPlan:
    """The flat buffer of a group.

    Attributes:
        slots: one per parameter, in order.
        ranks: number of ranks.
    """

    slots: tuple[Slot, ...]
    ranks: int

    @cached_property
    def row(self) -> int:
        """Elements of one rank's row."""
        return sum(slot.size for slot in self.slots)

    @cached_property
    def gathered(self) -> int:
        """Elements of all ranks' rows."""
        return self.row * self.ranks


def plan_flat(shapes: Sequence[Sequence[int]], ranks: int) -> FlatPlan:
    """Return the flat buffer of parameters of global ``shapes``, each with at least one dim, over ``ranks`` ranks."""
    slots, offset = [], 0
    for shape in shapes:
        slot = Slot(tuple(shape), ranks, offset)
        slots.append(slot)
        offset += slot.size
    return FlatPlan(tuple(slots), ranks)
