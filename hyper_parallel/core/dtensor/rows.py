"""Packing and unpacking of shards, compiled once per step: one copy at most, however many members there are.

A tensor is split by giving the members a new dim, which is moved to the front; joining is the inverse. Where the
elements of a part are contiguous already, nothing is rearranged. Uneven shards are padded, which costs one copy more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hyper_parallel.platform.contract.tensors import Rearrangement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["GatheredRows", "ScatteredRows", "padded"]

Shape = tuple[int, ...]


def padded(local: Any, dim: int, missing: int, platform: Platform) -> Any:
    """Return ``local``, padded with ``missing`` zeros at the end of ``dim``."""
    shape = (*local.shape[:dim], missing, *local.shape[dim + 1 :])
    zeros = platform.zeros(shape, dtype=local.dtype, device=getattr(local, "device", None))
    return platform.cat([local, zeros], dim)


def _fill_rows(sizes: Sequence[int]) -> bool:
    """Whether only the last parts are shorter than the first: one shorter part, then empty ones."""
    return max(sizes) <= sizes[0] and not any(size and earlier < sizes[0] for earlier, size in pairwise(sizes))


@dataclass(frozen=True, eq=False)
class _Rows:
    """Parts along one dim, of which only the last may be shorter.

    Attributes:
        shapes: shapes of the parts, one per member.
        dim: the dim along which they are concatenated.
        copied: False if the elements of each part are contiguous in the complete tensor, so that nothing is rearranged.
    """

    shapes: tuple[Shape, ...]
    dim: int
    copied: bool

    @classmethod
    def of(cls, shapes: Sequence[Shape], dim: int) -> Self | None:
        """Return the rows of parts of ``shapes`` along ``dim``; None unless only the last ones are shorter."""
        return cls.filled(shapes, dim) if _fill_rows([shape[dim] for shape in shapes]) else None

    @classmethod
    def filled(cls, shapes: Sequence[Shape], dim: int) -> Self:
        """Return the rows of parts of ``shapes``, of which only the last may be shorter, like shards of one axis."""
        return cls(tuple(map(tuple, shapes)), dim, math.prod(shapes[0][:dim]) > 1)

    @property
    def shape(self) -> Shape:
        """Shape of a row, which is that of the first part."""
        return self.shapes[0]


class GatheredRows(_Rows):
    """Rows that members sent, to be joined along one dim.

    Shards by the ceil rule are uneven only at the end: all rows are as long as the first, and padding is at the end of
    the concatenation.
    """

    @cached_property
    def length(self) -> int:
        """Size of the concatenation along ``dim``, without padding."""
        return sum(shape[self.dim] for shape in self.shapes)

    @cached_property
    def uneven(self) -> bool:
        """Whether any part is shorter than its row."""
        return self.length < self.whole[self.dim]

    def padded(self, local: Any, platform: Platform) -> Any:
        """Return ``local``, one of the parts, contiguous, with zeros up to the size of a row."""
        missing = self.shape[self.dim] - local.shape[self.dim] if self.uneven else 0
        return padded(local, self.dim, missing, platform) if missing else platform.contiguous(local)

    @cached_property
    def whole(self) -> Shape:
        """Shape of all rows, concatenated."""
        return (*self.shape[: self.dim], self.shape[self.dim] * len(self.shapes), *self.shape[self.dim + 1 :])

    @cached_property
    def by_dim(self) -> Rearrangement:
        """The rearrangement that moves the members' dim in front of ``dim``, and merges the two."""
        order = (*range(1, self.dim + 1), 0, *range(self.dim + 1, len(self.shape) + 1))
        return Rearrangement.of((len(self.shapes), *self.shape), order, self.whole)

    def joined(self, rows: Any, platform: Platform) -> Any:
        """Return the rows, concatenated along ``dim``, without their padding, contiguous."""
        whole = platform.rearranged(rows, self.by_dim) if self.copied else platform.contiguous(rows).reshape(self.whole)
        return platform.contiguous(platform.narrow(whole, self.dim, 0, self.length)) if self.uneven else whole


class ScatteredRows(_Rows):
    """A tensor to be split along one dim, a row for each member; rows of shorter parts, at the end, are padded."""

    @cached_property
    def missing(self) -> int:
        """Size of the padding along ``dim``."""
        return self.shape[self.dim] * len(self.shapes) - sum(shape[self.dim] for shape in self.shapes)

    @cached_property
    def by_member(self) -> Rearrangement:
        """The rearrangement that splits the members' dim off ``dim``, and moves it to the front."""
        separated = (*self.shape[: self.dim], len(self.shapes), *self.shape[self.dim :])
        return Rearrangement.of(separated, (self.dim, *range(self.dim), *range(self.dim + 1, len(separated))))

    def split(self, local: Any, platform: Platform) -> Any:
        """Return the parts as rows of a contiguous tensor, in the memory of ``local`` if possible."""
        if self.missing:
            local = padded(local, self.dim, self.missing, platform)
        if self.copied:
            return platform.rearranged(local, self.by_member)
        return platform.contiguous(local).reshape((len(self.shapes), *self.shape))
