"""Plain local tensors: the operations that redistribution and dispatch need, one spelling for both frameworks."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["TensorsFacet"]


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

    def tree_map(self, fn: Callable[[Any], Any], tree: Any) -> Any:
        """Apply ``fn`` to every leaf; lists, tuples, named tuples and dicts keep their types."""
        if isinstance(tree, tuple) and hasattr(tree, "_fields"):
            return type(tree)(*(self.tree_map(fn, item) for item in tree))
        if isinstance(tree, (list, tuple)):
            return type(tree)(self.tree_map(fn, item) for item in tree)
        if isinstance(tree, dict):
            return type(tree)((key, self.tree_map(fn, item)) for key, item in tree.items())
        return fn(tree)
