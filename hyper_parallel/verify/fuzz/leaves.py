"""Leaves of programs on ranks: random placements, and what each rank has of a global array.

Partial values are made by formulas, and not at random, so that adding them up gives the value to the bit in every
dtype: small integers get other integers on each rank, other values a multiple of themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.placements import Partial, Placement, Replicate, Shard
from hyper_parallel.verify.ops.shards import can_be_partial, local_box

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyper_parallel.core.dtensor.layout import Layout

__all__ = ["local_array", "random_placements"]

_REDUCTIONS = {"f": ("sum", "sum", "sum", "avg", "max", "min"), "i": ("sum", "max", "min"), "b": ("any", "all")}
_REPLICATED, _SHARDED = 0.25, 0.85


def random_placements(
    array: Any, mesh: Sequence[int], rng: np.random.Generator, *, partial: bool = True
) -> tuple[Placement, ...]:
    """Return a placement per axis: Shard of any dim, Replicate, or Partial of one reduction.

    Args:
        array: the values.
        mesh: sizes of the axes.
        rng: draws.
        partial: whether Partial may be among them.
    """
    reductions = [op for op in _REDUCTIONS.get(array.dtype.kind, ()) if can_be_partial(array, op)]
    if not np.isfinite(array).all():
        reductions = [op for op in reductions if op in {"max", "min"}]  # parts of an infinity add up to no number
    reduction = reductions[int(rng.integers(len(reductions)))] if reductions and partial else ""
    return tuple(_random_placement(array.ndim, reduction, rng) for _ in mesh)


def _random_placement(ndim: int, reduction: str, rng: np.random.Generator) -> Placement:
    draw = rng.random()
    if draw < _REPLICATED or (not ndim and not reduction):
        return Replicate()
    if (draw < _SHARDED or not reduction) and ndim:
        return Shard(int(rng.integers(ndim)))
    return Partial(reduction) if reduction else Replicate()


def local_array(array: Any, layout: Layout, coordinate: Sequence[int], *, integral: bool) -> Any:
    """Return what the rank at ``coordinate`` has of a global array.

    Args:
        array: the global values.
        layout: where they are.
        coordinate: of the rank, one per axis.
        integral: the values are small integers.
    """
    for axis, op in layout.partials:
        array = _part(array, op, layout.mesh.shape[axis], coordinate[axis], integral=integral)
    return np.array(local_box(array, layout, tuple(coordinate)), order="C")


def _part(array: Any, op: str, count: int, step: int, *, integral: bool) -> Any:
    """Return the part of rank ``step`` of ``count``; all of them reduce to ``array``."""
    places = np.arange(array.size).reshape(array.shape)
    if op in {"any", "all"}:
        mine = (places + step) % count == 0
        return (array & mine) if op == "any" else (array | ~mine)
    if op in {"max", "min"}:
        gap = np.where((places + step) % count == 0, 0, 1 + places % 3)
        return np.asarray(array - gap if op == "max" else array + gap).astype(array.dtype)
    others = range(1, count)
    if op == "avg":
        share = 2 * (step % 2) if step else count - sum(2 * (other % 2) for other in others)
        return np.asarray(array * share).astype(array.dtype)
    if integral or array.dtype.kind == "i":
        pattern = places % 7 - 3
        part = pattern * step if step else array - pattern * sum(others)
        return np.asarray(part).astype(array.dtype)
    share = (2 if step % 2 else -2) if step else 1 - sum(2 if other % 2 else -2 for other in others)
    return np.asarray(array * share).astype(array.dtype)
