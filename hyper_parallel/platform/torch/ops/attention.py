"""PyTorch's scaled dot-product attention; with dropout it is an operator of its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.platform.torch.ops.registry import decomposition, kernel


def _may_drop(arguments: dict[str, Any]) -> bool:
    rate = arguments["dropout_p"]
    return type(rate) not in (int, float) or rate > 0


@decomposition(
    F.scaled_dot_product_attention,
    signature="q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False",
    unless=("scaled_dot_product_attention", _may_drop),
)
def _attention_call(ops: Any, dropout_p: float, **arguments: Any) -> Any:
    if dropout_p > 0.0:
        return ops.attention_with_dropout(dropout_p=dropout_p, **arguments)
    return ops.scaled_dot_product_attention(**arguments)


@kernel("scaled_dot_product_attention")
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
        visible = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
        attn_mask = visible.tril(first_query)
    return F.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
