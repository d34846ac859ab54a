"""Which columns of the coverage matrix placements of an operator can have, and which ones layouts fill."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from hyper_parallel.core.dtensor.boxes import coordinates
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placements import PARTIAL_OPS, Partial, Shard
from hyper_parallel.core.shard.rule import Row
from hyper_parallel.verify.ops.pieces import allows

__all__ = ["features", "offered", "offered_by_operands"]


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


def features(mesh: tuple[int, ...], layouts: Sequence[Layout]) -> Iterator[str]:
    """The columns that a check with operands and results of these layouts belongs to."""
    if len(mesh) > 1:
        yield "several axes"
    yield from dict.fromkeys(feature for layout in layouts for feature in _layout_features(layout))


@lru_cache(maxsize=4096)
def _layout_features(layout: Layout) -> tuple[str, ...]:
    found = ["partial"] if layout.partials else []
    if any(size % layout.shard_count(dim) for dim, size in enumerate(layout.shape or ())):
        found.append("uneven")
    if any(layout.dim_axes) and 0 in layout.local_shape_at(list(coordinates(layout.mesh))[-1]):
        found.append("empty")
    return tuple(found)
