"""Normalisations and attention on plain MindSpore tensors, composed of kernels that CPU has too."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mindspore
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.mindspore.local_shape import matmul

__all__ = ["LOCAL"]

EPSILON = {mindspore.float16: 2.0**-10, mindspore.float32: 2.0**-23, mindspore.float64: 2.0**-52}


def _layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    # The kernel behind mint's is missing on CPU, the older one knows no float64.
    return _affine(_standard(x, tuple(range(x.ndim - len(normalized_shape), x.ndim)), eps)[0], weight, bias)


def _native_layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    out, mean, scale = _standard(x, tuple(range(x.ndim - len(normalized_shape), x.ndim)), eps)
    return _affine(out, weight, bias), ops.stop_gradient(mean), ops.stop_gradient(scale)


def _standard(x: Tensor, dims: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    mean = mint.mean(x, dims, True)
    centred = x - mean
    scale = mint.rsqrt(mint.mean(centred * centred, dims, True) + eps)
    return centred * scale, mean, scale


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    dims = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    small = EPSILON[x.dtype] if eps is None else eps
    return _affine(x * mint.rsqrt(mint.mean(x * x, dims, True) + small), weight, None)


def _group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    groups = x.reshape((x.shape[0], num_groups, -1))
    out = _standard(groups, (-1,), eps)[0].reshape(x.shape)
    per_channel = (-1,) + (1,) * (x.ndim - 2)
    return _affine(
        out,
        None if weight is None else weight.reshape(per_channel),
        None if bias is None else bias.reshape(per_channel),
    )


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    first_query: int | None = None,
) -> Tensor:
    """Softmax attention; ``first_query`` is where a causal run of queries starts among all of them."""
    if enable_gqa and q.shape[-3] != k.shape[-3]:
        k, v = (_grouped(one, q.shape[-3] // one.shape[-3]) for one in (k, v))
    scores = matmul(q, mint.transpose(k, -2, -1)) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal or first_query is not None:
        rows = ops.arange(q.shape[-2]).reshape((-1, 1)) + (first_query or 0)
        attn_mask = ops.arange(k.shape[-2]).reshape((1, -1)) <= rows
    if attn_mask is not None:
        if attn_mask.dtype == mindspore.bool_:
            scores = mint.where(attn_mask, scores, ops.full_like(scores, -math.inf))
        else:
            scores = scores + attn_mask
    return matmul(ops.softmax(scores, -1), v)


def _grouped(x: Tensor, times: int) -> Tensor:
    *batch, heads, rows, width = x.shape
    wide = mint.broadcast_to(x.reshape((*batch, heads, 1, rows, width)), (*batch, heads, times, rows, width))
    return wide.reshape((*batch, heads * times, rows, width))


LOCAL: dict[str, Callable[..., Any]] = {
    "layer_norm": _layer_norm,
    "native_layer_norm": _native_layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "scaled_dot_product_attention": _attention,
}
