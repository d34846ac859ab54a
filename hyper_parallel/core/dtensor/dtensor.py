"""The distributed tensor: a local tensor, a layout, and the promise that together they mean one global tensor.

This class holds what both frameworks share. ``platform/<framework>/dtensor.py`` subclasses it together with the
framework's tensor type. Autograd runs on the locals; the class adds no node of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Any
from weakref import ref

from hyper_parallel.core.dtensor.deferred_gradients import deferral_hook
from hyper_parallel.core.dtensor.events import watchers
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh, get_current_mesh
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.dtensor.redistribute import gathered_view, redistribute
from hyper_parallel.core.dtensor.transition import plan_transition
from hyper_parallel.errors import (
    LayoutError,
    MeshError,
    MeshMismatchError,
    NotPlainError,
    PlacementError,
    ShardMismatchError,
)
from hyper_parallel.platform.select import platform_of, platform_of_argument

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.events import Cause
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["DTensor", "require_dense", "resolve_mesh", "varying_axes"]


class DTensor:
    """A tensor held in pieces by the ranks of a mesh.

    Args:
        local: this rank's piece, a plain tensor of either framework.
        device_mesh: the mesh.
        placements: one placement per axis, or one alias per dim.

    Shapes are taken as even shards; for uneven ones use :meth:`from_local` with ``shape``.

    Raises:
        LayoutError: (a ValueError) placements that do not fit mesh or tensor.
    """

    _local: Any
    _layout: Layout
    dtype: Any
    shape: Any
    _platform: Platform
    _views: dict[Any, Any] | None
    _origin: tuple[Any, tuple[int, int], Any] | None
    _readonly: str | None
    _passed_by = False  # gradients went straight to what this was redistributed from

    def __new__(cls, local: Any, device_mesh: DeviceMesh, placements: Any) -> Any:
        """A DTensor of the framework that ``local`` belongs to."""
        return cls.from_local(local, device_mesh, placements)

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Everything was set when the object was made."""

    # -- in and out ----------------------------------------------------------------------------------------------

    @staticmethod
    def from_local(
        local: Any,
        device_mesh: DeviceMesh | None = None,
        placements: Any = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,  # noqa: ARG004 - accepted for PyTorch's signature; storage is local
    ) -> Any:
        """Wrap ``local``; its gradient comes back in the dual layout.

        Args:
            local: this rank's piece.
            device_mesh: the mesh, by default the current one.
            placements: placements or aliases; all Replicate by default.
            run_check: compare shapes and dtypes of all ranks (communicates).
            shape: global shape; without it shards are taken to be even.
            stride: ignored.

        Raises:
            LayoutError: the placements do not fit mesh or tensor.
            MeshMismatchError: the placements are a layout of another mesh.
            NotPlainError: ``local`` is a DTensor, or sparse.
            ShardMismatchError: the piece is not what this rank holds of ``shape``, or ranks disagree.
        """
        mesh = resolve_mesh(device_mesh)
        if isinstance(local, DTensor):
            msg = f"from_local: local must be a plain tensor, got {local!r}"
            raise NotPlainError(msg)
        platform = require_dense(local, "from_local: local")
        local_shape = tuple(local.shape)
        if placements is None:
            placements = [Replicate()] * mesh.ndim
        layout = Layout.place(mesh, placements, (0,) * len(local_shape) if shape is None else _sizes(shape))
        if len(layout.dim_axes) != len(local_shape):
            msg = (
                f"from_local: shape {list(shape or ())} has {layout.ndim} dims, "
                f"local {list(local_shape)} has {len(local_shape)}"
            )
            raise ShardMismatchError(msg)
        if shape is None:
            layout = layout.with_shape(layout.with_shape(None).get_global_shape(local_shape))
        if run_check:
            _check_pieces(platform, local, layout)
        if layout.local_shape != local_shape:
            raise ShardMismatchError(_piece_message(layout, local_shape))
        return platform.wrap(local, layout)

    @staticmethod
    def from_torch(tensor: Any) -> Any:
        """A ``torch.distributed.tensor.DTensor`` as a DTensor of ours: same storage, same graph.

        Raises:
            NotPlainError: (a TypeError) it is none.
            UnsupportedOperatorError: a placement that only PyTorch has.
        """
        return platform_of(tensor).from_torch(tensor)

    def to_local(self, grad_placements: Sequence[Any] | None = None) -> Any:
        """This rank's piece, on the graph.

        Args:
            grad_placements: placements in which the caller's code will produce the gradient; by default the dual of
                this tensor's. Say ``[Partial()]`` for a replicated axis along which the following code differs.

        Raises:
            LayoutError: a gradient placement that this layout cannot have.
        """
        if grad_placements is None:
            self._origin = None  # who holds the piece may hook it: from here on, every gradient goes through it
            return self._local
        axes = varying_axes(self._layout, grad_placements, "to_local")
        return self.local_for(self._layout, axes)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Any = None, *, async_op: bool = False
    ) -> Any:
        """The same tensor in another layout; the identical layout costs nothing.

        Args:
            device_mesh: must be this tensor's mesh, if given.
            placements: placements or aliases; all Replicate by default.
            async_op: accepted; the result is always complete.

        Raises:
            LayoutError: the placements do not fit mesh or tensor.
            MeshMismatchError: the tensor, or the layout given as placements, lives on another mesh.
        """
        del async_op
        layout = self._layout
        if device_mesh is not None and device_mesh is not layout.mesh:
            msg = f"redistribute: the tensor lives on {layout.mesh!r}, not on {device_mesh!r}"
            raise MeshMismatchError(msg)
        if placements is None:
            placements = [Replicate()] * layout.mesh.ndim
        return self.redistribute_to(Layout.place(layout.mesh, placements, layout.shape))  # type: ignore[arg-type]

    def redistribute_to(self, target: Layout, cause: Cause | None = None) -> Any:
        """The same tensor in layout ``target``."""
        if target is self._layout:
            return self
        platform = self._platform
        steps = plan_transition(self._layout, target)
        moved: DTensor = platform.wrap(redistribute(self._local, steps, platform, cause), target)
        if platform.grad_enabled() and platform.needs_grad(self._local):
            written = (platform.version(self._local), platform.version(moved._local))
            moved._origin = (self._local, written, steps)
        return moved

    def full_tensor(self, grad_placements: Sequence[Any] | None = None) -> Any:
        """The whole tensor, plain, on every rank."""
        return self.redistribute().to_local(grad_placements)

    def reduce_partial(self) -> Any:
        """The same tensor with every pending reduction done."""
        layout = self._layout
        return self.redistribute_to(Layout.of(layout.mesh, layout.dim_axes, (), layout.shape))

    # -- what dispatch asks ----------------------------------------------------------------------------------------

    def local_for(self, target: Layout, varying: tuple[int, ...], cause: Cause | None = None) -> Any:
        """The local tensor in layout ``target``, entering a computation that differs along the axes ``varying``.

        The result is kept while this tensor lives, so that several consumers share one collective in backward.
        """
        platform, local = self._platform, self._local
        if not (platform.grad_enabled() and platform.needs_grad(local)):
            return (
                local
                if target is self._layout
                else redistribute(local, plan_transition(self._layout, target), platform, cause)
            )
        key, views = (target, varying), self._views
        version, listening = platform.version(local), watchers()
        if views is not None:
            kept = views.get(key)
            # Its node tells those who listened when it was made.
            if kept is not None and kept[0] == version and kept[2] is listening:
                return kept[1]
        if not platform.may_keep_view(self):
            return self._enter(target, varying, cause, None)
        # Behind a leaf there is no graph that a kept view would hold: it serves the next forward too.
        lasting = target is self._layout and not platform.passes_gradient(local)
        made = self._enter(target, varying, cause, None if lasting else _Forget(self, key))
        if views is None:
            views = self._views = {}
        views[key] = (version, made, listening)
        return made

    def _enter(self, target: Layout, varying: tuple[int, ...], cause: Cause | None, passed: _Forget | None) -> Any:
        if self._origin is not None and target is self._layout:
            source, written, steps = self._origin
            version = self._platform.version
            # Either one written since: its node is no longer the one that was gathered, or that was gathered into.
            if written == (version(source), version(self._local)) and steps.gathers_along(varying):
                self._passed_by = True
                return gathered_view(source, self._local, steps, varying, self._platform, passed)
        keep = deferral_hook(self, varying, cause) if target is self._layout else None
        return redistribute(
            self._local, plan_transition(self._layout, target, varying), self._platform, cause, passed, keep
        )

    def drop_views(self) -> None:
        """Forget what was derived from the values: they are about to change."""
        self._views = None
        self._origin = None
        self._passed_by = False

    # -- facts -----------------------------------------------------------------------------------------------------

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh."""
        return self._layout.mesh

    @property
    def placements(self) -> tuple[Any, ...]:
        """One placement per mesh axis."""
        return self._layout.placements

    @property
    def layout(self) -> Layout:
        """The layout, global shape included."""
        return self._layout

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Sizes of this rank's piece."""
        return self._layout.local_shape


