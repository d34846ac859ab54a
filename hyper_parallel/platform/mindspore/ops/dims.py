"""Operators of MindSpore that reorder, slice, expand, roll, mask or drop dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.mindspore.ops.empty_shards import COMPUTED
from hyper_parallel.platform.mindspore.ops.registry import (
    METHOD,
    computes_on_cpu,
    decomposition,
    expect,
    kernel,
    number,
    replicated,
    spelling,
    spellings,
)

__all__ = ["MATRIX", "indexed_shape", "on_diagonals", "select", "unsqueeze"]

MATRIX = 2
"""Number of dims of a matrix."""

# -- spellings ---------------------------------------------------------------------------------------------------------

spellings("""
TransposeExtView transpose  TransposeExt transpose  TransposeView permute  TExt t
ExpandDims unsqueeze  ExpandDimsView unsqueeze  BroadcastTo expand  BroadcastToView expand
Tile tile  Repeat repeat  RepeatInterleaveInt repeat_interleave
NarrowView narrow  Narrow narrow  SelectExt select  SelectExtView select
ReverseV2 flip  Roll roll  TrilExt tril  Triu triu  Tril tril
""")
spelling("diagonal", "Diagonal", "DiagonalView", signature="x, offset=0, dim1=0, dim2=1")

# -- kernels -----------------------------------------------------------------------------------------------------------

kernel("transpose")(lambda x, dim0, dim1: mint.transpose(x, dim0, dim1))
kernel("permute")(lambda x, dims: mint.permute(x, tuple(dims)))
for _name in ("t", "reversed_dims"):
    kernel(_name)(lambda x: mint.permute(x, tuple(range(x.ndim))[::-1]))
kernel("matrix_transpose")(lambda x: mint.transpose(x, -2, -1))
kernel("narrow", empty_shape=COMPUTED)(lambda x, dim, start, length: mint.narrow(x, dim, start, length))


@kernel("movedim")
def _movedim(x: Tensor, source: Any, destination: Any) -> Tensor:
    ndim = x.ndim
    sources = [dim % ndim for dim in ((source,) if isinstance(source, int) else source)]
    targets = [dim % ndim for dim in ((destination,) if isinstance(destination, int) else destination)]
    rest = iter([dim for dim in range(ndim) if dim not in sources])
    order = [sources[targets.index(dim)] if dim in targets else next(rest) for dim in range(ndim)]
    return mint.permute(x, tuple(order))


@kernel("squeeze")
def _squeeze(x: Tensor, dim: Any = None) -> Tensor:
    dims = range(x.ndim) if dim is None else [index % x.ndim for index in ((dim,) if isinstance(dim, int) else dim)]
    return x.reshape(tuple(size for index, size in enumerate(x.shape) if index not in dims or size != 1))


@kernel("unsqueeze")
def unsqueeze(x: Tensor, dim: int) -> Tensor:
    """Return ``x`` with a new dim of size 1."""
    position = dim % (x.ndim + 1)
    return x.reshape((*x.shape[:position], 1, *x.shape[position:]))


@kernel("expand", empty_shape=COMPUTED)
def _expand(x: Tensor, shape: Sequence[int]) -> Tensor:
    lead = len(shape) - x.ndim
    sizes = tuple(x.shape[index - lead] if size == -1 else size for index, size in enumerate(shape))
    return mint.broadcast_to(x, sizes)


@kernel("select", empty_shape=COMPUTED)
def select(x: Tensor, dim: int, index: int) -> Tensor:
    """Return one slice along ``dim``, which is dropped."""
    axis = dim % x.ndim
    row = mint.narrow(x, axis, index % x.shape[axis], 1)
    return row.reshape((*x.shape[:axis], *x.shape[axis + 1 :]))


def indexed_shape(x: Tensor, index: Any) -> tuple[tuple[int, ...], Any]:
    """Compute shape and dtype of ``x[index]`` with NumPy: MindSpore may divide by zero on empty tensors."""
    return np.broadcast_to(0, tuple(x.shape))[index].shape, x.dtype


def _sliced(
    x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> tuple[tuple[int, ...], Any]:
    return indexed_shape(x, (slice(None),) * (dim % x.ndim) + (slice(start, end, step),))


@kernel("slice", empty_shape=_sliced)
def _slice(x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)]


@kernel("repeat")
def _repeat(x: Tensor, repeats: Sequence[int]) -> Tensor:
    return mint.tile(x, tuple(repeats))


@kernel("repeat_interleave")
def _repeat_interleave(x: Tensor, repeats: int, dim: int | None = None, *, output_size: int | None = None) -> Tensor:
    del output_size
    if dim is None:
        x, dim = x.reshape((-1,)), 0
    axis = dim % x.ndim
    wide = mint.broadcast_to(unsqueeze(x, axis + 1), (*x.shape[: axis + 1], repeats, *x.shape[axis + 1 :]))
    return wide.reshape((*x.shape[:axis], x.shape[axis] * repeats, *x.shape[axis + 1 :]))


@kernel("diagonal")
def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    first, second = dim1 % x.ndim, dim2 % x.ndim
    rest = [dim for dim in range(x.ndim) if dim not in (first, second)]
    rows, columns = x.shape[first], x.shape[second]
    start, count = (
        (offset, min(rows, columns - offset)) if offset >= 0 else (-offset * columns, min(rows + offset, columns))
    )
    flat = mint.permute(x, (*rest, first, second)).reshape((*(x.shape[dim] for dim in rest), rows * columns))
    places = ops.arange(max(count, 0)) * (columns + 1) + start
    if x.dtype == mindspore.bfloat16:  # not supported by the kernel
        return ops.cast(ops.gather(ops.cast(flat, mindspore.float32), places, len(rest)), x.dtype)
    return ops.gather(flat, places, len(rest))


@kernel("unfold")
def _unfold(x: Tensor, dimension: int, size: int, step: int) -> Tensor:
    axis = dimension % x.ndim
    starts = ops.arange(0, x.shape[axis] - size + 1, step)
    index = (starts.reshape((-1, 1)) + ops.arange(size).reshape((1, -1))).reshape((-1,))
    windows = ops.gather(x, index, axis).reshape((*x.shape[:axis], starts.shape[0], size, *x.shape[axis + 1 :]))
    return mint.permute(windows, (*(dim for dim in range(windows.ndim) if dim != axis + 1), axis + 1))


@kernel("flip")
def _flip(x: Tensor, dims: Sequence[int]) -> Tensor:
    if x.dtype == mindspore.bfloat16:  # not supported by the kernel
        return ops.cast(mint.flip(ops.cast(x, mindspore.float32), tuple(dims)), x.dtype)
    return mint.flip(x, tuple(dims))


@kernel("roll")
def _roll(x: Tensor, shifts: Any, dims: Any = None) -> Tensor:
    if dims is None:
        return _roll(x.reshape((-1,)), shifts, 0).reshape(x.shape)
    pairs = [(shifts, dims)] if isinstance(dims, int) else list(zip(shifts, dims, strict=True))
    for shift, dim in pairs:
        size = x.shape[dim]
        cut = -shift % size if size else 0
        if cut:
            x = mint.cat([mint.narrow(x, dim, cut, size - cut), mint.narrow(x, dim, 0, cut)], dim)
    return x


def _triangle(lower: bool) -> Callable[..., Tensor]:
    def compute(x: Tensor, diagonal: int = 0) -> Tensor:
        rows = ops.arange(x.shape[-2]).reshape((-1, 1))
        columns = ops.arange(x.shape[-1]).reshape((1, -1))
        kept = (columns - rows <= diagonal) if lower else (columns - rows >= diagonal)
        return mint.where(kept, x, ops.zeros_like(x))

    return compute


kernel("tril")(_triangle(lower=True))
kernel("triu")(_triangle(lower=False))

# -- decompositions ----------------------------------------------------------------------------------------------------


@decomposition("Transpose", "DeprecatedTranspose", "DeprecatedPermute")
def _transpose(ops: Any, _: Any, x: Any, *dims: Any) -> Any:
    """Return ``x`` with its dims in another order, as ``x.T`` and ``ops.transpose(x, order)`` do.

    Without an order, or with None, the dims are reversed. Two dims for a tensor that does not have two dims are
    swapped.
    """
    if dims in ((), (None,)):
        return ops.permute(x, tuple(reversed(range(len(x.shape)))))
    order = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], (list, tuple)) else dims
    if len(order) == MATRIX and len(x.shape) != MATRIX:
        return ops.transpose(x, *order)
    return ops.permute(x, order)


@decomposition("ExpandAs")
def _expand_as(ops: Any, _: Any, x: Any, other: Any) -> Any:
    return ops.expand(x, tuple(other.shape))


@decomposition("Squeeze", "DeprecatedSqueeze")
def _squeeze_dims(ops: Any, primitive: Any, x: Any, dim: Any = None) -> Any:
    """Remove dims of size 1: the given ones, or all if none are given."""
    dim = getattr(primitive, "init_attrs", {}).get("axis", ()) if dim is None else dim
    return ops.squeeze(x, None if dim in ((), []) else dim)


@decomposition("Slice")
def _slice_dims(ops: Any, _: Any, x: Any, begin: Sequence[int], size: Sequence[int]) -> Any:
    """Slice each dim from its begin; a size of -1 extends to the end of the dim."""
    for dim, (start, length) in enumerate(zip(begin, size, strict=True)):
        length = x.shape[dim] - start if length == -1 else length  # noqa: PLW2901 - spelled out
        if (start, length) != (0, x.shape[dim]):
            x = ops.narrow(x, dim, start, length)
    return x


@decomposition("StridedSlice")
def _strided_slice(
    ops: Any, primitive: Any, x: Any, begin: Sequence[int], end: Sequence[int], strides: Sequence[int], *masks: int
) -> Any:
    """``x[begin:end:strides]`` with bit masks for open ends, an ellipsis, new dims and dropped dims."""
    names = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
    bits = masks or [primitive.init_attrs[name] for name in names]
    return ops.getitem(
        x, tuple(_item(bits, dim, *bounds) for dim, bounds in enumerate(zip(begin, end, strides, strict=True)))
    )


def _item(masks: Sequence[int], dim: int, begin: int, end: int, stride: int) -> Any:
    open_begin, open_end, ellipsis, new, shrink = (mask >> dim & 1 for mask in masks)
    if ellipsis:
        return Ellipsis
    if new:
        return None
    return begin if shrink else slice(None if open_begin else begin, None if open_end else end, stride)


@decomposition("DeprecatedRepeatInterleave")
def _repeat_interleave_int(ops: Any, _: Any, x: Any, repeats: int, dim: int | None = None) -> Any:
    return ops.repeat_interleave(x, repeats, dim)


@decomposition("Meshgrid")
def _meshgrid(ops: Any, primitive: Any, tensors: Sequence[Any], indexing: Any = None) -> Any:
    """Expand each vector over the grid of all vectors; the indexing ``xy`` swaps the first two dims."""
    order_name = primitive.init_attrs["indexing"] if indexing is None else indexing
    count = len(tensors)
    order = list(range(count))
    if order_name in ("xy", 1) and count > 1:
        order[:2] = [1, 0]
    sizes = [math.prod(tensor.shape) for tensor in tensors]
    shape = tuple(sizes[index] for index in order)
    dims = [order.index(index) for index in range(count)]
    return tuple(
        ops.expand(ops.view(tensor, tuple(-1 if dim == own else 1 for dim in range(count))), shape)
        for tensor, own in zip(tensors, dims, strict=True)
    )


def on_diagonals(ops: Any, x: Any, offset: int = 0) -> Any:
    """Return matrices with the last dim of ``x`` on a diagonal, in two new last dims."""
    count = x.shape[-1]
    size = count + abs(offset)
    rows = np.arange(size) - max(-offset, 0)
    inside = (rows >= 0) & (rows < count)
    chosen = ops.index_select(x, -1, replicated(Tensor(np.clip(rows, 0, max(count - 1, 0))), x))
    mask = np.eye(size, k=offset, dtype=bool) & inside[:, None]
    return ops.where(replicated(Tensor(mask), x), ops.unsqueeze(chosen, -1), 0)


@decomposition("Diag", "DiagExt")
def _diag(ops: Any, primitive: Any, x: Any, offset: int = 0) -> Any:
    """Return a matrix with the vector on its diagonal, or the diagonal of a matrix."""
    if len(x.shape) == 1:
        return on_diagonals(ops, x, offset)
    expect("Diag", "the number of dims", len(x.shape), 1 if primitive is not None else MATRIX)
    return ops.clone(ops.diagonal(x, offset, 0, 1))  # MindSpore's operator copies, too


@decomposition(METHOD + "DiagExt")
def _method_diag(ops: Any, _: Any, x: Any, offset: int = 0) -> Any:
    """Return a matrix with the vector on its diagonal, or the diagonal of a matrix.

    A matrix is rejected on CPU: there MindSpore returns a tensor of four dims, for which there is no rule.
    """
    if len(x.shape) == 1:
        return on_diagonals(ops, x, offset)
    expect("Tensor.diag", "the number of dims on CPU", computes_on_cpu(), False)
    return ops.clone(ops.diagonal(x, offset, 0, 1))


@decomposition("MatrixDiagV3")
def _matrix_diag(ops: Any, _: Any, x: Any, k: Any, rows: Any, columns: Any, padding: Any) -> Any:
    values = [number(value) for value in (k, rows, columns, padding)]
    expect("MatrixDiagV3", "k, num_rows, num_cols, padding_value", values, [0, -1, -1, 0])
    return on_diagonals(ops, x)


@decomposition("MatrixBandPart")
def _matrix_band_part(ops: Any, _: Any, x: Any, lower: Any, upper: Any) -> Any:
    """Keep ``lower`` diagonals below and ``upper`` above the main one; a negative number keeps all."""
    lower, upper = number(lower), number(upper)
    x = x if lower < 0 else ops.triu(x, -lower)
    return x if upper < 0 else ops.tril(x, upper)
