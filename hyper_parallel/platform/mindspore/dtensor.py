"""The DTensor of MindSpore: a tensor subclass over the storage of its local tensor.

The object shares storage and autograd identity with its local tensor, so that optimizers written in C++ can update a
``Parameter`` made of it; its Python attributes are those of the global tensor. MindSpore calls
``__fallback__`` for operators; methods that would reach the storage without it are overridden here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import wraps
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, bfloat16, float32, ops
from mindspore.common.initializer import Constant, One, Zero, initializer

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.moved_view import MovedView, follow
from hyper_parallel.core.dtensor.skip_dispatch import open_blocks, skipped
from hyper_parallel.core.shard.dispatch import CACHE_MISS
from hyper_parallel.errors import LayoutError, PlanError, UnsupportedOperatorError
from hyper_parallel.platform.mindspore import intercept, patches
from hyper_parallel.platform.mindspore.composite_functions import make_picklable
from hyper_parallel.platform.mindspore.ops.kernels import filled, write_over
from hyper_parallel.platform.mindspore.ops.registry import Spelling, getitem_entry, handlers
from hyper_parallel.platform.mindspore.shared_storage import counting
from hyper_parallel.platform.mindspore.versions import make_subclass, no_grad
from hyper_parallel.platform.mindspore.versions.older import reveal_errors

__all__ = ["MindSporeDTensor", "wrap"]


class MindSporeDTensor(DTensor, Tensor):
    """A DTensor that is a ``mindspore.Tensor``."""

    _platform: Any = None  # set by install()
    _views = None
    _origin = None
    _readonly: str | None = None

    __fallback__ = intercept.fallback

    def __new__(cls, local: Any, device_mesh: Any = None, placements: Any = None) -> Any:
        """Create a DTensor from a local tensor; ``Parameter(dtensor)`` calls this with the DTensor alone."""
        if isinstance(local, MindSporeDTensor):
            return wrap(local._local, local._layout, cls)
        return DTensor.from_local(local, device_mesh, placements)

    @property
    def local_param_info(self) -> Any:
        """MindSpore's parameter info of the local tensor; if the local tensor lacked it, its gradient would be zero."""
        return self._local.param_info

    @local_param_info.setter
    def local_param_info(self, info: Any) -> None:
        self._local.param_info = info

    # -- sizes ---------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """Global sizes."""
        return self._layout.shape  # type: ignore[return-value] # a DTensor's layout carries one

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self._layout.dim_axes)

    def dim(self) -> int:
        """Number of dims."""
        return len(self._layout.dim_axes)

    ndimension = dim

    @property
    def size(self) -> int:
        """Global number of elements."""
        return math.prod(self.shape)

    def numel(self) -> int:
        """Global number of elements."""
        return math.prod(self.shape)

    nelement = numel

    def __len__(self) -> int:
        """Global size of dim 0."""
        if not self.shape:
            msg = "len() of a 0-d tensor"
            raise TypeError(msg)
        return self.shape[0]

    def stride(self, dim: int | None = None) -> Any:
        """Strides, in elements, of the complete tensor stored densely."""
        steps = tuple(math.prod(self.shape[index + 1 :]) for index in range(self.ndim))
        return steps if dim is None else steps[dim]

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides, in bytes, of the complete tensor stored densely."""
        return tuple(step * self.itemsize for step in self.stride())

    @property
    def nbytes(self) -> int:
        """Bytes of the complete tensor."""
        return self.size * int(self.itemsize)

    # -- leaving the device mesh ---------------------------------------------------------------------------------

    def item(self, index: Any = None) -> Any:
        """Return the only element as a Python number; partial values are reduced first."""
        whole = self._numbers()
        return whole.item() if index is None else whole.asnumpy().item(index)

    def _numbers(self) -> Any:
        """Return the complete tensor; bfloat16, which NumPy lacks, as float32, which represents every value of it."""
        whole = self.full_tensor()
        return ops.cast(whole, float32) if whole.dtype == bfloat16 else whole

    def tolist(self) -> Any:
        """Nested lists of the complete tensor."""
        return self._numbers().asnumpy().tolist()

    def __bool__(self) -> bool:
        """Truth of a one-element tensor."""
        return bool(self._numbers().asnumpy())

    def __float__(self) -> float:
        """Value of a one-element tensor."""
        return float(self._numbers().asnumpy())

    def __int__(self) -> int:
        """Value of a one-element tensor."""
        return int(self._numbers().asnumpy())

    def __index__(self) -> int:
        """Value of a one-element integer tensor."""
        return int(self.full_tensor().__index__())

    def asnumpy(self) -> Any:
        """Values of the complete tensor, as a read-only array of the global shape; partial values are reduced first.

        It is a collective: every rank of the mesh must call it unless the tensor is replicated. The values of this
        rank's shard are ``to_local().asnumpy()``. ``numpy()`` is the same method. The array of a plain tensor shares
        its storage; that of a DTensor cannot, so it is read-only.

        Returns:
            a ``numpy.ndarray`` of the tensor's dtype.
        """
        whole = np.array(self.full_tensor().asnumpy(), order="C")
        whole.setflags(write=False)
        return whole

    numpy = asnumpy

    def __array__(self, dtype: Any = None, *, copy: bool | None = None) -> Any:
        """Return the complete tensor as a NumPy array, as :meth:`asnumpy` does."""
        whole = self.asnumpy()
        return np.array(whole, dtype) if copy else whole.astype(whole.dtype if dtype is None else dtype, copy=False)

    # -- indexing and iteration ----------------------------------------------------------------------------------

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write ``value`` at ``index``, by the operator's sharding rule."""
        intercept.call("__setitem__", (self, index, value))

    def __iter__(self) -> Iterator[Any]:
        """Slices along dim 0."""
        if not self.shape:
            msg = "iteration over a 0-d tensor"
            raise TypeError(msg)
        return iter([self[index] for index in range(self.shape[0])])

    def __contains__(self, element: Any) -> bool:
        """Return True if any element equals ``element``."""
        whole = self.full_tensor().asnumpy()
        value = element.full_tensor() if isinstance(element, DTensor) else element
        return bool((whole == (value.asnumpy() if isinstance(value, Tensor) else value)).any())

    # -- storage -------------------------------------------------------------------------------------------------

    def detach(self) -> Any:
        """Return a DTensor with the same storage, off the graph."""
        if open_blocks() and skipped(None, "detach"):
            return ops.stop_gradient(self._local)
        return self._alias(ops.stop_gradient(self._local))

    @property
    def data(self) -> Any:
        """The parameter itself; or, for another tensor, a tensor of the same storage off the graph."""
        return self if isinstance(self, Parameter) else self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        self.set_data(value)

    def set_data(self, data: Any, slice_shape: bool = False) -> Any:
        """Write values into the storage that this tensor, its local tensor and any optimizer share."""
        del slice_shape
        self._overwrite(data, "set_data")
        return self

    def _update_data(self, data: Any) -> Any:
        self._overwrite(data, "_update_data")
        return self

    def init_data(self, layout: Any = None, set_sliced: bool = False) -> Any:
        """Return the tensor itself, after a check that its shard has values.

        Raises:
            PlanError: the shard has no values yet.
        """
        del layout, set_sliced
        if self._local.has_init:
            msg = (
                f"init_data: {self._layout.notation(self.dtype)} has no values yet, and MindSpore would sample each "
                "shard by itself; call platform.init_parameters(module)"
            )
            raise PlanError(msg)
        return self

    def assign_value(self, value: Any) -> Any:
        """Overwrite the values, as :meth:`set_data` does."""
        self._overwrite(value, "assign_value")
        return self

    assign_value_cpp = assign_value

    def _refused(self, *_: Any, **__: Any) -> Any:
        """Refuse a method that would act on this rank's shard alone."""
        msg = "this method of MindSpore acts on storage, of which a rank has a shard only; use to_local() for the shard"
        raise UnsupportedOperatorError(msg)

    set_ = cauchy = log_normal = fill = from_dlpack = to_dlpack = get_bytes = itemset = _refused
    to_coo = to_csr = storage = untyped_storage = _refused

    def move_to(self, to: Any, blocking: bool = True) -> Any:
        """Return the tensor itself: local tensors stay on the device of the mesh."""
        del to, blocking
        return self

    def isreal(self) -> Any:
        """Return a boolean per element: True if it has no imaginary part."""
        return intercept.call("ops.isreal", (self,))

    def drop_views(self) -> None:
        """Drop the cached views, also those of other tensors with the same storage."""
        super().drop_views()
        self._platform.wrote(self._local)

    def _overwrite(self, data: Any, member: str) -> None:
        """Write ``data``: a DTensor of any layout, a number, an initializer, or this rank's shard.

        Raises:
            LayoutError: a plain tensor does not have the shape of the shard.
            UnsupportedOperatorError: the DTensor is read-only.
        """
        if isinstance(data, DTensor):
            local = data.redistribute_to(self._layout)._local
        else:
            # ``initializer`` refuses the shape of an empty shard.
            local = filled(self.local_shape, data, self.dtype) if isinstance(data, (int, float)) else data
            local = local.init_data() if local.has_init else local
        if tuple(local.shape) != self.local_shape:
            msg = (
                f"{member}: this rank holds {list(self.local_shape)} of {self._layout.notation(self.dtype)}, "
                f"the data has {list(local.shape)}; pass a DTensor, or this rank's shard"
            )
            raise LayoutError(msg)
        if self._readonly is not None:
            msg = f"{member}: {self._layout.notation(self.dtype)} cannot be written to: {self._readonly}"
            raise UnsupportedOperatorError(msg)
        self.drop_views()
        if self._local.device == "meta":
            for without_storage in (self._local, self):  # each has its own reference to the storage
                Tensor.data.__set__(without_storage, local.astype(self.dtype) if local.device != "meta" else local)
        elif 0 not in self.local_shape:
            with no_grad():  # MindSpore still records after a cell that raised
                write_over(self._local, local.astype(self.dtype))

    def clone(self, init: Any = "same") -> Any:
        """Return a new parameter for a parameter (initialized by ``init``), else a differentiable copy.

        Raises:
            UnsupportedOperatorError: ``init`` draws random numbers.
        """
        if not isinstance(self, Parameter):
            return intercept.call("copied", (self,))
        parameter = self._parameter(_copied(self._local))
        if isinstance(init, Tensor):
            parameter.set_data(init)
        elif init != "same":
            if str(init).lower() not in _CONSTANTS and not isinstance(init, (int, float, Zero, One, Constant)):
                msg = (
                    f"Parameter.clone({init!r}) of a DTensor: every rank would draw numbers of its own; use "
                    "hyper_parallel.distribute_tensor(initializer(...), mesh, placements) as the new value"
                )
                raise UnsupportedOperatorError(msg)
            if 0 not in self.local_shape:  # MindSpore's initializers refuse empty shapes
                parameter.set_data(initializer(init, self.local_shape, self.dtype))
        return parameter

    def copy(self) -> Any:
        """Return a copy, as :meth:`clone` does."""
        return self.clone()

    def __copy__(self) -> Any:
        """Return a new parameter with its own values for a parameter, else a second object for the same tensor."""
        return self.clone() if isinstance(self, Parameter) else self._alias(self._local)

    def _alias(self, local: Tensor) -> Any:
        """Return a second DTensor over the same storage; it becomes stale when this one does."""
        alias = wrap(local, self._layout)
        alias._readonly = self._readonly
        self._platform.follow_writes(alias, self, is_copy=False)
        return alias

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """New storage, off the graph."""
        if id(self) not in memo:
            local = _copied(self._local)
            memo[id(self)] = self._parameter(local) if isinstance(self, Parameter) else wrap(local, self._layout)
        return memo[id(self)]

    def _parameter(self, local: Tensor) -> Any:
        return Parameter(
            wrap(local, self._layout),
            name=self.name,
            requires_grad=self.requires_grad,
            layerwise_parallel=self.layerwise_parallel,
            parallel_optimizer=self.parallel_optimizer,
        )

    # -- copying, pickling, printing -----------------------------------------------------------------------------

    __hash__ = object.__hash__  # identity, as tensors do

    def __repr__(self) -> str:
        """The layout notation, and this rank's values."""
        kind = f"Parameter {self.name}, " if isinstance(self, Parameter) else ""
        return f"DTensor({kind}{self._layout.notation(self.dtype)} on {self._layout.mesh!r}, local={self._local!r})"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        """Format a 0-d tensor as a number, others as objects."""
        return format(self.item(), spec) if not self.shape else object.__format__(self, spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the local tensor and the layout."""
        del protocol
        options = (self.name, self.requires_grad) if isinstance(self, Parameter) else None
        return (_rebuild, (_copied(self._local), self._layout, options))


class MindSporeMovedView(MovedView, MindSporeDTensor):  # type: ignore[override] # the layout is read-only here
    """A copy where one device would return a view, on MindSpore."""

    _unchecked_local = staticmethod(lambda view: vars(view)["_local"])
    _unchecked_layout = staticmethod(lambda view: vars(view)["_layout"])


def invalidate_with(copy: MindSporeDTensor, base: MindSporeDTensor) -> None:
    """Make ``copy`` stale when ``base`` is written; if ``base`` is such a copy itself, when the base of ``base`` is."""
    follow(copy, MindSporeMovedView, (base,), lambda base: counting(base._local))


def wrap(local: Tensor, layout: Layout, cls: type = MindSporeDTensor) -> Any:
    """Return a DTensor over ``local``, which is not checked against ``layout``."""
    dtensor = _make(cls, local)
    dtensor._local = local
    dtensor._layout = layout
    return dtensor


_make = make_subclass  # MindSpore has no other way to make a subclass object over existing storage


def _copied(local: Tensor) -> Tensor:
    return Tensor.from_numpy(np.array(local.asnumpy(), order="C"))


def _rebuild(local: Tensor, layout: Layout, options: tuple[str, bool] | None) -> Any:
    dtensor = wrap(local, layout)
    return dtensor if options is None else Parameter(dtensor, name=options[0], requires_grad=options[1])


def install(platform: Any) -> None:
    """Complete the class: set its platform, and add Python operators that skip MindSpore's search for a handler."""
    MindSporeDTensor._platform = platform
    started = intercept.start(platform, handlers())
    dispatcher = platform.dispatcher = started.dispatcher
    for name, operator in _BINARY.items():
        setattr(MindSporeDTensor, name, dispatcher.binary(Spelling(name, operator).entry))
    for name, operator in _UNARY.items():
        setattr(MindSporeDTensor, name, dispatcher.unary(Spelling(name, operator).entry))
    for name, operator in METHODS.items():
        setattr(MindSporeDTensor, name, _method(getattr(Tensor, name), started.repeated_methods[operator]))
    MindSporeDTensor.__getitem__ = dispatcher.subscript(  # type: ignore[method-assign] # as above
        lambda x, index: intercept.call("__getitem__", (x, index)), getitem_entry()
    )
    patches.install()
    reveal_errors(MindSporeDTensor, patches.CALLS)
    make_picklable()


_BINARY = {
    "__add__": "add",
    "__radd__": "add",
    "__sub__": "sub",
    "__mul__": "mul",
    "__rmul__": "mul",
    "__truediv__": "div",
    "__pow__": "pow",
    "__matmul__": "matmul",
}
_UNARY = {"__neg__": "neg", "__abs__": "abs"}
METHODS = {
    "reshape": "Reshape",
    "view": "Reshape",
    "unsqueeze": "ExpandDims",
    "transpose": "TransposeExtView",
    "exp": "Exp",
    "log": "Log",
    "sqrt": "Sqrt",
    "square": "Square",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
}
"""Methods that compute little, with the operator that MindSpore calls for each."""


def _method(plain: Any, repeated: Any) -> Any:
    """Return a method that runs cached calls without MindSpore's search for a handler.

    Args:
        plain: MindSpore's method, which handles calls that are not cached.
        repeated: see :attr:`~hyper_parallel.platform.mindspore.intercept.Interception.repeated_methods`.
    """

    @wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = CACHE_MISS if kwargs or open_blocks() else repeated((self, *args))
        return plain(self, *args, **kwargs) if result is CACHE_MISS else result

    return method


# MindSpore's names of initializers that draw nothing.
_CONSTANTS = frozenset({"zero", "zeros", "one", "ones"})
