"""Index ranges of many ranks at once, as arrays: what steps cost is computed from them, without a loop over ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from hyper_parallel.core.dtensor.boxes import contains, coordinates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.core.dtensor.mesh import DeviceMesh

__all__ = [
    "SMALL",
    "Bounds",
    "Indices",
    "all_inside",
    "bounds_at",
    "count_pieces",
    "member_indices",
    "shared_volumes",
    "volumes",
]

SMALL = 32
"""Ranks up to which a loop is faster than arrays."""
Indices: TypeAlias = "tuple[Any, ...]"
"""Positions in a mesh: per axis an index, or an array of one index for each rank."""
Bounds: TypeAlias = "list[tuple[Any, Any]]"
"""Per dim of a tensor the first index of each rank, and the one after its last; arrays, or numbers if all are equal."""


def member_indices(mesh: DeviceMesh, axes: Sequence[int], origin: Sequence[int]) -> Indices:
    """Return the positions that differ from ``origin`` along ``axes`` only, in the order of ``mesh_slice``."""
    sizes = [mesh.shape[axis] for axis in axes]
    along = dict(zip(axes, np.unravel_index(np.arange(math.prod(sizes)), sizes), strict=True)) if sizes else {}
    return tuple(along.get(axis, index) for axis, index in enumerate(origin))


def bounds_at(layout: Layout, indices: Indices) -> Bounds:
    """Return what the ranks at ``indices`` hold: see :meth:`Layout.box_at`, which does the same for one rank."""
    sizes, bounds = layout.mesh.shape, []
    for size, axes in zip(layout.shape or (), layout.dim_axes, strict=True):
        start: Any = 0
        stop: Any = size
        for axis in axes:
            length, index = stop - start, indices[axis]
            chunk = -(-length // sizes[axis])
            stop = start + _lesser((index + 1) * chunk, length)
            start = start + _lesser(index * chunk, length)
        bounds.append((start, stop))
    return bounds


def volumes(bounds: Bounds) -> Any:
    """Return the number of elements of each rank's box."""
    volume: Any = 1
    for start, stop in bounds:
        volume = volume * (stop - start)
    return volume


def shared_volumes(first: Bounds, second: Bounds) -> Any:
    """Return the number of elements that are in both boxes of each rank."""
    volume: Any = 1
    for (a, b), (c, d) in zip(first, second, strict=True):
        volume = volume * -_lesser(-_lesser(b, d) - _lesser(-a, -c), 0)
    return volume


def _lesser(a: Any, b: Any) -> Any:
    """Return the lesser of numbers, or of each pair of elements of arrays; NumPy takes microseconds for a number."""
    return min(a, b) if type(a) is int and type(b) is int else np.minimum(a, b)


def all_inside(outer: Layout, inner: Layout) -> bool:
    """Return True if every rank's box of ``inner`` is in its box of ``outer``."""
    pairs = zip(outer.dim_axes, inner.dim_axes, strict=True)
    if all(after[: len(before)] == before for before, after in pairs):
        return True
    mesh = outer.mesh
    if mesh.size() <= SMALL:
        return all(contains(outer.box_at(position), inner.box_at(position)) for position in coordinates(mesh))
    for ends in ({0, size - 1} for size in mesh.shape), (range(size) for size in mesh.shape):  # corners, then all
        indices = tuple(np.ix_(*map(sorted, ends)))
        boxes = bounds_at(inner, indices)
        if not np.all(shared_volumes(bounds_at(outer, indices), boxes) == volumes(boxes)):
            return False
    return True


def count_pieces(boxes: Bounds, pieces: Bounds, count: int) -> Any:
    """Return the number of pieces of a grid that each rank's box meets.

    Args:
        boxes: of ranks.
        pieces: non-empty boxes of a grid, one or more times each, and empty ones.
        count: number of pieces, repeated and empty ones included.
    """
    filled = np.broadcast_to(volumes(pieces) > 0, (count,))
    met: Any = np.int64(1)
    for (start, stop), edges in zip(boxes, pieces, strict=True):
        begins, ends = (np.unique(np.broadcast_to(edge, (count,))[filled]) for edge in edges)
        before, after = np.searchsorted(ends, start, "right"), np.searchsorted(begins, stop, "left")
        met = met * np.maximum(after - before, 0)
    return np.where(volumes(boxes) > 0, met, 0)
