"""The distributed tensor: each rank's local tensor and a layout, which together denote one global tensor.

This class is what both frameworks share. ``platform/<framework>/dtensor.py`` subclasses it together with the
framework's tensor type. Autograd runs on local tensors; the class adds no node of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from operator import index
from typing import TYPE_CHECKING, Any
from weakref import ref

from hyper_parallel._caches import register
from hyper_parallel._lazy import names_from_elsewhere
from hyper_parallel.core.dtensor.deferred_gradients import deferral_hook
from hyper_parallel.core.dtensor.events import watchers
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh, get_current_mesh
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard, own_placements
from hyper_parallel.core.dtensor.redistribute import gathered_view, redistribute, redistribute_in_dtypes
from hyper_parallel.core.dtensor.transition import dual, plan_gradient, plan_transition
from hyper_parallel.errors import (
    ArgumentTypeError,
    LayoutError,
    MeshError,
    MeshMismatchError,
    PlacementError,
    ShardMismatchError,
)
from hyper_parallel.platform.select import framework_of, platform_named, platform_of, platform_of_argument

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.events import Cause
    from hyper_parallel.platform.contract.platform import Platform

__all__ = [
    "SUMMED_OPERANDS",
    "DTensor",
    "require_dense",
    "resolve_mesh",
    "takes_no_part",
    "to_local",
    "varying_axes",
    "without_elements",
]

SUMMED_OPERANDS: ContextVar[Mapping[int, tuple[str, DeviceMesh, tuple[int, ...]]] | None] = ContextVar(
    "hyper_parallel_summed_operands", default=None
)
"""For the innermost running ``local_map``, by ``id`` of a local tensor: the operand's name, and the mesh axes over
which its gradient is summed after the function's backward.
"""

if TYPE_CHECKING:
    # At run time it is also a tensor of one framework, with that framework's methods, and is accepted by its functions.
    from hyper_parallel.core.dtensor.typed_operators import TypedOperators as _FrameworkTensor
else:
    _FrameworkTensor = object


class DTensor(_FrameworkTensor):
    """A tensor that is distributed over the ranks of a mesh.

    Shards are assumed to be even; for uneven shards use :meth:`from_local` with ``shape``.

    Args:
        local: this rank's local tensor, a plain tensor of either framework.
        device_mesh: the mesh.
        placements: one placement per axis, or one alias per dim.

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
    _is_callers_leaf = False  # the local tensor is a leaf that was passed to ``from_local``
    _is_bypassed = False  # the gradient bypasses this tensor and goes to the one it was redistributed from

    def __new__(cls, local: Any, device_mesh: DeviceMesh, placements: Any) -> Any:
        """Return a DTensor of the framework that ``local`` belongs to."""
        return cls.from_local(local, device_mesh, placements)

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: ``__new__`` has set all attributes."""

    # -- conversion ----------------------------------------------------------------------------------------------

    @staticmethod
    def from_local(
        local: Any,
        device_mesh: DeviceMesh | None = None,
        placements: Any = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Any] | None = None,
    ) -> DTensor:
        """Return a DTensor with the local tensor ``local`` on this rank.

        ``local`` receives its gradient in the dual layout, unless ``grad_placements`` are given. On a rank outside
        of the mesh the result has no elements of ``local``, which determines shape and dtype and receives a gradient of
        zeros.

        Args:
            local: this rank's local tensor.
            device_mesh: the mesh, by default the current one.
            placements: placements or aliases; all Replicate by default.
            run_check: compare shapes, dtypes and requires_grad of all ranks, and copy the first replica's values to the
                ranks that should hold equal ones, as PyTorch does (communicates).
            shape: global shape; without it, shards are assumed to be even.
            stride: ignored; accepted as in PyTorch's signature.
            grad_placements: placements of the gradient that ``local`` receives. Along an axis on which the tensor is
                Replicate or Partial(sum) it may be Partial(sum): the ranks' gradients then add up to the true one.

        Raises:
            LayoutError: the placements do not match the mesh or the tensor, the gradient cannot have
                ``grad_placements``, or ``local`` is an operand of a ``local_map`` that would sum its gradient although
                it is complete.
            MeshMismatchError: the placements are a layout of another mesh, or ``local`` is on another type of device.
            ArgumentTypeError: ``local`` is a DTensor, or sparse.
            ShardMismatchError: ``local`` does not have this rank's local shape, or ranks disagree.
            MeshLookupError: on MindSpore, this rank is not in the mesh.
        """
        del stride
        summed = SUMMED_OPERANDS.get()
        if summed is not None and id(local) in summed and grad_placements is None:
            _require_partial_gradient(summed[id(local)], resolve_mesh(device_mesh), placements, tuple(local.shape))
        special = run_check or shape is not None or grad_placements is not None
        key = None if special else _even_key(local, device_mesh, placements)
        even = _EVEN.get(key)
        if even is not None and even[0].is_dense(local):
            return _wrap_callers(local, *even)
        mesh = resolve_mesh(device_mesh)
        if isinstance(local, DTensor):
            msg = f"from_local: local must be a plain tensor, got {local!r}"
            raise ArgumentTypeError(msg)
        platform = require_dense(local, "from_local: local")
        _require_device(platform, local, mesh)
        layout, local_shape = _layout_from_local(mesh, placements, shape, tuple(local.shape)), tuple(local.shape)
        if takes_no_part(platform, mesh):
            return without_elements(local, platform, layout, "from_local: local", known=shape is not None)
        if run_check:
            _check_ranks(platform, local, layout)
            local = _first_replica(platform, local, layout)
        if layout.local_shape != local_shape:
            msg = (
                f"from_local: rank {layout.mesh.rank} holds {list(layout.local_shape)} of {layout.notation()}, "
                f"but local has {list(local_shape)}"
            )
            raise ShardMismatchError(msg)
        if grad_placements is not None:
            local = _reducing_gradient(local, platform, layout, grad_placements)
        elif key is not None:
            _remember_even(key, (platform, layout))
        return _wrap_callers(local, platform, layout)

    @staticmethod
    def from_torch(tensor: Any) -> DTensor:
        """Return PyTorch's own ``torch.distributed.tensor.DTensor`` as a DTensor of this library, on the same graph.

        Raises:
            ArgumentTypeError: (a TypeError) ``tensor`` is not such a DTensor.
            UnsupportedOperatorError: it has a placement that only PyTorch has.
        """
        return platform_of(tensor).from_torch(tensor)  # type: ignore[no-any-return]

    def to_local(self, grad_placements: Sequence[Any] | None = None) -> Any:
        """Return this rank's local tensor, on the graph.

        Args:
            grad_placements: placements of the gradient that the code after this call produces; by default those of
                the dual layout. Give ``[Partial()]`` for a replicated axis along which that code differs between ranks.

        Raises:
            LayoutError: a gradient placement that this layout cannot have.
        """
        if grad_placements is None:
            self._origin = None  # the local tensor may be hooked, so from now on every gradient has to go through it
            return self._local
        axes = varying_axes(self._layout, grad_placements, "to_local")
        return self._local if self._layout.mesh.coordinate is None else self.local_for(self._layout, axes)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Any = None,
        *,
        async_op: bool = False,
        forward_dtype: Any = None,
        backward_dtype: Any = None,
    ) -> DTensor:
        """Return the same tensor in another layout; the tensor itself if layout and dtype are equal.

        Args:
            device_mesh: must be this tensor's mesh, if given.
            placements: placements or aliases; all Replicate by default.
            async_op: accepted, without effect; the result is always complete.
            forward_dtype: floating dtype to which values are cast before they are communicated, and of the result;
                by default the dtype of the tensor.
            backward_dtype: floating dtype in which the gradient is communicated, before it is cast to the dtype of the
                tensor; by default that dtype, whatever ``forward_dtype`` is.

        Raises:
            LayoutError: the placements do not fit the mesh or the tensor.
            MeshMismatchError: the tensor, or the layout given as placements, is on another mesh.
            UnsupportedOperatorError: dtypes for a tensor that is not floating, or for a reduction that is not a sum.
        """
        del async_op
        layout = self._layout
        if device_mesh is not None and device_mesh is not layout.mesh:
            msg = f"redistribute: the tensor is on {layout.mesh!r}, not on {device_mesh!r}"
            raise MeshMismatchError(msg)
        if placements is None:
            placements = [Replicate()] * layout.mesh.ndim
        target = Layout.place(layout.mesh, placements, layout.shape)  # type: ignore[arg-type]
        if forward_dtype is None and backward_dtype is None:
            return self.redistribute_to(target)
        platform, transition = self._platform, plan_transition(layout, target)
        local = redistribute_in_dtypes(self._local, transition, platform, forward_dtype, backward_dtype)
        return self if local is self._local and target is layout else platform.wrap(local, target)

    def redistribute_to(self, target: Layout, cause: Cause | None = None) -> DTensor:
        """Return the same tensor in the layout ``target``; ``cause`` is for the event log."""
        if target is self._layout:
            return self
        platform, local = self._platform, self._local
        transition = plan_transition(self._layout, target)
        result: DTensor = platform.wrap(redistribute(local, transition, platform, cause), target)
        if transition.gathered and platform.needs_grad(local) and platform.grad_enabled():
            result._origin = (local, (platform.version(local), platform.version(result._local)), transition)
        return result

    def full_tensor(self, grad_placements: Sequence[Any] | None = None) -> Any:
        """Return the global tensor, as a plain tensor on every rank of the mesh.

        Args:
            grad_placements: as for :meth:`to_local`.

        Raises:
            MeshLookupError: this rank is not in the mesh, so it holds no values.
        """
        self._layout.mesh.own_coordinate()
        return self.redistribute().to_local(grad_placements)

    def reduce_partial(self) -> DTensor:
        """Return the same tensor with its partial values reduced."""
        layout = self._layout
        return self.redistribute_to(Layout.of(layout.mesh, layout.dim_axes, (), layout.shape))

    # -- used by dispatch ------------------------------------------------------------------------------------------

    def local_for(self, target: Layout, varying: tuple[int, ...], cause: Cause | None = None) -> Any:
        """Return the local tensor in the layout ``target``, for a consumer that differs along the axes ``varying``.

        The result is kept while this tensor lives, so that several consumers share one collective in backward.

        Args:
            target: layout that the consumer needs.
            varying: mesh axes, replicated in ``target``, along which the consumer's other operands
                differ between ranks.
            cause: operator and argument, for the event log.

        Raises:
            MeshLookupError: this rank is not in the mesh, so it has nothing to compute with.
        """
        platform, local = self._platform, self._local
        if self._layout.mesh.coordinate is None:
            self._layout.mesh.own_coordinate()
        if not (platform.grad_enabled() and platform.needs_grad(local)):
            return (
                local
                if target is self._layout
                else redistribute(local, plan_transition(self._layout, target), platform, cause)
            )
        key, views = (target, varying), self._views
        # The node of a view notifies the watchers that were active when it was made.
        view = None if views is None else views.get(key)
        if view is not None and view[0] == platform.version(local) and view[2] is watchers():
            return view[1]
        return self.new_view(target, varying, cause)

    def new_view(self, target: Layout, varying: tuple[int, ...], cause: Cause | None) -> Any:
        """Make and keep the view that :meth:`local_for` returns for a tensor whose gradient is recorded."""
        platform, local = self._platform, self._local
        if not platform.may_cache_view(self):
            return self._view(target, varying, cause, None)
        # A view of a leaf keeps no graph alive, so later forwards reuse it.
        outlives_backward = target is self._layout and not platform.passes_gradient(local)
        key = (target, varying)
        view = self._view(target, varying, cause, None if outlives_backward else _DropView(self, key))
        if self._views is None:
            self._views = {}
        self._views[key] = (platform.version(local), view, watchers())
        return view

    def _view(
        self, target: Layout, varying: tuple[int, ...], cause: Cause | None, on_backward: _DropView | None
    ) -> Any:
        if self._origin is not None and target is self._layout:
            source, versions, transition = self._origin
            version = self._platform.version
            # If either tensor has been written to since, its autograd node is no longer that of the redistribution.
            if versions == (version(source), version(self._local)) and transition.gathers_along(varying):
                self._is_bypassed = True
                return gathered_view(source, self._local, transition, varying, self._platform, on_backward)
        defer = deferral_hook(self, varying, cause) if target is self._layout else None
        return redistribute(
            self._local, plan_transition(self._layout, target, varying), self._platform, cause, on_backward, defer
        )

    def leave_leaf(self) -> None:
        """Stop being the leaf tensor that was passed to ``from_local``, before a write in place.

        The tensor becomes a view of the leaf. It shares the leaf's storage, and the leaf still receives the gradient
        of its values from before the write.
        """
        platform, layout = self._platform, self._layout
        if platform.needs_grad(self._local) and platform.grad_enabled():
            self._is_callers_leaf = False
            transition = plan_transition(layout, layout)
            self._local = gathered_view(self._local, platform.detach(self._local), transition, (), platform)

    def drop_views(self) -> None:
        """Drop the views that were derived from the values, which are about to change."""
        self._views = None
        self._origin = None
        self._is_bypassed = False

    # -- properties ------------------------------------------------------------------------------------------------

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
        """Shape of this rank's local tensor."""
        return self._layout.local_shape


