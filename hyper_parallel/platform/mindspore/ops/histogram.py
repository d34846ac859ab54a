"""Bins and counts of MindSpore; bins are computed with NumPy, because MindSpore has few CPU kernels.

That of ``searchsorted`` uses sizes of earlier calls.
"""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint

from hyper_parallel.platform.mindspore.ops.kernels import BY_NUMBER
from hyper_parallel.platform.mindspore.ops.registry import (
    METHOD,
    computes_on_cpu,
    decomposition,
    kernel,
    spelling,
)
from hyper_parallel.platform.mindspore.ops.scatter import scatter_add

__all__: list[str] = []

spelling("histc", "HistcExt", signature="x, bins=100, min=0, max=0")
spelling("bincount", "BincountExt", signature="x, weights=None, minlength=0")

# -- kernels -----------------------------------------------------------------------------------------------------------


def _side(right: bool, side: str | None = None) -> str:
    return side or ("right" if right else "left")


def _bisected(edges: Any, values: Any, side: str) -> Any:
    """Bisect per element: NumPy's search starts from its neighbour's result, which differs on unsorted edges."""
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
def _histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:  # noqa: A002 - canonical names
    values = x.asnumpy()
    low, high = (min, max) if min != max or not values.size else (values.min(), values.max())
    low, high = (low - 1, high + 1) if low == high else (low, high)
    inside = values[(values >= low) & (values <= high)]
    # As the kernels do it: the bin by division, in the dtype of the values.
    indices = np.minimum(((inside - low) / (high - low) * bins).astype(np.int64), bins - 1)
    return Tensor(np.bincount(indices.reshape(-1), minlength=bins).astype(values.dtype))


# -- decompositions ----------------------------------------------------------------------------------------------------


@decomposition("Histogram")
def _histogram(ops: Any, primitive: Any, x: Any) -> Any:
    """Counts in the dtype of ``x``; those of float16 in float32."""
    bins, low, high = (primitive.init_attrs[name] for name in ("bins", "min", "max"))
    counts = ops.histc(x, bins, low, high)
    return ops.cast(counts, dtype=mindspore.float32) if x.dtype == mindspore.float16 else counts


@decomposition(METHOD + "HistcExt")
def _method_histc(ops: Any, _: Any, x: Any, bins: int = 100, min: float = 0, max: float = 0) -> Any:  # noqa: A002
    """On CPU counts of float16 are float32."""
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
    """On CPU counts are float32, and so are sums of weights."""
    counts = ops.bincount(ops.cast(x, dtype=mindspore.int64), weights, minlength)
    return ops.cast(counts, dtype=mindspore.float32) if computes_on_cpu() else counts
