"""MindSpore's reductions that are several canonical ones."""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import Tensor

from hyper_parallel.platform.mindspore.primitives import composed, expect
from hyper_parallel.platform.mindspore.tensors import BY_NUMBER

__all__: list[str] = []


@composed("ReduceStd")
def _deviation(ops: Any, _: Any, x: Any, dim: Any = (), unbiased: bool = True, keepdim: bool = False) -> Any:
    """With the mean."""
    dims = None if dim in ((), []) else tuple(dim) if isinstance(dim, (list, tuple)) else (dim,)
    return tuple(ops.std_mean(x, dims, correction=int(unbiased), keepdim=keepdim))


@composed("CumulativeLogsumexp")
def _running(ops: Any, primitive: Any, x: Any, dim: Any) -> Any:
    """The dim comes as a tensor."""
    for name in ("exclusive", "reverse"):
        expect("CumulativeLogsumexp", name, primitive.init_attrs[name], False)
    return ops.logcumsumexp(x, dim.asnumpy().item() if isinstance(dim, Tensor) else dim)


@composed("LpNorm")
def _norm(ops: Any, primitive: Any, x: Any) -> Any:
    """The smallest norm is ``epsilon``."""
    p, keep, epsilon = (getattr(primitive, name) for name in ("p", "keep_dims", "epsilon"))
    dims = primitive.axis if isinstance(primitive.axis, (list, tuple)) else (primitive.axis,)
    return ops.clamp(ops.vector_norm(x, p, tuple(dims), keep), min=epsilon)


@composed("L2Loss")
def _half_square(ops: Any, _: Any, x: Any) -> Any:
    return ops.div(ops.sum(ops.square(x)), 2)


@composed("L2Normalize")
def _normalised(ops: Any, primitive: Any, x: Any) -> Any:
    total = ops.sum(ops.square(x), primitive.axis, True)
    return ops.mul(x, ops.rsqrt(ops.clamp(total, min=primitive.epsilon)))


@composed("SquareSumAll")
def _square_sums(ops: Any, _: Any, x: Any, y: Any) -> Any:
    return ops.sum(ops.square(x)), ops.sum(ops.square(y))


@composed("Histogram")
def _histogram(ops: Any, primitive: Any, x: Any) -> Any:
    """Counts in the dtype of ``x``."""
    bins, low, high = (primitive.init_attrs[name] for name in ("bins", "min", "max"))
    return ops.histc(x, bins, low, high)


@composed("Cummin")
def _running_least(ops: Any, _: Any, x: Any, dim: int) -> Any:
    """The places are 32-bit numbers."""
    values, places = ops.cummin(x, dim)
    return values, ops.cast(places, dtype=mindspore.int32)


@composed("Median")
def _median(ops: Any, primitive: Any, x: Any) -> Any:
    """With the place; of all elements together, with place 0 as nobody reads it."""
    whole, axis, keep, skip = (
        primitive.init_attrs[name] for name in ("global_median", "axis", "keep_dims", "ignore_nan")
    )
    if whole:
        return ops.median_all(x, skip), None
    return tuple((ops.nanmedian_along if skip else ops.median_along)(x, axis, keep))


@composed("SearchSorted")
def _search_sorted(
    ops: Any, _: Any, table: Any, x: Any, sorter: Any = None, dtype: Any = mindspore.int64, right: bool = False
) -> Any:
    narrow = BY_NUMBER.get(dtype, dtype) == mindspore.int32
    return ops.searchsorted(table, x, sorter=sorter, out_int32=narrow, right=right)


@composed("Sort")
def _sorted(ops: Any, primitive: Any, x: Any) -> Any:
    """The places are 32-bit numbers."""
    values, places = ops.sort(x, primitive.init_attrs["axis"], primitive.init_attrs["descending"])
    return values, ops.cast(places, dtype=mindspore.int32)


@composed("TopK")
def _largest(ops: Any, _: Any, x: Any, k: int) -> Any:
    """Along the last dim; the places are 32-bit numbers."""
    values, places = ops.topk(x, k)
    return values, ops.cast(places, dtype=mindspore.int32)


@composed("Cross")
def _cross(ops: Any, _: Any, x: Any, y: Any, dim: int = -65530) -> Any:
    """Without a dim, along the first of size 3."""
    return ops.cross(x, y, next(at for at, size in enumerate(x.shape) if size == 3) if dim == -65530 else dim)


@composed("LogMatrixDeterminant")
def _log_determinant(ops: Any, _: Any, x: Any) -> Any:
    return tuple(ops.slogdet(x))


@composed("MatrixInverse")
def _inverse(ops: Any, primitive: Any, x: Any) -> Any:
    expect("MatrixInverse", "adjoint", primitive.init_attrs["adjoint"], False)
    return ops.inv(x)
