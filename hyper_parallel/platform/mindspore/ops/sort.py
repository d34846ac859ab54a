"""MindSpore's sorting and counting operators; indices are found on the host, since few CPU kernels find them."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint, ops as native

from hyper_parallel.platform.mindspore.ops.kernels import BY_NUMBER
from hyper_parallel.platform.mindspore.ops.registry import (
    METHOD,
    computes_on_cpu,
    decomposition,
    kernel,
    replicated,
    spelling,
    spellings,
)
from hyper_parallel.platform.mindspore.ops.scatter import scatter_add

__all__: list[str] = []

spellings("SortExt sort  ArgSort argsort  TopkExt topk  Kthvalue kthvalue")

# -- kernels -----------------------------------------------------------------------------------------------------------


def _order(x: Tensor, dim: int, *, descending: bool) -> Tensor:
    """Return the indices that sort ``x``, stably, found on the host; NaN is the greatest."""
    values = x.asnumpy()
    if not x.ndim:
        return Tensor(np.zeros((), np.int64))
    if not descending:
        return Tensor(np.argsort(values, axis=dim, kind="stable").astype(np.int64))
    back = np.argsort(np.flip(values, dim), axis=dim, kind="stable")
    return Tensor((values.shape[dim] - 1 - np.flip(back, dim)).astype(np.int64))


@kernel("sort")
def _sort(x: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> tuple[Tensor, Tensor]:
    del stable  # the sort is always stable
    indices = _order(x, dim, descending=descending)
    return (mint.gather(x, dim, indices) if x.ndim else x * 1), indices


kernel("argsort")(lambda x, dim=-1, descending=False, stable=False: _order(x, dim, descending=descending))


@kernel("topk")
def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    del sorted  # the results are always sorted
    indices = mint.narrow(_order(x, dim, descending=largest), dim, 0, k)
    return mint.gather(x, dim, indices), indices


@kernel("kthvalue")
def _kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    indices = mint.narrow(_order(x, dim, descending=False), dim, k - 1, 1)
    values = mint.gather(x, dim, indices)
    if keepdim:
        return values, indices
    shape = tuple(size for axis, size in enumerate(x.shape) if axis != dim % x.ndim)
    return values.reshape(shape), indices.reshape(shape)


# -- decompositions ----------------------------------------------------------------------------------------------------


@decomposition("Sort")
def _legacy_sort(ops: Any, primitive: Any, x: Any) -> Any:
    """Return the sorted elements, and their indices as 32-bit numbers."""
    values, indices = ops.sort(x, primitive.init_attrs["axis"], primitive.init_attrs["descending"])
    return values, ops.cast(indices, dtype=mindspore.int32)


@decomposition("TopK")
def _legacy_topk(ops: Any, _: Any, x: Any, k: int) -> Any:
    """Return the largest elements along the last dim, and their indices as 32-bit numbers."""
    values, indices = ops.topk(x, k)
    return values, ops.cast(indices, dtype=mindspore.int32)


@decomposition("DeprecatedSort")
def _sort_along(ops: Any, _: Any, x: Any, axis: int = -1, descending: bool = False) -> Any:
    values, indices = ops.sort(x, axis, descending)
    return values, ops.cast(indices, dtype=mindspore.int32)


@decomposition("DeprecatedArgsort")
def _argsort_along(ops: Any, _: Any, x: Any, axis: int = -1, descending: bool = False) -> Any:
    return ops.cast(ops.argsort(x, axis, descending), dtype=mindspore.int32)


def _index_dtype() -> Any:
    """Return the dtype of the indices that methods return: int32 on CPU, else int64."""
    return mindspore.int32 if computes_on_cpu() else mindspore.int64


@decomposition(METHOD + "SortExt")
def _method_sort(ops: Any, _: Any, x: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    values, indices = ops.sort(x, dim, descending, stable)
    return values, ops.cast(indices, dtype=_index_dtype())


@decomposition(METHOD + "ArgSort")
def _method_argsort(ops: Any, _: Any, x: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    return ops.cast(ops.argsort(x, dim, descending, stable), dtype=_index_dtype())


@decomposition(METHOD + "TopkExt")
def _method_topk(ops: Any, _: Any, x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    values, indices = ops.topk(x, k, dim, largest, sorted)
    return values, ops.cast(indices, dtype=_index_dtype())


@decomposition("Unique")
def _unique(_ops: Any, _: Any, x: Any) -> Any:
    """Return values in order of first appearance, and each element's position among them; ``x`` is gathered.

    MindSpore has no gradient of this on CPU. For an empty tensor, its kernel returns values of an earlier call.
    """
    whole = x.full_tensor()
    if whole.size:
        values, places = native.unique(whole)
    else:
        dtype = whole.dtype if whole.dtype == mindspore.int64 else mindspore.int32
        values, places = whole.reshape(-1), Tensor(np.zeros(whole.shape), dtype)
    return replicated(values, x), replicated(places, x)


spelling("histc", "HistcExt", signature="x, bins=100, min=0, max=0")
spelling("bincount", "BincountExt", signature="x, weights=None, minlength=0")

# -- kernels -----------------------------------------------------------------------------------------------------------


def _side(right: bool, side: str | None = None) -> str:
    return side or ("right" if right else "left")


def _bisected(edges: Any, values: Any, side: str) -> Any:
    """Bisect per element: NumPy starts from the previous element's result, which matters for unsorted edges."""
    low, high = np.zeros(values.shape, np.int64), np.full(values.shape, len(edges))
    while (low < high).any():
        middle = (low + high) // 2
        there = edges[np.minimum(middle, len(edges) - 1)]
        beyond = (low < high) & ~(there >= values if side == "left" else there > values)
        low, high = np.where(beyond, middle + 1, low), np.where(beyond, high, np.minimum(middle, high))
    return low


