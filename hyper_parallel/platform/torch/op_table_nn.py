"""PyTorch's names for normalisations, attention and embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from hyper_parallel.platform.torch.op_line import Line

__all__ = ["FUNCTIONS", "LOCAL"]

FUNCTIONS = [
    Line("layer_norm", (F.layer_norm,)),
    Line(
        "layer_norm",
        (torch.layer_norm,),
        "x, normalized_shape, weight=None, bias=None, eps=1e-05, cudnn_enable=True",
    ),
    Line("rms_norm", (F.rms_norm, torch.rms_norm)),
    Line("group_norm", (F.group_norm,)),
    Line("embedding", (F.embedding,), canonical=True),
    Line(
        "scaled_dot_product_attention",
        (F.scaled_dot_product_attention,),
        "q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False",
    ),
]


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    first_query: int | None = None,
) -> Tensor:
    """``F.scaled_dot_product_attention``; ``first_query`` is where a causal run of queries starts among all of them."""
    if first_query is not None:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
        attn_mask = seen.tril(first_query)
    return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


LOCAL: dict[str, Callable[..., Any]] = {
    "layer_norm": lambda x, normalized_shape, weight=None, bias=None, eps=1e-05, cudnn_enable=True: F.layer_norm(  # noqa: ARG005
        x, normalized_shape, weight, bias, eps
    ),
    "rms_norm": lambda x, normalized_shape, weight=None, eps=None: F.rms_norm(x, normalized_shape, weight, eps),
    "group_norm": lambda x, num_groups, weight=None, bias=None, eps=1e-05: F.group_norm(
        x, num_groups, weight, bias, eps
    ),
    "scaled_dot_product_attention": _attention,
    "native_layer_norm": torch.native_layer_norm,
}
