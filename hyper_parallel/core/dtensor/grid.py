"""Grids of ranks: nested lists, row-major indices and positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hyper_parallel.errors import MeshError

__all__ = ["grid_of", "nest", "ravel", "unravel"]


def grid_of(mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and row-major ranks of a nested sequence; ragged rows are an error.

    Raises:
        MeshError: the rows are of different lengths.
    """
    if hasattr(mesh, "tolist"):
        mesh = mesh.tolist()
    if isinstance(mesh, int):
        return (), (mesh,)
    rows = [grid_of(row) for row in mesh]
    if len({shape for shape, _ in rows}) > 1:
        msg = f"DeviceMesh: mesh must be a regular grid of ranks, got {mesh!r}"
        raise MeshError(msg)
    inner = rows[0][0] if rows else ()
    return (len(rows), *inner), tuple(rank for _, ranks in rows for rank in ranks)


def unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Position of row-major index ``index``."""
    position = []
    for size in reversed(shape):
        index, step = divmod(index, size)
        position.append(step)
    return tuple(reversed(position))


def ravel(position: Sequence[int], shape: tuple[int, ...]) -> int:
    """Row-major index of ``position``."""
    index = 0
    for step, size in zip(position, shape, strict=True):
        index = index * size + step
    return index


def nest(flat: list[Any], shape: tuple[int, ...]) -> list[Any]:
    """Row-major items as nested lists."""
    if len(shape) <= 1:
        return flat
    inner = math.prod(shape[1:])
    return [nest(flat[start : start + inner], shape[1:]) for start in range(0, len(flat), inner)]
