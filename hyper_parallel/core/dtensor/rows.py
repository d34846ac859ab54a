"""Packing and unpacking of equal shards, compiled once per step: one copy at most, however many members there are.

A tensor is split by giving its members a dim of their own, which then goes first, and joined the other way round. Where
the elements of a part lie together already, nothing is rearranged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["GatheredRows", "ScatteredRows"]

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Rows:
    """Parts of one shape along one dim.

    Attributes:
        shapes: of the parts, one per member.
        dim: along which they lie.
        copied: False if all elements of a part lie together in the whole, so that nothing is rearranged.
    """

    shapes: tuple[Shape, ...]
    dim: int
    copied: bool

    @classmethod
    def of(cls, shapes: Sequence[Shape], dim: int) -> Self | None:
        """Return the rows of parts of ``shapes`` along ``dim``; None if the parts are not equal."""
        shape = tuple(shapes[0])
        if any(tuple(other) != shape for other in shapes):
            return None
        return cls((shape,) * len(shapes), dim, math.prod(shape[:dim]) > 1)

    @property
    def shape(self) -> Shape:
        """Shape of a part."""
        return self.shapes[0]


class GatheredRows(_Rows):
    """Rows that members sent, to be joined along one dim."""

    @cached_property
    def whole(self) -> Shape:
        """Shape of all parts, joined."""
        return (*self.shape[: self.dim], self.shape[self.dim] * len(self.shapes), *self.shape[self.dim + 1 :])

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Dims of the rows with the members' dim before ``dim``."""
        return (*range(1, self.dim + 1), 0, *range(self.dim + 1, len(self.shape) + 1))

    def joined(self, rows: Any) -> Any:
        """Return the rows, of the shape of a part each, concatenated along ``dim``."""
        return (rows.permute(self.order) if self.copied else rows).reshape(self.whole)


class ScatteredRows(_Rows):
    """A tensor to be split along one dim, a row for each member."""

    @cached_property
    def separated(self) -> Shape:
        """Shape of the whole with a dim of the members before ``dim``."""
        return (*self.shape[: self.dim], len(self.shapes), *self.shape[self.dim :])

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Those dims with the members' one first."""
        return (self.dim, *range(self.dim), *range(self.dim + 1, len(self.shape) + 1))

    def split(self, local: Any, platform: Platform) -> Any:
        """Return the parts as rows of a contiguous tensor, in the memory of ``local`` where that is possible."""
        if self.copied:
            return platform.contiguous(local.reshape(self.separated).permute(self.order))
        return platform.contiguous(local).reshape((len(self.shapes), *self.shape))
