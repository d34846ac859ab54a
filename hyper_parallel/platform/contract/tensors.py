"""Facet *tensors*: operations on plain local tensors, the same on both frameworks."""

from __future__ import annotations

import abc
import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hyper_parallel._tree import tree_map

__all__ = ["Rearrangement", "TensorsFacet", "dtype_name"]

_HOMES = ("torch", "mindspore")


def dtype_name(dtype_str: Any) -> str:
    """Return the bare name in ``"torch.float32"``, ``"mindspore.float32"``, ``"Float32"`` or ``"float32"``.

    A string with another prefix is returned unchanged. An object that is not a string gives ``""``.
    """
    if not isinstance(dtype_str, str):
        return ""  # not the name of a dtype
    home, dot, name = dtype_str.rpartition(".")
    return name.lower() if not dot or home in _HOMES else dtype_str


class Rearrangement(NamedTuple):
    """A permutation of the elements of a tensor: those of ``reshape(shape).permute(order).reshape(result)``.

    Attributes:
        shape: shape as which the tensor is viewed first.
        order: dims of ``shape`` in their new order.
        result: shape of the result.
        sizes: sizes of the dims in their new order.
        strides: strides of the permuted view, of shape ``sizes``, if the tensor is dense.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    result: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], order: tuple[int, ...], result: tuple[int, ...] | None = None) -> Rearrangement:
        """Return the rearrangement; without ``result``, its shape is that of the permuted view."""
        sizes = tuple(shape[dim] for dim in order)
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        return cls(shape, order, sizes if result is None else result, sizes, tuple(strides[dim] for dim in order))


class TensorsFacet(abc.ABC):
    """Facet *tensors*. Operations are differentiable where the framework's are."""

    @abc.abstractmethod
    def is_tensor(self, obj: Any) -> bool:
        """Return True for any tensor of the framework, DTensors and parameters included."""

    @abc.abstractmethod
    def cat(self, tensors: Sequence[Any], dim: int) -> Any:
        """Concatenate along ``dim``; tensors may be empty."""

    @abc.abstractmethod
    def narrow(self, data: Any, dim: int, start: int, length: int) -> Any:
        """Return ``length`` elements of dim ``dim`` from ``start`` on; a view if the framework has one."""

    @abc.abstractmethod
    def reshape(self, data: Any, shape: Sequence[int]) -> Any:
        """Return the same elements, row-major, in another shape."""

    @abc.abstractmethod
    def contiguous(self, data: Any) -> Any:
        """Return the same values, densely stored."""

    def rearranged(self, data: Any, how: Rearrangement) -> Any:
        """Return the elements of ``data``, which needs no gradient, in another order, densely stored."""
        return self.contiguous(data.reshape(how.shape).permute(how.order)).reshape(how.result)

    @abc.abstractmethod
    def copy(self, data: Any) -> Any:
        """Return the same values in new storage, off the graph."""

    def dense_by_chance(self, local: Any, layout: Any) -> bool:
        """Return True if the view ``local`` is dense only because a sharded dim has one element on this rank."""
        del local, layout
        return False

    def dense_copy(self, local: Any) -> Any:
        """Return a copy on the graph, whose dims are in row-major order in memory."""
        return self.contiguous(local)

    def can_view(self, local: Any, shape: Sequence[int], target: Sequence[int]) -> bool:
        """Return whether a tensor of ``shape``, with the memory order of ``local``, can be viewed as ``target``."""
        del local, shape, target
        return True

    def storing_like(
        self, part: Sequence[int], shapes: Sequence[Sequence[int]], stays: Sequence[bool]
    ) -> Callable[[Any, Sequence[Any]], Any]:
        """Return a function that stores an elementwise result in the memory order of the global result.

        Args:
            part: the shape of this rank's shard of the result.
            shapes: the global shape of every operand.
            stays: per operand, whether its shard is used as it is; if not, the shard was just received.

        Returns:
            a function of this rank's shards of the result and of the operands. It returns the result, or a copy in
            another memory order, on the graph.
        """
        del part, shapes, stays
        return lambda data, _: data

    @abc.abstractmethod
    def detach(self, data: Any) -> Any:
        """Return a tensor of the same storage, off the graph."""

    def function_result(self, data: Any) -> Any:
        """Return ``data`` in a form that the forward of a custom autograd function may return.

        Frameworks treat a result that is a view specially: PyTorch rejects in-place writes to it.
        """
        return self.detach(data)

    @abc.abstractmethod
    def zeros(self, size: Sequence[int], dtype: Any = None, device: Any = None) -> Any:
        """Return zeros of ``size``."""

    @abc.abstractmethod
    def full(self, size: Sequence[int], fill_value: Any, dtype: Any = None, device: Any = None) -> Any:
        """Return a constant tensor."""

    @abc.abstractmethod
    def zeros_like(self, data: Any) -> Any:
        """Return zeros of the shape, dtype and device of ``data``."""

    @abc.abstractmethod
    def ones_like(self, data: Any) -> Any:
        """Return ones of the shape, dtype and device of ``data``."""

    @abc.abstractmethod
    def arange(self, start: int, end: int, step: int = 1, dtype: Any = None, device: Any = None) -> Any:
        """Return the integers from ``start`` to below ``end``."""

    @abc.abstractmethod
    def is_floating(self, data: Any) -> bool:
        """Return True for floating and complex tensors, which may have a gradient."""

    @abc.abstractmethod
    def itemsize(self, data: Any) -> int:
        """Return the number of bytes per element."""

    @abc.abstractmethod
    def tensor_to_numpy(self, tensor: Any) -> Any:
        """Return a NumPy array of the values; bfloat16 becomes float32."""

    @abc.abstractmethod
    def from_numpy(self, array: Any, device: Any = None) -> Any:
        """Return a tensor of the array's values and dtype, in storage of its own."""

    @abc.abstractmethod
    def str_to_dtype(self, dtype_str: str) -> Any:
        """Return the dtype named ``"torch.float32"``, ``"mindspore.float32"``, ``"Float32"`` or ``"float32"``.

        Raises:
            ValueError: the name is unknown; the message lists the candidates.
        """

    @abc.abstractmethod
    def to_device(self, data: Any, device_type: str) -> Any:
        """Return the tensor on ``cpu``, ``cuda`` or ``npu``; the tensor itself if it is there already."""

    def differing_device(self, data: Any, device_type: str) -> str:
        """Return the type of device that a plain tensor is on, if it differs from ``device_type``; else empty.

        Always empty where the framework moves tensors to its device by itself.
        """
        del data, device_type
        return ""

    @abc.abstractmethod
    def set_tensor_requires_grad(self, input_tensor: Any) -> Any:
        """Make a leaf require a gradient; return the tensor itself."""

    @abc.abstractmethod
    def power_sum(self, data: Any, p: float) -> Any:
        """Return the 0-d sum of ``|x| ** p`` (the largest ``|x|`` for ``inf``), in f32 or wider; 0 if empty."""

    def root(self, data: Any, p: float) -> Any:
        """Return the ``p``-th root of a 0-d tensor, in its dtype."""
        return data ** (1.0 / p)

    @abc.abstractmethod
    def maximum(self, first: Any, second: Any) -> Any:
        """Return the elementwise maximum; NaN wins."""

    @abc.abstractmethod
    def clamp_max(self, data: Any, high: float) -> Any:
        """Replace values above ``high`` by ``high``."""

    @abc.abstractmethod
    def scale_(self, data: Any, factor: Any) -> None:
        """Multiply a plain tensor in place by the 0-d tensor ``factor``, off the graph."""

    def is_meta(self, data: Any) -> bool:
        """Return True for a tensor that has a shape and no values."""
        return str(getattr(data, "device", "")).startswith("meta")

    def is_dense(self, data: Any) -> bool:
        """Return False for sparse storage."""
        return type(data).__name__ not in {"COOTensor", "CSRTensor", "RowTensor"}

    @abc.abstractmethod
    def get_op_name(self, func: Any) -> str:
        """Return the plain name of a function, method, operator overload or primitive: ``add``, ``MatMul``."""

    def chunk(self, data: Any, split_dim: int, split_size: int, index: int) -> Any:
        """Return chunk ``index`` of ``split_size`` chunks along ``split_dim``, as ``torch.chunk``; it may be empty.

        Raises:
            ValueError: no such dim or chunk.
        """
        dims = len(data.shape)
        if not -dims <= split_dim < dims or split_size < 1 or not 0 <= index < split_size:
            msg = f"chunk: a tensor of {list(data.shape)} has no chunk {index} of {split_size} along dim {split_dim}"
            raise ValueError(msg)
        size = data.shape[split_dim]
        rows = -(-size // split_size)
        start = min(rows * index, size)
        return self.narrow(data, split_dim % dims, start, min(start + rows, size) - start)

    @abc.abstractmethod
    def tensor_type_cast(self, input_data: Any, cast_type: Any) -> Any:
        """Return ``input_data`` in another dtype, given as a dtype or a name that :meth:`str_to_dtype` knows."""

    def cast_fp_tensor(self, dtype: Any, x: Any) -> Any:
        """Return a real floating tensor in ``dtype``; anything else unchanged."""
        return self.tensor_type_cast(x, dtype) if self.is_tensor(x) and self.is_real_floating(x) else x

    @abc.abstractmethod
    def is_real_floating(self, data: Any) -> bool:
        """Return True for floating tensors that are not complex."""

    @abc.abstractmethod
    def get_tensor_storage_size(self, tensor: Any) -> int:
        """Return the bytes of the storage: of a view, that of its base; of a DTensor, that of its local tensor."""

    def get_element_size(self, tensor: Any) -> int:
        """Return the number of bytes per element."""
        return self.itemsize(tensor)

    @abc.abstractmethod
    def ones(self, size: Sequence[int], dtype: Any = None, device: Any = None) -> Any:
        """Return ones of ``size``."""

    def empty(self, size: Sequence[int], dtype: Any = None, device: Any = None) -> Any:
        """Return a tensor of ``size`` with unspecified values."""
        return self.new_tensor(size, dtype, device)

    @abc.abstractmethod
    def full_like(self, tensor: Any, fill_value: Any, dtype: Any = None) -> Any:
        """Return a constant of the shape, device and (by default) dtype of ``tensor``."""

    @abc.abstractmethod
    def empty_like(self, tensor: Any, *, dtype: Any = None, device: Any = None, pin_memory: bool = False) -> Any:
        """Return a tensor of the shape of ``tensor`` with unspecified values.

        ``pin_memory`` locks its pages for transfers to a device; without a device it has no effect.
        """

    @abc.abstractmethod
    def new_tensor(self, tensor_shape: Sequence[int], tensor_type: Any = None, device: Any = None) -> Any:
        """Return a tensor of this shape and dtype with unspecified values."""

    @abc.abstractmethod
    def device_of(self, data: Any) -> Any:
        """Return the device of ``data``, as creation functions take it."""

    @abc.abstractmethod
    def fill_(self, target: Any, source: Any) -> Any:
        """Write the values of ``source`` into the plain tensor ``target``, off the graph; return ``target``."""

    def _unwritable(self, data: Any) -> str:
        """Return why :meth:`fill_` cannot write to ``data``, and what to do; empty if it can."""
        del data
        return ""

    @abc.abstractmethod
    def list_to_size(self, size_list: Sequence[int]) -> Any:
        """Return a shape in the framework's own type."""

    def construct_strided_slice(
        self, x: Any, begin: Sequence[int], end: Sequence[int], stride: Sequence[int] | None = None
    ) -> Any:
        """Return ``x[begin[0]:end[0]:stride[0], ...]``; dims without an entry are not sliced.

        Raises:
            ValueError: the lists differ in length or are longer than the shape, or a stride is not positive.
        """
        steps = [1] * len(begin) if stride is None else list(stride)
        if not len(begin) == len(end) == len(steps) <= len(x.shape) or min(steps, default=1) < 1:
            msg = (
                f"construct_strided_slice: begin {list(begin)}, end {list(end)} and stride {steps} must have one entry "
                f"per leading dim of {list(x.shape)}, and strides must be positive"
            )
            raise ValueError(msg)
        return x[tuple(slice(*bounds) for bounds in zip(begin, end, steps, strict=True))]

    def get_tensor_transform(self) -> Any:
        """Return the object whose ``transform(x, layout)`` redistributes a DTensor, also across meshes."""
        return self._transform

    @property
    @abc.abstractmethod
    def _transform(self) -> Any:
        """The ``TensorTransform`` of ``core``, which this package must not import."""

    def tree_map(self, fn: Callable[[Any], Any], tree: Any) -> Any:
        """Apply ``fn`` to every leaf; lists, tuples, named tuples, dicts and dataclasses keep their types."""

        def on_leaf(leaf: Any) -> Any:
            if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
                return fn(leaf)
            changed = copy.copy(leaf)
            for field in dataclasses.fields(leaf):
                # Not by setattr: it may be frozen.
                object.__setattr__(changed, field.name, self.tree_map(fn, getattr(leaf, field.name)))
            return changed

        return tree_map(on_leaf, tree, (list, tuple, dict))

    def apply_to_tensors(self, fn: Callable[[Any], Any], container: Any) -> Any:
        """Apply ``fn`` to every tensor in a structure; other values are unchanged, and containers keep their types."""
        return self.tree_map(lambda leaf: fn(leaf) if self.is_tensor(leaf) else leaf, container)
