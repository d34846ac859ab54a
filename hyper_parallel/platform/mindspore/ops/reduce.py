"""Reductions, running sums and softmaxes of MindSpore."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint, ops
from mindspore.mint.nn import functional as F

from hyper_parallel.platform.mindspore.ops.kernels import BY_NUMBER, normalized_dims, single_precision
from hyper_parallel.platform.mindspore.ops.registry import (
    METHOD,
    computes_on_cpu,
    decomposition,
    expect,
    kernel,
    number,
    spelling,
    spellings,
)

__all__: list[str] = []

# -- spellings ---------------------------------------------------------------------------------------------------------

spellings("""
SumExt sum  MeanExt mean  ProdExt prod  Nansum nansum  CountNonZero count_nonzero  Any any  AnyExt any  ReduceAny any
All all  ReduceAll all  ReduceMax amax  ReduceMin amin  AMax amax  AMin amin  ArgMaxExt argmax  ArgMinExt argmin
Max max  Min min  MaxDim max_along  MinDim min_along  LogSumExp logsumexp  LogSumExpExt logsumexp  CumsumExt cumsum
LogCumsumExp logcumsumexp  LinalgVectorNorm vector_norm  MedianDim median_along
Cummax cummax  CumminExt cummin  MedianExt median_all  Renorm renorm
""")
spelling("sum", "DeprecatedSum", signature="x, dim=None, dtype=None, keepdim=False, initial=None")
spelling("mean", "DeprecatedMean", signature="x, dim=None, keepdim=False")
spelling("prod", "DeprecatedProd", signature="x, dim=None, keepdim=False, dtype=None")
spelling("var", "DeprecatedVar", signature="x, dim=None, correction=0, keepdim=False")
spelling("std", "DeprecatedStd", signature="x, dim=None, correction=0, keepdim=False")
spelling("argmax", "DeprecatedArgmax", signature="x, dim=None, keepdim=False")
spelling(
    "amax", "DeprecatedMax", signature="x, dim=None, keepdim=False, initial=None, where=True, return_indices=False"
)
spelling(
    "amin", "DeprecatedMin", signature="x, dim=None, keepdim=False, initial=None, where=True, return_indices=False"
)
spelling("any", "DeprecatedAny", "DeprecatedReduceAny", signature="x, dim=None, keepdim=False")
spelling("all", "DeprecatedAll", "DeprecatedReduceAll", signature="x, dim=None, keepdim=False")
spelling("log_softmax", "LogSoftmaxExt", signature="x, dim=-1, dtype=None")
spelling("var", "Var", signature="x, dim=None, correction=1, keepdim=False")
spelling("std", "Std", signature="x, dim=None, correction=1, keepdim=False")
spelling("var_mean", "VarMean", signature="x, dim=None, correction=1, keepdim=False")
spelling("std_mean", "StdMean", signature="x, dim=None, correction=1, keepdim=False")

# -- kernels -----------------------------------------------------------------------------------------------------------


@kernel("sum", empty=0)
def _sum(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    dims = normalized_dims(x, dim)
    return mint.sum(x, dims, keepdim, dtype=dtype) if dims else mint.sum(x, dtype=dtype)


@kernel("mean", empty=float("nan"))
def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    dims = normalized_dims(x, dim)
    return mint.mean(x, dims, keepdim, dtype=dtype) if dims else mint.mean(x, dtype=dtype)


@kernel("nansum", empty=0)
def _nansum(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    if _is_integral(x):
        total = _sum(x, dim, keepdim, dtype=dtype)
        return total if dtype is not None or x.dtype == mindspore.bool_ else ops.cast(total, x.dtype)
    return _sum(mint.where(mint.isnan(x), ops.zeros_like(x), x), dim, keepdim, dtype=dtype)


def _is_integral(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex())


@kernel("prod", empty=1)
def _prod(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    if dim is None:
        out = mint.prod(x, dtype=dtype)
        return out.reshape((1,) * x.ndim) if keepdim else out
    return mint.prod(x, dim, keepdim, dtype=dtype)


def _over_dims(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adapt ``func``, which expects dims as a tuple."""

    def compute(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        dims = normalized_dims(x, dim)
        return func(x, dims, keepdim) if dims else x * 1

    return compute


kernel("amax")(_over_dims(mint.amax))
kernel("amin")(_over_dims(mint.amin))


def _of_booleans(func: Callable[..., Tensor], *kept: Any) -> Callable[..., Tensor]:
    """Adapt ``func``, which reduces booleans over one dim; results are boolean unless the dtype is in ``kept``."""

    def compute(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        truth = x if x.dtype == mindspore.bool_ else single_precision(x) != 0
        for index in sorted(normalized_dims(x, dim), reverse=True):
            truth = func(truth, index, keepdim)
        return ops.cast(truth, x.dtype) if x.dtype in kept else truth

    return compute


kernel("any", empty=False)(_of_booleans(mint.any, mindspore.uint8))
kernel("all", empty=True)(_of_booleans(mint.all))


def _index_of(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adapt ``func``, which expects one dim and returns 32-bit indices, to all dims and 64-bit indices."""

    def compute(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        if dim is None:
            out = func(x.reshape((-1,)), 0, False)
            out = out.reshape((1,) * x.ndim) if keepdim else out
        else:
            out = func(x, dim, keepdim)
        return ops.cast(out, mindspore.int64)

    return compute


kernel("argmax")(_index_of(ops.argmax))
kernel("argmin")(_index_of(lambda x, dim, keepdim: ops.argmin(x, dim, keepdim)))
kernel("count_nonzero", empty=0)(lambda x, dim=None: _sum(ops.cast(x != 0, mindspore.int64), dim))


def _variance(x: Tensor, dim: Any, correction: float, keepdim: bool) -> Tensor:
    """Return the variance, for half precision in float32; the mean of integers is an integer in MindSpore."""
    dims = normalized_dims(x, dim)
    count = math.prod(x.shape[index] for index in dims)
    if _is_integral(x):
        squares = ops.pow(x - ops.mean(x, dims, True), 2)
        return ops.cast(ops.ReduceSum(keepdim)(squares, dims), mindspore.float32) / max(count - correction, 0)
    x = single_precision(x)
    centred = x - mint.mean(x, dims, True)
    return mint.sum(centred * centred, dims, keepdim) / max(count - correction, 0)


@kernel("var")
def _var(x: Tensor, dim: Any = None, *, correction: float = 1, keepdim: bool = False) -> Tensor:
    return ops.cast(_variance(x, dim, correction, keepdim), mindspore.float32 if _is_integral(x) else x.dtype)


@kernel("std")
def _std(x: Tensor, dim: Any = None, *, correction: float = 1, keepdim: bool = False) -> Tensor:
    root = mint.sqrt(_variance(x, dim, correction, keepdim))
    return ops.cast(root, mindspore.float32 if _is_integral(x) else x.dtype)


def _with_mean(func: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def compute(x: Tensor, dim: Any = None, *, correction: float = 1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        return func(x, dim, correction=correction, keepdim=keepdim), _mean(x, dim, keepdim)

    return compute


kernel("var_mean")(_with_mean(_var))
kernel("std_mean")(_with_mean(_std))


@kernel("logsumexp")
def _logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    dims = normalized_dims(x, dim)
    top = ops.stop_gradient(mint.amax(x, dims, True))
    top = mint.where(mint.isfinite(top), top, ops.zeros_like(top))
    out = mint.log(mint.sum(mint.exp(x - top), dims, True)) + top
    return out if keepdim else out.reshape(tuple(size for index, size in enumerate(x.shape) if index not in dims))


@kernel("logcumsumexp")
def _logcumsumexp(x: Tensor, dim: int) -> Tensor:
    top = ops.stop_gradient(mint.amax(x, dim, True))
    return mint.log(ops.cumsum(mint.exp(x - top), dim)) + top


@kernel("vector_norm", empty=0)
def _vector_norm(x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    x = x if dtype is None else ops.cast(x, dtype)
    dims, size = normalized_dims(x, dim), mint.abs(x)
    if ord == math.inf:
        return mint.amax(size, dims, keepdim)
    if ord == -math.inf:
        return mint.amin(size, dims, keepdim)
    if ord == 0:
        return mint.sum(ops.cast(x != 0, x.dtype), dims, keepdim)
    total = mint.sum(x * x if ord == 2 else mint.pow(size, ord), dims, keepdim)
    # At the origin the gradient is zero, as in PyTorch.
    some = mint.where(total > 0, total, ops.ones_like(total))
    return mint.where(total > 0, mint.pow(some, 1 / ord), ops.zeros_like(total))


@kernel("renorm")
def _renorm(x: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    return ops.renorm(x, int(p) if p == int(p) else p, dim, float(maxnorm))  # the kernel accepts integers only


kernel("max_along")(lambda x, dim, keepdim=False: tuple(mint.max(x, dim, keepdim)))
kernel("min_along")(lambda x, dim, keepdim=False: tuple(mint.min(x, dim, keepdim)))
kernel("median_along")(lambda x, dim, keepdim=False: tuple(ops.median(x, dim, keepdim)))
kernel("extreme_all")(lambda x, largest: mint.max(x) if largest else mint.min(x))


@kernel("aminmax")
def _aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    dims = tuple(range(x.ndim)) if dim is None else (dim,)
    return mint.amin(x, dims, keepdim), mint.amax(x, dims, keepdim)


def _running(accumulate: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def compute(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Ties take the last index; gradients flow to the selected elements."""
        values = x.asnumpy()
        best = accumulate(values, axis=dim)
        where = np.arange(values.shape[dim]).reshape(
            [-1 if axis == dim % values.ndim else 1 for axis in range(values.ndim)]
        )
        indices = np.maximum.accumulate(np.where(values == best, where, 0), axis=dim).astype(np.int64)
        tensor = Tensor(indices)
        return mint.gather(x, dim, tensor), tensor

    return compute


kernel("cummax")(_running(np.maximum.accumulate))
kernel("cummin")(_running(np.minimum.accumulate))


@kernel("median_all")
def _median_all(x: Tensor, skip_nan: bool = False) -> Tensor:
    values = x.asnumpy().reshape(-1)
    order = np.argsort(values, kind="stable")  # NaN comes last
    missing = int(np.isnan(values).sum())
    count = values.size - missing if skip_nan else values.size
    index = order[-1] if missing and (not skip_nan or not count) else order[(count - 1) // 2]
    return ops.gather(x.reshape((-1,)), Tensor(int(index), mindspore.int64), 0)


@kernel("nanmedian_along")
def _nanmedian_along(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values = x.asnumpy()
    order = np.argsort(values, axis=dim, kind="stable")
    known = (~np.isnan(values)).sum(axis=dim, keepdims=True)
    indices = Tensor(np.take_along_axis(order, np.maximum((known - 1) // 2, 0), dim).astype(np.int64))
    medians = mint.gather(x, dim, indices)
    if keepdim:
        return medians, indices
    shape = tuple(size for axis, size in enumerate(x.shape) if axis != dim % x.ndim)
    return medians.reshape(shape), indices.reshape(shape)


def _converted(x: Tensor, dtype: Any) -> Tensor:
    return x if dtype is None else ops.cast(x, dtype)


kernel("cumsum")(lambda x, dim, *, dtype=None: ops.cumsum(_converted(x, dtype), dim))
kernel("cumprod")(lambda x, dim, *, dtype=None: mint.cumprod(_converted(x, dtype), dim))
kernel("softmax")(lambda x, dim, dtype=None: F.softmax(_converted(x, dtype), dim))
kernel("softmin")(lambda x, dim, dtype=None: F.softmax(-_converted(x, dtype), dim))
kernel("log_softmax")(lambda x, dim, dtype=None: ops.log_softmax(_converted(x, dtype), dim))

# -- decompositions ----------------------------------------------------------------------------------------------------


@decomposition("ReduceSum", "ReduceMean", "ReduceProd")
def _legacy_reduction(ops: Any, primitive: Any, x: Any, dim: Any = (), keepdim: bool | None = None, *_: Any) -> Any:
    """Reduce; ``keep_dims`` may be an attribute. Sums and products keep the dtype, also of booleans."""
    if getattr(primitive, "skip_mode", False) and dim == ():
        return x
    keep = bool(getattr(primitive, "keep_dims", False) if keepdim is None else keepdim)
    op = {"ReduceSum": ops.sum, "ReduceMean": ops.mean, "ReduceProd": ops.prod}[primitive.name]
    result = op(x, None if dim == () else dim, keep)
    return result if primitive.name == "ReduceMean" else ops.cast(result, dtype=x.dtype)


@decomposition("ReduceStd")
def _std_and_mean(ops: Any, _: Any, x: Any, dim: Any = (), unbiased: bool = True, keepdim: bool = False) -> Any:
    dims = None if dim in ((), []) else tuple(dim) if isinstance(dim, (list, tuple)) else (dim,)
    return tuple(ops.std_mean(x, dims, correction=int(unbiased), keepdim=keepdim))


@decomposition("ArgMaxWithValue")
def _argmax_with_value(ops: Any, primitive: Any, x: Any, *args: Any) -> Any:
    """Return the index of the maximum, then its value, as ``ops.max(x, axis)`` does."""
    return _index_and_value(ops.max_along, primitive, x, args)


@decomposition("ArgMinWithValue")
def _argmin_with_value(ops: Any, primitive: Any, x: Any, *args: Any) -> Any:
    """Return the index of the minimum, then its value, as ``ops.min(x, axis)`` does."""
    return _index_and_value(ops.min_along, primitive, x, args)


def _index_and_value(along: Any, primitive: Any, x: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
    axis, keep = args or (primitive.axis, primitive.keep_dims)
    values, indices = along(x, axis, keep)
    return indices, values


@decomposition("Argmax")
def _argmax(ops: Any, primitive: Any, x: Any, *args: Any) -> Any:
    return _legacy_index(ops, ops.argmax, primitive, x, args)


@decomposition("Argmin")
def _argmin(ops: Any, primitive: Any, x: Any, *args: Any) -> Any:
    return _legacy_index(ops, ops.argmin, primitive, x, args)


def _legacy_index(ops: Any, op: Any, primitive: Any, x: Any, args: tuple[Any, ...]) -> Any:
    """Return the index, in int32 unless the primitive's ``output_type`` is int64."""
    axis = args[0] if args else primitive.axis
    dtype = args[1] if len(args) > 1 else getattr(primitive, "output_type", mindspore.int32)
    indices = op(x, axis, False)
    return indices if BY_NUMBER.get(dtype, dtype) == mindspore.int64 else ops.cast(indices, dtype=mindspore.int32)


@decomposition("DeprecatedArgmin")
def _argmin_along(ops: Any, _: Any, x: Any, axis: int | None = None, keepdims: bool = False) -> Any:
    return ops.cast(ops.argmin(x, axis, keepdims), dtype=mindspore.int32)


@decomposition("CumSum", "CumProd")
def _running_total(
    ops: Any, primitive: Any, x: Any, dim: Any, exclusive: bool | None = None, reverse: bool | None = None
) -> Any:
    """Return the cumulative sum or product in the dtype of ``x``; ``exclusive`` and ``reverse`` as in MindSpore."""
    own = primitive.init_attrs
    exclusive, reverse = (
        own[name] if given is None else given for name, given in (("exclusive", exclusive), ("reverse", reverse))
    )
    dim = number(dim) % max(len(x.shape), 1)
    running, start = (ops.cumsum, ops.zeros_like) if primitive.name == "CumSum" else (ops.cumprod, ops.ones_like)
    dtype, x = x.dtype, ops.flip(x, (dim,)) if reverse else x
    if exclusive:
        x = ops.cat([start(ops.narrow(x, dim, 0, 1)), ops.narrow(x, dim, 0, x.shape[dim] - 1)], dim)
    total = running(x, dim)
    total = ops.flip(total, (dim,)) if reverse else total
    return total if total.dtype == dtype else ops.cast(total, dtype=dtype)


@decomposition("CumulativeLogsumexp")
def _running_logsumexp(ops: Any, primitive: Any, x: Any, dim: Any) -> Any:
    """Return the running log-sum-exp; the dim is passed as a tensor."""
    for name in ("exclusive", "reverse"):
        expect("CumulativeLogsumexp", name, primitive.init_attrs[name], False)
    return ops.logcumsumexp(x, number(dim))


_SMALL = (mindspore.bool_, mindspore.int8, mindspore.uint8, mindspore.int16)


@decomposition("DeprecatedCumsum", METHOD + "CumsumExt")
def _cumsum(ops: Any, _: Any, x: Any, axis: int | None = None, dtype: Any = None) -> Any:
    """Return the cumulative sum, of the flattened ``x`` if axis is None; booleans and small integers become int32."""
    dtype = mindspore.int32 if dtype is None and x.dtype in _SMALL else dtype
    x = x if dtype is None else ops.cast(x, dtype=dtype)
    return ops.cumsum(ops.view(x, (-1,)), 0) if axis is None else ops.cumsum(x, axis)


@decomposition("Cummin")
def _cummin(ops: Any, _: Any, x: Any, dim: int) -> Any:
    """Return the cumulative minimum and its indices, as 32-bit numbers."""
    values, indices = ops.cummin(x, dim)
    return values, ops.cast(indices, dtype=mindspore.int32)


@decomposition("Median")
def _median(ops: Any, primitive: Any, x: Any) -> Any:
    """Return the median with its index along a dim; over all elements, None for the index, which no caller reads."""
    whole, axis, keep, skip = (
        primitive.init_attrs[name] for name in ("global_median", "axis", "keep_dims", "ignore_nan")
    )
    if whole:
        return ops.median_all(x, skip), None
    return tuple((ops.nanmedian_along if skip else ops.median_along)(x, axis, keep))


@decomposition("LpNorm")
def _norm(ops: Any, primitive: Any, x: Any) -> Any:
    """Return the norm, or ``epsilon`` if that is larger."""
    p, keep, epsilon = (getattr(primitive, name) for name in ("p", "keep_dims", "epsilon"))
    dims = primitive.axis if isinstance(primitive.axis, (list, tuple)) else (primitive.axis,)
    return ops.clamp(ops.vector_norm(x, p, tuple(dims), keep), min=epsilon)


@decomposition("L2Loss")
def _half_square(ops: Any, _: Any, x: Any) -> Any:
    return ops.div(ops.sum(ops.square(x)), 2)


@decomposition("L2Normalize")
def _normalized(ops: Any, primitive: Any, x: Any) -> Any:
    total = ops.sum(ops.square(x), primitive.axis, True)
    return ops.mul(x, ops.rsqrt(ops.clamp(total, min=primitive.epsilon)))


@decomposition("SquareSumAll")
def _square_sums(ops: Any, _: Any, x: Any, y: Any) -> Any:
    return ops.sum(ops.square(x)), ops.sum(ops.square(y))


@decomposition("Trace")
def _legacy_trace(ops: Any, _: Any, x: Any) -> Any:
    """Return the trace in the dtype of ``x``."""
    return ops.cast(ops.sum(ops.diagonal(x)), dtype=x.dtype)


@decomposition("TraceExt")
def _trace(ops: Any, _: Any, x: Any) -> Any:
    return ops.sum(ops.diagonal(x))


@decomposition("TraceV2")
def _trace_of(ops: Any, _: Any, x: Any, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None) -> Any:
    """Return the trace; without ``dtype``, that of integers is int64 and that of booleans boolean."""
    total = ops.sum(ops.diagonal(x, offset, axis1, axis2), -1, dtype=dtype)
    return ops.cast(total, dtype=x.dtype) if dtype is None and x.dtype == mindspore.bool_ else total


@decomposition("Softmax")
def _softmax(ops: Any, _: Any, x: Any, dim: Any = -1) -> Any:
    return ops.softmax(x, _only_dim("Softmax", dim))


@decomposition("LogSoftmax")
def _log_softmax(ops: Any, _: Any, x: Any, dim: Any = -1) -> Any:
    return ops.log_softmax(x, _only_dim("LogSoftmax", dim))


def _only_dim(name: str, dim: Any) -> Any:
    """Return the dim, which may be given as a sequence of one."""
    if not isinstance(dim, (list, tuple)):
        return dim
    expect(name, "the number of dims", len(dim), 1)
    return dim[0]


# -- methods -----------------------------------------------------------------------------------------------------------
# MindSpore picks the meaning of some methods by device: on CPU it falls back to older ones, with different defaults.


@decomposition(METHOD + "Std")
def _method_std(ops: Any, _: Any, x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    """Return the standard deviation; the default correction is 0 on CPU, and 1 elsewhere."""
    chosen = (0 if computes_on_cpu() else 1) if correction is None else correction
    return ops.std(x, dim, correction=chosen, keepdim=keepdim)


@decomposition(METHOD + "ArgMinExt")
def _method_argmin(ops: Any, _: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """Return the indices of the minima, on CPU as 32-bit numbers."""
    indices = ops.argmin(x, dim, keepdim)
    return ops.cast(indices, dtype=mindspore.int32) if computes_on_cpu() else indices


@decomposition(METHOD + "CountNonZero")
def _method_count_nonzero(ops: Any, _: Any, x: Any, dim: Any = None) -> Any:
    """Return the number of nonzero elements, on CPU as 32-bit numbers."""
    counts = ops.count_nonzero(x, dim)
    return ops.cast(counts, dtype=mindspore.int32) if computes_on_cpu() else counts


@decomposition(METHOD + "MedianExt", "DeprecatedMedian")
def _method_median(ops: Any, _: Any, x: Any, axis: int | None = None, keepdims: bool = False) -> Any:
    """Return the median and its indices; without an axis, on CPU along the last dim, elsewhere over all elements."""
    if axis is None and not computes_on_cpu():
        return ops.median_all(x)
    return ops.median_along(x, -1 if axis is None else axis, keepdims)