@kernel("bucketize")
def _bucketize(x: Tensor, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Tensor:
    edges = boundaries.asnumpy() if isinstance(boundaries, Tensor) else np.asarray(boundaries)
    bins = _bisected(edges, x.asnumpy(), _side(right))
    return Tensor(np.asarray(bins, np.int32 if out_int32 else np.int64))


@kernel("searchsorted")
def _searchsorted(
    table: Tensor,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    rows = table.asnumpy()
    if sorter is not None:
        rows = np.take_along_axis(rows, sorter.asnumpy(), -1)
    values = x.asnumpy() if isinstance(x, Tensor) else np.asarray(x, rows.dtype)
    dtype = np.int32 if out_int32 else np.int64
    if rows.ndim == 1:
        return Tensor(np.asarray(_bisected(rows, values, _side(right, side)), dtype))
    bins = np.empty(values.shape, dtype)
    for row in np.ndindex(values.shape[:-1]):
        bins[row] = _bisected(rows[row], values[row], _side(right, side))
    return Tensor(bins)


@kernel("bincount_to", empty=0)
def _bincount_to(x: Tensor, weights: Tensor | None, count: int) -> Tensor:
    values = x.asnumpy()
    if weights is None:
        return Tensor(np.bincount(values, minlength=count).astype(np.int64))
    return scatter_add(mint.zeros((count,), dtype=weights.dtype), 0, x, weights)


@kernel("histc", empty=0)
def _histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    values = x.asnumpy()
    low, high = (min, max) if min != max or not values.size else (values.min(), values.max())
    low, high = (low - 1, high + 1) if low == high else (low, high)
    inside = values[(values >= low) & (values <= high)]
    # As in the kernels, the bin is found by division in the dtype of the values.
    indices = np.minimum(((inside - low) / (high - low) * bins).astype(np.int64), bins - 1)
    return Tensor(np.bincount(indices.reshape(-1), minlength=bins).astype(values.dtype))


# -- decompositions ----------------------------------------------------------------------------------------------------


@decomposition("Histogram")
def _histogram(ops: Any, primitive: Any, x: Any) -> Any:
    """Return counts in the dtype of ``x``, or in float32 for float16."""
    bins, low, high = (primitive.init_attrs[name] for name in ("bins", "min", "max"))
    counts = ops.histc(x, bins, low, high)
    return ops.cast(counts, dtype=mindspore.float32) if x.dtype == mindspore.float16 else counts


@decomposition(METHOD + "HistcExt")
def _method_histc(ops: Any, _: Any, x: Any, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """Return the histogram; on CPU the counts of float16 are float32."""
    counts = ops.histc(x, bins, min, max)
    return ops.cast(counts, dtype=mindspore.float32) if x.dtype == mindspore.float16 and computes_on_cpu() else counts


@decomposition("SearchSorted")
def _search_sorted(
    ops: Any, _: Any, table: Any, x: Any, sorter: Any = None, dtype: Any = mindspore.int64, right: bool = False
) -> Any:
    narrow = BY_NUMBER.get(dtype, dtype) == mindspore.int32
    return ops.searchsorted(table, x, sorter=sorter, out_int32=narrow, right=right)


@decomposition(METHOD + "BincountExt")
def _method_bincount(ops: Any, _: Any, x: Any, weights: Any = None, minlength: int = 0) -> Any:
    """Count the occurrences of each integer, or sum their weights; on CPU in float32."""
    if weights is not None and computes_on_cpu():
        weights = ops.cast(weights, dtype=mindspore.float32)
    counts = ops.bincount(ops.cast(x, dtype=mindspore.int64), weights, minlength)
    return ops.cast(counts, dtype=mindspore.float32) if computes_on_cpu() else counts