# Platforms and layouts of even shards, by the arguments of ``from_local`` that they depend on.
_EVEN: dict[tuple[Any, ...] | None, tuple[Platform, Layout]] = {}
_MAX_EVEN = 16384
_LOCK = threading.Lock()
register("even shards of from_local", _EVEN, lambda: _MAX_EVEN, has_layouts=True)


def _even_key(local: Any, mesh: Any, placements: Any) -> tuple[Any, ...] | None:
    """Cache key of the layout of even shards; None if an argument cannot be hashed."""
    if type(mesh) is not DeviceMesh or type(placements) not in _LISTS:
        return None
    if not _HASHABLE.issuperset(map(type, placements)):
        return None
    on_accelerator = "" if mesh.device_type == "cpu" else str(getattr(local, "device", ""))
    return (type(local), mesh, on_accelerator, tuple(placements), tuple(getattr(local, "shape", ())))


def _remember_even(key: tuple[Any, ...], even: tuple[Platform, Layout]) -> None:
    with _LOCK:
        if len(_EVEN) >= _MAX_EVEN:  # shapes and meshes that never recur must not fill the memory
            _EVEN.clear()
        _EVEN[key] = even


_LISTS = frozenset({list, tuple})
_HASHABLE = frozenset({Shard, Replicate, Partial, str})


