"""Plain local tensors: the operations that redistribution and dispatch need, one spelling for both frameworks."""

from __future__ import annotations

import abc
import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["TensorsFacet", "dtype_name"]

_HOMES = ("torch", "mindspore")


def dtype_name(dtype_str: Any) -> str:
    """The bare name in ``"torch.float32"``, ``"mindspore.float32"``, ``"Float32"`` or ``"float32"``; else as it is."""
    if not isinstance(dtype_str, str):
        return ""  # which no dtype is called
    home, dot, name = dtype_str.rpartition(".")
    return name.lower() if not dot or home in _HOMES else dtype_str


class TensorsFacet(abc.ABC):
    """Facet *tensors*. Operations are differentiable where the framework's are."""

    @abc.abstractmethod
    def is_tensor(self, obj: Any) -> bool:
        """True for any tensor of the framework, DTensors and parameters included."""

    @abc.abstractmethod
    def cat(self, tensors: Sequence[Any], dim: int) -> Any:
        """Concatenate along ``dim``; pieces may be empty."""

    @abc.abstractmethod
    def narrow(self, data: Any, dim: int, start: int, length: int) -> Any:
        """``length`` elements of dim ``dim`` from ``start``; a view where the framework has one."""

    @abc.abstractmethod
    def reshape(self, data: Any, shape: Sequence[int]) -> Any:
        """The same elements, row-major, in another shape."""

    @abc.abstractmethod
    def contiguous(self, data: Any) -> Any:
        """The same values, densely stored."""

    @abc.abstractmethod
    def copy(self, data: Any) -> Any:
        """The same values in new storage, off the graph."""

    def dense_by_chance(self, local: Any, layout: Any) -> bool:
        """True when ``local`` is a view that counts as dense only because a dim that is cut has one element here."""
        del local, layout
        return False

    @abc.abstractmethod
    def detach(self, data: Any) -> Any:
        """The same storage, off the graph."""

    @abc.abstractmethod
    def zeros(self, size: Sequence[int], dtype: Any = None, device: Any = None) -> Any:
        """Zeros of ``size``."""

    @abc.abstractmethod
    def full(self, size: Sequence[int], fill_value: Any, dtype: Any = None, device: Any = None) -> Any:
        """A constant tensor."""

    @abc.abstractmethod
    def zeros_like(self, data: Any) -> Any:
        """Zeros of the shape, dtype and device of ``data``."""

    @abc.abstractmethod
    def ones_like(self, data: Any) -> Any:
        """Ones of the shape, dtype and device of ``data``."""

    @abc.abstractmethod
    def arange(self, start: int, end: int, step: int = 1, dtype: Any = None, device: Any = None) -> Any:
        """Integers from ``start`` below ``end``."""

    @abc.abstractmethod
    def is_floating(self, data: Any) -> bool:
        """True for floating and complex tensors: those that may carry a gradient."""

    @abc.abstractmethod
    def itemsize(self, data: Any) -> int:
        """Bytes per element."""

    @abc.abstractmethod
    def tensor_to_numpy(self, tensor: Any) -> Any:
        """A NumPy array of the values; bfloat16 becomes float32."""

    @abc.abstractmethod
    def from_numpy(self, array: Any, device: Any = None) -> Any:
        """A tensor of the array's values and dtype, in storage of its own."""

    @abc.abstractmethod
    def str_to_dtype(self, dtype_str: str) -> Any:
        """``"torch.float32"``, ``"mindspore.float32"``, ``"Float32"`` or ``"float32"`` as a dtype.

        Raises:
            ValueError: unknown name, with the candidates.
        """

    @abc.abstractmethod
    def to_device(self, data: Any, device_type: str) -> Any:
        """The same tensor on ``cpu``, ``cuda`` or ``npu``; itself if it is there."""

    @abc.abstractmethod
    def set_tensor_requires_grad(self, input_tensor: Any) -> Any:
        """Make a leaf take part in differentiation; the tensor itself."""

    @abc.abstractmethod
    def power_sum(self, data: Any, p: float) -> Any:
        """Sum of ``|x| ** p`` over all elements (largest ``|x|`` for ``inf``), 0-d, in f32 or wider; 0 if empty."""

    def root(self, data: Any, p: float) -> Any:
        """The ``p``-th root of a 0-d tensor, as exact as its dtype."""
        return data ** (1.0 / p)

    @abc.abstractmethod
    def maximum(self, first: Any, second: Any) -> Any:
        """Element by element the larger one; NaN wins."""

    @abc.abstractmethod
    def clamp_max(self, data: Any, high: float) -> Any:
        """Values above ``high`` become ``high``."""

    @abc.abstractmethod
    def scale_(self, data: Any, factor: Any) -> None:
        """Multiply a plain tensor in place by the 0-d ``factor``, off the graph."""

    def is_meta(self, data: Any) -> bool:
        """True for a tensor that has a shape and no values."""
        return str(getattr(data, "device", "")).startswith("meta")

    def is_dense(self, data: Any) -> bool:
        """False for sparse storage, whose elements have no place of their own."""
        return type(data).__name__ not in {"COOTensor", "CSRTensor", "RowTensor"}

    @abc.abstractmethod
    def get_op_name(self, func: Any) -> str:
        """The plain name of a function, method, operator overload or primitive: ``add``, ``MatMul``."""

    def chunk(self, data: Any, split_dim: int, split_size: int, index: int) -> Any:
        """Piece ``index`` of ``split_size`` pieces along ``split_dim``, by the ceil rule: the last ones may be empty.

        Raises:
            ValueError: no such dim, no such piece.
        """
        dims = len(data.shape)
        if not -dims <= split_dim < dims or split_size < 1 or not 0 <= index < split_size:
            msg = f"chunk: a tensor of {list(data.shape)} has no piece {index} of {split_size} along dim {split_dim}"
            raise ValueError(msg)
        size = data.shape[split_dim]
        rows = -(-size // split_size)
        start = min(rows * index, size)
        return self.narrow(data, split_dim % dims, start, min(start + rows, size) - start)

    @abc.abstractmethod
    def tensor_type_cast(self, input_data: Any, cast_type: Any) -> Any:
        """``input_data`` in another dtype, given as dtype or as a name that :meth:`str_to_dtype` knows."""

    def cast_fp_tensor(self, dtype: Any, x: Any) -> Any:
        """A real floating tensor in ``dtype``; everything else as it is."""
        return self.tensor_type_cast(x, dtype) if self.is_tensor(x) and self.is_real_floating(x) else x

    @abc.abstractmethod
    def is_real_floating(self, data: Any) -> bool:
        """True for floating tensors that are not complex."""

    @abc.abstractmethod
    def get_tensor_storage_size(self, tensor: Any) -> int:
        """Bytes of the storage behind the tensor (behind a view, of what it is a view of); a DTensor's own piece."""

    def get_element_size(self, tensor: Any) -> int:
        """Bytes per element."""
        return self.itemsize(tensor)

    @abc.abstractmethod
    def ones(self, size: Sequence[int], dtype: Any = None, device: Any = None) -> Any:
        """Ones of ``size``."""

    def empty(self, size: Sequence[int], dtype: Any = None, device: Any = None) -> Any:
        """A tensor of ``size`` whose values nobody promised anything about."""
        return self.new_tensor(size, dtype, device)

    @abc.abstractmethod
    def full_like(self, tensor: Any, fill_value: Any, dtype: Any = None) -> Any:
        """A constant of the shape, device and (by default) dtype of ``tensor``."""

    @abc.abstractmethod
    def empty_like(self, tensor: Any, *, dtype: Any = None, device: Any = None, pin_memory: bool = False) -> Any:
        """Shape of ``tensor``, values nobody promised anything about.

        ``pin_memory`` locks its pages for transfers to a device; where this process has no device it means nothing.
        """

    @abc.abstractmethod
    def new_tensor(self, tensor_shape: Sequence[int], tensor_type: Any = None, device: Any = None) -> Any:
        """A tensor of this shape and dtype whose values nobody promised anything about."""

    @abc.abstractmethod
    def device_of(self, data: Any) -> Any:
        """Where ``data`` is, as the creating functions take it."""

    @abc.abstractmethod
    def fill_(self, target: Any, source: Any) -> Any:
        """Write the values of ``source`` into the plain ``target``, off the graph; ``target`` itself."""

    def _unwritable(self, data: Any) -> str:
        """Why the framework does not let :meth:`fill_` write into ``data``, and what it would; empty if it does."""
        del data
        return ""

    @abc.abstractmethod
    def list_to_size(self, size_list: Sequence[int]) -> Any:
        """The framework's own type of a shape."""

    def construct_strided_slice(
        self, x: Any, begin: Sequence[int], end: Sequence[int], stride: Sequence[int] | None = None
    ) -> Any:
        """``x[begin[0]:end[0]:stride[0], ...]``; dims that are not named are whole.

        Raises:
            ValueError: lists of different or too great length, or a stride that is not positive.
        """
        steps = [1] * len(begin) if stride is None else list(stride)
        if not len(begin) == len(end) == len(steps) <= len(x.shape) or min(steps, default=1) < 1:
            msg = (
                f"construct_strided_slice: begin {list(begin)}, end {list(end)} and stride {steps} must have one entry "
                f"per leading dim of {list(x.shape)}, and strides must be positive"
            )
            raise ValueError(msg)
        return x[tuple(slice(*one) for one in zip(begin, end, steps, strict=True))]

    def get_tensor_transform(self) -> Any:
        """What moves a DTensor to a layout on another mesh of the same ranks: ``transform(x, layout)``."""
        return self._transform

    @property
    @abc.abstractmethod
    def _transform(self) -> Any:
        """The planner's entry; a platform reaches up to it."""

    def tree_map(self, fn: Callable[[Any], Any], tree: Any) -> Any:
        """Apply ``fn`` to every leaf; lists, tuples, named tuples, dicts and dataclasses keep their types."""
        if isinstance(tree, tuple) and hasattr(tree, "_fields"):
            return type(tree)(*(self.tree_map(fn, item) for item in tree))
        if isinstance(tree, (list, tuple)):
            return type(tree)(self.tree_map(fn, item) for item in tree)
        if isinstance(tree, dict):
            made = copy.copy(tree)  # keeps a default factory, and an order of its own
            for key, item in tree.items():
                made[key] = self.tree_map(fn, item)
            return made
        if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
            changed = copy.copy(tree)
            for field in dataclasses.fields(tree):
                # Not by setattr: it may be frozen.
                object.__setattr__(changed, field.name, self.tree_map(fn, getattr(tree, field.name)))
            return changed
        return fn(tree)

    def apply_to_tensors(self, fn: Callable[[Any], Any], container: Any) -> Any:
        """Apply ``fn`` to every tensor in a structure; everything else stays, containers keep their types."""
        return self.tree_map(lambda leaf: fn(leaf) if self.is_tensor(leaf) else leaf, container)
