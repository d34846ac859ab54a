"""Indexing, gathering and scattering on plain MindSpore tensors, with canonical names and CPU kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint, ops

from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.mindspore.empty import nothing

__all__ = ["LOCAL", "scatter_add", "setitem"]


# First and last index that are held here, and the size of the whole dim.
Window = tuple[int, int, int]


def _found(x: Tensor, dim: int, index: Tensor, window: Window) -> tuple[Tensor, Tensor, Tensor]:
    """The table, indices into it, and where they mean something; an empty table gets one row of zeros."""
    start, stop, size = window
    _check_range(index, size)
    inside = mint.logical_and(index >= start, index < stop)
    if start == stop:
        shape = list(x.shape)
        shape[dim] = 1
        x = mint.cat([x, mint.zeros(tuple(shape), dtype=x.dtype)], dim)
    return x, mint.where(inside, index - start, ops.zeros_like(index)), inside


def _check_range(index: Tensor, size: int) -> None:
    """Raise where reading the indices costs nothing; elsewhere the framework's own kernels do not look either."""
    if not str(index.device).upper().startswith("CPU") or not index.size:
        return
    values = index.asnumpy()
    low, high = int(values.min()), int(values.max())
    if not 0 <= low <= high < size:
        msg = f"index out of range: indices are {low} to {high}, the dim has size {size}"
        raise IndexError(msg)


def _gather(x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False, window: Window | None = None) -> Tensor:
    del sparse_grad
    if window is None:
        return mint.gather(x, dim, index)
    if 0 in index.shape:
        return nothing(tuple(index.shape), x)
    table, local, inside = _found(x, dim, index, window)
    return mint.gather(table, dim, local).masked_fill(mint.logical_not(inside), 0)


def _index_select(x: Tensor, dim: int, index: Tensor, window: Window | None = None) -> Tensor:
    if window is None:
        return ops.gather(x, index, dim % x.ndim)
    at = dim % x.ndim
    made = (*x.shape[:at], *index.shape, *x.shape[at + 1 :])
    if 0 in made:
        return nothing(made, x)
    table, local, inside = _found(x, dim, index, window)
    shape = [1] * x.ndim
    shape[dim] = -1
    return ops.gather(table, local, dim % x.ndim).masked_fill(mint.logical_not(inside).reshape(tuple(shape)), 0)


def embedding(
    x: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    window: Window | None = None,
) -> Tensor:
    """Rows of ``weight``, or what the rows ``window`` of a larger table contribute; padding rows get no gradient."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        msg = "embedding: max_norm, scale_grad_by_freq and sparse are not served on MindSpore"
        raise NotImplementedError(msg)
    del norm_type
    padded = None if padding_idx is None else x == padding_idx % (window[2] if window else weight.shape[0])
    if window is None:
        return _without_gradient(ops.gather(weight, x, 0), padded)
    made = (*x.shape, *weight.shape[1:])
    if 0 in made:
        return nothing(made, weight)
    table, local, inside = _found(weight, 0, x, window)
    rows = _without_gradient(ops.gather(table, local, 0), padded)
    return rows.masked_fill(mint.logical_not(inside)[..., None], 0)


def _lookup(
    weight: Tensor,
    x: Tensor,
    padding_idx: int | None = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    window: Window | None = None,
) -> Tensor:
    padding = None if padding_idx is None or padding_idx < 0 else padding_idx
    return embedding(x, weight, padding, None, 2.0, scale_grad_by_freq, sparse, window)


def _without_gradient(rows: Tensor, where: Tensor | None) -> Tensor:
    return rows if where is None else mint.where(where[..., None], ops.stop_gradient(rows), rows)


def _scatter(
    x: Tensor, dim: int, index: Tensor, src: Any = None, *, value: Any = None, reduce: str | None = None
) -> Tensor:
    if reduce is not None:
        msg = f"scatter with reduce={reduce!r}: MindSpore has no such operator; scatter_add adds"
        raise UnsupportedOperatorError(msg)
    if not str(x.device).upper().startswith("CPU") or not x.ndim:
        return mint.scatter(x, dim, index, value if src is None else src)
    # The CPU kernel behind mint.scatter uses the sizes of an earlier call for a vector, and writes elsewhere.
    given = value if src is None else src
    updates = given if isinstance(given, Tensor) else ops.full(tuple(index.shape), given, dtype=x.dtype)
    return ops.tensor_scatter_elements(x, index, updates, dim)


def scatter_add(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """``x`` with ``src`` added, by whole positions: the kernel for places along a dim loses sums to a race on CPU."""
    if not x.ndim:
        return scatter_add(x.reshape((1,)), 0, index.reshape((-1,)), src.reshape((-1,))).reshape(())
    at, shape = dim % x.ndim, tuple(index.shape)
    steps = [Tensor(one) for one in np.indices(shape, np.int64)]
    steps[at] = mint.where(index < 0, index + x.shape[at], index).astype(mindspore.int64)
    read = src if src.shape == shape else src[tuple(slice(size) for size in shape)]
    places = mint.cat([one.reshape((-1, 1)) for one in steps], 1)
    return ops.tensor_scatter_add(x, places, read.reshape((-1,)))


def _index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    at = dim % x.ndim
    shape = [1] * x.ndim
    shape[at] = -1
    wide = mint.broadcast_to(index.reshape(tuple(shape)), tuple(source.shape))
    return scatter_add(x, at, wide, source if alpha == 1 else source * alpha)


def _one_hot(x: Tensor, num_classes: int = -1) -> Tensor:
    classes = ops.arange(num_classes).astype(x.dtype)
    return (x[..., None] == classes).astype(x.dtype)


def setitem(x: Tensor, index: Any, value: Any) -> None:
    """``x[index] = value``; an empty piece is written, too: every rank must have the same graph."""
    if 0 in x.shape:
        x.copy_(nothing(tuple(x.shape), x, *([value] if isinstance(value, Tensor) else [])))
    else:
        x[index] = value


LOCAL: dict[str, Callable[..., Any]] = {
    "getitem": lambda x, index: x[index],
    "index": lambda x, index: x[index],
    "setitem": setitem,
    "gather": _gather,
    "index_select": _index_select,
    "scatter": _scatter,
    "scatter_add": scatter_add,
    "index_add": _index_add,
    "one_hot": _one_hot,
    "embedding": embedding,
    "lookup": _lookup,
}
