"""Shared kernels: copy, fill, write and sample.

MindSpore's own cannot be used: ``mint.clone`` has no CPU kernel, ``ops.full`` converts all values to integers, drops
imaginary parts and does not support bfloat16, and on CPU ``copy_`` does not write to a part of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint, ops
from mindspore.ops.auto_generate.gen_ops_prim import dtype_to_type_id

from hyper_parallel.core.dtensor.sampling import LocalRandomNumbers
from hyper_parallel.errors import UnsupportedOperatorError

__all__ = [
    "BY_NUMBER",
    "DTYPES",
    "HALF",
    "broadcast_operands",
    "constant",
    "copied",
    "filled",
    "is_leaf",
    "normalized_dims",
    "one_operand",
    "promoted",
    "requires_grad",
    "sampled",
    "single_precision",
    "tensor_operands",
    "two_operands",
    "write_over",
]

_NAMES = "float16 float32 float64 bfloat16 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool_ complex64 complex128"
DTYPES = {name.rstrip("_"): getattr(mindspore, name) for name in _NAMES.split()}
"""The dtypes by name."""
BY_NUMBER = {dtype_to_type_id("hyper_parallel", "dtype", dtype): dtype for dtype in DTYPES.values()}
"""The dtypes by the numbers under which MindSpore's functional layer passes them."""

_BY_KIND = {
    "b": mindspore.bool_,
    "i": mindspore.int64,
    "u": mindspore.int64,
    "f": mindspore.float32,
    "c": mindspore.complex64,
}
_COMPLEX = {mindspore.complex64: np.complex64, mindspore.complex128: np.complex128}
_FLOATING = (mindspore.float16, mindspore.float32, mindspore.float64, mindspore.bfloat16)
HALF = (mindspore.float16, mindspore.bfloat16)
"""Half-precision dtypes, whose squares overflow or lose most of their digits."""
_ROUNDED_ALIKE = (mindspore.float32, mindspore.float64)


def requires_grad(local: Tensor) -> bool:
    """Return True where the gradient engine has a node for ``local``; there is no public API for it."""
    return bool(local._requires_grad)


def is_leaf(tensor: Tensor) -> bool:
    """Return True for tensors that no operation made; there is no public API for it."""
    return bool(tensor._is_leaf)


def copied(x: Tensor, *, memory_format: Any = None) -> Tensor:
    """Return the same values in new storage, on the graph."""
    del memory_format
    return mint.logical_or(x, x) if x.dtype == mindspore.bool_ else x * 1


def single_precision(x: Tensor) -> Tensor:
    """Convert half precision to float32; return everything else unchanged.

    In float16 a variance overflows from a deviation of 256 on, and the gradient of its reciprocal root is infinity
    times zero for constant input, such as a single element.
    """
    return ops.cast(x, mindspore.float32) if x.dtype in HALF else x


def filled(size: Sequence[int], value: Any, dtype: Any = None) -> Any:
    """Return a tensor of ``size`` with ``value`` everywhere.

    Args:
        size: shape of the tensor.
        value: a number, or a tensor of one element.
        dtype: the dtype; None for that of the Python number: bool, int64, float32 or complex64.

    Raises:
        ValueError: ``dtype`` cannot represent ``value``.
    """
    if isinstance(value, Tensor):
        return ops.full(tuple(size), value, dtype=value.dtype if dtype is None else dtype)
    dtype = _BY_KIND[np.asarray(value).dtype.kind] if dtype is None else dtype
    if dtype in _COMPLEX:
        return Tensor.from_numpy(np.full(tuple(size), value, _COMPLEX[dtype]))
    lost = np.iscomplexobj(value) or not (np.isfinite(value) or dtype in _FLOATING or dtype == mindspore.bool_)
    if lost:
        msg = f"full: {value} is not a {dtype}; pass a dtype that can represent it"
        raise ValueError(msg)
    if dtype == mindspore.bfloat16:
        return ops.full(tuple(size), value, dtype=mindspore.float32).astype(dtype)
    return ops.full(tuple(size), value, dtype=dtype)


