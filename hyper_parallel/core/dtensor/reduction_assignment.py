"""Computes which rank reduces which elements of partial values, for all ranks of a mesh slice at once; used for costs.

The assignment is that of :func:`~hyper_parallel.core.dtensor.boxes.reduced_boxes`, which lists boxes. This module
computes arrays of sizes only, because a search over thousands of ranks does not need the boxes.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hyper_parallel._caches import register
from hyper_parallel.core.dtensor.bounds import bounds_at, member_indices, member_ranges
from hyper_parallel.core.dtensor.boxes import intersect, volume

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyper_parallel.core.dtensor.bounds import Bounds, Indices
    from hyper_parallel.core.dtensor.boxes import Coordinate
    from hyper_parallel.core.dtensor.layout import Box, Layout

__all__ = ["SumParts", "loads_of_few", "senders_of", "senders_of_few", "sum_parts"]


class SumParts(NamedTuple):
    """Parts into which the elements of a slice are split. All arrays but ``box_of`` have one entry per part.

    Attributes:
        reducers: member that sums the part.
        sizes: number of elements of the part.
        needed: whether the reducer needs the sum itself.
        boxes: index of the target box that contains the part.
        box_of: per member, the index of its target box.
    """

    reducers: Any
    sizes: Any
    needed: Any
    boxes: Any
    box_of: Any


class _Grid:
    """The cells into which the edges of all boxes of a slice cut the tensor, numbered row-major."""

    def __init__(self, *bounds: Any) -> None:
        """Build the grid from starts and stops of boxes, arrays of shape (members, dims)."""
        columns = np.concatenate(bounds).T
        self.edges = [np.unique(column) for column in columns]
        self.shape = tuple(max(len(edges) - 1, 0) for edges in self.edges)

    def cells_in(self, starts: Any, stops: Any) -> tuple[Any, Any]:
        """Return pairs of a box and a cell inside it, as two arrays: the box's row, and the cell's number."""
        first, counts = np.zeros_like(starts), np.zeros_like(starts)
        for dim, edges in enumerate(self.edges):
            first[:, dim] = np.searchsorted(edges, starts[:, dim])
            counts[:, dim] = np.searchsorted(edges, stops[:, dim]) - first[:, dim]
        totals = counts.prod(axis=1)
        rows = np.repeat(np.arange(len(starts)), totals)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(totals) - totals, totals)
        cells, stride = np.zeros(len(rows), np.int64), 1
        for dim in reversed(range(len(self.edges))):
            count = counts[rows, dim]
            cells += (first[rows, dim] + within % count) * stride
            within //= count
            stride *= self.shape[dim]
        return rows, cells

    def sizes(self, cells: Any) -> Any:
        """Return the sizes of cells, of shape (cells, dims)."""
        lengths = [np.diff(edges) for edges in self.edges]
        return np.stack(
            [length[index] for length, index in zip(lengths, np.unravel_index(cells, self.shape), strict=True)], axis=1
        )


def sum_parts(
    source: Layout, target: Layout, slice_axes: tuple[int, ...], reduced: tuple[int, ...], origin: Coordinate
) -> SumParts:
    """Return the parts of one slice; arguments as in :func:`~hyper_parallel.core.dtensor.boxes.reduced_boxes`."""
    mesh = source.mesh
    indices = member_indices(mesh, slice_axes, origin)
    sizes = [mesh.shape[axis] for axis in slice_axes]
    count = math.prod(sizes)
    in_group = [np.zeros_like(indices[axis]) if axis in reduced else indices[axis] for axis in slice_axes]
    first_member = np.ravel_multi_index(in_group, sizes)
    if not source.ndim:  # one element, which the first member sums
        boxes = np.zeros(count, np.int64)
        return SumParts(boxes[:1], np.ones(1, np.int64), np.ones(1, bool), boxes[:1], boxes)
    held, wanted = (_edges(bounds_at(layout, indices), count) for layout in (source, target))
    grid = _Grid(*held, *wanted)
    target_starts, target_stops, box_of = _unique(*wanted)
    boxes, cells = grid.cells_in(target_starts, target_stops)
    order = np.argsort(cells)
    boxes, cells = boxes[order], cells[order]
    starts = np.maximum(held[0], wanted[0])
    reducers, reduced_cells = grid.cells_in(starts, np.maximum(starts, np.minimum(held[1], wanted[1])))
    others = np.setdiff1d(cells, reduced_cells)
    needed = np.ones(len(reducers), bool)
    if others.size:  # no holder of a partial value needs the sum
        holders, held_cells = grid.cells_in(*held)
        chosen = np.isin(held_cells, others)
        reducers, reduced_cells = (
            np.concatenate(pair) for pair in ((reducers, holders[chosen]), (reduced_cells, held_cells[chosen]))
        )
        needed = np.concatenate((needed, np.zeros(int(chosen.sum()), bool)))
    order = np.lexsort((reducers, first_member[reducers], reduced_cells))
    reducers, reduced_cells, needed = reducers[order], reduced_cells[order], needed[order]
    sizes_of_parts = _part_sizes(grid, reduced_cells)
    kept = sizes_of_parts > 0
    of_cells = boxes[np.searchsorted(cells, reduced_cells[kept])]
    return SumParts(reducers[kept], sizes_of_parts[kept], needed[kept], of_cells, box_of)


def loads_of_few(
    source: Layout, target: Layout, slice_axes: tuple[int, ...], reduced: tuple[int, ...]
) -> tuple[list[int], int]:
    """Return how many elements each member of the first slice receives, and the most messages of a member.

    Used for few members: it builds no arrays. Arguments and assignment are those of :func:`sum_parts`: a cell is the
    intersection of a source box and a target box, and is split among the members that have both boxes. If no member
    has both, it is split among all members that hold its values.
    """
    held, wanted = (_boxes(layout, slice_axes) for layout in (source, target))
    order = _in_groups(source.mesh.shape, slice_axes, reduced)
    others = math.prod(source.mesh.shape[axis] for axis in reduced) - 1
    both: dict[tuple[Box, Box], list[int]] = {}
    for member in order:
        both.setdefault((held[member], wanted[member]), []).append(member)
    size_of = {box: volume(box) for box in wanted}
    loads = [size_of[box] for box in wanted]
    uncovered = sum(size_of.values())
    senders: dict[Box, set[int]] = {box: set() for box in wanted}
    summing: set[int] = set()
    own: set[int] = set()

    def share(lengths: Sequence[int], box: Box, reducers: Sequence[int], needed: bool) -> None:
        longest, size = max(lengths, default=1), math.prod(lengths)
        chunk, layers = -(-longest // len(reducers)), size // longest
        for part, reducer in enumerate(reducers):
            length = min(chunk, longest - part * chunk)
            if length <= 0:
                break
            loads[reducer] += (others - needed) * length * layers
            senders[box].add(reducer)
            summing.add(reducer)
            if needed:
                own.add(reducer)

    for (before, after), reducers in both.items():
        lengths = [min(b, d) - max(a, c) for (a, b), (c, d) in zip(before, after, strict=True)]
        if min(lengths, default=1) > 0:
            uncovered -= math.prod(lengths)
            share(lengths, after, reducers, needed=True)
    for before, after in itertools.product(dict.fromkeys(held), dict.fromkeys(wanted)) if uncovered else ():
        lengths = [min(b, d) - max(a, c) for (a, b), (c, d) in zip(before, after, strict=True)]
        if min(lengths, default=1) > 0 and (before, after) not in both:
            share(lengths, after, [member for member in order if held[member] == before], needed=False)
    messages = (len(senders[box]) - (member in own) + others * (member in summing) for member, box in enumerate(wanted))
    return loads, max(messages)


def _boxes(layout: Layout, slice_axes: tuple[int, ...]) -> list[Box]:
    """Return the boxes of the members of the first slice."""
    if not layout.ndim:
        return [()] * math.prod(layout.mesh.shape[axis] for axis in slice_axes)
    return list(zip(*member_ranges(layout, slice_axes), strict=True))


@lru_cache(1024)
def _in_groups(counts: tuple[int, ...], slice_axes: tuple[int, ...], reduced: tuple[int, ...]) -> tuple[int, ...]:
    """Return the members of a slice, by groups of those that differ along ``reduced`` only."""
    members = list(itertools.product(*(range(counts[axis]) for axis in slice_axes)))
    first = [tuple(0 if axis in reduced else i for axis, i in zip(slice_axes, at, strict=True)) for at in members]
    return tuple(sorted(range(len(members)), key=lambda member: (first[member], member)))


register("groups of few ranks", _in_groups)


def senders_of(source: Layout, target: Layout, slice_axes: tuple[int, ...], coordinate: Coordinate) -> int:
    """Return a lower bound, at most one too low, of the number of ranks that send sums to the rank at ``coordinate``.

    Each source box intersects the target box in one cell. The ranks that hold the cell's values and need the same
    target box sum it; if there is no such rank, all ranks that hold its values do.
    """
    mesh, needed = source.mesh, target.box_at(coordinate)
    sharding, splitting = ({axis for axes in layout.dim_axes for axis in axes} for layout in (source, target))
    counts = _numbers_of_reducers(source, target, slice_axes)
    slice_origin = tuple(0 if axis in slice_axes else index for axis, index in enumerate(coordinate))
    holders = _cells(source, needed, member_indices(mesh, [a for a in slice_axes if a in sharding], slice_origin))
    alike = _cells(source, needed, member_indices(mesh, [a for a in slice_axes if a not in splitting], coordinate))
    senders = sum(_number_of_parts(cell, counts[cell in alike]) for cell in holders)
    return senders - bool(volume(intersect(needed, source.box_at(coordinate))))


def senders_of_few(source: Layout, target: Layout, slice_axes: tuple[int, ...], member: int) -> int:
    """Like :func:`senders_of`, for the member with number ``member`` of the first slice, without arrays."""
    held, wanted = (_boxes(layout, slice_axes) for layout in (source, target))
    needed, counts = wanted[member], _numbers_of_reducers(source, target, slice_axes)
    alike = {before for before, after in zip(held, wanted, strict=True) if after == needed}
    senders = own = 0
    for before in set(held):
        lengths = [min(b, d) - max(a, c) for (a, b), (c, d) in zip(before, needed, strict=True)]
        longest = max(lengths, default=1)
        if min(lengths, default=1) > 0:
            senders += -(-longest // -(-longest // counts[before in alike]))
            own += before == held[member]
    return senders - own


def _numbers_of_reducers(source: Layout, target: Layout, slice_axes: tuple[int, ...]) -> tuple[int, int]:
    """Return how many ranks hold the same values, and how many of them also need the same sums."""
    counts = source.mesh.shape
    sharding, splitting = ({axis for axes in layout.dim_axes for axis in axes} for layout in (source, target))
    copies = math.prod([counts[axis] for axis in slice_axes if axis not in sharding])
    return copies, math.prod([counts[axis] for axis in slice_axes if axis not in sharding and axis not in splitting])


def _cells(source: Layout, box: Box, indices: Indices) -> set[Box]:
    """Return the parts of ``box`` that the ranks at ``indices`` hold."""
    bounds = bounds_at(source, indices)
    count = max(np.size(start) for start, _ in bounds) if bounds else 1
    starts, stops = _edges(bounds, count) if bounds else (np.zeros((1, 0), np.int64),) * 2
    low, high = np.array(box, np.int64).reshape(-1, 2).T
    starts, stops = np.maximum(starts, low), np.minimum(stops, high)
    filled = (stops > starts).all(axis=1)
    pairs = zip(starts[filled].tolist(), stops[filled].tolist(), strict=True)
    return {tuple(zip(first, last, strict=True)) for first, last in pairs}


def _number_of_parts(cell: Box, ranks: int) -> int:
    """Return the number of parts into which a cell is split among ``ranks`` ranks."""
    longest = max((stop - start for start, stop in cell), default=1)
    return -(-longest // -(-longest // ranks))


def _edges(bounds: Bounds, count: int) -> tuple[Any, Any]:
    """Return starts and stops of the members' boxes, of shape (members, dims)."""
    starts, stops = zip(*bounds, strict=True)
    return tuple(np.stack([np.broadcast_to(edge, (count,)) for edge in edges], axis=1) for edges in (starts, stops))


def _unique(starts: Any, stops: Any) -> tuple[Any, Any, Any]:
    """Return the distinct boxes, and for each member the number of its box."""
    both, number = np.unique(np.concatenate((starts, stops), axis=1), axis=0, return_inverse=True)
    ndim = starts.shape[1]
    return both[:, :ndim], both[:, ndim:], number.reshape(-1)


def _part_sizes(grid: _Grid, cells: Any) -> Any:
    """Return the number of elements of each part: a cell listed n times is split into n parts along its longest dim."""
    different, first, counts = np.unique(cells, return_index=True, return_counts=True)
    sizes = grid.sizes(different)
    longest = sizes.max(axis=1)
    layers = sizes.prod(axis=1) // longest
    chunk = -(-longest // counts)
    index = np.arange(len(cells)) - np.repeat(first, counts)
    chunk, longest, layers = (np.repeat(values, counts) for values in (chunk, longest, layers))
    return (np.minimum((index + 1) * chunk, longest) - np.minimum(index * chunk, longest)) * layers
