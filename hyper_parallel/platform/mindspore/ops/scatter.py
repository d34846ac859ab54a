"""MindSpore's scatter operators, and writes by index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint, ops

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.dispatch import Dispatcher
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.mindspore.ops.empty_shards import no_elements
from hyper_parallel.platform.mindspore.ops.index import normalized_index, select_column
from hyper_parallel.platform.mindspore.ops.kernels import is_leaf, requires_grad
from hyper_parallel.platform.mindspore.ops.pointwise import into
from hyper_parallel.platform.mindspore.ops.registry import (
    decomposition,
    kernel,
    number,
    replicated,
    setitem_entry,
    spellings,
)

__all__ = ["scatter_add"]

spellings("ScatterAddExt scatter_add  IndexAddExt index_add")
spellings("InplaceScatterAdd scatter_add  InplaceIndexAddExt index_add", in_place=True)

# -- kernels -----------------------------------------------------------------------------------------------------------


@kernel("scatter", empty_unchanged=True)
def _scatter(
    x: Tensor, dim: int, index: Tensor, src: Any = None, *, value: Any = None, reduce: str | None = None
) -> Tensor:
    if reduce is not None:
        msg = f"scatter with reduce={reduce!r}: MindSpore has no such operator; scatter_add adds"
        raise UnsupportedOperatorError(msg)
    if not str(x.device).upper().startswith("CPU") or not x.ndim:
        return mint.scatter(x, dim, index, value if src is None else src)
    # The CPU kernel behind mint.scatter uses the sizes of an earlier call for a vector, and writes to wrong positions.
    source = value if src is None else src
    updates = source if isinstance(source, Tensor) else ops.full(tuple(index.shape), source, dtype=x.dtype)
    if x.is_complex():  # not supported by the kernel
        parts = (ops.tensor_scatter_elements(part(x), index, part(updates), dim) for part in (ops.real, ops.imag))
        return ops.Complex()(*parts)
    return ops.tensor_scatter_elements(x, index, updates, dim)


@kernel("scatter_add", empty_unchanged=True)
def scatter_add(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """Return ``x`` with ``src`` added, by full indices: the kernel along a dim has a data race on CPU."""
    if not x.ndim:
        return scatter_add(x.reshape((1,)), 0, index.reshape((-1,)), src.reshape((-1,))).reshape(())
    axis, shape = dim % x.ndim, tuple(index.shape)
    steps = [Tensor(indices) for indices in np.indices(shape, np.int64)]
    steps[axis] = mint.where(index < 0, index + x.shape[axis], index).astype(mindspore.int64)
    read = src if src.shape == shape else src[tuple(slice(size) for size in shape)]
    places = mint.cat([indices.reshape((-1, 1)) for indices in steps], 1)
    return _added(x, places, read.reshape((-1,)))


def _added(x: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """Add ``values`` at ``places``; booleans and complex numbers, which the kernel lacks, are converted first."""
    if x.dtype == mindspore.bool_:
        return ops.cast(_added(ops.cast(x, mindspore.int32), places, ops.cast(values, mindspore.int32)), x.dtype)
    if x.is_complex():
        parts = (_added(part(x), places, part(values)) for part in (ops.real, ops.imag))
        return ops.Complex()(*parts)
    return ops.tensor_scatter_add(x, places, values)


@kernel("index_add", empty_unchanged=True)
def _index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    axis = dim % x.ndim
    shape = [1] * x.ndim
    shape[axis] = -1
    wide = mint.broadcast_to(index.reshape(tuple(shape)), tuple(source.shape))
    return scatter_add(x, axis, wide, source if alpha == 1 else source * alpha)


@kernel("setitem", reliable_on_empty=True, writes=True)
def _setitem(x: Tensor, index: Any, value: Any) -> None:
    """Write ``value`` at ``index``, into an empty shard too: every rank must have the same graph."""
    if 0 in x.shape:
        x.copy_(no_elements(tuple(x.shape), x, *([value] if isinstance(value, Tensor) else [])))
    else:
        x[index] = value


# -- decompositions ----------------------------------------------------------------------------------------------------


@decomposition("__setitem__", with_dispatcher=True)
def _setitem_of(dispatcher: Dispatcher, _: Any, x: Any, index: Any, value: Any) -> Any:
    return dispatcher.dispatch(setitem_entry(), (x, normalized_index(x, index)[0], value), {})


def _rows(ops: Any, x: Any, index: Any, updates: Any) -> tuple[Any, Any, Any]:
    """Return ``x`` with its indexed dims merged into one, the index into that dim, and the updates in that shape."""
    depth = index.shape[-1]
    places = None
    for dim in range(depth):
        step = ops.mul(select_column(ops, index, dim, x.shape[dim]), math.prod(x.shape[dim + 1 : depth]))
        places = step if places is None else ops.add(places, step)
    rest = tuple(x.shape[depth:])
    return ops.view(x, (-1, *rest)), ops.view(places, (-1,)), ops.view(updates, (-1, *rest))


@decomposition("TensorScatterAdd")
def _scatter_nd_add(ops: Any, _: Any, x: Any, index: Any, updates: Any) -> Any:
    rows, places, values = _rows(ops, x, index, updates)
    return ops.view(ops.index_add(rows, 0, places, values), tuple(x.shape))


@decomposition("TensorScatterSub")
def _scatter_nd_sub(ops: Any, _: Any, x: Any, index: Any, updates: Any) -> Any:
    return _scatter_nd_add(ops, _, x, index, ops.neg(updates))


@decomposition("ScatterNd")
def _scatter_nd(ops: Any, _: Any, index: Any, updates: Any, shape: Sequence[int]) -> Any:
    """Add ``updates`` into zeros at ``index``."""
    return _scatter_nd_add(ops, _, ops.new_zeros(updates, tuple(shape)), index, updates)


@decomposition("TensorScatterUpdate")
def _scatter_nd_update(ops: Any, _: Any, x: Any, index: Any, updates: Any) -> Any:
    rows, places, values = _rows(ops, x, index, updates)
    wide = ops.expand(ops.view(places, (-1, *(1,) * (len(rows.shape) - 1))), tuple(values.shape))
    return ops.view(ops.scatter(rows, 0, wide, values), tuple(x.shape))


@decomposition("Scatter", "DeprecatedScatter")
def _scatter_along(
    ops: Any, _: Any, x: Any, dim: Any = None, index: Any = None, src: Any = None, reduction: Any = 0,
    *, reduce: Any = None, axis: int = 0,
) -> Any:  # fmt: skip
    """Write along a dim, or add if the reduction is 1 or ``add``; methods pass ``reduce``, functions a number."""
    dim, reduction = axis if dim is None else dim, reduction if reduce is None else reduce
    if reduction in (0, "none"):
        return ops.scatter(x, dim, index, src)
    if reduction not in (1, "add") or not isinstance(src, Tensor):
        return ops.scatter(x, dim, index, src, reduce=reduction)  # the kernel refuses it
    return ops.scatter_add(x, dim, index, src)


@decomposition("TensorScatterElements")
def _scatter_elements(ops: Any, _: Any, x: Any, index: Any, updates: Any, axis: int = 0, reduction: Any = 0) -> Any:
    """Write along ``axis``, or add; the index may be a plain tensor that MindSpore's Python layer created."""
    index = index if isinstance(index, DTensor) else replicated(index, x)
    return (ops.scatter_add if reduction in (1, "add") else ops.scatter)(x, axis, index, updates)


