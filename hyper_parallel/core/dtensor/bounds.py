"""Index ranges of all ranks of a slice, from which costs of steps are computed.

For many ranks they are arrays, without a loop over ranks; for few ranks they are tuples, since a loop is faster then.
"""

from __future__ import annotations

import bisect
import itertools
import math
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from hyper_parallel._caches import register
from hyper_parallel.core.dtensor.boxes import contains, coordinates

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.core.dtensor.placements import DimAxes

__all__ = [
    "SMALL",
    "Bounds",
    "Indices",
    "all_inside",
    "bounds_at",
    "count_pieces",
    "first_share",
    "first_sizes",
    "first_sizes_of",
    "least_share",
    "member_indices",
    "member_ranges",
    "most_pieces",
    "shared_parts",
    "shared_sizes",
    "shared_volumes",
    "volumes",
]

SMALL = 32
"""Number of ranks up to which a loop is faster than arrays."""
# Maximum number of entries of a cache of ranges; its entries contain only numbers.
_MAX_CACHED = 512
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
    """Return the boxes of the ranks at ``indices``: see :meth:`Layout.box_at`, which does the same for one rank."""
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


def member_ranges(layout: Layout, slice_axes: tuple[int, ...]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return per dim the range of each member of the first slice along ``slice_axes``; no arrays, for few members."""
    return _member_ranges(layout.mesh.shape, layout.shape or (), layout.dim_axes, slice_axes)


@lru_cache(_MAX_CACHED)
def _member_ranges(
    counts: tuple[int, ...], shape: tuple[int, ...], dim_axes: DimAxes, slice_axes: tuple[int, ...]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    result = []
    for size, axes in zip(shape, dim_axes, strict=True):
        ranges = [(0, size)]
        for axis in axes:
            split: list[tuple[int, int]] = []
            for start, stop in ranges:
                chunk = -(-(stop - start) // counts[axis])
                edges = [min(start + index * chunk, stop) for index in range(counts[axis] + 1)]
                split.extend(pairwise(edges))
            ranges = split if axis in slice_axes else split[:: counts[axis]]
        result.append(tuple([ranges[index] for index in _shard_numbers(counts, axes, slice_axes)]))
    return tuple(result)


@lru_cache(_MAX_CACHED)
def _shard_numbers(counts: tuple[int, ...], axes: tuple[int, ...], slice_axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return for each member of a slice the index of its shard along ``axes``."""
    members = itertools.product(*(range(counts[axis]) for axis in slice_axes))
    splitting = [(slice_axes.index(axis), counts[axis]) for axis in axes if axis in slice_axes]
    numbers = []
    for member in members:
        number = 0
        for position, count in splitting:
            number = number * count + member[position]
        numbers.append(number)
    return tuple(numbers)


register("ranges of few ranks", _member_ranges)
register("shards of few ranks", _shard_numbers)


def first_sizes(layout: Layout) -> list[int]:
    """Return the sizes of the first rank's shard: no rank has a longer one along any dim."""
    return first_sizes_of(layout.shape or (), layout.dim_axes, layout.mesh.shape)


def first_sizes_of(shape: Sequence[int], dim_axes: DimAxes, counts: Sequence[int]) -> list[int]:
    """Return the sizes of the first rank's shard of a tensor of ``shape``, split along axes of a mesh of ``counts``."""
    pairs = zip(shape, dim_axes, strict=True)
    return [first_share(size, [counts[axis] for axis in axes]) if axes else size for size, axes in pairs]


def first_share(length: int, counts: Iterable[int]) -> int:
    """Return the length of the first shard of a dim that is split by ``counts``, the outermost first."""
    for count in counts:
        length = -(-length // count)
    return length


def least_share(length: int, counts: Sequence[int]) -> int:
    """Return the length of the shortest of the shards of a dim that is split by ``counts``, the outermost first."""
    lengths = {length}
    for count in counts:
        shares: set[int] = set()
        for whole in lengths:
            chunk = -(-whole // count)
            shares.update((chunk, max(whole - (count - 1) * chunk, 0)))
            if chunk and whole % chunk:
                shares.add(whole % chunk)
        lengths = shares
    return min(lengths)


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


def shared_sizes(first: Sequence[Sequence[tuple[int, int]]], second: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
    """Return the number of elements that are in both boxes of each member, from :func:`member_ranges`."""
    return list(map(math.prod, zip(*map(shared_parts, first, second), strict=True)))


def shared_parts(first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]) -> list[int]:
    """Return the length that two ranges of each member share."""
    if first == second:
        return [stop - start for start, stop in first]
    return [max(min(b, d) - max(a, c), 0) for (a, b), (c, d) in zip(first, second, strict=True)]


def most_pieces(
    boxes: Sequence[Sequence[tuple[int, int]]], pieces: Sequence[Sequence[tuple[int, int]]], own: Sequence[int]
) -> int:
    """Return the largest number of other members' pieces that one member's box intersects.

    Args:
        boxes: per dim the range of each member's box.
        pieces: per dim the range of each member's piece; non-empty pieces form a grid.
        own: elements of each member's piece in its box.
    """
    met = []
    for ranges, others in zip(boxes, pieces, strict=True):
        filled = sorted({piece for piece in others if piece[0] < piece[1]})
        starts, stops = [start for start, _ in filled], [stop for _, stop in filled]
        count_of = {
            (a, b): bisect.bisect_left(starts, b) - bisect.bisect_right(stops, a) if a < b else 0
            for a, b in set(ranges)
        }
        met.append([count_of[box] for box in ranges])
    counts = map(math.prod, zip(*met, strict=True))
    return max(count - bool(elements) for count, elements in zip(counts, own, strict=True))


def _lesser(a: Any, b: Any) -> Any:
    """Return the minimum of two numbers, or the elementwise minimum of arrays; for numbers, NumPy would be slow."""
    return min(a, b) if type(a) is int and type(b) is int else np.minimum(a, b)


def all_inside(outer: Layout, inner: Layout) -> bool:
    """Return True if every rank's box of ``inner`` is in its box of ``outer``."""
    pairs = zip(outer.dim_axes, inner.dim_axes, strict=True)
    if all(after[: len(before)] == before for before, after in pairs):
        return True
    mesh = outer.mesh
    if mesh.size() <= SMALL:
        return all(contains(outer.box_at(position), inner.box_at(position)) for position in coordinates(mesh))
    for ends in (
        ({0, size - 1} for size in mesh.shape),
        (range(size) for size in mesh.shape),
    ):  # the corners first, then all ranks
        indices = tuple(np.ix_(*map(sorted, ends)))
        boxes = bounds_at(inner, indices)
        if not np.all(shared_volumes(bounds_at(outer, indices), boxes) == volumes(boxes)):
            return False
    return True


def count_pieces(boxes: Bounds, pieces: Bounds, count: int) -> Any:
    """Return the number of pieces of a grid that each rank's box intersects.

    Args:
        boxes: boxes of ranks.
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
