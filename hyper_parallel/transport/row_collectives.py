"""Collectives on rows: one tensor whose row ``i`` comes from, or goes to, member ``i``; and :class:`Parts` of a tensor.

Redistribution uses rows if all members' shards have one size, or can be padded to one size. A call then packs once,
starts one collective of the engine, and unpacks once, for any number of members. :meth:`Transport.all_to_all` does the
same for parts that differ in size or are empty.
"""

from __future__ import annotations

import abc
import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Parts", "RowCollectives"]

Ranks = tuple[int, ...]
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Parts:
    """Parts of one tensor that follow each other in memory, one for each member of a collective.

    A caller that repeats a collective keeps them, so that later calls compute nothing for each member.

    Attributes:
        shapes: shapes of the parts, as the caller sees them; checks compare them between members.
        sizes: the number of elements of each part, its padding included.
    """

    shapes: Shapes
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, shapes: Iterable[Iterable[int]]) -> Parts:
        """Return the parts of ``shapes``, without padding."""
        whole = tuple(tuple(shape) for shape in shapes)
        return cls(whole, tuple(map(math.prod, whole)))

    @cached_property
    def total(self) -> int:
        """The number of elements of all parts together."""
        return sum(self.sizes)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The index of the first element of each part."""
        return (0, *itertools.accumulate(self.sizes))[:-1]

    def of_members(self, order: Iterable[int]) -> tuple[int, ...]:
        """Return the sizes of the parts of the members at the positions ``order``."""
        return tuple(self.sizes[member] for member in order)


class RowCollectives(abc.ABC):
    """The collectives of a transport on rows, the first dim of a contiguous tensor; all rows have one shape.

    ``shapes``, ``sends`` and ``expects`` have one shape per member, which is the shape of the row's contents without
    padding. Checks compare these shapes between members. A member may call the form with rows while another member
    calls the form with lists.
    """

    @abc.abstractmethod
    def all_gather_rows(self, x: Any, ranks: Ranks, shapes: Shapes) -> Any:
        """Return every member's ``x``, contiguous and equally shaped, as rows of a new tensor."""

    @abc.abstractmethod
    def reduce_scatter_rows(self, rows: Any, op: str, ranks: Ranks, shapes: Shapes) -> Any:
        """Member ``i`` receives the reduction of all members' rows ``i``, a new tensor of the shape of a row.

        Raises:
            ReductionError: ``op`` is unknown, or ``avg`` of integers or booleans.
        """

    @abc.abstractmethod
    def all_to_all_rows(self, rows: Any, ranks: Ranks, sends: Shapes, expects: Shapes) -> Any:
        """Send row ``i`` to member ``i``; return what the members sent, as rows of a new tensor."""