def write_over(target: Any, values: Any) -> Any:
    """Write ``values``, of the same shape and dtype, into ``target`` and into the tensor that it is a part of.

    Raises:
        UnsupportedOperatorError: gradients would have to flow through the write, which MindSpore does not support.
    """
    if 0 in target.shape or _owns_storage(target):
        return target.copy_(values)
    written = target
    if not written.shape:  # MindSpore assigns neither to a scalar nor to bfloat16
        written, values = written.view(1), values.view(1)
    if written.dtype == mindspore.bfloat16:
        if requires_grad(target) or requires_grad(values):
            msg = "a part of a bfloat16 tensor cannot be written where gradients flow; use the out-of-place form"
            raise UnsupportedOperatorError(msg)
        written, values = written.view(mindspore.int16), values.view(mindspore.int16)
    written[:] = values
    return target


def _owns_storage(tensor: Any) -> bool:
    return tensor.numel() * tensor.itemsize == tensor.untyped_storage().size() and tensor.is_contiguous()


def sampled(numbers: LocalRandomNumbers, dtype: Any) -> Tensor:
    """Return random numbers, made block after block, each rounded to ``dtype`` as MindSpore casts."""
    array = np.empty(numbers.rows, mindspore.dtype_to_nptype(dtype))
    for rows, columns, values in numbers.blocks():
        array[rows, columns] = values if dtype in _ROUNDED_ALIKE else _cast(values, dtype)
    return Tensor.from_numpy(array.reshape(numbers.shape))


def constant(value: float, shape: tuple[int, ...], dtype: Any) -> Tensor:
    """Return ``value``, rounded as MindSpore casts, in ``shape``."""
    return Tensor.from_numpy(np.full(shape, _cast(np.array([value], np.float64), dtype)))


def _cast(values: Any, dtype: Any) -> Any:
    return ops.cast(Tensor.from_numpy(np.array(values, order="C")), dtype).asnumpy()


def normalized_dims(x: Tensor, dim: Any) -> tuple[int, ...]:
    """Return ``dim`` (None: all) as a tuple of dims that are not negative."""
    if type(dim) is int and x.ndim:
        return (dim % x.ndim,)
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return tuple(range(x.ndim))
    return tuple(index % max(x.ndim, 1) for index in ((dim,) if isinstance(dim, int) else dim))


def one_operand(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of one tensor under the canonical parameter name."""
    return lambda x: func(x)


def two_operands(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of two operands under the canonical parameter names."""
    return lambda x, y: func(x, y)


@lru_cache(maxsize=None, typed=True)  # typed, because 1 == True
def _common_dtype(first: Any, second: Any) -> Any:
    return (Tensor(1, first) + (Tensor(1, second) if isinstance(second, mindspore.Type) else second)).dtype


def promoted(x: Any, y: Any) -> Any:
    """Return MindSpore's result dtype for two tensors, or for a tensor and a number, in either order."""
    tensor, other = (x, y) if isinstance(x, Tensor) else (y, x)
    if isinstance(other, Tensor):
        return tensor.dtype if tensor.dtype == other.dtype else _common_dtype(tensor.dtype, other.dtype)
    return _common_dtype(tensor.dtype, type(other)(1))


def tensor_operands(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``func``, which takes tensors of one dtype only, adapted to numbers and tensors of several dtypes."""

    def compute(x: Any, y: Any) -> Tensor:
        dtype = promoted(x, y)
        return func(*(ops.cast(each, dtype) if isinstance(each, Tensor) else Tensor(each, dtype) for each in (x, y)))

    return compute


def broadcast_operands(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``func`` called with operands of one shape; its kernel reads out of bounds on others."""

    def compute(x: Tensor, y: Tensor) -> Tensor:
        shape = np.broadcast_shapes(x.shape, y.shape)
        return func(*(operand if operand.shape == shape else mint.broadcast_to(operand, shape) for operand in (x, y)))

    return compute
