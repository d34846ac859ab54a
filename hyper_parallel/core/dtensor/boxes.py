"""Box arithmetic over a mesh: who holds which part, and who sends it to whom. Pure; no tensor in sight.

Every dim is split on its own, so the boxes of one layout form a grid. A transfer is cut along grids, which makes
every received part a cell of a product grid: a target is put together by concatenating along one dim after another.
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
    "count_intersections",
    "intersect",
    "members",
    "reduced_boxes",
    "slice_origin",
    "split_at_edges",
    "volume",
]

Coordinate = tuple[int, ...]
Interval = tuple[int, int]


class BoxTransfer(NamedTuple):
    """``box`` travels from member ``sender`` to member ``receiver`` of a slice of the mesh."""

    box: Box
    sender: int
    receiver: int


class ReducedBox(NamedTuple):
    """``box`` is reduced on member ``owner`` and wanted by the members ``wanted``; ``group`` is who holds summands."""

    box: Box
    owner: int
    group: tuple[int, ...]
    wanted: tuple[int, ...]


def volume(box: Box) -> int:
    """Number of elements."""
    return math.prod(stop - start for start, stop in box)


def intersect(one: Box, other: Box) -> Box:
    """Common part; an interval without one is empty, ``(start, start)``."""
    return tuple((max(a, c), max(a, c, min(b, d))) for (a, b), (c, d) in zip(one, other, strict=True))


def contains(outer: Box, inner: Box) -> bool:
    """True when every element of ``inner`` is in ``outer``; an empty box is in every box."""
    return not volume(inner) or all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def coordinates(mesh: DeviceMesh) -> Iterator[Coordinate]:
    """Every position of the mesh, row-major."""
    return itertools.product(*map(range, mesh.shape))


def members(mesh: DeviceMesh, axes: Sequence[int], at: Coordinate) -> list[Coordinate]:
    """Positions that differ from ``at`` along ``axes`` only, in the order of ``mesh.ranks_along(axes)``."""
    found = []
    for steps in itertools.product(*(range(mesh.shape[axis]) for axis in axes)):
        position = list(at)
        for axis, step in zip(axes, steps, strict=True):
            position[axis] = step
        found.append(tuple(position))
    return found


def box_edges(boxes: Iterable[Box], ndim: int) -> list[list[int]]:
    """Per dim the sorted edges of ``boxes``."""
    edges: list[set[int]] = [set() for _ in range(ndim)]
    for box in boxes:
        for dim, (start, stop) in enumerate(box):
            edges[dim].update((start, stop))
    return [sorted(one) for one in edges]


def split_at_edges(box: Box, edges: Sequence[Sequence[int]]) -> list[list[Interval]]:
    """Per dim the non-empty intervals into which ``edges`` cut ``box``."""
    return [
        [(a, b) for a, b in itertools.pairwise([start, *(e for e in one if start < e < stop), stop]) if a < b]
        for (start, stop), one in zip(box, edges, strict=True)
    ]


def slice_origin(at: Coordinate, slice_axes: Sequence[int]) -> Coordinate:
    """First position of the slice of the mesh along ``slice_axes`` that ``at`` lies in."""
    return tuple(0 if axis in slice_axes else step for axis, step in enumerate(at))


def box_transfers(
    source: Layout, target: Layout, slice_axes: tuple[int, ...], first: Coordinate
) -> tuple[BoxTransfer, ...]:
    """What every member of the slice of the mesh that starts at ``first`` must receive, and from whom.

    A part that the receiver holds itself does not travel. Of several holders the one that shares most coordinates with
    the receiver sends; among equals they take turns with the receiver's position, which spreads the load.
    """
    at = members(source.mesh, slice_axes, first)
    held = [source.box_at(one) for one in at]
    holders: dict[Box, list[int]] = {}
    for index, box in enumerate(held):
        holders.setdefault(box, []).append(index)
    edges = box_edges(held, source.ndim)
    grid = box_grid(held, source.ndim)
    found = []
    for receiver, position in enumerate(at):
        for cell in itertools.product(*split_at_edges(target.box_at(position), edges)):
            if not contains(held[receiver], cell):
                owner = tuple(map(_around, grid, cell))
                found.append(BoxTransfer(cell, _nearest(holders[owner], receiver, at), receiver))
    return tuple(found)


def box_grid(boxes: Iterable[Box], ndim: int) -> list[list[Interval]]:
    """Per dim the intervals, in order, of boxes that form a grid; of those with elements."""
    filled = {box for box in boxes if volume(box)}
    return [sorted({box[dim] for box in filled}) for dim in range(ndim)]


def count_intersections(box: Box, grid: Sequence[Sequence[Interval]]) -> int:
    """How many boxes of a grid have a part in common with ``box``."""
    found = 1
    for (start, stop), intervals in zip(box, grid, strict=True):
        first = bisect.bisect_right(intervals, start, key=lambda one: one[1])
        last = bisect.bisect_left(intervals, stop, key=lambda one: one[0])
        found *= max(last - first, 0)
    return found if volume(box) else 0


def _around(intervals: Sequence[Interval], part: Interval) -> Interval:
    """The interval that ``part`` lies in."""
    return intervals[bisect.bisect_right(intervals, (part[0], math.inf)) - 1]


def _nearest(candidates: Sequence[int], receiver: int, at: Sequence[Coordinate]) -> int:
    def distance(index: int) -> tuple[int, int]:
        differing = sum(a != b for a, b in zip(at[index], at[receiver], strict=True))
        return differing, (index - receiver) % len(at)

    return min(candidates, key=distance)


def reduced_boxes(
    source: Layout, target: Layout, slice_axes: tuple[int, ...], reduced: tuple[int, ...], first: Coordinate
) -> tuple[ReducedBox, ...]:
    """Who reduces which part when the summands along ``reduced`` become ``target`` in the fewest transmissions.

    A part with ``k`` summands wanted by ``d`` ranks costs ``(k - 1) + (d - 1)`` transmissions if a rank that holds a
    summand and wants the sum is the one who adds; several such ranks share the part evenly.
    """
    mesh = source.mesh
    at = members(mesh, slice_axes, first)
    index_of = {position: index for index, position in enumerate(at)}
    # Groups are known by their first member: of thousands of ranks, each group is listed once.
    firsts = [slice_origin(one, reduced) for one in at]
    group_of = {one: tuple(index_of[member] for member in members(mesh, reduced, one)) for one in dict.fromkeys(firsts)}
    held = [source.box_at(one) for one in at]
    wanted_boxes = [target.box_at(one) for one in at]
    edges = box_edges([*held, *wanted_boxes], source.ndim)
    wanted: dict[Box, list[int]] = {}
    for index, box in enumerate(wanted_boxes):
        for cell in itertools.product(*split_at_edges(box, edges)):
            wanted.setdefault(cell, []).append(index)
    groups: dict[Box, list[tuple[int, ...]]] = {}
    for box, group in dict.fromkeys((box, group_of[one]) for box, one in zip(held, firsts, strict=True)):
        for cell in itertools.product(*split_at_edges(box, edges)):
            groups.setdefault(cell, []).append(group)
    cells = sorted(wanted.keys() & groups.keys())
    return tuple(piece for cell in cells for piece in _shared(cell, sorted(groups[cell]), tuple(wanted[cell])))


def _shared(cell: Box, groups: Sequence[tuple[int, ...]], wanted: tuple[int, ...]) -> Iterator[ReducedBox]:
    """Cut ``cell`` along its longest dim so that every rank fit to reduce it gets an even part."""
    fit = [(rank, group) for group in groups for rank in group if rank in wanted]
    fit = fit or [(rank, group) for group in groups for rank in group]
    dim = max(range(len(cell)), key=lambda d: cell[d][1] - cell[d][0], default=None)
    if dim is None:
        yield ReducedBox(cell, fit[0][0], fit[0][1], wanted)
        return
    start, stop = cell[dim]
    for part, (owner, group) in enumerate(fit):
        low, high = chunk_bounds(stop - start, len(fit), part)
        if low < high:
            box = (*cell[:dim], (start + low, start + high), *cell[dim + 1 :])
            yield ReducedBox(box, owner, group, wanted)