def _reducing_gradient(local: Any, platform: Platform, layout: Layout, grad_placements: Sequence[Any]) -> Any:
    """Return ``local``, which receives its gradient in ``grad_placements``; detached if no gradient is recorded.

    Otherwise a leaf that is used later would receive the gradient in the dual layout.
    """
    partial = varying_axes(layout, grad_placements, "from_local", sums=True)
    if not partial or not platform.needs_grad(local):
        return local
    if not platform.grad_enabled():
        return platform.detach(local)
    return redistribute(local, plan_gradient(layout, dual(layout, partial)), platform)


def _wrap_callers(local: Any, platform: Platform, layout: Layout) -> DTensor:
    """Wrap a local tensor that the caller keeps, so that a write to the DTensor does not change the caller's leaf."""
    tensor: DTensor = platform.wrap(local, layout)
    if not platform.loses_writes_through_views and platform.needs_grad(local) and not platform.passes_gradient(local):
        tensor._is_callers_leaf = True
    return tensor


def to_local(value: Any) -> Any:
    """Return the local tensor of a DTensor, and other values unchanged."""
    return value.to_local() if isinstance(value, DTensor) else value


def takes_no_part(platform: Platform, mesh: DeviceMesh) -> bool:
    """Return True on a rank outside of ``mesh``, where tensors hold nothing.

    Raises:
        MeshLookupError: the framework cannot infer the dtypes of results without computing them.
    """
    if mesh.coordinate is not None:
        return False
    if not platform.computes_on_meta:
        mesh.own_coordinate()
    return True


