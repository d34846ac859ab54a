"""Ranks agree on the global sizes of a tensor of which each knows its piece."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from hyper_parallel.errors import ShardMismatchError

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["layout_from_gathered_shapes", "layout_from_local_shapes"]


def layout_from_local_shapes(
    platform: Platform, local: Any, layout: Layout, where: str, known: Collection[int] = ()
) -> Layout:
    """``layout`` with the global shape that the pieces of all ranks make; a collective call unless all is known.

    Args:
        platform: the framework of ``local``.
        local: this rank's piece.
        layout: its placements, with global sizes in the dims ``known`` (any in the others).
        where: whose pieces, for the message: ``"fc1 (Linear)": the pieces of input``.
        known: dims of which the global size is known.

    Raises:
        ShardMismatchError: (a ValueError) the pieces are not those of one tensor: shards follow the ceil rule.
    """
    given = layout.shape or ()
    shape = [given[dim] if dim in known else size for dim, size in enumerate(local.shape)]
    unknown = [dim for dim, axes in enumerate(layout.dim_axes) if dim not in known and layout.shard_count(dim) > 1]
    if not unknown:
        return layout.with_shape(shape)
    mesh = layout.mesh
    ranks = mesh.ranks_along(tuple(sorted({axis for dim in unknown for axis in layout.dim_axes[dim]})))
    held = dict(zip(ranks, platform.transport().all_gather_object(tuple(local.shape), ranks), strict=True))
    return layout_from_gathered_shapes(layout.with_shape(shape), held, local.dtype, where, unknown)


def layout_from_gathered_shapes(
    layout: Layout, held: Mapping[int, tuple[int, ...]], dtype: Any, where: str, unknown: Collection[int]
) -> Layout:
    """``layout`` with the sizes that pieces make in the dims ``unknown``; it carries those of the others.

    Args:
        layout: placements, and global sizes of the dims that are known.
        held: sizes of the pieces by rank, at least of the ranks along the axes that cut the dims ``unknown``.
        dtype: for the message.
        where: whose pieces, for the message.
        unknown: dims to find the size of.

    Raises:
        ShardMismatchError: (a ValueError) the pieces are not those of one tensor.
    """
    mesh, shape = layout.mesh, list(layout.shape or ())
    for dim in unknown:
        shape[dim] = sum(held[rank][dim] for rank in mesh.ranks_along(layout.dim_axes[dim]))
    whole = layout.with_shape(shape)
    if any(whole.local_shape_at(mesh.coordinate_of(rank)) != sizes for rank, sizes in held.items()):
        facts = ", ".join(f"rank {rank}: {list(sizes)}" for rank, sizes in held.items())
        msg = f"{where} are not those of one {whole.notation(dtype)} ({facts}); shards follow the ceil rule"
        raise ShardMismatchError(msg)
    return whole
