"""Finds the global shape of a tensor from the local shapes of all ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from hyper_parallel.errors import ShardMismatchError

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["layout_from_gathered_shapes", "layout_from_local_shapes", "note_boundary_layout"]


def layout_from_local_shapes(
    platform: Platform, local: Any, layout: Layout, where: str, known: Collection[int] = ()
) -> Layout:
    """Return ``layout`` with the global shape that the local shards of all ranks add up to.

    Communicates along the axes that split a dim of unknown size; on a rank of a fake world, layouts are remembered
    instead.

    Args:
        platform: the framework of ``local``.
        local: this rank's shard.
        layout: its placements, with the global sizes of the dims ``known`` (other sizes are ignored).
        where: start of the message, such as ``"fc1 (Linear)": the shards of input``.
        known: dims whose global size is known.

    Raises:
        ShardMismatchError: (a ValueError) the local shapes do not form one tensor; every shard must have
            ``ceil(size / ranks)`` elements, except the last ones, which may have fewer.
    """
    sizes = layout.shape or ()
    shape = [sizes[dim] if dim in known else size for dim, size in enumerate(local.shape)]
    unknown = [dim for dim, axes in enumerate(layout.dim_axes) if dim not in known and layout.shard_count(dim) > 1]
    if not unknown:
        return layout.with_shape(shape)
    noted = _noted(layout, tuple(local.shape)) if platform.transport().backend == "fake" else None
    if noted is not None:
        return noted
    mesh = layout.mesh
    ranks = mesh.ranks_along(tuple(sorted({axis for dim in unknown for axis in layout.dim_axes[dim]})))
    shapes = dict(zip(ranks, platform.transport().all_gather_object(tuple(local.shape), ranks), strict=True))
    return layout_from_gathered_shapes(layout.with_shape(shape), shapes, local.dtype, where, unknown)


_SEEN: ContextVar[tuple[Layout, ...]] = ContextVar("hyper_parallel_boundary_layouts", default=())
_SEEN_MOST = 64


def note_boundary_layout(layout: Layout) -> None:
    """Record a layout at a module's boundary in a fake world: its local tensor may return later as a plain tensor."""
    _SEEN.set((layout, *(other for other in _SEEN.get() if other is not layout))[:_SEEN_MOST])


def _noted(layout: Layout, local: tuple[int, ...]) -> Layout | None:
    """Return the last layout noted with these placements and local sizes; None if there is none."""
    alike = (other for other in _SEEN.get() if (other.mesh, other.dim_axes) == (layout.mesh, layout.dim_axes))
    return next((other for other in alike if other.local_shape == local), None)


def layout_from_gathered_shapes(
    layout: Layout, local_shapes: Mapping[int, tuple[int, ...]], dtype: Any, where: str, unknown: Collection[int]
) -> Layout:
    """Return ``layout`` with the global sizes of the dims ``unknown``, which are the sums of local sizes.

    Args:
        layout: placements, and global sizes of the other dims.
        local_shapes: local shapes by rank, at least of the ranks along the axes that split the dims ``unknown``.
        dtype: dtype for the message.
        where: start of the message.
        unknown: dims whose global size is not known.

    Raises:
        ShardMismatchError: (a ValueError) the local shapes do not form one tensor.
    """
    mesh, shape = layout.mesh, list(layout.shape or ())
    for dim in unknown:
        shape[dim] = sum(local_shapes[rank][dim] for rank in mesh.ranks_along(layout.dim_axes[dim]))
    complete = layout.with_shape(shape)
    if any(complete.local_shape_at(mesh.coordinate_of(rank)) != sizes for rank, sizes in local_shapes.items()):
        facts = ", ".join(f"rank {rank}: {list(sizes)}" for rank, sizes in local_shapes.items())
        msg = (
            f"{where} do not form one {complete.notation(dtype)} ({facts}); every shard must have ceil(size / ranks) "
            "elements, except the last ones, which may have fewer"
        )
        raise ShardMismatchError(msg)
    return complete