class _Forget:
    """Forgets a kept view once its gradient has passed, and the graph that needed it with it."""

    __slots__ = ("key", "tensor")

    def __init__(self, tensor: DTensor, key: Any) -> None:
        self.tensor, self.key = ref(tensor), key

    def __call__(self) -> None:
        tensor = self.tensor()
        if tensor is not None and tensor._views is not None:
            tensor._views.pop(self.key, None)


def resolve_mesh(device_mesh: DeviceMesh | None) -> DeviceMesh:
    """``device_mesh``, or the current one.

    Raises:
        ValueError: neither is there.
        TypeError: it is something else.
    """
    mesh = device_mesh if device_mesh is not None else get_current_mesh()
    if mesh is None:
        msg = "device_mesh: none given and none is current; pass one, or use 'with mesh:'"
        raise MeshError(msg)
    given: object = mesh  # users are not checked by mypy
    if not isinstance(given, DeviceMesh):
        msg = f"device_mesh must be a DeviceMesh, got {type(given).__name__}; init_device_mesh makes one"
        raise NotPlainError(msg)
    return given


def varying_axes(layout: Layout, grad_placements: Sequence[Any], where: str) -> tuple[int, ...]:
    """Axes along which a replicated tensor's gradient arrives as summands.

    Raises:
        PlacementError: not one placement per axis; ``where`` starts the message.
        LayoutError: a gradient placement that is neither that nor the dual.
    """
    wanted = tuple(grad_placements)
    if len(wanted) != layout.mesh.ndim:
        msg = f"{where}: {len(wanted)} grad_placements given for the {layout.mesh.ndim} axes {layout.mesh.names}"
        raise PlacementError(msg)
    varying = []
    for axis, grad in enumerate(wanted):
        held = layout.placement_on(axis)
        grad = Shard(grad.dim % max(layout.ndim, 1)) if isinstance(grad, Shard) else grad  # noqa: PLW2901
        if held == Replicate() and grad == Partial():
            varying.append(axis)
        elif grad != (held if isinstance(held, Shard) else Replicate()):
            whole = "Replicate() or Partial(sum)" if held == Replicate() else "Replicate()"
            can_be = repr(held) if isinstance(held, Shard) else whole
            msg = (
                f"{where}: on axis {layout.mesh.names[axis]} the tensor is {held!r}; its gradient can be {can_be}, "
                f"not {grad!r}"
            )
            raise LayoutError(msg)
    return tuple(varying)


