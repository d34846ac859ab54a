"""Redistribution between meshes of different shapes over the same ranks: one exchange of boxes."""

from __future__ import annotations

import itertools
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from hyper_parallel._caches import register
from hyper_parallel.core.dtensor.boxes import BoxTransfer, box_edges, contains, split_at_edges, volume
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.exchange import OwnBoxes, assemble
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.steps import empty_like, narrow_box, sizes_of
from hyper_parallel.errors import ArgumentTypeError, MeshMismatchError, ShardMismatchError

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["TensorTransform"]

_LOCK = threading.Lock()
_CACHE = "_hyper_parallel_transform"


class _MeshTransition(NamedTuple):
    """Two layouts on meshes of the same ranks, both without partial values."""

    platform: Platform
    source: Layout
    target: Layout


class TensorTransform:
    """Redistributes DTensors between layouts on any meshes of the same ranks."""

    def transform(self, tensor: Any, layout: Layout) -> Any:
        """Return ``tensor`` in ``layout``; backward redistributes the gradient back.

        On the same mesh this is ``redistribute``.

        Args:
            tensor: a DTensor.
            layout: the target, on a mesh of the same ranks; its shape, if it has one, must be that of the tensor.

        Raises:
            ArgumentTypeError: (a TypeError) ``tensor`` is not a DTensor.
            MeshMismatchError: (a ValueError) the target's mesh has different ranks.
            ShardMismatchError: (a ValueError) the target has a different shape.
        """
        if not isinstance(tensor, DTensor):
            msg = f"transform: expected a DTensor, got {type(tensor).__name__}; create one by distribute_tensor"
            raise ArgumentTypeError(msg)
        target = layout.with_shape(tensor.shape) if layout.shape is None else layout
        if target.shape != tuple(tensor.shape):
            msg = (
                f"transform: the tensor is {tensor.layout.notation(tensor.dtype)}, the layout is {target.notation()}; "
                "their shapes must be equal"
            )
            raise ShardMismatchError(msg)
        mesh, target_mesh = tensor.device_mesh, target.mesh
        if target_mesh is mesh:
            return tensor.redistribute_to(target)
        if set(target_mesh.ranks) != set(mesh.ranks):
            msg = f"transform: the tensor is on {mesh!r}, the layout on {target_mesh!r}; they must have the same ranks"
            raise MeshMismatchError(msg)
        platform, reduced = tensor._platform, tensor.reduce_partial()
        without_partials = Layout.of(target_mesh, target.dim_axes, (), target.shape)
        change = _MeshTransition(platform, reduced.layout, without_partials)
        local = reduced.to_local()
        recorded = platform.is_floating(local) and platform.grad_enabled() and platform.needs_grad(local)
        moved = _function(platform).apply(local, change) if recorded else _exchange(local, change)
        return platform.wrap(moved, without_partials).redistribute_to(target)


def _function(platform: Platform) -> Any:
    """Return the platform's autograd function, which is built once and kept on it."""
    function = platform.__dict__.get(_CACHE)
    if function is None:
        with _LOCK:
            function = platform.__dict__.setdefault(_CACHE, _mesh_transition_function(platform.Function))
    return function


def _mesh_transition_function(base: Any) -> Any:
    class MeshTransitionFunction(base):  # type: ignore[misc] # the framework's class is known at run time only
        """Forward redistributes to another mesh; backward redistributes back."""

        @staticmethod
        def forward(ctx: Any, local: Any, change: _MeshTransition) -> Any:
            """Exchange the boxes."""
            ctx.change = change
            return _exchange(local, change)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
            """Exchange the boxes of the gradient, in the other direction."""
            change = ctx.change
            return MeshTransitionFunction.apply(
                grad, _MeshTransition(change.platform, change.target, change.source)
            ), None

    return MeshTransitionFunction


@lru_cache(maxsize=1024)
def _transfers(source: Layout, target: Layout) -> tuple[BoxTransfer, ...]:
    """Return every box that is sent; members are indices into the sorted ranks.

    Parts that a receiver itself holds are not sent. If several members hold a part, the receiver's index selects the
    sender.
    """
    ranks = sorted(source.mesh.ranks)
    boxes = [source.local_box(rank) for rank in ranks]
    edges = box_edges(boxes, source.ndim)
    transfers = []
    for receiver, rank in enumerate(ranks):
        for cell in itertools.product(*split_at_edges(target.local_box(rank), edges)):
            if not contains(boxes[receiver], cell):
                holders = [member for member, box in enumerate(boxes) if contains(box, cell)]
                transfers.append(BoxTransfer(cell, holders[receiver % len(holders)], receiver))
    return tuple(transfers)


register("transfers between meshes", _transfers, has_layouts=True)


def _exchange(local: Any, change: _MeshTransition) -> Any:
    source, target, platform = change.source, change.target, change.platform
    ranks = tuple(sorted(source.mesh.ranks))
    box, target_box, own = source.local_box(), target.local_box(), ranks.index(source.mesh.rank)
    boxes = OwnBoxes.of(_transfers(source, target), own, len(ranks))
    parts = boxes.exchange(ranks, lambda part: narrow_box(local, box, part, platform), local, platform)
    if not volume(target_box):
        return empty_like(local, sizes_of(target_box), platform)
    if not parts:
        return platform.copy(narrow_box(local, box, target_box, platform))
    edges = box_edges([source.local_box(rank) for rank in ranks], len(target_box))
    cells = split_at_edges(target_box, edges)
    for cell in itertools.product(*cells):
        if cell not in parts:
            parts[cell] = narrow_box(local, box, cell, platform)
    return assemble(parts, cells, platform)
