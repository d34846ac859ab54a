"""Pointwise operators on plain MindSpore tensors, with canonical parameter names and CPU kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mindspore
from mindspore import Tensor, mint, ops
from mindspore.mint.nn import functional as F

from hyper_parallel.platform.mindspore.empty import tolerant
from hyper_parallel.platform.mindspore.filled import filled

__all__ = ["LOCAL", "clone"]

INFINITY = float("inf")

_converted = tolerant("convert", lambda x, dtype: ops.cast(x, dtype))


def _add(x: Any, y: Any, *, alpha: float = 1) -> Any:
    return x + y if alpha == 1 else x + y * alpha


def _sub(x: Any, y: Any, *, alpha: float = 1) -> Any:
    return x - y if alpha == 1 else x - y * alpha


def _div(x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    return x / y if rounding_mode is None else ops.stop_gradient(mint.div(x, y, rounding_mode=rounding_mode))


def _round(x: Tensor, *, decimals: int = 0) -> Tensor:
    return mint.round(x, decimals=decimals) if decimals else mint.round(x)


def _elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return mint.where(x > 0, x, alpha * mint.expm1(mint.minimum(x, ops.zeros_like(x))))


def _celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return mint.where(x > 0, x, alpha * mint.expm1(mint.minimum(x, ops.zeros_like(x)) / alpha))


def _selu(x: Tensor) -> Tensor:
    return 1.0507009873554805 * _elu(x, 1.6732632423543772)


def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    steep = x * beta
    low = mint.where(steep > threshold, ops.zeros_like(x), steep)
    return mint.where(steep > threshold, x, mint.log1p(mint.exp(low)) / beta)


def _logsigmoid(x: Tensor) -> Tensor:
    return mint.minimum(x, ops.zeros_like(x)) - mint.log1p(mint.exp(-mint.abs(x)))


def _logit(x: Tensor, eps: float | None = None) -> Tensor:
    inside = x if eps is None else mint.clamp(x, eps, 1 - eps)
    return mint.log(inside / (1 - inside))


def _clamp(x: Tensor, min: Any = None, max: Any = None) -> Tensor:  # noqa: A002 - canonical names
    return mint.clamp(x, min, max)


def _cast(x: Tensor, dtype: Any = None, device: Any = None, *, copy: bool = False, **_: Any) -> Tensor:
    del device
    if dtype is None or dtype == x.dtype:
        return clone(x) if copy else x
    return _converted(x, dtype)


def _contiguous(x: Tensor, memory_format: Any = None) -> Tensor:
    del memory_format  # MindSpore has one
    return x if 0 in x.shape else x.contiguous()


def clone(x: Tensor, *, memory_format: Any = None) -> Tensor:
    """The same values in new storage, on the graph; ``mint.clone`` has no CPU kernel."""
    del memory_format
    return mint.logical_or(x, x) if x.dtype == mindspore.bool_ else x * 1


def _like(value: float) -> Callable[..., Tensor]:
    def make(x: Tensor, *, dtype: Any = None, **_: Any) -> Tensor:
        return filled(tuple(x.shape), value, dtype or x.dtype)

    return make


def _full_like(x: Tensor, fill_value: float, *, dtype: Any = None, **_: Any) -> Tensor:
    return filled(tuple(x.shape), fill_value, dtype or x.dtype)


def _new(value: float) -> Callable[..., Tensor]:
    def make(x: Tensor, size: Any, dtype: Any = None, **_: Any) -> Tensor:
        return filled(tuple(size), value, dtype or x.dtype)

    return make


def _new_full(x: Tensor, size: Any, fill_value: float, *, dtype: Any = None, **_: Any) -> Tensor:
    return filled(tuple(size), fill_value, dtype or x.dtype)


def _copysign(x: Tensor, y: Any) -> Tensor:
    return mint.where(_signbit(y + x * 0), -mint.abs(x), mint.abs(x))


def _signbit(x: Tensor) -> Tensor:
    return mint.logical_or(x < 0, mint.logical_and(x == 0, mint.reciprocal(x) < 0))


def _whole_pair(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``func`` takes tensors only; numbers become tensors of the other operand's dtype."""

    def compute(x: Any, y: Any) -> Tensor:
        return func(x, y if isinstance(y, Tensor) else Tensor(y, x.dtype))

    return compute


