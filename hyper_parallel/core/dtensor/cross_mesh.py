"""Between meshes of different shapes over the same ranks: one exchange of the boxes that a rank lacks."""

from __future__ import annotations

import itertools
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from hyper_parallel.core.dtensor.boxes import BoxTransfer, box_edges, contains, split_at_edges, volume
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.exchange import assemble, pack, unpack
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.steps import empty_like, narrow_box, sizes_of
from hyper_parallel.errors import MeshMismatchError, NotPlainError, ShardMismatchError

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Box
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["TensorTransform"]

_LOCK = threading.Lock()
_CACHE = "_hyper_parallel_transform"


class _Move(NamedTuple):
    """From one layout to another, neither with pending reductions."""

    platform: Platform
    source: Layout
    target: Layout


class TensorTransform:
    """Moves DTensors between layouts of any meshes of the same ranks."""

    def transform(self, tensor: Any, layout: Layout) -> Any:
        """``tensor`` laid out as ``layout``; on its own mesh this is ``redistribute``. Gradients take the way back.

        Args:
            tensor: a DTensor.
            layout: the target, on a mesh of the same ranks; its shape, if it has one, is the tensor's.

        Raises:
            NotPlainError: (a TypeError) ``tensor`` is no DTensor.
            MeshMismatchError: (a ValueError) the target's mesh has other ranks.
            ShardMismatchError: (a ValueError) the target is of another shape.
        """
        if not isinstance(tensor, DTensor):
            msg = f"transform: expected a DTensor, got {type(tensor).__name__}; distribute_tensor makes one"
            raise NotPlainError(msg)
        target = layout.with_shape(tensor.shape) if layout.shape is None else layout
        if target.shape != tuple(tensor.shape):
            msg = f"transform: the tensor is {tensor.layout.notation(tensor.dtype)}, the layout is {target.notation()}"
            raise ShardMismatchError(msg)
        mesh, goal = tensor.device_mesh, target.mesh
        if goal is mesh:
            return tensor.redistribute_to(target)
        if set(goal.ranks) != set(mesh.ranks):
            msg = f"transform: the tensor lives on {mesh!r}, the layout on {goal!r}; they must have the same ranks"
            raise MeshMismatchError(msg)
        platform, whole = tensor._platform, tensor.reduce_partial()
        summed = Layout.of(goal, target.dim_axes, (), target.shape)
        move = _Move(platform, whole.layout, summed)
        local = whole.to_local()
        recorded = platform.is_floating(local) and platform.grad_enabled() and platform.needs_grad(local)
        moved = _function(platform).apply(local, move) if recorded else _exchange(local, move)
        return platform.wrap(moved, summed).redistribute_to(target)


def _function(platform: Platform) -> Any:
    """The platform's autograd function, built once and kept on it."""
    found = platform.__dict__.get(_CACHE)
    if found is None:
        with _LOCK:
            found = platform.__dict__.setdefault(_CACHE, _build(platform.Function))
    return found


def _build(base: Any) -> Any:
    class Transform(base):  # type: ignore[misc] # the framework's class is known at run time only
        """A move; backward is the move back."""

        @staticmethod
        def forward(ctx: Any, local: Any, move: _Move) -> Any:
            """There."""
            ctx.move = move
            return _exchange(local, move)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
            """Back."""
            move = ctx.move
            return Transform.apply(grad, _Move(move.platform, move.target, move.source)), None

    return Transform


@lru_cache(maxsize=1024)
def _routes(source: Layout, target: Layout) -> tuple[BoxTransfer, ...]:
    """Every box that travels, by places in the sorted ranks; what a receiver holds itself does not."""
    ranks = sorted(source.mesh.ranks)
    held = [source.local_box(rank) for rank in ranks]
    edges = box_edges(held, source.ndim)
    found = []
    for receiver, rank in enumerate(ranks):
        for cell in itertools.product(*split_at_edges(target.local_box(rank), edges)):
            if not contains(held[receiver], cell):
                holders = [place for place, box in enumerate(held) if contains(box, cell)]
                found.append(BoxTransfer(cell, holders[receiver % len(holders)], receiver))
    return tuple(found)


def _exchange(local: Any, move: _Move) -> Any:
    source, target, platform = move.source, move.target, move.platform
    ranks = tuple(sorted(source.mesh.ranks))
    me, box, wanted = ranks.index(source.mesh.rank), source.local_box(), target.local_box()
    sent = _routes(source, target)
    outgoing = [[one.box for one in sent if (one.sender, one.receiver) == (me, peer)] for peer in range(len(ranks))]
    incoming = [[one.box for one in sent if (one.sender, one.receiver) == (peer, me)] for peer in range(len(ranks))]
    flat = platform.transport().all_to_all(
        [pack([narrow_box(local, box, one, platform) for one in boxes], local, platform) for boxes in outgoing],
        ranks,
        [(sum(map(volume, boxes)),) for boxes in incoming],
    )
    if not volume(wanted):
        return empty_like(local, sizes_of(wanted), platform)
    parts: dict[Box, Any] = {}
    for boxes, buffer in zip(incoming, flat, strict=True):
        parts.update(unpack(boxes, buffer, platform))
    if not parts:
        return platform.copy(narrow_box(local, box, wanted, platform))
    cells = split_at_edges(wanted, box_edges([source.local_box(rank) for rank in ranks], len(wanted)))
    for cell in itertools.product(*cells):
        if cell not in parts:
            parts[cell] = narrow_box(local, box, cell, platform)
    return assemble(parts, cells, platform)
