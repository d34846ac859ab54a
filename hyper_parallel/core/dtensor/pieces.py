"""The global shape that pieces of known sizes make, or why they make none. Pure, but for the exchange of sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hyper_parallel.errors import ShardMismatchError

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["exchanged_layout", "layout_of_pieces"]

Shape = tuple[int, ...]


def layout_of_pieces(layout: Layout, pieces: Mapping[int, Shape], where: str) -> Layout:
    """``layout`` with the global shape that the pieces make.

    Args:
        layout: placements; its own shape does not count.
        pieces: sizes of every rank's piece, by rank.
        where: start of the message.

    Raises:
        ShardMismatchError: (a ValueError) the pieces are not those of one tensor in this layout.
    """
    mesh = layout.mesh
    # Along this rank's own line; that every other line agrees is what the comparison shows.
    shape = [sum(pieces[rank][dim] for rank in mesh.ranks_along(axes)) for dim, axes in enumerate(layout.dim_axes)]
    found = layout.with_shape(shape)
    wrong = [rank for rank in mesh.ranks if pieces[rank] != found.local_shape_at(mesh.coordinate_of(rank))]
    if wrong:
        facts = ", ".join(f"rank {rank}: {list(pieces[rank])}" for rank in mesh.ranks)
        wanted = list(found.local_shape_at(mesh.coordinate_of(wrong[0])))
        msg = (
            f"{where}: the pieces do not make one tensor of {shape} under {layout.placements}: "
            f"rank {wrong[0]} should hold {wanted} ({facts})"
        )
        raise ShardMismatchError(msg)
    return found


def exchanged_layout(layout: Layout, mine: Shape, platform: Platform, where: str) -> Layout:
    """:func:`layout_of_pieces` from the sizes that all ranks of the mesh tell each other; a collective call."""
    if not any(layout.dim_axes):
        return layout.with_shape(mine)
    mesh = layout.mesh
    told = platform.transport().all_gather_object(tuple(mine), mesh.ranks)
    return layout_of_pieces(layout, dict(zip(mesh.ranks, told, strict=True)), where)