def without_elements(local: Any, platform: Platform, layout: Layout, what: str, *, known: bool) -> DTensor:
    """Return the DTensor of a rank outside of the mesh: it has no element of ``local``, but is on its graph.

    Args:
        local: a plain tensor.
        platform: the framework of ``local``.
        layout: the layout of the result.
        what: start of the message.
        known: whether the program has given the global shape.

    Raises:
        ShardMismatchError: ``local`` is empty and the global shape is not known.
    """
    if not known and 0 in local.shape:
        mesh = layout.mesh
        msg = (
            f"{what} is empty, {list(local.shape)}, on rank {mesh.rank}, which is not in {mesh!r}; its shape does not "
            "determine the global shape; pass shape= to from_local, or keep the DTensor (use_local_output=False in a "
            "style)"
        )
        raise ShardMismatchError(msg)
    none = platform.reshape(platform.reshape(local, (-1,))[:0], layout.local_shape)
    return platform.wrap(none, layout)  # type: ignore[no-any-return]


def _require_partial_gradient(
    summed: tuple[str, DeviceMesh, tuple[int, ...]], mesh: DeviceMesh, placements: Any, shape: tuple[int, ...]
) -> None:
    """Raise a PlacementError if an operand of ``local_map`` becomes a DTensor whose gradient would be summed twice."""
    name, own, axes = summed
    layout = _layout_from_local(mesh, placements, None, shape)
    again = [axis for axis in axes if mesh is own and layout.placement_on(axis).is_replicate()]
    if again:
        over = own.names[again[0]] if own.names else again[0]
        msg = (
            f"from_local: {name} is replicated over {over}, so its gradient is complete, and local_map would sum it "
            f"over {over} once more; give {name} the entry {[Replicate()] * own.ndim} in in_grad_placements"
        )
        raise PlacementError(msg)


