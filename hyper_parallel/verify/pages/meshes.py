"""Pictures of a mesh, and of the local shards of a tensor on its ranks, uneven and empty ones included."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from hyper_parallel.core.dtensor.layout import Box, Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh, ravel
from hyper_parallel.verify.pages import svg

__all__ = ["layout_svg", "mesh_svg"]

SHOWN = 8
"""Maximum number of drawn positions of an axis; longer axes are truncated."""

SLICES = 4
"""Maximum number of grids: one per position of all axes except the last two."""

_FOLDED = 3
"""Minimum number of equal consecutive rows that are drawn as one."""

_GAP = 8.0
_EDGE = 1.0
_ROOM = (92.0, 60.0)  # largest width and height of a tensor's outline
_LEAST = 9.0  # shortest side of an outline

Coordinate = tuple[int, ...]


def mesh_svg(mesh: DeviceMesh) -> Markup:
    """Return a picture of a mesh: named axes, positions numbered from 0, global ranks in the boxes.

    Args:
        mesh: mesh with any number of axes; the last two are rows and columns, and each position of the others has its
            own grid.
    """

    def box(coordinate: Coordinate) -> list[Markup]:
        rank = mesh.ranks[ravel(coordinate, mesh.shape)]
        return [svg.text(26, 22, rank, anchor="middle", bold=True)]

    title = f"mesh {_axes(mesh)}"
    ranks = ", ".join(map(str, mesh.ranks[:64])) + (", …" if len(mesh.ranks) > 64 else "")
    return _Grid(mesh, 52, 34, box).draw(title, f"ranks in row-major order: {ranks}")


def layout_svg(layout: Layout) -> Markup:
    """Return a picture of the local shard of every rank of the mesh.

    In every rank's box the outline is the global tensor, and the filled area is the local shard. An empty shard has no
    filled area. A partial value is striped and marked with a sum sign.

    Args:
        layout: a layout with placements and a global shape (``layout.with_shape(...)``).

    Raises:
        LayoutError: the layout has no shape, or only a mesh.
    """
    layout.box_at((0,) * layout.mesh.ndim)  # raises if shape or placements are missing
    outline = _Outline(layout)
    width = max(_ROOM[0], 84.0) + 20
    height = outline.height + 58

    def box(coordinate: Coordinate) -> list[Markup]:
        rank = layout.mesh.ranks[ravel(coordinate, layout.mesh.shape)]
        return outline.draw(coordinate, layout.box_at(coordinate), rank, width)

    placements = ", ".join(f"{name}: {layout.placement_on(axis)}" for axis, name in enumerate(layout.mesh.names))
    shards = [_in_words(layout, coordinate) for coordinate in itertools.islice(_coordinates(layout.mesh.shape), 64)]
    hatch = [_hatch(outline.fill)] if layout.partials else []
    grid = _Grid(layout.mesh, width, height, box, layout.box_at)
    return grid.draw(f"{layout.notation()} on {_axes(layout.mesh)} ({placements})", "; ".join(shards), hatch)


def _hatch(name: str) -> Markup:
    """Return a striped fill with a name that is unique in a page, because fills of a hidden picture cannot be used."""
    return Markup(
        '<defs><pattern id="{}" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="3" height="6" style="fill:{}"/></pattern></defs>'
    ).format(name, svg.colour("one"))


@dataclass(frozen=True)
class _Grid:
    """Grid of boxes, one per position of a mesh, with the names of its axes.

    Attributes:
        mesh: mesh to draw.
        width: width of a box.
        height: height of a box.
        content: returns the content of a box, drawn from its upper left corner.
        key: returns a key that is equal for boxes that differ only in their rank; if three or more rows, or grids, have
            equal keys, only one is drawn.
    """

    mesh: DeviceMesh
    width: float
    height: float
    content: Callable[[Coordinate], Sequence[Markup]]
    key: Callable[[Coordinate], object] | None = None

    def draw(self, title: str, description: str, extra: Sequence[Markup] = ()) -> Markup:
        """Return the picture."""
        rows, columns = self._rows(), self.mesh.shape[-1] if self.mesh.ndim else 1
        shown = min(columns, SHOWN)
        longest = max((len(self._row_label(row)) for row in range(min(rows, SHOWN))), default=0)
        left = svg.FONT * svg.CHARACTER * longest + (14 if longest else 0)
        wide = left + shown * (self.width + _GAP) + (20 if columns > SHOWN else 0)
        heads = list(itertools.islice(_coordinates(self.mesh.shape[:-2]), SLICES + 1))
        parts, top = list(extra), 0.0
        total = math.prod(self.mesh.shape[:-2])
        alike = total > 2 and len({self._keys(head, range(min(rows, SHOWN))) for head in heads}) == 1
        for head in heads[: 1 if alike and self.key else SLICES]:
            drawn, height = self._slice(head, left)
            parts.append(svg.group(0, top, drawn))
            top += height
        if len(heads) > SLICES or (alike and self.key):
            names = " x ".join(self.mesh.names[:-2])
            text = f"{total} {names} grids like this one" if alike and self.key else f"… {total} grids in all"
            parts.append(svg.text(0, top + 14, text, fill="quiet"))
            wide, top = max(wide, len(text) * svg.FONT * svg.CHARACTER), top + 24
        return svg.picture(max(wide, 60.0), top + _EDGE, title, description, parts)

    def _rows(self) -> int:
        return self.mesh.shape[-2] if self.mesh.ndim > 1 else 1

    def _row_label(self, row: int) -> str:
        return f"{self.mesh.names[-2]} {row}" if self.mesh.ndim > 1 else ""

    def _slice(self, head: Coordinate, left: float) -> tuple[list[Markup], float]:
        """Return the grid of the last two axes at fixed positions of the others, and its height."""
        parts, top = [], 0.0
        if head:
            fixed = ", ".join(f"{name} {index}" for name, index in zip(self.mesh.names, head, strict=False))
            parts.append(svg.text(0, 14, fixed, bold=True))
            top = 24.0
        columns, rows = self.mesh.shape[-1], self._rows()
        for column in range(min(columns, SHOWN)):
            x = left + column * (self.width + _GAP) + self.width / 2
            parts.append(svg.text(x, top + 14, f"{self.mesh.names[-1]} {column}", anchor="middle", fill="quiet"))
        top += 22
        drawn = self._drawn_rows(head, rows)
        for row, like in drawn[:SHOWN]:
            parts.append(svg.text(0, top + self.height / 2 + 4, self._row_label(row), fill="quiet"))
            parts += [
                self._box(left + column * (self.width + _GAP), top, self._coordinate(head, row, column))
                for column in range(min(columns, SHOWN))
            ]
            if columns > SHOWN:
                x = left + SHOWN * (self.width + _GAP)
                parts.append(svg.text(x, top + self.height / 2 + 4, "…", fill="quiet"))
            top += self.height + _GAP
            if like > 1:
                parts.append(svg.text(left, top + 8, f"{like} {self.mesh.names[-2]} rows like this one", fill="quiet"))
                top += 20
        if len(drawn) > SHOWN or columns > SHOWN:
            parts.append(svg.text(left, top + 12, f"… {rows * columns} ranks in all", fill="quiet"))
            top += 22
        return parts, top + (_GAP if head else 0)

    def _coordinate(self, head: Coordinate, row: int, column: int) -> Coordinate:
        return (*head, *((row,) if self.mesh.ndim > 1 else ()), column)

    def _keys(self, head: Coordinate, rows: Sequence[int]) -> tuple[object, ...]:
        """Return the keys of the drawn boxes of some rows."""
        if self.key is None:
            return (head, *rows)
        columns = range(min(self.mesh.shape[-1], SHOWN))
        return tuple(self.key(self._coordinate(head, row, column)) for row in rows for column in columns)

    def _drawn_rows(self, head: Coordinate, rows: int) -> list[tuple[int, int]]:
        """Return the rows to draw, each with the number of equal rows that it stands for."""
        drawn: list[tuple[int, int]] = []
        for _, group in itertools.groupby(range(rows), lambda row: self._keys(head, (row,))):
            alike = list(group)
            drawn += [(row, 1) for row in alike] if len(alike) < _FOLDED else [(alike[0], len(alike))]
            if len(drawn) > SHOWN:
                break
        return drawn

    def _box(self, x: float, y: float, coordinate: Coordinate) -> Markup:
        position = ", ".join(f"{name} {index}" for name, index in zip(self.mesh.names, coordinate, strict=True))
        style = f"fill:{svg.colour('panel')};stroke:{svg.colour('line')}"
        frame = svg.rect(_EDGE, _EDGE, self.width - 2, self.height - 2, style=style, hint=position, radius=5)
        return svg.group(x, y, [frame, *self.content(coordinate)])


class _Outline:
    """A small outline of the global tensor, of two of its dims, preferably sharded ones."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.shape: tuple[int, ...] = layout.shape or ()
        self.dims = self._drawn_dims()
        sizes = [self.shape[dim] for dim in self.dims]
        across, down = (sizes[-1] if sizes else 1), (sizes[0] if len(sizes) > 1 else 1)
        unit = min(_ROOM[0] / max(across, 1), _ROOM[1] / max(down, 1), 22.0)
        self.width, self.height = max(across * unit, _LEAST), max(down * unit, _LEAST)
        self.across, self.down = across, down
        self.fill = f"summand-{hashlib.sha256(repr(layout).encode()).hexdigest()[:12]}"

    def _drawn_dims(self) -> tuple[int, ...]:
        order = sorted(range(len(self.shape)), key=lambda dim: (not self.layout.dim_axes[dim], dim))
        return tuple(sorted(order[:2]))

    def draw(self, coordinate: Coordinate, box: Box, rank: int, width: float) -> list[Markup]:
        """Return the outline, the local shard, and two lines of text."""
        x, y = (width - self.width) / 2, 28.0
        sizes = tuple(stop - start for start, stop in box)
        empty = 0 in sizes
        dashed = f"fill:none;stroke:{svg.colour('quiet')};stroke-dasharray:3 2"
        parts = [
            svg.text(width / 2, 19, f"rank {rank}", anchor="middle", bold=True),
            svg.rect(x, y, self.width, self.height, style=dashed),
        ]
        if not empty:
            parts.append(self._shard(x, y, box, _in_words(self.layout, coordinate)))
        shown = "empty" if empty else _product(sizes) + (" \N{N-ARY SUMMATION}" if self.layout.partials else "")
        parts.append(svg.text(width / 2, y + self.height + 18, shown, anchor="middle", size=12,
                              fill="warn" if empty else "text"))  # fmt: skip
        return parts

    def _shard(self, x: float, y: float, box: Box, hint: str) -> Markup:
        left, right = box[self.dims[-1]] if self.dims else (0, 1)
        upper, lower = box[self.dims[0]] if len(self.dims) > 1 else (0, 1)
        fill = f"url(#{self.fill})" if self.layout.partials else svg.colour("one")
        style = f"fill:{fill};fill-opacity:.75;stroke:{svg.colour('one')}"
        per_x, per_y = self.width / max(self.across, 1), self.height / max(self.down, 1)
        return svg.rect(
            x + left * per_x, y + upper * per_y, (right - left) * per_x, (lower - upper) * per_y, style=style, hint=hint
        )


def _in_words(layout: Layout, coordinate: Coordinate) -> str:
    """Return a description of the local shard at a coordinate."""
    box = layout.box_at(coordinate)
    rank = layout.mesh.ranks[ravel(coordinate, layout.mesh.shape)]
    if any(start == stop for start, stop in box):
        return f"rank {rank}: empty"
    ranges = ", ".join(f"{start}:{stop}" for start, stop in box)
    pending = "".join(f", to be reduced by {op} over {layout.mesh.names[axis]}" for axis, op in layout.partials)
    return f"rank {rank}: [{ranges}]{pending}"


def _product(sizes: Sequence[int]) -> str:
    return " \N{MULTIPLICATION SIGN} ".join(map(str, sizes)) or "one value"


def _axes(mesh: DeviceMesh) -> str:
    return " x ".join(f"{name}={size}" for name, size in zip(mesh.names, mesh.shape, strict=True))


def _coordinates(shape: Sequence[int]) -> itertools.product[Coordinate]:
    return itertools.product(*map(range, shape))
