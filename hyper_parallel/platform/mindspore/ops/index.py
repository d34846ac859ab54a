"""MindSpore's reads by index, gathers and one-hot encoding.

Reads by index are overridden, because MindSpore would index the local tensor without calling ``__fallback__``. The
values of a mask determine the size of the result, so a mask is gathered and converted to positions.
"""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint, ops

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.mindspore.ops.dims import MATRIX, indexed_shape
from hyper_parallel.platform.mindspore.ops.empty_shards import no_elements
from hyper_parallel.platform.mindspore.ops.registry import (
    decomposition,
    expect,
    getitem_entry,
    kernel,
    number,
    replicated,
    spellings,
)

__all__ = ["Window", "normalized_index", "positions", "select_column", "table_window"]

Window = tuple[int, int, int]
"""First and last index in the local table, and the global size of the dim."""

spellings("GatherD gather  IndexSelect index_select")

# -- kernels -----------------------------------------------------------------------------------------------------------

kernel("getitem", empty_shape=indexed_shape)(lambda x, index: x[index])
kernel("index")(lambda x, index: x[index])


def table_window(x: Tensor, dim: int, index: Tensor, window: Window) -> tuple[Tensor, Tensor, Tensor]:
    """Return the table, indices into it, and a mask of those in the window; an empty table gets one row of zeros.

    Raises:
        IndexError: an index is outside of the dim of the complete table.
    """
    start, stop, size = window
    _check_range(index, size)
    inside = mint.logical_and(index >= start, index < stop)
    if start == stop:
        shape = list(x.shape)
        shape[dim] = 1
        x = mint.cat([x, mint.zeros(tuple(shape), dtype=x.dtype)], dim)
    return x, mint.where(inside, index - start, ops.zeros_like(index)), inside


def _check_range(index: Tensor, size: int) -> None:
    """Check indices on CPU only; MindSpore's device kernels do not check them either."""
    if not str(index.device).upper().startswith("CPU") or not index.size:
        return
    values = index.asnumpy()
    low, high = int(values.min()), int(values.max())
    if not 0 <= low <= high < size:
        msg = f"index out of range: indices are {low} to {high}, the dim has size {size}"
        raise IndexError(msg)


@kernel("gather", empty_handled_with="window")
def _gather(x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False, window: Window | None = None) -> Tensor:
    del sparse_grad
    if window is None:
        return mint.gather(x, dim, index)
    if 0 in index.shape:
        return no_elements(tuple(index.shape), x)
    table, local, inside = table_window(x, dim, index, window)
    return mint.gather(table, dim, local).masked_fill(mint.logical_not(inside), 0)


@kernel("index_select", empty_handled_with="window")
def _index_select(x: Tensor, dim: int, index: Tensor, window: Window | None = None) -> Tensor:
    if window is None:
        return ops.gather(x, index, dim % x.ndim)
    axis = dim % x.ndim
    result = (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])
    if 0 in result:
        return no_elements(result, x)
    table, local, inside = table_window(x, dim, index, window)
    shape = [1] * x.ndim
    shape[dim] = -1
    return ops.gather(table, local, dim % x.ndim).masked_fill(mint.logical_not(inside).reshape(tuple(shape)), 0)


@kernel("one_hot")
def _one_hot(x: Tensor, num_classes: int = -1) -> Tensor:
    classes = ops.arange(num_classes).astype(x.dtype)
    return (x[..., None] == classes).astype(x.dtype)


# -- what indices mean -------------------------------------------------------------------------------------------------


def normalized_index(x: Any, index: Any) -> tuple[Any, bool]:
    """Return the index with lists, arrays and masks turned into integer tensors, and whether it has tensors at all."""
    if type(index) in (int, slice) or index is None or index is Ellipsis:
        return index, False
    if index is True:  # here MindSpore returns a view with a new dim
        return None, False
    items = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(item, (Tensor, list, bool, np.ndarray)) for item in items):
        return index, False
    like = next(operand for operand in (x, *items) if isinstance(operand, DTensor))
    normalized: list[Any] = []
    for item in items:
        entry = replicated(Tensor(np.asarray(item)), like) if isinstance(item, (list, bool, np.ndarray)) else item
        if isinstance(entry, Tensor) and entry.dtype == mindspore.bool_:
            normalized.extend(positions(entry, like))
        else:
            normalized.append(entry)
    return tuple(normalized), True


def positions(mask: Any, like: DTensor) -> list[Any]:
    """Return where ``mask`` is true, one replicated integer tensor per dim."""
    whole = mask.full_tensor() if isinstance(mask, DTensor) else mask
    return [replicated(Tensor(indices.astype(np.int64)), like) for indices in np.nonzero(whole.asnumpy())]


