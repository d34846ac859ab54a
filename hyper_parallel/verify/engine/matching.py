"""Finds the positions of a rank's array in a global array, by values.

A shard is described by the flat position of each of its elements in the global array. This covers every way to shard:
blocks, uneven and empty shards, several dims, interleaved and permuted rows, shards of fused projections, slices of the
flattened array.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.noise import as_wide

__all__ = ["Box", "Match", "box_positions", "compact", "find_part", "positions_of", "rows_of"]

_SIDE = 1 << 22
"""Largest number of entries of a table that compares rows with rows."""

_STEPS, _STARTS = 64, 1000
"""Largest number of strides of interleaved rows, and of start rows, that are tried."""


@dataclass(frozen=True)
class Match:
    """The positions of a shard.

    Attributes:
        positions: flat position of each element in the global array: an int64 array of the shard's shape.
        unique: whether no other positions have the same values.
    """

    positions: Any
    unique: bool


@dataclass(frozen=True)
class Box:
    """The positions of a box of a global array, or of a slice of its flattened form, stored without an array.

    Attributes:
        start: first index in each dim of ``total``.
        shape: shape of the box.
        total: shape of the global array; one-dimensional for a slice of a flattened array.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    total: tuple[int, ...]

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the box in the global array."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))

    @property
    def rows(self) -> tuple[Any, ...]:
        """Indices along each dim."""
        return tuple(np.arange(start, start + size) for start, size in zip(self.start, self.shape, strict=True))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return the flat position of each element; always a new array."""
        if copy is False:
            raise ValueError("the positions of a box are computed")
        return box_positions(self.rows, self.total).reshape(self.shape).astype(dtype or np.int64, copy=False)


def positions_of(rows: tuple[Any, ...], shape: tuple[int, ...]) -> Any:
    """Return the positions of ``rows`` in each dim of an array of ``shape``: a :class:`Box` if they are consecutive."""
    starts = [int(row[0]) if len(row) else 0 for row in rows]
    if all(np.array_equal(row, np.arange(start, start + len(row))) for row, start in zip(rows, starts, strict=True)):
        return Box(tuple(starts), tuple(len(row) for row in rows), shape)
    return box_positions(rows, shape)


def compact(positions: Any, shape: tuple[int, ...]) -> Any:
    """Return positions as a :class:`Box` if they form one in an array of ``shape`` or its flat view; else as given."""
    if isinstance(positions, Box) or not positions.size:
        return positions
    rows = rows_of(positions, shape)
    if rows is not None:
        return positions_of(rows, shape)
    if positions.ndim == 1 and np.array_equal(positions, np.arange(positions[0], positions[0] + positions.size)):
        return Box((int(positions[0]),), positions.shape, (int(np.prod(shape)),))
    return positions


def box_positions(rows: tuple[Any, ...], shape: tuple[int, ...]) -> Any:
    """Return flat positions of the elements at ``rows[dim]`` in each dim of an array of ``shape``."""
    if not shape:
        return np.zeros((), dtype=np.int64)
    grid = np.ix_(*(np.asarray(row, dtype=np.int64) for row in rows))
    strides = np.cumprod([1, *reversed(shape[1:])])[::-1]
    return sum((index * int(stride) for index, stride in zip(grid, strides, strict=True)), np.int64(0))


def rows_of(positions: Any, shape: tuple[int, ...]) -> tuple[Any, ...] | None:
    """Return the indices along each dim if the positions are a product of such rows; None otherwise."""
    if isinstance(positions, Box):
        return positions.rows if positions.total == shape and positions.size else None
    if positions.ndim != len(shape) or not positions.size:
        return None
    rows = []
    for dim in range(positions.ndim):
        line = positions[tuple(slice(None) if other == dim else 0 for other in range(positions.ndim))]
        rows.append(np.unravel_index(line, shape)[dim])
    return tuple(rows) if np.array_equal(box_positions(tuple(rows), shape), positions) else None


def find_part(part: Any, whole: Any, allowed: Any | None = None) -> Match | None:
    """Return the positions of ``part`` in ``whole``; None if it is not found.

    Args:
        part: a rank's array.
        whole: the global array; compared in the dtype of ``part``.
        allowed: largest difference per element of ``whole``, or None for equality.
    """
    part, whole = np.asarray(part), np.asarray(whole)
    if not part.size or part.size > whole.size or part.dtype.kind != whole.dtype.kind:
        return None
    if allowed is None:
        whole = whole.astype(part.dtype)
    search = _Search(part, whole, allowed)
    unsure = None
    for positions, unique in search.candidates():
        if search.equal(positions):
            if unique:
                return Match(positions, unique=True)
            unsure = unsure or Match(positions, unique=False)
    return unsure


class _Search:
    """The search for one shard in one complete array."""

    def __init__(self, part: Any, whole: Any, allowed: Any | None) -> None:
        self.part, self.whole, self.allowed = part, whole, allowed
        finite = np.asarray(0.0 if allowed is None else allowed)
        finite = finite[np.isfinite(finite)]
        self.tolerance = 4 * float(np.median(finite)) if finite.size else 0.0

    def equal(self, positions: Any) -> bool:
        """Return whether the elements at ``positions`` equal those of the shard."""
        expected = self.whole.reshape(-1)[positions]
        if self.allowed is None:
            return np.array_equal(expected, self.part, equal_nan=self.part.dtype.kind in "fc")
        with np.errstate(invalid="ignore"):
            close = np.abs(as_wide(expected) - as_wide(self.part)) <= self.allowed.reshape(-1)[positions]
        return bool((close | (expected == self.part)).all())

    def candidates(self) -> Iterator[tuple[Any, bool]]:
        """Yield positions that may match, of blocks, rows and single elements; each with whether no others match."""
        part, whole = self.part, self.whole
        if part.ndim == whole.ndim and all(map(int.__le__, part.shape, whole.shape)):
            dims = [dim for dim in range(part.ndim) if part.shape[dim] != whole.shape[dim]]
            if not dims:
                yield np.arange(whole.size).reshape(whole.shape), True
            for dim in dims if len(dims) == 1 else range(part.ndim) if not dims else ():
                yield from self._rows(dim)
        if part.ndim == 1 and whole.ndim != 1:
            yield from self._flat()
        yield from self._elements()

    def _rows(self, dim: int) -> Iterator[tuple[Any, bool]]:
        """Yield selections of rows along ``dim``: a block, every n-th row, any rows.

        Each row is represented by one number, so rows are found by sorting instead of by comparing all pairs.
        """
        own, rows = (_project(np.moveaxis(array, dim, 0)) for array in (self.part, self.whole))
        width = max(1, self.part.size // self.part.shape[dim])
        size = max(1.0, float(np.abs(rows[np.isfinite(rows)]).max(initial=0.0)))
        tolerance = 1e-12 * size + self.tolerance * 4 * width**0.5
        order = np.argsort(rows, kind="stable")
        first = np.searchsorted(rows[order], own - tolerance, side="left")
        last = np.searchsorted(rows[order], own + tolerance, side="right")
        if not (last > first).all():
            return
        count, total = len(own), len(rows)
        starts = np.sort(order[first[0] : last[0]])[:_STARTS]
        progressions = list(_progressions(own, rows, starts, tolerance))
        certain = bool((last - first == 1).all())
        blocks = [line for line in progressions if count == 1 or line[1] - line[0] == 1]
        for lines in (blocks, progressions):  # one number per row matches; the elements must confirm it
            fits = [line for line in lines if certain or self.equal(self._box(dim, line))]
            for line in fits:
                yield self._box(dim, line), certain or len(fits) == 1
            if fits:
                return
        if count <= total:
            yield self._box(dim, self._nearest(dim, order, first, last)), certain

    def _nearest(self, dim: int, order: Any, first: Any, last: Any) -> Any:
        """Return, for each row of the shard, the nearest of its candidates, ``order[first:last]``."""
        if int((last - first).sum()) * (self.part.size // len(first)) > 4 * _SIDE:
            return np.minimum.reduceat(np.append(order, len(order)), np.stack([first, last], 1).reshape(-1))[::2]
        own, rows = (
            as_wide(np.moveaxis(array, dim, 0)).reshape(array.shape[dim], -1) for array in (self.part, self.whole)
        )
        nearest = []
        for row, start, end in zip(own, first, last, strict=True):
            near = np.sort(order[start:end])
            with np.errstate(invalid="ignore"):
                distances = np.where(rows[near] == row, 0.0, np.abs(rows[near] - row)).max(axis=1)
            nearest.append(near[np.nan_to_num(distances, nan=np.inf).argmin()])
        return np.array(nearest)

    def _box(self, dim: int, rows: Any) -> Any:
        every = [np.arange(size) for size in self.whole.shape]
        every[dim] = rows
        return box_positions(tuple(every), self.whole.shape)

    def _flat(self) -> Iterator[tuple[Any, bool]]:
        """Yield contiguous slices of the flattened array."""
        flat, size = as_wide(self.whole.reshape(-1)), self.part.size
        first = as_wide(self.part.reshape(-1))[0]
        starts = np.flatnonzero(np.abs(flat[: flat.size - size + 1] - first) <= self.tolerance)
        fits = [start + np.arange(size) for start in starts[:_STARTS]]
        fits = [positions for positions in fits if self.equal(positions)]
        for positions in fits:
            yield positions, len(fits) == 1

    def _elements(self) -> Iterator[tuple[Any, bool]]:
        """Yield positions found by single values: rows of several dims, or any order if all values are distinct."""
        if self.part.dtype.kind != "f":
            return
        flat = as_wide(self.whole.reshape(-1))
        order = np.argsort(flat, kind="stable")
        values = as_wide(self.part.reshape(-1))
        first = np.searchsorted(flat[order], values - self.tolerance, side="left")
        last = np.searchsorted(flat[order], values + self.tolerance, side="right")
        sure = (last - first == 1).reshape(self.part.shape)
        positions = order[np.minimum(first, flat.size - 1)].reshape(self.part.shape)
        if self.part.ndim == self.whole.ndim > 0 and sure.any():
            rows = [self._vote(dim, sure, positions) for dim in range(self.part.ndim)]
            if all(row is not None for row in rows):  # a few distinct values among many equal ones may match by chance
                yield box_positions(tuple(rows), self.whole.shape), self.allowed is None or bool(sure.mean() >= 0.5)
        if sure.all() and np.unique(positions).size == positions.size:
            yield positions, True

    def _vote(self, dim: int, sure: Any, positions: Any) -> Any | None:
        """Return, for each row of ``part``, the row of ``whole`` with most of its elements; None if unknown.

        The elements of some rows occur several times, such as tokens with which several texts begin. The place of such
        rows is known if the other rows form a block.
        """
        count, total = self.part.shape[dim], self.whole.shape[dim]
        if count * total > _SIDE:
            return None
        votes = np.zeros((count, total), dtype=np.int64)
        found = np.unravel_index(positions[sure], self.whole.shape)[dim]
        np.add.at(votes, (np.nonzero(sure)[dim], found), 1)
        rows, known = votes.argmax(axis=1), votes.any(axis=1)
        if known.all():
            return rows
        block = np.arange(count) + (rows - np.arange(count))[known][0] if known.any() else rows
        fits = known.any() and np.array_equal(block[known], rows[known]) and 0 <= block[0] <= block[-1] < total
        return block if fits else None


def _progressions(own: Any, rows: Any, starts: Any, tolerance: float) -> Iterator[Any]:
    """Yield evenly spaced selections of ``rows`` that begin at one of ``starts`` and equal ``own``."""
    count, total = len(own), len(rows)
    steps = range(1, min((total - 1) // (count - 1), _STEPS) + 1) if count > 1 else (1,)
    few = np.unique(np.linspace(0, count - 1, min(count, 9)).astype(np.int64))
    for step in steps:
        for start in starts:
            if start + step * (count - 1) >= total:
                continue
            line = start + step * np.arange(count)
            if all((np.abs(own[some] - rows[line[some]]) <= tolerance).all() for some in (few, slice(None))):
                yield line


def _project(rows: Any) -> Any:
    """Return one number per row: equal for equal rows, and different for different rows except by chance."""
    flat = as_wide(rows.reshape(rows.shape[0], -1))
    flat = np.where(np.isfinite(flat), flat, 7.25)
    weights = np.random.default_rng(11).standard_normal(flat.shape[1])
    return (flat * weights).sum(axis=1)
