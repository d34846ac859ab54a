"""Enumerates the placements that an operand can have, or draws some at random."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.placements import Partial, Placement, Replicate, Shard
from hyper_parallel.verify.checker.shards import can_be_partial

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["all_placements", "placement_tuples", "possible_placements", "random_placements"]

_REDUCTIONS = {"f": ("sum", "sum", "sum", "avg", "max", "min"), "i": ("sum", "max", "min"), "b": ("any", "all")}
_REPLICATED, _SHARDED = 0.25, 0.85


def possible_placements(array: Any, partial: Sequence[str]) -> list[Placement]:
    """Return every placement of an array on one axis; a Partial only if the values can be split into partial values."""
    shards = (Shard(dim) for dim in range(array.ndim))
    return [Replicate(), *shards, *(Partial(op) for op in partial if can_be_partial(array, op))]


def all_placements(ndim: int, mesh_ndim: int, *, partial: Sequence[str] = ("sum",)) -> list[tuple[Placement, ...]]:
    """Return every tuple of placements of a tensor of ``ndim`` dims on ``mesh_ndim`` axes.

    Args:
        ndim: dims of the tensor.
        mesh_ndim: axes of the mesh.
        partial: reductions of Partial; a tuple has Partials of at most one reduction.
    """
    choices: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(ndim)), *(Partial(op) for op in partial)]
    return placement_tuples(choices, mesh_ndim)


def placement_tuples(choices: Sequence[Placement], axes: int) -> list[tuple[Placement, ...]]:
    """Return every tuple of these placements on ``axes`` axes in which all Partials have the same reduction."""
    return [
        placements
        for placements in itertools.product(choices, repeat=axes)
        if len({placement for placement in placements if isinstance(placement, Partial)}) <= 1
    ]


def random_placements(
    array: Any, mesh: Sequence[int], rng: np.random.Generator, *, partial: bool = True
) -> tuple[Placement, ...]:
    """Return a placement per axis: Shard of any dim, Replicate, or Partial of one reduction.

    Args:
        array: the values.
        mesh: sizes of the axes.
        rng: random number generator.
        partial: whether Partial is allowed.
    """
    reductions = [op for op in _REDUCTIONS.get(array.dtype.kind, ()) if can_be_partial(array, op)]
    if not np.isfinite(array).all():
        reductions = [op for op in reductions if op in {"max", "min"}]  # partial sums of an infinity may give NaN
    reduction = reductions[int(rng.integers(len(reductions)))] if reductions and partial else ""
    return tuple(_random_placement(array.ndim, reduction, rng) for _ in mesh)


def _random_placement(ndim: int, reduction: str, rng: np.random.Generator) -> Placement:
    draw = rng.random()
    if draw < _REPLICATED or (not ndim and not reduction):
        return Replicate()
    if (draw < _SHARDED or not reduction) and ndim:
        return Shard(int(rng.integers(ndim)))
    return Partial(reduction) if reduction else Replicate()
