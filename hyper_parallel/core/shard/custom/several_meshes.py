"""Functions of DTensors on several meshes: the axes along which an operand's gradient is summed."""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import TYPE_CHECKING

from hyper_parallel._caches import register
from hyper_parallel.errors import MeshMismatchError

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.core.dtensor.mesh import DeviceMesh

__all__ = ["axes_to_sum", "is_replicated_over"]


def axes_to_sum(region: str, name: str, target: Layout, values: tuple[tuple[str, Layout], ...]) -> tuple[int, ...]:
    """Return the axes along which an operand is replicated but ranks compute different contributions to its gradient.

    Two ranks compute the same if the placements say that every operand and output is equal on both.

    Args:
        region: the function, for messages.
        name: the operand.
        target: the operand's layout.
        values: name and layout of every operand and output, each on its own mesh.

    Raises:
        MeshMismatchError: (a ValueError) along an axis some ranks compute the same but others do not, or a mesh lacks
            some of the ranks, so that it is unknown whether they do.
    """
    axes, problem = _axes_to_sum(target, values)
    if problem:
        msg = (
            f"{region}: the gradient of {name} on {target.mesh!r} cannot be derived: {problem}. Give {name} an entry "
            "in in_grad_placements: Partial() for axes along which its gradient must be summed, Replicate() for other "
            "axes on which it is replicated; or move it to the mesh of the other operands with "
            "get_platform().get_tensor_transform().transform(tensor, layout)"
        )
        raise MeshMismatchError(msg)
    return axes


@lru_cache(maxsize=1024)
def is_replicated_over(layout: Layout, mesh: DeviceMesh) -> bool:
    """Whether every rank of ``mesh`` has the same local tensor of ``layout``, which may be on another mesh."""
    values = (("", layout),)
    return all(rank in layout.mesh.ranks and _first_difference(mesh.rank, rank, values) is None for rank in mesh.ranks)


@lru_cache(maxsize=1024)
def _axes_to_sum(target: Layout, values: tuple[tuple[str, Layout], ...]) -> tuple[tuple[int, ...], str]:
    """Return the axes, and the contradiction between ranks or ``""``."""
    mesh, own = target.mesh, target.mesh.own_coordinate()
    free = tuple(axis for axis in range(mesh.ndim) if target.placement_on(axis).is_replicate())
    ranks = mesh.ranks_along(free)
    moved = [
        {axis for axis, index in zip(free, indices, strict=True) if index != own[axis]}
        for indices in itertools.product(*(range(mesh.shape[axis]) for axis in free))
    ]
    differing = [_first_difference(mesh.rank, rank, values) for rank in ranks]
    summed = {axis for axes, name in zip(moved, differing, strict=True) if len(axes) == 1 and name for axis in axes}
    for rank, axes, name in zip(ranks, moved, differing, strict=True):
        missing = next((value for value, layout in values if rank not in layout.mesh.ranks), None)
        if name is None and missing is not None:
            return (), f"{missing} is on a mesh without rank {rank}, which may or may not compute the same as this rank"
        if (name is None) == bool(axes & summed):
            return (), f"of the ranks {list(ranks)}, on which it is replicated, some compute the same but others do not"
    return tuple(sorted(summed)), ""


def _first_difference(rank: int, other: int, values: tuple[tuple[str, Layout], ...]) -> str | None:
    """Return the first value that may differ between two ranks according to its placements, or None."""
    for name, layout in values:
        if other in layout.mesh.ranks:
            here, there = layout.mesh.coordinate_of(rank), layout.mesh.coordinate_of(other)
            axes = range(layout.mesh.ndim)
            if any(here[axis] != there[axis] and not layout.placement_on(axis).is_replicate() for axis in axes):
                return name
    return None


register("axes along which gradients of operands on several meshes are summed", _axes_to_sum, has_layouts=True)
register("layouts replicated over other meshes", is_replicated_over, has_layouts=True)