def require_dense(tensor: Any, what: str) -> Platform:
    """The platform of ``tensor``, whose elements have to be in places of their own.

    Raises:
        NotPlainError: (a TypeError) it is sparse, or no tensor.
    """
    platform = platform_of_argument(tensor, what)
    if not platform.is_dense(tensor):
        msg = f"{what} has sparse storage, of which no rank can hold a piece; use tensor.to_dense()"
        raise NotPlainError(msg)
    return platform


def _sizes(shape: Sequence[int]) -> tuple[int, ...]:
    try:
        sizes = tuple(index(size) for size in shape)
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes):
        msg = f"from_local: shape must give an int per dim, none negative, got {shape!r}"
        raise LayoutError(msg)
    return sizes


def _check_pieces(platform: Platform, local: Any, layout: Layout) -> None:
    mesh = layout.mesh
    mine = (tuple(local.shape), str(local.dtype))
    found = dict(zip(mesh.ranks, platform.transport().all_gather_object(mine, mesh.ranks), strict=True))
    facts = ", ".join(f"rank {rank}: {list(shape)} {dtype}" for rank, (shape, dtype) in found.items())
    if len({dtype for _, dtype in found.values()}) > 1:
        msg = f"from_local: ranks hold different dtypes ({facts})"
        raise ShardMismatchError(msg)
    for rank, (shape, _) in found.items():
        wanted = layout.local_shape_at(mesh.coordinate_of(rank))
        if shape != wanted:
            msg = (
                f"from_local: the pieces do not make one tensor of {list(layout.shape or ())} under "
                f"{layout.placements}: rank {rank} should hold {list(wanted)} ({facts}); pass shape=, the global shape"
            )
            raise ShardMismatchError(msg)


def _piece_message(layout: Layout, local_shape: tuple[int, ...]) -> str:
    return (
        f"from_local: rank {layout.mesh.rank} holds {list(layout.local_shape)} of {layout.notation()}, "
        f"but local has {list(local_shape)}"
    )
