"""World sizes to try next, for a program whose axes have equal sizes or divide all dims evenly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from hyper_parallel.verify.engine.pairing import PairedRuns

__all__ = ["OtherSize", "unequal_axes", "unequal_sizes", "uneven_sizes"]

_LARGER = 4
"""Number of larger sizes of an axis that are tried."""


@dataclass(frozen=True)
class OtherSize:
    """A world size to try, and the mesh of that world.

    Attributes:
        size: number of ranks.
        mesh: sizes by axis, if the user named the axes.
    """

    size: int
    mesh: Mapping[str, int] | None

    def __str__(self) -> str:
        """Return the world in words."""
        axes = " x ".join(f"{axis}={size}" for axis, size in (self.mesh or {}).items())
        return f"{self.size} ranks" + (f" ({axes})" if axes else "")


def unequal_axes(runs: PairedRuns, mesh: Mapping[str, int] | None) -> list[OtherSize]:
    """Return worlds whose axes have different sizes: the next larger sizes, then doubled sizes, which divide more dims.

    Args:
        runs: the compared runs.
        mesh: sizes by axis, if the user named them; otherwise the program makes its axes from the number of ranks.
    """
    world = runs.parallel.world_size
    axes = dict(mesh or {axis: size for axis, size in runs.axes.sizes().items() if size > 1 and axis != "world"})
    larger = unequal_sizes(axes)
    doubled = _doubled(axes)
    worlds = []
    for sizes in (larger, _reversed(larger), doubled, _reversed(doubled)):
        count = world * math.prod(sizes.values()) // math.prod(axes.values())
        worlds.append(OtherSize(count, sizes if mesh else None))
    return [other for place, other in enumerate(worlds) if other not in worlds[:place]]


def unequal_sizes(mesh: Mapping[str, int]) -> dict[str, int]:
    """Return a mesh whose axes of more than one rank have different sizes, each at least as large as before.

    Axes are considered in order. An axis keeps its size if no earlier axis has it; otherwise it gets the next larger
    size that no earlier axis has.
    """
    sizes: dict[str, int] = {}
    for axis, size in mesh.items():
        free = size
        while size > 1 and free in sizes.values():
            free += 1
        sizes[axis] = free
    return sizes


def uneven_sizes(runs: PairedRuns, axis: str, mesh: Mapping[str, int] | None) -> list[OtherSize]:
    """Return worlds in which the axis is larger, does not divide all sharded dims of weights, but divides batches.

    Programs must handle uneven shards of weights, but need not accept uneven batches.

    Args:
        runs: the compared runs.
        axis: the axis that divides all dims evenly.
        mesh: sizes by axis, if the user named them.
    """
    size = runs.axes.sizes()[axis]
    totals = sorted(set(_sharded_dims(runs, axis)))
    rows = [total for total, part in _rows(runs) if part < total]
    worlds = []
    for larger in range(size + 1, size + 1 + _LARGER):
        if any(total % larger for total in totals) and not any(total % larger for total in rows):
            count = runs.parallel.world_size // size * larger
            worlds.append(OtherSize(count, {**mesh, axis: larger} if mesh and axis in mesh else None))
    return worlds


def _sharded_dims(runs: PairedRuns, axis: str) -> Iterator[int]:
    """Yield the sizes of dims of weights that are sharded along the axis."""
    for key, record in runs.bounds.reference.items():
        if key[0] != "weight" or key[2] != -1:
            continue
        total = np.shape(record.value)
        for group in runs.axes.groups[axis]:
            for rank in group:
                if key in runs.ranks[rank] and np.shape(runs.value(key, rank)) != total:
                    part = np.shape(runs.value(key, rank))
                    yield from (whole for whole, own in zip(total, part, strict=False) if whole != own)


def _rows(runs: PairedRuns) -> Iterator[tuple[int, int]]:
    """Yield, for each input, its number of rows in the reference and on a rank."""
    whole = {name: array.shape[0] for _, name, array in runs.reference_notes.get("inputs", ()) if array.ndim}
    for rank in runs.parallel.ranks:
        for _, name, array in rank.notes.get("inputs", ()):
            if name in whole and array.ndim:
                yield whole[name], array.shape[0]


def _doubled(axes: Mapping[str, int]) -> dict[str, int]:
    """Return the axes with sizes doubled until no earlier axis has the same size."""
    sizes: dict[str, int] = {}
    for axis, size in axes.items():
        free = size
        while size > 1 and free in sizes.values():
            free *= 2
        sizes[axis] = free
    return sizes


def _reversed(axes: Mapping[str, int]) -> dict[str, int]:
    """Return the axes, with the sizes above 1 in the opposite order."""
    sizes = [size for size in axes.values() if size > 1]
    return {axis: sizes.pop() if size > 1 else size for axis, size in axes.items()}