def _floor_divide(x: Any, y: Any) -> Tensor:
    # The kernels for numbers are missing on CPU; a number meets integers as one of their kind, if it is whole.
    if not isinstance(y, Tensor):
        return ops.stop_gradient(x // y)
    return ops.stop_gradient(mint.floor_divide(x, y))


def _fmax(x: Tensor, y: Tensor) -> Tensor:
    # The gradient of MindSpore's own is computed in float32.
    return mint.where(mint.logical_or(x >= y, mint.isnan(y)), x, y)


def _xlogy(x: Any, y: Any) -> Any:
    return mint.xlogy(x, y)


def _base(base: float) -> Callable[[Tensor], Tensor]:
    return lambda x: mint.log(x) / math.log(base)


def _unary(home: Any, names: str) -> dict[str, Callable[..., Any]]:
    """MindSpore's functions of one tensor under the canonical parameter name."""

    def named(func: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: func(x)

    return {name: named(getattr(home, name)) for name in names.split()}


def _binary(home: Any, names: str) -> dict[str, Callable[..., Any]]:
    """MindSpore's functions of two operands under the canonical parameter names."""

    def named(func: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, y: func(x, y)

    return {name: named(getattr(home, name)) for name in names.split()}


UNARY: dict[str, Callable[..., Any]] = {
    **_unary(
        mint,
        "abs neg exp expm1 log log1p sqrt rsqrt square sin cos tan sinh cosh tanh atanh erf erfc erfinv sigmoid sign"
        " ceil floor trunc reciprocal sinc isnan isfinite isinf logical_not",
    ),
    **_unary(ops, "asin acos atan asinh acosh frac lgamma digamma"),
    **_unary(F, "relu silu hardswish hardsigmoid"),
    "softshrink": lambda x, lambd=0.5: F.softshrink(x, lambd),
    "hardshrink": lambda x, lambd=0.5: F.hardshrink(x, lambd),
    "nan_to_num": lambda x, nan=0.0, posinf=None, neginf=None: mint.nan_to_num(x, nan, posinf, neginf),
    "round": _round,
    "exp2": lambda x: mint.exp(x * math.log(2)),
    "log2": _base(2),
    "log10": _base(10),
    "sgn": lambda x: mint.sign(x),
    "signbit": _signbit,
    "isneginf": lambda x: x == -INFINITY,
    "isposinf": lambda x: x == INFINITY,
    "bitwise_not": lambda x: mint.logical_not(x) if x.dtype == mindspore.bool_ else -x - 1,
    "gelu": lambda x, approximate="none": ops.gelu(x, approximate),
    "mish": lambda x: x * mint.tanh(_softplus(x)),
    "relu6": lambda x: mint.clamp(x, 0, 6),
    "hardtanh": lambda x, min_val=-1.0, max_val=1.0: mint.clamp(x, min_val, max_val),
    "leaky_relu": lambda x, negative_slope=0.01: mint.where(x > 0, x, x * negative_slope),
    "threshold": lambda x, threshold, value: mint.where(x > threshold, x, ops.full_like(x, value)),
    "elu": _elu,
    "celu": _celu,
    "selu": _selu,
    "softplus": _softplus,
    "logsigmoid": _logsigmoid,
    "logit": _logit,
}

BINARY: dict[str, Callable[..., Any]] = {
    **_binary(
        mint,
        "maximum minimum fmod remainder eq ne lt le gt ge logical_and logical_or logical_xor",
    ),
    **_binary(ops, "atan2 logaddexp hypot"),
    "bitwise_and": _whole_pair(mint.bitwise_and),
    "bitwise_or": _whole_pair(ops.bitwise_or),
    "bitwise_xor": _whole_pair(ops.bitwise_xor),
    "floor_divide": _floor_divide,
    "isclose": lambda x, y, rtol=1e-05, atol=1e-08, equal_nan=False: mint.isclose(x, y, rtol, atol, equal_nan),
    "add": _add,
    "sub": _sub,
    "rsub": lambda x, y, *, alpha=1: _sub(y, x, alpha=alpha),
    "mul": lambda x, y: x * y,
    "pow": lambda x, y: x**y,  # mint.pow has no second derivative
    "div": _div,
    "heaviside": lambda x, y: mint.where(x == 0, y, ops.cast(x > 0, x.dtype)),
    "fmax": _fmax,
    "fmin": lambda x, y: -_fmax(-x, -y),
    "xlogy": _xlogy,
    "copysign": _copysign,
}

OTHERS: dict[str, Callable[..., Any]] = {
    "where": lambda condition, x, y: mint.where(condition, x, y),
    "clamp": _clamp,
    "lerp": lambda x, end, weight: x + weight * (end - x),
    "addcmul": lambda x, tensor1, tensor2, *, value=1: x + tensor1 * tensor2 * value,
    "addcdiv": lambda x, tensor1, tensor2, *, value=1: x + tensor1 / tensor2 * value,
    "masked_fill": lambda x, mask, value: x.masked_fill(mask, value),
    "cast": _cast,
    "clone": clone,
    "contiguous": _contiguous,
    "detach": lambda x: ops.stop_gradient(x),
    "zeros_like": _like(0),
    "ones_like": _like(1),
    "empty_like": _like(0),
    "full_like": _full_like,
    "new_zeros": _new(0),
    "new_ones": _new(1),
    "new_empty": _new(0),
    "new_full": _new_full,
    "zero": _like(0),
    "fill": lambda x, value: _full_like(x, value) if not isinstance(value, Tensor) else ops.zeros_like(x) + value,
    "copy": lambda x, y, non_blocking=False: ops.zeros_like(x) + ops.cast(y, x.dtype),  # noqa: ARG005 - canonical
}

LOCAL = {**UNARY, **BINARY, **OTHERS}
