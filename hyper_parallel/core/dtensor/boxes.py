"""Index boxes: the parts of a tensor that ranks hold and send. Uses no tensors.

A box is a half-open index range per dim. Every dim is split independently, so the boxes of one layout form a grid.
Parts are cut along these grids, so the parts that a rank receives form a product grid, and the rank assembles its box
by concatenating along one dim after another.
"""

from __future__ import annotations

import bisect
import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

from hyper_parallel.core.dtensor.layout import chunk_bounds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hyper_parallel.core.dtensor.layout import Box, Layout
    from hyper_parallel.core.dtensor.mesh import DeviceMesh

__all__ = [
    "BoxTransfer",
    "Coordinate",
    "ReducedBox",
    "box_edges",
    "box_grid",
    "box_transfers",
    "contains",
    "coordinates",
    "intersect",
    "mesh_slice",
    "reduced_boxes",
    "slice_origin",
    "split_at_edges",
    "volume",
    "whole_box",
]

Coordinate = tuple[int, ...]
"""A position in a mesh, one index per axis."""
Interval = tuple[int, int]
"""A half-open index range along one dim."""


class BoxTransfer(NamedTuple):
    """``box`` is sent from member ``sender`` to member ``receiver`` of a slice of the mesh."""

    box: Box
    sender: int
    receiver: int


class ReducedBox(NamedTuple):
    """``box`` is summed on member ``reducer``, from the partial values of ``holders``, and sent to ``receivers``."""

    box: Box
    reducer: int
    holders: tuple[int, ...]
    receivers: tuple[int, ...]


