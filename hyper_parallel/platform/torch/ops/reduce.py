"""PyTorch's spellings of reductions, softmaxes and running sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.platform.torch.ops.registry import aten, decomposition, kernel, spelling

# -- reductions whose functions take no dim=None -----------------------------------------------------------------------


def _reduction(op: str, *overloads: Callable[..., Any], copies_back: bool = False) -> None:
    """``torch.<op>`` and ``Tensor.<op>``; the kernel takes ``dim=None``, which PyTorch's functions do not."""
    function = getattr(torch, op)
    spelling(op, op, *overloads, canonical=True, copies_back=copies_back)

    @kernel(op)
    def run(x: Tensor, dim: Any = None, **options: Any) -> Tensor:
        if dim is not None:
            return function(x, dim, **options)
        keepdim = options.pop("keepdim", False)
        if options.get("dtype", 0) is None:
            del options["dtype"]
        out = function(x, **options)
        return out.reshape((1,) * x.ndim) if keepdim else out


_reduction("sum", aten.sum.default, aten.sum.dim_IntList)
_reduction("nansum", aten.nansum.default)
_reduction("count_nonzero", aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
_reduction("mean", aten.mean.default, aten.mean.dim)
_reduction("any", aten.any.default, aten.any.dim, aten.any.dims)
_reduction("all", aten.all.default, aten.all.dim, aten.all.dims)
_reduction("amax", aten.amax.default)
_reduction("amin", aten.amin.default)
_reduction("argmax", aten.argmax.default)
_reduction("argmin", aten.argmin.default)
_reduction("logsumexp", aten.logsumexp.default)


spelling("prod", "prod", aten.prod.default, aten.prod.dim_int, canonical=True)


@kernel("prod")
def _prod(x: Tensor, dim: int | None = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """Return the product; the product of one factor is computed as the first power of the factor.

    The gradient of PyTorch's product depends on the factor only if the factor is not zero, so in a second backward,
    ranks with different factors would run different collectives. The gradient of the power always depends on it.
    """
    if dim is None:
        out = torch.prod(x) if dtype is None else torch.prod(x, dtype=dtype)
        return out.reshape((1,) * x.ndim) if keepdim else out
    if x.requires_grad and x.ndim and x.shape[dim] == 1:
        factor = x if keepdim else x.squeeze(dim)
        return factor.to(factor.dtype if dtype is None else dtype).pow(1)
    return torch.prod(x, dim, keepdim, dtype=dtype)


# -- extremes and medians: of all elements, or values and indices along a dim ------------------------------------------

spelling("max", "max", aten.max.default, aten.max.dim, aten.max.other, canonical=True)
spelling("min", "min", aten.min.default, aten.min.dim, aten.min.other, canonical=True)
spelling("median", "median", aten.median.default, aten.median.dim, canonical=True)
spelling("nanmedian", "nanmedian", aten.nanmedian.default, aten.nanmedian.dim, canonical=True)
spelling("mode", "mode", aten.mode.default)
spelling("aminmax", "aminmax", aten.aminmax.default)


@kernel("max_along")
def _max_along(x: Tensor, dim: int, keepdim: bool) -> Any:
    return torch.max(x, dim, keepdim)


@kernel("min_along")
def _min_along(x: Tensor, dim: int, keepdim: bool) -> Any:
    return torch.min(x, dim, keepdim)


@kernel("median_along")
def _median_along(x: Tensor, dim: int, keepdim: bool) -> Any:
    return torch.median(x, dim, keepdim)


@kernel("nanmedian_along")
def _nanmedian_along(x: Tensor, dim: int, keepdim: bool) -> Any:
    return torch.nanmedian(x, dim, keepdim)


@kernel("median_all")
def _median_all(x: Tensor, skip_nan: bool) -> Tensor:
    return torch.nanmedian(x) if skip_nan else torch.median(x)


@kernel("extreme_all")
def _extreme_all(x: Tensor, largest: bool) -> Tensor:
    return torch.max(x) if largest else torch.min(x)


@kernel("aminmax")
def _aminmax(x: Tensor, dim: int | None, keepdim: bool) -> Any:
    return torch.aminmax(x, keepdim=keepdim) if dim is None else torch.aminmax(x, dim=dim, keepdim=keepdim)


# -- variances and norms -----------------------------------------------------------------------------------------------


def _variance(op: str) -> None:
    """Old calls pass ``unbiased``, also as the first positional argument; new ones pass ``correction``."""
    function = getattr(torch, op)

    @kernel(op)
    def local(x: Tensor, dim: Any, correction: Any, keepdim: bool) -> Any:
        return function(x, dim=dim, correction=correction, keepdim=keepdim)

    @decomposition(op, signature="x, dim=None, unbiased=None, keepdim=False, *, correction=None")
    def run(ops: Any, x: Any, dim: Any, unbiased: Any, keepdim: Any, correction: Any) -> Any:
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        if correction is None:
            correction = 1 if unbiased is None else int(unbiased)
        return getattr(ops, op)(x, dim, correction=correction, keepdim=keepdim)


for _op in ("var", "std", "var_mean", "std_mean"):
    _variance(_op)

spelling("norm")
spelling(
    "norm", aten.norm.ScalarOpt_dim, aten.norm.Scalar, aten.norm.ScalarOpt_dim_dtype, aten.norm.ScalarOpt_dtype,
    signature="x, p=2, dim=None, keepdim=False, *, dtype=None",
)  # fmt: skip
spelling("vector_norm", torch.linalg.vector_norm, aten.linalg_vector_norm.default, canonical=True)
spelling("dist", "dist", aten.dist.default)
spelling("renorm", "renorm", Tensor.renorm_, aten.renorm.default)
spelling("trace", "trace", aten.trace.default)
spelling("hash_tensor", "hash_tensor", aten.hash_tensor.default)


@kernel("vector_norm")
def _vector_norm(x: Tensor, ord: Any, dim: Any, keepdim: bool, dtype: Any) -> Tensor:
    return torch.linalg.vector_norm(x, ord, dim, keepdim, dtype=dtype)


@kernel("hash_tensor")
def _hash_tensor(x: Tensor, dim: Any, keepdim: bool, mode: int) -> Tensor:
    if dim is None:
        return torch.hash_tensor(x, keepdim=keepdim, mode=mode)
    return torch.hash_tensor(x, dim, keepdim=keepdim, mode=mode)


# -- softmaxes and running sums ----------------------------------------------------------------------------------------

for _op in ("softmax", "log_softmax"):
    spelling(_op)
for _op in ("softmax", "log_softmax", "softmin"):
    spelling(_op, getattr(F, _op), signature="x, dim, _stacklevel=3, dtype=None")
spelling("softmax", aten._softmax.default, signature="x, dim, half_to_float=False")
spelling("log_softmax", aten._log_softmax.default, signature="x, dim, half_to_float=False")
spelling("safe_softmax", aten._safe_softmax.default)
spelling("softmax_backward", aten._softmax_backward_data.default)
spelling("log_softmax_backward", aten._log_softmax_backward_data.default)
_reduction("cumsum", aten.cumsum.default, copies_back=True)
_reduction("cumprod", aten.cumprod.default, copies_back=True)
_reduction("logcumsumexp", aten.logcumsumexp.default)
spelling("cummax", "cummax", aten.cummax.default)
spelling("cummin", "cummin", aten.cummin.default)


@kernel("softmin")
def _softmin(x: Tensor, dim: int, dtype: Any) -> Tensor:
    return torch.softmax(-x, dim, dtype)


@kernel("safe_softmax")
def _safe_softmax(x: Tensor, dim: int, dtype: Any) -> Tensor:
    return aten._safe_softmax(x, dim, dtype)


# torch.distributions checks its parameters and samples with these.
spelling("all", "_is_all_true", aten._is_all_true.default, signature="x")
spelling("any", "_is_any_true", aten._is_any_true.default, signature="x")
