"""The flat buffer of a group of sharded parameters: where each shard lies. Uses no tensors and no framework.

Every rank contributes a row of equal length. A row holds, one parameter after another, this rank's shard, padded to the
size of the largest shard. So one all-gather of rows gathers all parameters of the group, and one reduce-scatter of rows
reduces all their gradients, however uneven the parameters are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyper_parallel.core.dtensor.layout import Layout

__all__ = ["FlatPlan", "Slot", "plan_flat", "split_dim"]


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in every rank's row.

    Attributes:
        shape: global shape; without dims only if there is one rank.
        ranks: number of ranks over which ``dim`` is sharded.
        offset: first element in the row.
        dim: the sharded dim.
    """

    shape: tuple[int, ...]
    ranks: int
    offset: int
    dim: int = 0

    @property
    def _extent(self) -> int:
        """Length along the dim over all ranks; 1 if the parameter has no dims."""
        return self.shape[self.dim] if self.shape else 1

    @cached_property
    def chunk(self) -> int:
        """Length along the dim per rank, rounded up."""
        return -(-self._extent // self.ranks)

    @cached_property
    def inner(self) -> int:
        """Elements for each index along the dim."""
        return math.prod(self.shape[: self.dim] + self.shape[self.dim + 1 :])

    @cached_property
    def size(self) -> int:
        """Elements in every rank's row, padding included."""
        return self.chunk * self.inner

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements in each rank's row, without padding."""
        return tuple(self.length(rank) * self.inner for rank in range(self.ranks))

    def length(self, rank: int) -> int:
        """Return how long the shard of the rank at position ``rank`` is along the dim; 0 if it is empty."""
        start = min(rank * self.chunk, self._extent)
        return min(start + self.chunk, self._extent) - start

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the shard of the rank at position ``rank``."""
        return (*self.shape[: self.dim], self.length(rank), *self.shape[self.dim + 1 :])


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


def plan_flat(shapes: Sequence[Sequence[int]], ranks: int, dims: Sequence[int] | None = None) -> FlatPlan:
    """Return the flat buffer of a group of parameters.

    Args:
        shapes: global shapes.
        ranks: number of ranks over which they are sharded.
        dims: the sharded dim of each, by default 0.
    """
    slots, offset = [], 0
    for shape, dim in zip(shapes, dims or [0] * len(shapes), strict=True):
        slot = Slot(tuple(shape), ranks, offset, dim)
        slots.append(slot)
        offset += slot.size
    return FlatPlan(tuple(slots), ranks)


def split_dim(layout: Layout, ranks: Sequence[int]) -> int:
    """Return the dim of a sharded parameter that the data axis splits; 0 if it splits none.

    Args:
        layout: layout of the parameter.
        ranks: ranks of the data axis.
    """
    for dim, axes in enumerate(layout.dim_axes):
        if any(layout.mesh.ranks_along((axis,)) == tuple(ranks) for axis in axes):
            return dim
    return 0