def volume(box: Box) -> int:
    """Return the number of elements of a box."""
    return math.prod(stop - start for start, stop in box)


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box of all elements of a tensor of ``shape``."""
    return tuple((0, size) for size in shape)


def intersect(first: Box, second: Box) -> Box:
    """Return the intersection of two boxes; along a disjoint dim it is empty, ``(start, start)``."""
    return tuple((max(a, c), max(a, c, min(b, d))) for (a, b), (c, d) in zip(first, second, strict=True))


def contains(outer: Box, inner: Box) -> bool:
    """Return True if every element of ``inner`` is in ``outer``; an empty box is in every box."""
    return not volume(inner) or all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def coordinates(mesh: DeviceMesh) -> Iterator[Coordinate]:
    """Yield every position of the mesh, row-major."""
    return itertools.product(*map(range, mesh.shape))


def mesh_slice(mesh: DeviceMesh, axes: Sequence[int], coordinate: Coordinate) -> list[Coordinate]:
    """Return the positions that differ from ``coordinate`` along ``axes`` only, as ``mesh.ranks_along`` orders them."""
    positions = []
    for indices in itertools.product(*(range(mesh.shape[axis]) for axis in axes)):
        position = list(coordinate)
        for axis, index in zip(axes, indices, strict=True):
            position[axis] = index
        positions.append(tuple(position))
    return positions


def box_edges(boxes: Iterable[Box], ndim: int) -> list[list[int]]:
    """Return the sorted edges of ``boxes`` per dim."""
    edges: list[set[int]] = [set() for _ in range(ndim)]
    for box in boxes:
        for dim, (start, stop) in enumerate(box):
            edges[dim].update((start, stop))
    return [sorted(dim_edges) for dim_edges in edges]


def split_at_edges(box: Box, edges: Sequence[Sequence[int]]) -> list[list[Interval]]:
    """Return per dim the non-empty intervals into which ``edges`` split ``box``."""
    cells = []
    for (start, stop), dim_edges in zip(box, edges, strict=True):
        inside = dim_edges[bisect.bisect_right(dim_edges, start) : bisect.bisect_left(dim_edges, stop)]
        cells.append([(a, b) for a, b in itertools.pairwise([start, *inside, stop]) if a < b])
    return cells


def slice_origin(coordinate: Coordinate, slice_axes: Sequence[int]) -> Coordinate:
    """Return the first position of the slice of the mesh along ``slice_axes`` that contains ``coordinate``."""
    return tuple(0 if axis in slice_axes else index for axis, index in enumerate(coordinate))


def box_transfers(
    source: Layout, target: Layout, slice_axes: tuple[int, ...], origin: Coordinate
) -> tuple[BoxTransfer, ...]:
    """Return the boxes that the members of one slice of the mesh must receive, each with its sender.

    Parts that the receiver itself holds are not sent. If several members hold a part, the one that shares the most
    coordinates with the receiver sends it. Ties are broken by the receiver's position, which spreads the load.

    Args:
        source: layout before, without partial values.
        target: layout after.
        slice_axes: mesh axes of the slice.
        origin: first position of the slice.
    """
    positions = mesh_slice(source.mesh, slice_axes, origin)
    source_boxes = [source.box_at(position) for position in positions]
    holders: dict[Box, list[int]] = {}
    for index, box in enumerate(source_boxes):
        holders.setdefault(box, []).append(index)
    edges = box_edges(source_boxes, source.ndim)
    grid = box_grid(source_boxes, source.ndim)
    transfers = []
    for receiver, position in enumerate(positions):
        for cell in itertools.product(*split_at_edges(target.box_at(position), edges)):
            if not contains(source_boxes[receiver], cell):
                enclosing = tuple(map(_enclosing_interval, grid, cell))
                transfers.append(BoxTransfer(cell, _nearest(holders[enclosing], receiver, positions), receiver))
    return tuple(transfers)


def box_grid(boxes: Iterable[Box], ndim: int) -> list[list[Interval]]:
    """Return per dim the sorted intervals of non-empty boxes that form a grid."""
    filled = {box for box in boxes if volume(box)}
    return [sorted({box[dim] for box in filled}) for dim in range(ndim)]


def _enclosing_interval(intervals: Sequence[Interval], part: Interval) -> Interval:
    """Return the interval that contains ``part``."""
    return intervals[bisect.bisect_right(intervals, (part[0], math.inf)) - 1]


def _nearest(candidates: Sequence[int], receiver: int, positions: Sequence[Coordinate]) -> int:
    def distance(index: int) -> tuple[int, int]:
        differing = sum(a != b for a, b in zip(positions[index], positions[receiver], strict=True))
        return differing, (index - receiver) % len(positions)

    return min(candidates, key=distance)


def reduced_boxes(
    source: Layout, target: Layout, slice_axes: tuple[int, ...], reduced: tuple[int, ...], origin: Coordinate
) -> tuple[ReducedBox, ...]:
    """Assign every part of one slice of the mesh to the member that sums its partial values.

    Consider a part with ``k`` partial values, needed by ``d`` ranks. It costs ``(k - 1) + (d - 1)`` transmissions if
    the summing rank holds a partial value and needs the sum. Several such ranks share the part evenly.

    Args:
        source: layout before, with partial values along ``reduced``.
        target: layout after.
        slice_axes: mesh axes of the slice.
        reduced: mesh axes whose partial values are summed.
        origin: first position of the slice.
    """
    mesh = source.mesh
    positions = mesh_slice(mesh, slice_axes, origin)
    index_of = {position: index for index, position in enumerate(positions)}
    # Groups of holders are keyed by their first member, so that each is listed once among thousands of ranks.
    origins = [slice_origin(position, reduced) for position in positions]
    holders_of = {
        first: tuple(index_of[member] for member in mesh_slice(mesh, reduced, first))
        for first in dict.fromkeys(origins)
    }
    source_boxes = [source.box_at(position) for position in positions]
    target_boxes = [target.box_at(position) for position in positions]
    edges = box_edges([*source_boxes, *target_boxes], source.ndim)
    receivers: dict[Box, list[int]] = {}
    for index, box in enumerate(target_boxes):
        for cell in itertools.product(*split_at_edges(box, edges)):
            receivers.setdefault(cell, []).append(index)
    holder_groups: dict[Box, list[tuple[int, ...]]] = {}
    for box, holders in dict.fromkeys(
        (box, holders_of[first]) for box, first in zip(source_boxes, origins, strict=True)
    ):
        for cell in itertools.product(*split_at_edges(box, edges)):
            holder_groups.setdefault(cell, []).append(holders)
    return tuple(
        reduced_box
        for cell in sorted(receivers.keys() & holder_groups.keys())
        for reduced_box in _split_among_reducers(cell, sorted(holder_groups[cell]), tuple(receivers[cell]))
    )


def _split_among_reducers(
    cell: Box, holder_groups: Sequence[tuple[int, ...]], receivers: tuple[int, ...]
) -> Iterator[ReducedBox]:
    """Split ``cell`` along its longest dim into even parts, one for each rank that can sum it at no extra cost."""
    reducers = [(rank, holders) for holders in holder_groups for rank in holders if rank in receivers]
    reducers = reducers or [(rank, holders) for holders in holder_groups for rank in holders]
    dim = max(range(len(cell)), key=lambda d: cell[d][1] - cell[d][0], default=None)
    if dim is None:
        yield ReducedBox(cell, reducers[0][0], reducers[0][1], receivers)
        return
    start, stop = cell[dim]
    for part, (reducer, holders) in enumerate(reducers):
        low, high = chunk_bounds(stop - start, len(reducers), part)
        if low < high:
            box = (*cell[:dim], (start + low, start + high), *cell[dim + 1 :])
            yield ReducedBox(box, reducer, holders, receivers)
