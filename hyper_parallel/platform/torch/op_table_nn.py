"""PyTorch's names for normalisations, attention and embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.entry import OpEntry
from hyper_parallel.core.shard.rules.norm import unbiased
from hyper_parallel.errors import LayoutError, MixedTensorError
from hyper_parallel.platform.torch.op_line import Line
from hyper_parallel.platform.torch.op_table_pointwise import routed

__all__ = ["FUNCTIONS", "LOCAL", "add_routes"]

FUNCTIONS = [
    Line("layer_norm", (F.layer_norm,)),
    Line(
        "layer_norm",
        (torch.layer_norm,),
        "x, normalized_shape, weight=None, bias=None, eps=1e-05, cudnn_enable=True",
    ),
    Line("rms_norm", (F.rms_norm, torch.rms_norm)),
    Line("group_norm", (F.group_norm,), canonical=True),  # which minds a piece of one value
    Line("embedding", (F.embedding,), canonical=True),
    Line("embedding_bag", (F.embedding_bag,)),
]


# -- calls that are other calls ----------------------------------------------------------------------------------------


def _attention_call(ops: Any, dropout_p: float, **given: Any) -> Any:
    if dropout_p > 0.0:
        return ops.attention_with_dropout(dropout_p=dropout_p, **given)
    return ops.scaled_dot_product_attention(**given)


def _normal(ops: Any, x: Any, dims: list[int], running: tuple[Any, Any], affine: tuple[Any, Any], rest: Any) -> Any:
    """Normalise by the statistics of ``x`` over ``dims``; running ones take their share of them."""
    momentum, eps = rest
    for name, held in zip(("running_mean", "running_var"), running, strict=True):
        if held is not None and not isinstance(held, DTensor):
            msg = (
                f"batch_norm: {name} is a plain tensor {list(held.shape)} and the input a DTensor; make it one too: "
                f"module.{name} = hyper_parallel.distribute_tensor(module.{name}, mesh, [Replicate()])"
            )
            raise MixedTensorError(msg)
    out, mean, var = ops.statistics_norm(x, dims, *affine, eps)
    with torch.no_grad():
        for held, found, scale in zip(running, (mean, var), (1.0, unbiased(x.shape, dims)), strict=True):
            if held is not None:
                per_channel = found.detach().mean([dim for dim in range(x.ndim) if dim != 1]) * scale
                held.copy_(held * (1.0 - momentum) + per_channel * momentum)
    return out


def _batch_norm(
    ops: Any, x: Any, running_mean: Any, running_var: Any, weight: Any, bias: Any, training: bool, momentum: float,
    eps: float, **_: Any,
) -> Any:  # fmt: skip
    if not training:
        return ops.channel_norm(x, running_mean, running_var, weight, bias, eps)
    dims = [dim for dim in range(x.ndim) if dim != 1]
    if x.ndim < 2:
        msg = f"batch_norm: x needs samples and channels, got {list(x.shape)}"
        raise LayoutError(msg)
    if x.numel() == x.shape[1]:
        msg = f"Expected more than 1 value per channel when training, got input size {x.shape}"
        raise ValueError(msg)
    return _normal(ops, x, dims, (running_mean, running_var), (weight, bias), (momentum, eps))


def _instance_norm(
    ops: Any, x: Any, running_mean: Any, running_var: Any, weight: Any, bias: Any, use_input_stats: bool,
    momentum: float, eps: float, **_: Any,
) -> Any:  # fmt: skip
    if not use_input_stats:
        return ops.channel_norm(x, running_mean, running_var, weight, bias, eps)
    if x.ndim < 3 or x.numel() == x.shape[0] * x.shape[1]:
        msg = f"Expected more than 1 spatial element when training, got input size {x.shape}"
        raise ValueError(msg)
    return _normal(ops, x, [*range(2, x.ndim)], (running_mean, running_var), (weight, bias), (momentum, eps))


_STATS = "x, weight, bias, running_mean, running_var"
ROUTES: dict[Any, tuple[str, Callable[..., Any]]] = {
    F.scaled_dot_product_attention: (
        "q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False",
        _attention_call,
    ),
    torch.batch_norm: (f"{_STATS}, training, momentum, eps, cudnn_enabled", _batch_norm),
    torch.instance_norm: (f"{_STATS}, use_input_stats, momentum, eps, cudnn_enabled", _instance_norm),
}


def add_routes(table: dict[Any, OpEntry]) -> None:
    """Add what is made of several operators."""
    for func, (signature, run) in ROUTES.items():
        routed(table, func, signature, run)


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
    """``F.scaled_dot_product_attention``; ``first_query`` is where a causal run of queries starts among all of them."""
    if first_query is not None:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
        attn_mask = seen.tril(first_query)
    return F.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)


LOCAL: dict[str, Callable[..., Any]] = {
    "layer_norm": lambda x, normalized_shape, weight=None, bias=None, eps=1e-05, cudnn_enable=True: F.layer_norm(  # noqa: ARG005
        x, normalized_shape, weight, bias, eps
    ),
    "rms_norm": lambda x, normalized_shape, weight=None, eps=None: F.rms_norm(x, normalized_shape, weight, eps),
    "group_norm": lambda x, num_groups, weight=None, bias=None, eps=1e-05: torch.group_norm(
        x, num_groups, weight, bias, eps
    ),
    "scaled_dot_product_attention": _attention,
    "channel_norm": lambda x, mean, var, weight=None, bias=None, eps=1e-05: F.batch_norm(
        x, mean, var, weight, bias, training=False, eps=eps
    ),
    "embedding_bag": lambda x, **rest: F.embedding_bag(x, **rest),
    "native_layer_norm": torch.native_layer_norm,
}
