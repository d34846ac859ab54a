"""Canonical operators on plain MindSpore tensors, with canonical parameter names.

Each uses kernels that are registered on CPU; many of ``mint``'s are not. Pieces may be empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Tensor, mint, ops
from mindspore.mint.nn import functional as F  # noqa: N812 - the field's name for it

from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.mindspore.empty import tolerant

__all__ = ["LOCAL", "write_back"]


def _add(x: Any, y: Any, *, alpha: float = 1) -> Any:
    return mint.add(x, y, alpha=alpha) if alpha != 1 else x + y


def _sub(x: Any, y: Any, *, alpha: float = 1) -> Any:
    return mint.sub(x, y, alpha=alpha) if alpha != 1 else x - y


def _div(x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    return x / y if rounding_mode is None else mint.div(x, y, rounding_mode=rounding_mode)


def _round(x: Tensor, *, decimals: int = 0) -> Tensor:
    return mint.round(x, decimals=decimals) if decimals else mint.round(x)


def _sum(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:  # noqa: FBT001, FBT002 - canonical
    if dim is None or dim == ():
        dim = tuple(range(x.ndim))
    return mint.sum(x, dim, keepdim, dtype=dtype)


def _layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    # Composed: the kernel behind mint's is missing on CPU, the older one knows neither float64 nor empty pieces.
    dims = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    centred = x - mint.mean(x, dims, True)  # noqa: FBT003 - keepdim, positional in MindSpore
    out = centred * mint.rsqrt(mint.mean(centred * centred, dims, True) + eps)  # noqa: FBT003
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is not None and x.shape[-1] == 0:  # nothing to contract: the kernel would leave the bias half written
        return _plain_linear(x, weight, None) + bias
    return _plain_linear(x, weight, bias)


_plain_linear = tolerant("linear", F.linear)


def write_back(compute: Callable[..., Any]) -> Callable[..., Any]:
    """``compute`` with its result written into its first argument, which MindSpore's in-place kernels on CPU leave out."""

    def write(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = compute(x, *args, **kwargs)
        if result.dtype != x.dtype:
            msg = f"a result of {result.dtype} cannot be written into a tensor of {x.dtype}; use the out-of-place form"
            raise UnsupportedOperatorError(msg)
        x.copy_(result)
        return x

    return write


_COMPUTE: dict[str, Callable[..., Any]] = {
    "abs": mint.abs,
    "neg": mint.neg,
    "exp": mint.exp,
    "sqrt": mint.sqrt,
    "rsqrt": mint.rsqrt,
    "sin": mint.sin,
    "cos": mint.cos,
    "tanh": mint.tanh,
    "sigmoid": mint.sigmoid,
    "relu": lambda x, inplace=False: F.relu(x),  # noqa: ARG005 - PyTorch's spelling
    "silu": lambda x, inplace=False: F.silu(x),  # noqa: ARG005
    "gelu": lambda x, approximate="none": ops.gelu(x, approximate),
    "erf": mint.erf,
    "log": mint.log,
    "reciprocal": mint.reciprocal,
    "square": mint.square,
    "sign": mint.sign,
    "floor": mint.floor,
    "ceil": mint.ceil,
    "round": _round,
    "add": _add,
    "sub": _sub,
    "mul": lambda x, y: x * y,
    "div": _div,
    "pow": mint.pow,
    "maximum": mint.maximum,
    "minimum": mint.minimum,
    "sum": _sum,
    "view": lambda x, shape: x.reshape(tuple(shape)),
    "linear": _linear,
    "layer_norm": _layer_norm,
}

LOCAL = {op: tolerant(op, compute) for op, compute in _COMPUTE.items()}
# The bias of an empty contraction has a gradient, so the operator sees to empty pieces itself.
LOCAL["linear"] = _linear
