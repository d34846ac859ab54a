"""The DTensor of PyTorch: a wrapper subclass whose autograd lives on its local tensor.

The wrapper carries global shape, dtype and device for PyTorch's own code, but no storage; it never requires grad
itself. Reading ``requires_grad``, ``grad`` or ``is_leaf`` reads the local tensor.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hyper_parallel.core.dtensor.deferred_gradients import (
    DeferredGradient,
    add_deferred,
    check_step_gradient,
    clear_deferred,
    get_deferred,
    set_deferred,
)
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout, rebuilt_by
from hyper_parallel.core.dtensor.moved_view import MovedView, follow
from hyper_parallel.core.dtensor.skip_dispatch import open_blocks, skipped
from hyper_parallel.core.dtensor.transition import dual
from hyper_parallel.errors import LayoutError, MixedTensorError, UnsupportedOperatorError
from hyper_parallel.platform.torch import intercept, persistence
from hyper_parallel.platform.torch.compiled import end_graph_at
from hyper_parallel.platform.torch.graph_nodes import node_to_read
from hyper_parallel.platform.torch.ops.index import plain_entry
from hyper_parallel.platform.torch.shared_storage import UncountedWrites, check_source, check_unfollowed
from hyper_parallel.platform.torch.tensors import global_strides
from hyper_parallel.platform.torch.versions import (
    DisableTorchFunctionSubclass,
    len_dispatch_stack,
    make_wrapper,
    peek_interpreter_stack,
)

__all__ = ["STORAGE_FORMAT", "TorchDTensor", "wrap"]


class TorchDTensor(DTensor, Tensor):
    """A DTensor that is a ``torch.Tensor``."""

    # The attributes that PyTorch's fast constructor sets; ``_layout`` and ``_local`` are aliases of these slots.
    __slots__ = ("_local_tensor", "_spec")

    _platform = None  # type: ignore[assignment] # set by install()
    _dispatch: Any = None
    _views = None
    _origin = None
    _readonly: str | None = None
    _grad_kept: tuple[Any, Any] | None = None
    _data_taken = False
    _uncounted: UncountedWrites | None = None

    def __new__(cls, local: Any, device_mesh: Any, placements: Any) -> Any:
        """Create a DTensor from a local tensor."""
        return DTensor.from_local(local, device_mesh, placements)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Function-level interception; a call without a rule here falls through to operator level."""
        entry = _ENTRIES.get(func)
        if entry is not None and (not kwargs or "out" not in kwargs):
            return cls._dispatch(entry, args, kwargs or _NO_KWARGS)
        if func in _FACTS and len(args) == 1 and not kwargs:
            return func(args[0]._local)
        return intercept.function(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # as PyTorch calls it
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Operator-level interception, below autograd's own keys."""
        return intercept.operator(func, types, args, kwargs or {})

    # -- sizes ---------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:  # type: ignore[override] # ours is read-only
        """Global sizes."""
        return torch.Size(self._layout.shape)  # type: ignore[arg-type]

    def size(self, dim: int | None = None) -> Any:
        """Global sizes, or one of them."""
        return self.shape if dim is None else self._layout.shape[dim]  # type: ignore[index]

    @property
    def ndim(self) -> int:  # type: ignore[override] # ours is read-only
        """Number of dims."""
        return len(self._layout.dim_axes)

    def dim(self) -> int:
        """Number of dims."""
        return len(self._layout.dim_axes)

    def numel(self) -> int:
        """Global number of elements."""
        return self.shape.numel()

    nelement = numel

    def __len__(self) -> int:
        """Global size of dim 0."""
        if not self._layout.shape:
            msg = "len() of a 0-d tensor (to make one tensor of several DTensors, call torch.stack)"
            raise TypeError(msg)
        return self._layout.shape[0]

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override] # ours is read-only
        """Element type."""
        return self._local.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override] # ours is read-only
        """The device of the local tensor."""
        return self._local.device

    @property
    def is_sparse(self) -> bool:  # type: ignore[override] # ours is read-only
        """Whether the local tensor is sparse; optimizers read this of every gradient."""
        return self._local.is_sparse

    def to_dense(self, *args: Any, **kwargs: Any) -> Any:
        """A sparse gradient as a dense tensor in the same layout; see ``torch.Tensor.to_dense``."""
        return wrap(self._local.to_dense(*args, **kwargs), self._layout)

    @property
    def is_leaf(self) -> bool:  # type: ignore[override] # ours is read-only
        """Whether the local tensor is a leaf."""
        return self._local.is_leaf

    @property
    def grad_fn(self) -> Any:  # type: ignore[override] # ours is read-only
        """The local tensor's node, read-only; register hooks on the tensor instead."""
        return node_to_read(self._local.grad_fn)

    @property
    def _version(self) -> int:  # type: ignore[override] # ours is read-only
        return self._local._version

    @property
    def requires_grad(self) -> bool:
        """True when the local tensor takes part in autograd."""
        return self._local.requires_grad

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        self._local.requires_grad_(flag)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Set ``requires_grad`` in place."""
        self._local.requires_grad_(requires_grad)
        return self

    @property
    def layout(self) -> Any:  # type: ignore[override] # ours is read-only, and no storage format
        """The layout, global shape included; for PyTorch's own Python code, the storage format of the local tensors."""
        return torch.strided if STORAGE_FORMAT.get() else self._layout

    # -- gradients -----------------------------------------------------------------------------------------------

    @property
    def grad(self) -> Any:
        """The gradient in the dual layout, already reduced unless ``defer_grad_reduce`` says otherwise.

        For Partial(avg), it is the gradient of each rank's value: that of the mean divided by the number of ranks.
        """
        local = self._local.grad
        deferred = get_deferred(self._local)
        if deferred is not None:
            return self._pending_grad(deferred, local)
        if local is None:
            self._grad_kept = None
            return None
        kept = self._grad_kept
        if kept is None or kept[0] is not local:
            if local.requires_grad and self._layout.partials:
                msg = (
                    f"grad of {self._layout.notation(self.dtype)} cannot be differentiated again; "
                    "use x = x.reduce_partial() in its place"
                )
                raise UnsupportedOperatorError(msg)
            kept = self._grad_kept = (local, wrap(local, dual(self._layout)))
        return kept[1]

    @grad.setter
    def grad(self, value: Any) -> None:
        local = None
        if value is not None:
            local = self._as_gradient(value, "grad")
            check_unfollowed("grad", value)
            if local is not value._local:
                value._readonly = "it was assigned to grad in another layout, which made a copy"
                invalidate_with(value, wrap(local, dual(self._layout)))
        clear_deferred(self._local)
        self._local.grad = local

    @grad.deleter
    def grad(self) -> None:
        clear_deferred(self._local)
        self._local.grad = None

    def _pending_grad(self, deferred: DeferredGradient, true: Tensor | None) -> Any:
        """The deferred gradient with the complete one added: one tensor, so that a write to it is not lost."""
        if true is not None:
            complete = DeferredGradient(dual(self._layout), true.detach(), None, "")
            deferred = add_deferred(deferred, complete, self._platform)  # type: ignore[arg-type] # it is set
            set_deferred(self._local, deferred)
            self._local.grad = None
        kept = self._grad_kept
        if kept is None or kept[0] is not deferred.partial_value:
            kept = self._grad_kept = (deferred.partial_value, wrap(deferred.partial_value, deferred.layout))
        return kept[1]

    def _as_gradient(self, value: Any, what: str) -> Tensor:
        layout = dual(self._layout)
        if type(value) is TorchDTensor and value._layout is layout and not value.requires_grad:
            return value._local
        if not isinstance(value, TorchDTensor):
            msg = f"{what} of a DTensor must be a DTensor, got {type(value).__name__}"
            raise MixedTensorError(msg)
        if value.shape != self.shape:
            msg = f"{what} has shape {list(value.shape)}, the tensor has {list(self.shape)}"
            raise LayoutError(msg)
        # Each rank's term gets the same gradient. If that requires a gradient, its gradient is the sum over ranks.
        pending = tuple(axis for axis, _ in self._layout.partials)
        local: Tensor = value.local_for(layout, pending if value.requires_grad else ())
        return local

    def backward(
        self,
        gradient: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Sequence[Any] | None = None,
    ) -> None:
        """Backpropagate; a scalar is seeded with 1, and gradients are never scaled by the mesh size."""
        if inputs is not None:
            torch.autograd.backward(self, gradient, retain_graph=retain_graph, create_graph=create_graph, inputs=inputs)
            return
        root, seed = self._root(gradient, "backward")
        torch.autograd.backward(root, seed, retain_graph=retain_graph, create_graph=create_graph)

    def _root(self, gradient: Any, what: str) -> tuple[Tensor, Tensor]:
        """The local tensor at which backward starts, and its cotangent."""
        if gradient is None and self.numel() != 1:
            layout = self._layout.notation(self.dtype)
            msg = f"{what}: grad can be implicitly created only for scalar outputs, not for {layout}"
            raise RuntimeError(msg)
        if gradient is not None and not self._layout.partials:
            return self._local, self._as_gradient(gradient, f"{what}: gradient")
        if any(op not in {"sum", "avg"} for _, op in self._layout.partials):
            with torch.enable_grad():
                return self.reduce_partial()._root(gradient, what)  # noqa: SLF001 - of its own class
        seed = torch.ones_like(self._local) if gradient is None else self._as_gradient(gradient, f"{what}: gradient")
        averaged = math.prod(self._layout.mesh.shape[axis] for axis, op in self._layout.partials if op == "avg")
        return self._local, seed if averaged == 1 else seed / averaged

    def _watched(self, what: str) -> Tensor:
        """The local tensor, after a check that every gradient of this tensor goes through it."""
        if self._is_bypassed:
            msg = (
                f"{what}: {self._layout.notation(self.dtype)} was redistributed and used already, and its gradient "
                "goes straight to what it was redistributed from; use x.clone() in its place, or register hooks first"
            )
            raise UnsupportedOperatorError(msg)
        self._origin = None
        return self._local

    def retain_grad(self) -> None:
        """Keep the gradient of a non-leaf."""
        self._watched("retain_grad").retain_grad()

    def register_hook(self, hook: Callable[[Any], Any]) -> Any:
        """``hook(grad)`` gets and may replace the gradient, as a DTensor in the dual layout."""
        layout = dual(self._layout)

        def on_local(grad: Tensor) -> Tensor | None:
            result = hook(wrap(grad, layout))
            return None if result is None else self._as_gradient(result, "gradient returned by a hook")

        return self._watched("register_hook").register_hook(on_local)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> Any:
        """``hook(tensor)`` after a leaf's gradient was accumulated."""
        return self._local.register_post_accumulate_grad_hook(lambda _: hook(self))

    def detach(self) -> Any:
        """Return a DTensor with the same storage, off the graph."""
        if open_blocks() and skipped(Tensor.detach, "detach"):
            return self._local.detach()
        return self._alias(self._local.detach())

    def detach_(self) -> Any:
        """Take the tensor itself off the graph; its values stay.

        Raises:
            RuntimeError: PyTorch's own, for a view.
        """
        self._local.detach_()
        self.drop_views()
        self._grad_kept = None
        clear_deferred(self._local)
        return self

    def stride(self, dim: int | None = None) -> Any:
        """Strides of the global tensor if it was stored in the order of dims of the local tensor."""
        strides = global_strides(self._local, self._layout.shape)  # type: ignore[arg-type] # of a tensor it is known
        return strides if dim is None else strides[dim]

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        """Whether :meth:`stride` is that of ``memory_format``; the local tensor may still have gaps."""
        return torch.empty_strided(self.shape, self.stride(), device="meta").is_contiguous(memory_format=memory_format)

    def drop_views(self) -> None:
        """See :meth:`DTensor.drop_views`; a tensor made in inference mode counts its writes here."""
        super().drop_views()
        if self._local.is_inference():
            self._uncounted_writes().note_write()

    def _alias(self, local: Tensor) -> Any:
        """Another tensor of the same storage, read-only where this one is."""
        alias = wrap(local, self._layout)
        alias._uncounted = self._uncounted or self._uncounted_writes()  # noqa: SLF001 - of its own class
        if self._readonly is not None:
            alias._readonly = self._readonly
        return alias

    @property
    def data(self) -> Any:
        """A DTensor with the same storage, off the graph; writes to it do not change the version counter."""
        self.drop_views()
        self._data_taken = True
        return self._alias(self._uncounted_writes().through(self._local))

    @data.setter
    def data(self, value: Any) -> None:
        writes = self._share(value, "data")
        self._local.data = value._local
        writes.share_with(self._local)
        with DisableTorchFunctionSubclass():  # documented in PyTorch's extending guide
            Tensor.data.__set__(self, value)  # type: ignore[attr-defined] # dtype and device of the wrapper

    def set_(self, source: Any = None, *others: Any, **named: Any) -> Any:
        """Take the storage of ``source``, which must be laid out like this tensor.

        Raises:
            LayoutError: (a ValueError) ``source`` has a different layout.
            UnsupportedOperatorError: sizes or strides are given, or ``source`` is a copy of a part of another tensor.
        """
        if others or named:
            msg = "set_() of a DTensor takes another DTensor, and no storage, sizes or strides"
            raise UnsupportedOperatorError(msg)
        writes = self._share(source, "the source of set_()")
        self._local.set_(source._local)
        writes.share_with(self._local)
        return self

    def _share(self, source: Any, what: str) -> UncountedWrites:
        """Prepare to take the storage of ``source``; return the counter of the writes to it."""
        check_source(what, self, source)
        self.drop_views()
        writes: UncountedWrites = source._uncounted_writes()  # noqa: SLF001 - of its own class
        writes.share_with(source._local)
        self._uncounted = writes
        return writes

    def _uncounted_writes(self) -> UncountedWrites:
        """The counter of uncounted writes that this tensor shares with its aliases."""
        if self._uncounted is None:
            self._uncounted = UncountedWrites.of(self._local)
        return self._uncounted

    def data_ptr(self) -> int:
        """Address of the local storage, which identifies tied tensors."""
        return self._local.data_ptr()

    def __create_write_items__(self, fqn: str, _value: Any) -> list[Any]:
        """The items that ``torch.distributed.checkpoint`` writes on this rank."""
        return persistence.write_items(self, fqn)

    def __create_chunk_list__(self) -> list[Any]:
        """The chunks that ``torch.distributed.checkpoint`` reads on this rank."""
        return persistence.chunks(self)

    def __get_tensor_shard__(self, _index: Any) -> Tensor:
        """The tensor that ``torch.distributed.checkpoint`` reads into, or from."""
        return self.detach().to_local()

    def to_torch(self) -> Any:
        """Return this tensor as a ``torch.distributed.tensor.DTensor`` with the same storage and graph.

        Raises:
            UnsupportedOnBackend: ``torch.distributed`` is not initialised.
            UnsupportedOperatorError: a layout that PyTorch's DTensor does not have.
        """
        from hyper_parallel.platform.torch.interop import to_torch

        return to_torch(self)

    def to_local(self, grad_placements: Sequence[Any] | None = None) -> Any:
        """See :meth:`DTensor.to_local`; that of a leaf may be written by ``.data``, without its version counter."""
        if self._local.is_leaf:
            self._data_taken = True
            self._views = None
        return super().to_local(grad_placements)

    def share_memory_(self) -> Any:
        """Refused: the storage is that of this rank's shard."""
        raise UnsupportedOperatorError(
            "share_memory_() of a DTensor: call x.to_local().share_memory_() for the local tensor"
        )

    def apply_(self, callable: Any) -> Any:  # noqa: A002 - PyTorch's name
        """Raise: it would act on this rank's shard only."""
        del callable
        raise UnsupportedOperatorError("apply_() of a DTensor: call x.to_local().apply_(...) for the local tensor")

    @property
    def __tensor_flatten__(self) -> Any:
        """Not provided: a compiler, which looks it up on every tensor, breaks its graph here.

        Raises:
            Unsupported: PyTorch's own exception, if a graph is being traced.
        """
        end_graph_at(self._layout.notation(self.dtype))
        raise AttributeError("__tensor_flatten__")

    # -- leaving the device mesh ---------------------------------------------------------------------------------

    def item(self) -> Any:
        """The only element, as a Python number; partial values are reduced first."""
        return self.full_tensor().item()

    def tolist(self) -> Any:
        """Nested lists of the complete tensor."""
        return self.full_tensor().tolist()

    def __bool__(self) -> bool:
        """Truth of a one-element tensor."""
        return bool(self.full_tensor())

    def __float__(self) -> float:
        """Value of a one-element tensor."""
        return float(self.full_tensor())

    def __int__(self) -> int:
        """Value of a one-element tensor."""
        return int(self.full_tensor())

    def __index__(self) -> int:
        """Value of a one-element integer tensor."""
        return self.full_tensor().__index__()

    def numpy(self, *, force: bool = False) -> Any:
        """Refused: it could mean the global or the local values."""
        del force
        msg = "numpy() of a DTensor: call x.full_tensor().numpy(), or x.to_local().numpy() for the local shard"
        raise UnsupportedOperatorError(msg)

    def __array__(self, dtype: Any = None, *, copy: bool | None = None) -> Any:
        """Refused, as :meth:`numpy`."""
        del dtype, copy
        return self.numpy()

    # -- object --------------------------------------------------------------------------------------------------

    __hash__ = object.__hash__  # identity, as tensors do

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # PyTorch's annotation is garbled
        """The notation of the layout, and this rank's values."""
        del tensor_contents
        return f"DTensor({self._layout.notation(self.dtype)} on {self._layout.mesh!r}, local={self._local!r})"

    def __format__(self, spec: str) -> str:
        """Format a 0-d tensor as a number, others as objects."""
        return format(self.item(), spec) if not self._layout.shape else object.__format__(self, spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a leaf with its own storage; as in PyTorch, a parameter's gradient is not copied."""
        if id(self) in memo:
            return memo[id(self)]
        local = self._leaf() if isinstance(self, torch.nn.Parameter) else self._local
        copied = _rebuild(copy.deepcopy(local, memo), self._layout, copy.deepcopy(self._extras(), memo))
        copied._readonly = None
        memo[id(self)] = copied
        return copied

    def _extras(self) -> dict[str, Any]:
        """Attributes that were attached to the object, ``_is_param`` included."""
        return {name: value for name, value in vars(self).items() if name not in _OWN}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the local tensor and the layout; gradients are not pickled."""
        del protocol
        return (_rebuild, (self._leaf(), self._layout, self._extras()))

    def _leaf(self) -> Tensor:
        """The local tensor's values as a new leaf, without gradient."""
        return self._local.detach().requires_grad_(self._local.requires_grad)


TorchDTensor._layout = TorchDTensor.__dict__["_spec"]
TorchDTensor._local = TorchDTensor.__dict__["_local_tensor"]
_local_of: Callable[[Any], Any] = TorchDTensor.__dict__["_local_tensor"].__get__
_layout_of: Callable[[Any], Any] = TorchDTensor.__dict__["_spec"].__get__

# True inside functions of PyTorch that skip __torch_function__ and read ``layout`` as the storage format.
STORAGE_FORMAT: ContextVar[bool] = ContextVar("hyper_parallel_storage_format", default=False)


class TorchMovedView(MovedView, TorchDTensor):  # type: ignore[override] # the layout is read-only here
    """A copy where one device would return a view, on PyTorch."""

    _unchecked_local = staticmethod(_local_of)
    _unchecked_layout = staticmethod(_layout_of)

    def _alias(self, local: Tensor) -> Any:
        alias = super()._alias(local)
        invalidate_with(alias, self)
        return alias


def invalidate_with(copy: TorchDTensor, *bases: TorchDTensor) -> None:
    """Make ``copy`` stale when a base is written; if a base is such a copy itself, when the base of that is."""
    if any(copy._local is _local_of(base) for base in bases):
        return
    follow(copy, TorchMovedView, bases, _counting)


def _counting(base: TorchDTensor) -> Callable[[], tuple[int, int]]:
    """The function that counts writes to ``base``."""
    uncounted = base._uncounted_writes()  # noqa: SLF001 - of its own class
    if base._local.is_inference():  # it has no version counter, so writes through this DTensor are counted
        return lambda: (0, uncounted.version)
    storage = base._local.detach()
    return lambda: (storage._version, uncounted.version)


_NO_KWARGS: dict[str, Any] = {}
# Entries by function, filled once before the first DTensor exists.
_ENTRIES: dict[Any, Any] = {}
# Properties that a local tensor shares with the global one; optimizers read them of every parameter at every step.
_FACTS = frozenset(
    (
        torch.is_complex,
        torch.is_floating_point,
        Tensor.is_complex,
        Tensor.is_floating_point,
    )
)


def wrap(local: Tensor, layout: Layout) -> TorchDTensor:
    """Return a DTensor over ``local``, which is not checked against ``layout``.

    PyTorch's fast constructor for its own DTensor reads ``layout.tensor_meta``, and dtype and device of a tensor. It
    warns if that tensor requires grad and the wrapper does not, as is normal here; so an empty tensor is passed then.
    """
    tensor: TorchDTensor
    if not local.requires_grad:
        tensor = make_wrapper(TorchDTensor, local, layout, False)
        return tensor
    key = local.dtype if local.is_cpu else (local.dtype, local.device)
    like = _LIKE.get(key)
    if like is None:
        like = _without_gradient(local, key)
    tensor = make_wrapper(TorchDTensor, like, layout, False)
    tensor._local = local
    return tensor


# Empty tensors by dtype and device, those of the CPU by dtype alone.
_LIKE: dict[Any, Tensor] = {}
_LOCK = threading.Lock()


def _without_gradient(local: Tensor, key: Any) -> Tensor:
    """A tensor of the dtype and device of ``local``; kept by ``key``, unless it is usable only in this context."""
    special = torch.is_inference_mode_enabled() or len_dispatch_stack() or peek_interpreter_stack() is not None
    if special or type(local.detach()) is not Tensor:
        return local.detach()
    like = torch.empty(0, dtype=local.dtype, device=local.device)  # dense, whatever the local tensor is
    with _LOCK:
        _LIKE[key] = like
    return like


# Attributes that copies and pickles do not have, because they are derived from the values or from the object itself.
_OWN = frozenset({
    "_local", "_layout",
    "_views", "_origin", "_is_callers_leaf", "_is_bypassed", "_grad_kept", "_data_taken", "_uncounted",
})  # fmt: skip


def _rebuild(local: Any, layout: Any, extras: dict[str, Any]) -> TorchDTensor:
    """Make a DTensor of data from a file or another process, which may be anything that ``torch.load`` allows.

    Raises:
        LayoutError: ``local`` is not a local tensor of ``layout``.
    """
    plain = isinstance(local, Tensor) and not isinstance(local, DTensor)
    if not plain or not isinstance(layout, Layout) or not _OWN.isdisjoint(extras):
        msg = "a pickled DTensor must be a local tensor, its layout, and attributes that others attached; load another"
        raise LayoutError(msg)
    if layout.local_shape != tuple(local.shape):
        mesh = layout.mesh
        held = f"of which rank {mesh.rank} holds {list(layout.local_shape)}, but its local tensor is"
        fix = "load the file that this rank wrote"
        if mesh.rank not in mesh.ranks:
            held = f"on a mesh without rank {mesh.rank}, with a local tensor"
            fix += ", or send the result of full_tensor(): pipeline stages return plain tensors"
        msg = f"a pickled DTensor has layout {layout.notation(local.dtype)}, {held} {list(local.shape)}; {fix}"
        raise LayoutError(msg)
    tensor = wrap(local, layout)
    tensor.__dict__.update(extras)
    return tensor


def install(platform: Any) -> None:
    """Complete the class: its platform, and a Python method for every method that has a rule.

    Python methods skip PyTorch's argument parser, which costs as much as the rest of a dispatch.
    """
    TorchDTensor._platform = platform
    dispatcher, entries, _ = intercept.start(platform)
    _ENTRIES.update(entries)
    TorchDTensor._dispatch = dispatcher.dispatch  # noqa: SLF001 - this module's own class
    platform.dispatcher = dispatcher
    register_optimizer_step_pre_hook(_refuse_pending)
    torch.serialization.add_safe_globals([_rebuild, *rebuilt_by()])
    for name, method in vars(TorchDTensor).copy().items():  # torch.Tensor.detach_(x) is x.detach_()
        if callable(method) and not name.startswith("_"):
            spellings = (getattr(home, name, None) for home in (torch, Tensor))
            intercept.GRAPH_FUNCTIONS.update((func, method) for func in spellings if callable(func))
    for name in dir(Tensor):
        func = getattr(Tensor, name, None)
        entry = entries.get(func) if callable(func) else None
        if entry is not None and name not in TorchDTensor.__dict__:
            setattr(TorchDTensor, name, _method(dispatcher, entry, name))


def _refuse_pending(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Refuse the step of any optimizer while the reduction of a gradient is pending."""
    del args, kwargs
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            deferred = get_deferred(parameter._local) if isinstance(parameter, TorchDTensor) else None
            if deferred is not None:
                name = group.get("param_names", {index: f"parameter {index} of group {number}"})[index]
                check_step_gradient(name, deferred.layout, parameter.dtype, deferred)


def _method(dispatcher: Any, entry: Any, name: str) -> Callable[..., Any]:
    dispatch = dispatcher.dispatch
    if name in _BINARY_DUNDERS:
        return dispatcher.binary(entry)
    if name in _UNARY_DUNDERS:
        return dispatcher.unary(entry)
    if name == "__getitem__":
        return dispatcher.subscript(
            lambda x, index: dispatch(entry, (x, index), {}), plain_entry("getitem", in_place=False)
        )

    def method(*args: Any, **kwargs: Any) -> Any:
        return dispatch(entry, args, kwargs)

    method.__name__ = name
    return method


_BINARY_DUNDERS = frozenset(
    f"__{prefix}{name}__"
    for name in "add sub mul truediv floordiv mod pow matmul and or xor eq ne lt le gt ge".split()  # noqa: SIM905 - reads best
    for prefix in ("", "r", "i")
)
_UNARY_DUNDERS = frozenset({"__neg__", "__abs__", "__invert__", "__pos__"})
