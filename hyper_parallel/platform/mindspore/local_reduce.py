"""Reductions, running sums, softmaxes and what random operators need, on plain MindSpore tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mindspore
from mindspore import Tensor, mint, ops
from mindspore.mint.nn import functional as F

from hyper_parallel.core.dtensor.sampling import LocalSample
from hyper_parallel.platform.mindspore.drawing import drawn
from hyper_parallel.platform.mindspore.writing import write_over

__all__ = ["LOCAL"]


def _dims(x: Tensor, dim: Any) -> tuple[int, ...]:
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return tuple(range(x.ndim))
    return tuple(one % max(x.ndim, 1) for one in ((dim,) if isinstance(dim, int) else dim))


def _sum(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    dims = _dims(x, dim)
    return mint.sum(x, dims, keepdim, dtype=dtype) if dims else mint.sum(x, dtype=dtype)


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    dims = _dims(x, dim)
    return mint.mean(x, dims, keepdim, dtype=dtype) if dims else mint.mean(x, dtype=dtype)


def _nansum(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return _sum(mint.where(mint.isnan(x), ops.zeros_like(x), x), dim, keepdim, dtype=dtype)


def _prod(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    if dim is None:
        out = mint.prod(x, dtype=dtype)
        return out.reshape((1,) * x.ndim) if keepdim else out
    return mint.prod(x, dim, keepdim, dtype=dtype)


def _over(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``func`` takes one dim at a time or dims as a tuple."""

    def reduce(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        dims = _dims(x, dim)
        return func(x, dims, keepdim) if dims else x * 1

    return reduce


def _truth(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reduce(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        x = x if x.dtype == mindspore.bool_ else x != 0
        for one in sorted(_dims(x, dim), reverse=True):
            x = func(x, one, keepdim)
        return x

    return reduce


def _place(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reduce(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        if dim is None:
            out = func(x.reshape((-1,)), 0, False)
            out = out.reshape((1,) * x.ndim) if keepdim else out
        else:
            out = func(x, dim, keepdim)
        return ops.cast(out, mindspore.int64)

    return reduce


def _var(x: Tensor, dim: Any = None, *, correction: float = 1, keepdim: bool = False) -> Tensor:
    dims = _dims(x, dim)
    count = math.prod(x.shape[one] for one in dims)
    centred = x - mint.mean(x, dims, True)
    return mint.sum(centred * centred, dims, keepdim) / max(count - correction, 0)


def _std(x: Tensor, dim: Any = None, *, correction: float = 1, keepdim: bool = False) -> Tensor:
    return mint.sqrt(_var(x, dim, correction=correction, keepdim=keepdim))


def _with_mean(func: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def reduce(x: Tensor, dim: Any = None, *, correction: float = 1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        return func(x, dim, correction=correction, keepdim=keepdim), _mean(x, dim, keepdim)

    return reduce


def _logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    dims = _dims(x, dim)
    top = ops.stop_gradient(mint.amax(x, dims, True))
    top = mint.where(mint.isfinite(top), top, ops.zeros_like(top))
    out = mint.log(mint.sum(mint.exp(x - top), dims, True)) + top
    return out if keepdim else out.reshape(tuple(size for one, size in enumerate(x.shape) if one not in dims))


def _logcumsumexp(x: Tensor, dim: int) -> Tensor:
    top = ops.stop_gradient(mint.amax(x, dim, True))
    return mint.log(ops.cumsum(mint.exp(x - top), dim)) + top


def _vector_norm(x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:  # noqa: A002
    x = x if dtype is None else ops.cast(x, dtype)
    dims, size = _dims(x, dim), mint.abs(x)
    if ord == math.inf:
        return mint.amax(size, dims, keepdim)
    if ord == -math.inf:
        return mint.amin(size, dims, keepdim)
    if ord == 0:
        return mint.sum(ops.cast(x != 0, x.dtype), dims, keepdim)
    total = mint.sum(x * x if ord == 2 else mint.pow(size, ord), dims, keepdim)
    # At the origin the gradient is zero, as PyTorch has it.
    some = mint.where(total > 0, total, ops.ones_like(total))
    return mint.where(total > 0, mint.pow(some, 1 / ord), ops.zeros_like(total))


def _in(x: Tensor, dtype: Any) -> Tensor:
    return x if dtype is None else ops.cast(x, dtype)


def _write(x: Tensor, numbers: LocalSample, dtype: Any) -> Tensor:
    del dtype
    write_over(x, drawn(numbers, x.dtype))  # an empty piece, too: every rank must have the same graph
    return x


LOCAL: dict[str, Callable[..., Any]] = {
    "sum": _sum,
    "mean": _mean,
    "nansum": _nansum,
    "prod": _prod,
    "amax": _over(mint.amax),
    "amin": _over(mint.amin),
    "any": _truth(mint.any),
    "all": _truth(mint.all),
    "argmax": _place(ops.argmax),
    "argmin": _place(lambda x, dim, keepdim: ops.argmin(x, dim, keepdim)),
    "count_nonzero": lambda x, dim=None: _sum(ops.cast(x != 0, mindspore.int64), dim),
    "var": _var,
    "std": _std,
    "var_mean": _with_mean(_var),
    "std_mean": _with_mean(_std),
    "logsumexp": _logsumexp,
    "logcumsumexp": _logcumsumexp,
    "vector_norm": _vector_norm,
    "max_along": lambda x, dim, keepdim=False: tuple(mint.max(x, dim, keepdim)),
    "min_along": lambda x, dim, keepdim=False: tuple(mint.min(x, dim, keepdim)),
    "median_along": lambda x, dim, keepdim=False: tuple(ops.median(x, dim, keepdim)),
    "extreme_all": lambda x, largest: mint.max(x) if largest else mint.min(x),
    "cumsum": lambda x, dim, *, dtype=None: ops.cumsum(_in(x, dtype), dim),
    "cumprod": lambda x, dim, *, dtype=None: mint.cumprod(_in(x, dtype), dim),
    "softmax": lambda x, dim, dtype=None: F.softmax(_in(x, dtype), dim),
    "softmin": lambda x, dim, dtype=None: F.softmax(-_in(x, dtype), dim),
    "log_softmax": lambda x, dim, dtype=None: ops.log_softmax(_in(x, dtype), dim),
    # Random operators draw by global index and need only these.
    "cast_as": lambda x, other: ops.cast(x, other.dtype),
    "write": _write,
    "make_like": lambda x, numbers, dtype: drawn(numbers, x.dtype if dtype is None else dtype),
}
