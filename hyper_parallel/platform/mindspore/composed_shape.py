"""MindSpore's operators that cut, widen or rearrange dims and are several canonical ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor

from hyper_parallel.platform.mindspore.indexing import replicated
from hyper_parallel.platform.mindspore.primitives import MATRIX, composed, expect

__all__ = ["on_diagonals"]


@composed("Squeeze")
def _squeeze(ops: Any, primitive: Any, x: Any, *args: Any) -> Any:
    """No dims at all mean every dim of size 1."""
    dim = args[0] if args else getattr(primitive, "init_attrs", {}).get("axis", ())
    return ops.squeeze(x, None if dim in ((), []) else dim)


@composed("Slice")
def _slice(ops: Any, _: Any, x: Any, begin: Sequence[int], size: Sequence[int]) -> Any:
    """A range per dim; a size of -1 reaches to the end."""
    for dim, (start, length) in enumerate(zip(begin, size, strict=True)):
        length = x.shape[dim] - start if length == -1 else length  # noqa: PLW2901 - spelled out
        if (start, length) != (0, x.shape[dim]):
            x = ops.narrow(x, dim, start, length)
    return x


@composed("StridedSlice")
def _strided(
    ops: Any, primitive: Any, x: Any, begin: Sequence[int], end: Sequence[int], strides: Sequence[int], *masks: int
) -> Any:
    """``x[begin:end:strides]`` with bit masks for open ends, an ellipsis, new dims and numbers."""
    names = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
    given = masks or [primitive.init_attrs[name] for name in names]
    return ops.getitem(
        x, tuple(_index(given, at, *one) for at, one in enumerate(zip(begin, end, strides, strict=True)))
    )


def _index(masks: Sequence[int], at: int, begin: int, end: int, stride: int) -> Any:
    open_begin, open_end, ellipsis, new, shrink = (mask >> at & 1 for mask in masks)
    if ellipsis:
        return Ellipsis
    if new:
        return None
    return begin if shrink else slice(None if open_begin else begin, None if open_end else end, stride)


@composed("Meshgrid")
def _meshgrid(ops: Any, primitive: Any, tensors: Sequence[Any], indexing: Any = None) -> Any:
    """Every vector stretched over the dims of all; ``xy`` swaps the first two."""
    kind = primitive.init_attrs["indexing"] if indexing is None else indexing
    count = len(tensors)
    order = list(range(count))
    if kind in ("xy", 1) and count > 1:
        order[:2] = [1, 0]
    sizes = [math.prod(one.shape) for one in tensors]
    shape = tuple(sizes[at] for at in order)
    places = [order.index(index) for index in range(count)]
    return tuple(
        ops.expand(ops.view(one, tuple(-1 if dim == place else 1 for dim in range(count))), shape)
        for one, place in zip(tensors, places, strict=True)
    )


def on_diagonals(ops: Any, x: Any, offset: int = 0) -> Any:
    """Matrices with the last dim of ``x`` on a diagonal, in two new last dims."""
    count = x.shape[-1]
    size = count + abs(offset)
    rows = np.arange(size) - max(-offset, 0)
    inside = (rows >= 0) & (rows < count)
    chosen = ops.index_select(x, -1, replicated(Tensor(np.clip(rows, 0, max(count - 1, 0))), x))
    mask = np.eye(size, k=offset, dtype=bool) & inside[:, None]
    return ops.where(replicated(Tensor(mask), x), ops.unsqueeze(chosen, -1), 0)


@composed("Diag", "DiagExt")
def _diag(ops: Any, primitive: Any, x: Any, offset: int = 0) -> Any:
    """A diagonal matrix of a vector; the diagonal of a matrix."""
    if len(x.shape) == 1:
        return on_diagonals(ops, x, offset)
    expect("Diag", "the number of dims", len(x.shape), 1 if primitive is not None else MATRIX)
    return ops.diagonal(x, offset, 0, 1)


@composed("MatrixDiagV3")
def _matrix_diag(ops: Any, _: Any, x: Any, k: Any, rows: Any, columns: Any, padding: Any) -> Any:
    found = [_number(one) for one in (k, rows, columns, padding)]
    expect("MatrixDiagV3", "k, num_rows, num_cols, padding_value", found, [0, -1, -1, 0])
    return on_diagonals(ops, x)


def _number(value: Any) -> Any:
    return value.asnumpy().item() if isinstance(value, Tensor) else value


@composed("MatrixBandPart")
def _band(ops: Any, _: Any, x: Any, lower: Any, upper: Any) -> Any:
    """A negative number of diagonals means all."""
    lower, upper = _number(lower), _number(upper)
    x = x if lower < 0 else ops.triu(x, -lower)
    return x if upper < 0 else ops.tril(x, upper)


@composed("Trace", "TraceExt")
def _trace(ops: Any, _: Any, x: Any) -> Any:
    return ops.sum(ops.diagonal(x))


@composed("Size")
def _size(ops: Any, _: Any, x: Any) -> Any:
    del ops
    return math.prod(x.shape)


@composed("TensorShape", "DynamicShape")
def _shape(ops: Any, _: Any, x: Any) -> Any:
    """The global sizes, as a tensor that every rank holds."""
    del ops
    return replicated(Tensor(list(x.shape), mindspore.int64), x)
