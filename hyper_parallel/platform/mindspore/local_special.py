"""Special functions, integers' operators and complex numbers on plain MindSpore tensors, with canonical names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.mindspore.local_pointwise import _binary, _unary, _whole_pair

__all__ = ["LOCAL"]


def _of_one(func: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: func(x)


def _logaddexp2(x: Tensor, y: Tensor) -> Tensor:
    scale = math.log(2)
    return ops.logaddexp(x * scale, y * scale) / scale


def _broadcast(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``func`` takes operands of one shape; of others, its kernel reads what is not theirs."""

    def compute(x: Tensor, y: Tensor) -> Tensor:
        shape = np.broadcast_shapes(x.shape, y.shape)
        return func(*(one if one.shape == shape else mint.broadcast_to(one, shape) for one in (x, y)))

    return compute


def _renorm(x: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    return ops.renorm(x, int(p) if p == int(p) else p, dim, float(maxnorm))  # the kernel takes whole exponents only


# MindSpore's names of the modified Bessel functions that have other names elsewhere.
BESSEL = {
    "i0": "i0", "i0e": "i0e", "i1": "i1", "i1e": "i1e", "modified_bessel_i0": "i0", "modified_bessel_i1": "i1",
    "modified_bessel_k0": "k0", "modified_bessel_k1": "k1", "scaled_modified_bessel_k0": "k0e",
    "scaled_modified_bessel_k1": "k1e",
}  # fmt: skip

LOCAL: dict[str, Callable[..., Any]] = {
    **_unary(ops, "bessel_j0 bessel_j1 bessel_y0 bessel_y1"),
    **{name: _of_one(getattr(ops, f"bessel_{own}")) for name, own in BESSEL.items()},
    **_binary(ops, "gcd lcm igamma igammac"),
    "zeta": _broadcast(ops.zeta),
    "nextafter": _broadcast(ops.nextafter),
    "polar": _broadcast(ops.polar),
    "complex": _broadcast(ops.Complex()),
    "bitwise_left_shift": _whole_pair(ops.bitwise_left_shift),
    "bitwise_right_shift": _whole_pair(ops.bitwise_right_shift),
    "mvlgamma": lambda x, p: ops.mvlgamma(x, p),
    "polygamma": lambda x, n: ops.polygamma(Tensor(n, mindspore.int32), x),
    "ldexp": lambda x, y: x * ops.pow(Tensor(2.0, x.dtype), y),
    "logaddexp2": _logaddexp2,
    "deg2rad": lambda x: x * (math.pi / 180),
    "rad2deg": lambda x: x * (180 / math.pi),
    "renorm": _renorm,
    "addr": lambda bias, x, y, *, beta=1, alpha=1: bias * beta + x.reshape((-1, 1)) * y.reshape((1, -1)) * alpha,
    "xlog1py": lambda x, y: mint.xlogy(x, y + 1),
}