def select_column(ops: Any, index: Any, column: int, size: int) -> Any:
    """Return column ``column`` of an index whose rows are positions; on CPU a rank checks its own positions.

    Raises:
        IndexError: a position does not exist, which MindSpore refuses too.
    """
    selected = ops.select(index, -1, column)
    local = selected._local if isinstance(selected, DTensor) else selected
    if local.size and str(local.device).upper().startswith("CPU"):
        values = local.asnumpy()
        outside = values[(values < 0) | (values >= size)]
        if outside.size:
            msg = f"index {int(outside[0])} does not exist in dim {column} of size {size}"
            raise IndexError(msg)
    return selected


# -- decompositions ----------------------------------------------------------------------------------------------------


@decomposition("__getitem__", "GetItem", with_dispatcher=True)
def _getitem(dispatcher: Any, _: Any, x: Any, index: Any) -> Any:
    normalized, advanced = normalized_index(x, index)
    if advanced:
        return dispatcher.ops.index(x, normalized)
    return dispatcher.dispatch(getitem_entry(), (x, normalized), {})


@decomposition("Gather", "DeprecatedGather")
def _gather_rows(ops: Any, _: Any, x: Any, index: Any, axis: int, batch_dims: int = 0) -> Any:
    """Return rows along ``axis``; ``nn.Embedding`` looks up its table with this operator."""
    if batch_dims:
        msg = f"Gather: batch_dims={batch_dims} has no sharding rule; use mint.gather"
        raise UnsupportedOperatorError(msg)
    index = (
        index if isinstance(index, DTensor) else replicated(index, x)
    )  # the index was made by MindSpore's Python layer
    axis = axis % len(x.shape)
    if axis == 0 and len(x.shape) == MATRIX:
        return ops.embedding(index, x)
    return ops.index(x, (*(slice(None),) * axis, index))


@decomposition("GatherNd")
def _gather_nd(ops: Any, _: Any, x: Any, index: Any) -> Any:
    """Return elements of ``x``; each row of ``index`` along its last dim is a position in the first dims of ``x``."""
    return ops.index(x, tuple(select_column(ops, index, dim, x.shape[dim]) for dim in range(index.shape[-1])))


@decomposition("MaskedSelect")
def _masked_select(ops: Any, _: Any, x: Any, mask: Any) -> Any:
    """Return the elements where ``mask`` is true; the mask is gathered, since its values determine the size."""
    shape = np.broadcast_shapes(tuple(x.shape), tuple(mask.shape))
    like = x if isinstance(x, DTensor) else mask
    x, mask = ops.expand(x, shape), ops.expand(mask, shape)
    return ops.index(x, tuple(positions(mask, like)))


@decomposition("Take")
def _take(ops: Any, _: Any, x: Any, index: Any) -> Any:
    return ops.index(ops.view(x, (-1,)), (index,))


@decomposition("DeprecatedTake")
def _take_along(ops: Any, _: Any, x: Any, index: Any, axis: int | None = None, mode: str = "clip") -> Any:
    """Return elements along ``axis``; positions out of range are clipped, or wrapped; negative ones count from the end.

    Raises:
        NotImplementedError: ``mode`` is "raise", which MindSpore does not have.
    """
    if mode not in ("clip", "wrap"):
        msg = f'"{mode}" mode is not implemented'
        raise NotImplementedError(msg)
    x, axis = (ops.view(x, (-1,)), 0) if axis is None else (x, axis % len(x.shape))
    index, size = index if isinstance(index, DTensor) else replicated(Tensor(index), x), x.shape[axis]
    places = ops.clamp(index, -size, size - 1) if mode == "clip" else index
    return ops.index(x, (*(slice(None),) * axis, ops.remainder(places, size)))


@decomposition("NonZero")
def _nonzero(ops: Any, _: Any, x: Any) -> Any:
    return ops.stack(positions(ops.ne(x, 0), x), 1)


@decomposition("OneHot")
def _legacy_one_hot(ops: Any, _: Any, x: Any, depth: int, on: Any, off: Any, axis: int = -1) -> Any:
    hot = ops.movedim(ops.one_hot(x, depth), -1, axis % (len(x.shape) + 1))
    first = on.asnumpy().item() if isinstance(on, Tensor) and not isinstance(on, DTensor) else on
    second = off.asnumpy().item() if isinstance(off, Tensor) and not isinstance(off, DTensor) else off
    dtype = on.dtype if isinstance(on, Tensor) else None
    hot = ops.cast(hot, dtype=dtype) if dtype is not None else hot
    return hot if (first, second) == (1, 0) else ops.add(ops.mul(hot, first - second), second)


@decomposition("OneHotExt")
def _one_hot_ext(ops: Any, _: Any, x: Any, classes: int, on: Any = 1, off: Any = 0, axis: int = -1) -> Any:
    """One-hot encode for ``mint.nn.functional.one_hot``, which passes the values one and zero."""
    values = [number(value) for value in (on, off)]
    expect("OneHotExt", "on_value, off_value, axis", [*values, axis], [1, 0, -1])
    return ops.one_hot(x, classes)