def _layout_from_local(
    mesh: DeviceMesh, placements: Any, shape: Sequence[int] | None, local_shape: tuple[int, ...]
) -> Layout:
    """Return the layout of the result of :meth:`DTensor.from_local`; shards are even if ``shape`` is None."""
    if placements is None:
        placements = [Replicate()] * mesh.ndim
    layout = Layout.place(mesh, placements, (0,) * len(local_shape) if shape is None else _checked_shape(shape))
    if len(layout.dim_axes) != len(local_shape):
        msg = (
            f"from_local: shape {list(shape or ())} has {layout.ndim} dims, "
            f"local {list(local_shape)} has {len(local_shape)}"
        )
        raise ShardMismatchError(msg)
    if shape is not None:
        return layout
    return layout.with_shape(layout.with_shape(None).get_global_shape(local_shape))


class _DropView:
    """Drops a kept view once its gradient arrives, since the graph that needed it is freed then."""

    __slots__ = ("key", "tensor")

    def __init__(self, tensor: DTensor, key: Any) -> None:
        self.tensor, self.key = ref(tensor), key

    def __call__(self) -> None:
        tensor = self.tensor()
        if tensor is not None and tensor._views is not None:
            tensor._views.pop(self.key, None)


def resolve_mesh(device_mesh: DeviceMesh | None) -> DeviceMesh:
    """Return ``device_mesh``, or the current mesh if it is None.

    Raises:
        MeshError: (a ValueError) no mesh is given and there is no current mesh.
        ArgumentTypeError: (a TypeError) ``device_mesh`` is not a DeviceMesh.
    """
    mesh = device_mesh if device_mesh is not None else get_current_mesh()
    if mesh is None:
        msg = "device_mesh: none was given and there is no current mesh; pass one, or use 'with mesh:'"
        raise MeshError(msg)
    untyped: object = mesh  # callers may not be type-checked
    if not isinstance(untyped, DeviceMesh) and (framework := framework_of(untyped)):
        untyped = platform_named(framework).own_mesh(untyped)
    if not isinstance(untyped, DeviceMesh):
        msg = f"device_mesh must be a DeviceMesh, got {type(untyped).__name__}; init_device_mesh makes one"
        raise ArgumentTypeError(msg)
    return untyped


def varying_axes(layout: Layout, grad_placements: Sequence[Any], where: str, *, sums: bool = False) -> tuple[int, ...]:
    """Return the axes along which the gradient of a replicated tensor is Partial.

    Args:
        layout: the tensor's layout.
        grad_placements: placements of the gradient, one per axis.
        where: start of the message.
        sums: whether the gradient may be Partial along axes on which the tensor is Partial(sum).

    Raises:
        PlacementError: there is not one placement per axis.
        LayoutError: a placement that is neither the dual nor an allowed Partial(sum).
    """
    grad_placements = own_placements(tuple(grad_placements))
    if len(grad_placements) != layout.mesh.ndim:
        msg = (
            f"{where}: {len(grad_placements)} grad_placements given for the {layout.mesh.ndim} axes {layout.mesh.names}"
        )
        raise PlacementError(msg)
    varying = []
    for axis, placement in enumerate(grad_placements):
        own = layout.placement_on(axis)
        grad = Shard(placement.dim % max(layout.ndim, 1)) if isinstance(placement, Shard) else placement
        may_be_partial = own == Replicate() or (sums and own == Partial())
        if may_be_partial and grad == Partial():
            varying.append(axis)
        elif grad != (own if isinstance(own, Shard) else Replicate()):
            unsharded = "Replicate() or Partial(sum)" if may_be_partial else "Replicate()"
            allowed = repr(own) if isinstance(own, Shard) else unsharded
            msg = (
                f"{where}: on axis {layout.mesh.names[axis]} the tensor is {own!r}; its gradient can be {allowed}, "
                f"not {grad!r}"
            )
            raise LayoutError(msg)
    return tuple(varying)