@decomposition("UnsortedSegmentSum")
def _segment_sum(ops: Any, _: Any, x: Any, segments: Any, count: int) -> Any:
    """Add rows into numbered segments; rows with negative numbers are omitted."""
    rest = tuple(x.shape[len(segments.shape) :])
    zeros = ops.new_zeros(x, (count, *rest))
    numbers, rows = ops.view(segments, (-1,)), ops.view(x, (-1, *rest))
    left_out = ops.view(ops.lt(numbers, 0), (-1, *(1,) * len(rest)))
    return ops.index_add(zeros, 0, ops.clamp(numbers, min=0), ops.where(left_out, 0, rows))


@decomposition("IndexFill")
def _index_fill(ops: Any, _: Any, x: Any, dim: Any, index: Any, value: Any) -> Any:
    """Set the rows at ``index`` along ``dim`` to ``value``."""
    axis = number(dim) % len(x.shape)
    if isinstance(value, DTensor):
        msg = "operator IndexFill: a DTensor as value has no sharding rule; pass a Python number"
        raise UnsupportedOperatorError(msg)
    filling = number(value)
    shape = (*x.shape[:axis], index.shape[0], *x.shape[axis + 1 :])
    return ops.scatter(x, axis, _along(ops, x, axis, index, shape), ops.new_full(x, shape, filling))


def _along(ops: Any, x: Any, dim: int, index: Any, shape: tuple[int, ...]) -> Any:
    """Return a vector of indices along ``dim``, expanded to ``shape``."""
    axis = dim % len(x.shape)
    return ops.expand(ops.view(index, tuple(-1 if own == axis else 1 for own in range(len(shape)))), shape)


@decomposition("IndexAdd")
def _legacy_index_add(ops: Any, primitive: Any, x: Any, index: Any, updates: Any) -> Any:
    """Add rows in place, as MindSpore does to parameters and to results of operators."""
    return into(x, ops.index_add(x, primitive.init_attrs["axis"], index, ops.cast(updates, dtype=x.dtype)))


@decomposition("ScatterUpdate")
def _rows_replaced(ops: Any, _: Any, x: Any, index: Any, updates: Any) -> Any:
    """Replace rows in place.

    Raises:
        UnsupportedOperatorError: gradients flow through ``x``.
    """
    local = x._local if isinstance(x, DTensor) else x
    if requires_grad(local) and not is_leaf(local):
        msg = "operator ScatterUpdate: MindSpore's gradient of the replaced rows is wrong; "
        raise UnsupportedOperatorError(msg + "write x[index] = updates")
    rows = ops.view(updates, (-1, *tuple(x.shape)[1:]))
    places = _along(ops, x, 0, ops.view(index, (-1,)), tuple(rows.shape))
    return into(x, ops.scatter(x, 0, places, rows))


# -- in place ----------------------------------------------------------------------------------------------------------


@decomposition("InplaceScatterSrc")
def _scatter_in_place(ops: Any, _: Any, x: Any, dim: int, index: Any, src: Any) -> Any:
    return into(x, ops.scatter(x, dim, index, src))


@decomposition("InplaceIndexCopy")
def _index_copy_in_place(ops: Any, _: Any, x: Any, dim: int, index: Any, source: Any) -> Any:
    return into(x, ops.scatter(x, dim, _along(ops, x, dim, index, tuple(source.shape)), source))


@decomposition("InplaceIndexFillScalar")
def _index_fill_in_place(ops: Any, _: Any, x: Any, dim: int, index: Any, value: float) -> Any:
    axis = dim % len(x.shape)
    shape = (*x.shape[:axis], index.shape[0], *x.shape[axis + 1 :])
    return into(x, ops.scatter(x, dim, _along(ops, x, dim, index, shape), ops.new_full(x, shape, value)))
