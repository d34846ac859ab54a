"""Collectives on rows: one tensor whose row ``i`` comes from, or goes to, member ``i``.

Redistribution uses them where all members' shards are equal, or can be padded: a call then packs once, starts one
collective of the engine, and unpacks once, however many members there are. The lists of :class:`Transport` serve
everything else.
"""

from __future__ import annotations

import abc
from typing import Any

__all__ = ["RowCollectives"]

Ranks = tuple[int, ...]
Shapes = tuple[tuple[int, ...], ...]


class RowCollectives(abc.ABC):
    """The collectives of a transport on rows, the first dim of a contiguous tensor; all rows have one shape.

    ``shapes``, ``sends`` and ``expects`` name what the rows hold as the caller sees it, one shape per member. Checks
    compare them between members, as they compare the shapes of the collectives on lists: both forms of one collective
    match each other. They have as many elements as a row, or fewer where rows are padded.
    """

    @abc.abstractmethod
    def all_gather_rows(self, x: Any, ranks: Ranks, shapes: Shapes) -> Any:
        """Return every member's ``x``, contiguous and equally shaped, as rows of a new tensor."""

    @abc.abstractmethod
    def reduce_scatter_rows(self, rows: Any, op: str, ranks: Ranks, shapes: Shapes) -> Any:
        """Member ``i`` receives the reduction of everybody's row ``i``, a new tensor of the shape of a row.

        Raises:
            ReductionError: ``op`` is unknown, or ``avg`` of integers or booleans.
        """

    @abc.abstractmethod
    def all_to_all_rows(self, rows: Any, ranks: Ranks, sends: Shapes, expects: Shapes) -> Any:
        """Send row ``i`` to member ``i``; return what the members sent, as rows of a new tensor."""
