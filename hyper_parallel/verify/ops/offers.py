"""Which columns of the coverage matrix placements of an operator can have, whether or not they were checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hyper_parallel.core.dtensor.placements import PARTIAL_OPS, Partial, Shard
from hyper_parallel.core.shard.rule import Row
from hyper_parallel.verify.ops.pieces import allows

__all__ = ["offered", "offered_by_operands"]


def offered(rows: Iterable[Row]) -> set[str]:
    """What a rule's rows can show: pending reductions, and chunks of unequal size."""
    found: set[str] = set()
    for row in rows:
        if any(isinstance(place, Partial) for place in (*row.inputs, *row.outputs)):
            found.add("partial")
        if _cuts_unevenly(row):
            found.add("uneven")
    return found


def _cuts_unevenly(row: Row) -> bool:
    """A cut dim without the condition that its size divides."""
    bound = {*row.even, *((index, dim) for index, dim, _ in row.sizes)}
    return any(isinstance(place, Shard) and (index, place.dim) not in bound for index, place in enumerate(row.inputs))


def offered_by_operands(arrays: Sequence[Any]) -> set[str]:
    """The same where no rows say it: placements of the operands."""
    found: set[str] = set()
    if any(array.ndim for array in arrays):
        found.add("uneven")
    if any(allows(array, op) for array in arrays for op in PARTIAL_OPS):
        found.add("partial")
    return found