def require_dense(tensor: Any, what: str) -> Platform:
    """Return the platform of ``tensor``, which must have dense storage.

    Raises:
        ArgumentTypeError: (a TypeError) ``tensor`` is sparse or not a tensor; ``what`` starts the message.
    """
    platform = platform_of_argument(tensor, what)
    if not platform.is_dense(tensor):
        msg = f"{what} has sparse storage, which cannot be sharded; use tensor.to_dense()"
        raise ArgumentTypeError(msg)
    return platform


def _require_device(platform: Platform, local: Any, mesh: DeviceMesh) -> None:
    """Check that a plain tensor is on the device type of its mesh.

    Raises:
        MeshMismatchError: the tensor is on another device type.
    """
    device = platform.differing_device(local, mesh.device_type)
    if device:
        fix = f'move it there with local.to("{mesh.device_type}")'
        msg = f"from_local: local is on {device}, but the mesh is {mesh!r}; {fix}, or make the mesh for {device}"
        raise MeshMismatchError(msg)


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    try:
        sizes = tuple(index(size) for size in shape)
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes):
        msg = f"from_local: shape must give an int per dim, none negative, got {shape!r}"
        raise LayoutError(msg)
    return sizes


def _check_ranks(platform: Platform, local: Any, layout: Layout) -> None:
    """Check that the local tensors of all ranks agree on dtype and requires_grad and have the shapes of ``layout``."""
    mesh = layout.mesh
    own = (tuple(local.shape), str(local.dtype), platform.needs_grad(local))
    gathered = dict(zip(mesh.ranks, platform.transport().all_gather_object(own, mesh.ranks), strict=True))
    facts = ", ".join(f"rank {rank}: {list(shape)} {dtype}" for rank, (shape, dtype, _) in gathered.items())
    if len({dtype for _, dtype, _ in gathered.values()}) > 1:
        msg = f"from_local: ranks hold different dtypes ({facts})"
        raise ShardMismatchError(msg)
    needing = [rank for rank, (_, _, needs_grad) in gathered.items() if needs_grad]
    if needing and len(needing) < len(gathered):
        msg = (
            f"from_local: local requires grad on ranks {needing} of {list(gathered)} only, so backward would wait for "
            "the others; call local.requires_grad_() on every rank, or on none"
        )
        raise ShardMismatchError(msg)
    for rank, (shape, _, _) in gathered.items():
        expected = layout.local_shape_at(mesh.coordinate_of(rank))
        if shape != expected:
            msg = (
                f"from_local: the local tensors do not make one tensor of {list(layout.shape or ())} under "
                f"{layout.placements}: rank {rank} should hold {list(expected)} ({facts}); pass shape=, the global "
                "shape"
            )
            raise ShardMismatchError(msg)


def _first_replica(platform: Platform, local: Any, layout: Layout) -> Any:
    """Return the values of the first of the ranks that should hold equal values; ``local`` itself if all are equal."""
    mesh = layout.mesh
    used = {axis for axes in layout.dim_axes for axis in axes} | {axis for axis, _ in layout.partials}
    axes = tuple(axis for axis in range(mesh.ndim) if axis not in used and mesh.shape[axis] > 1)
    if not axes:
        return local
    ranks, transport = mesh.ranks_along(axes), platform.transport()
    own = platform.contiguous(platform.detach(local))
    first = transport.broadcast(own, ranks[0], ranks)
    agrees = platform.tensor_to_numpy(own).tobytes() == platform.tensor_to_numpy(first).tobytes()
    if all(transport.all_gather_object(agrees, mesh.ranks)):
        return local
    return gathered_view(local, first, plan_transition(layout, layout), (), platform)


if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept every misspelt name
    __getattr__ = names_from_elsewhere(__name__)
