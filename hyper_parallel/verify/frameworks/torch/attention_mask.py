"""Recovers the dropout mask inside PyTorch's fused attention, which the function does not return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["attention_mask", "masked_attention"]


def attention_mask(attention: Callable[..., Any], query: Any, key: Any, state: torch.Tensor) -> torch.Tensor | None:
    """Return the mask of the attention weights that a dropout kept; the generator's state is not changed.

    The attention is computed again with the same random numbers, with zeros as queries and keys, so that all weights
    are equal, and with the identity matrix as values. Its output is then the matrix of weights after the dropout.

    Args:
        attention: ``scaled_dot_product_attention`` with its dropout, as a function of query, key and value.
        query: tensor (..., queries, width).
        key: (..., keys, width).
        state: state of the CPU's generator before the attention was computed.

    Returns:
        tensor (..., queries, keys), zero where a weight was dropped. None if the mask is unknown: on devices other than
        the CPU, for tensors of a subclass, or if the random numbers depend on more than the shapes.
    """
    if type(query) is not torch.Tensor or type(key) is not torch.Tensor or query.device.type != "cpu":
        return None
    keys = key.shape[-2]
    rows = torch.eye(keys, dtype=key.dtype).expand(*key.shape[:-1], keys)
    after = torch.get_rng_state()
    try:
        with torch.no_grad():
            torch.set_rng_state(state)
            kept: torch.Tensor = attention(torch.zeros_like(query), torch.zeros_like(key), rows)
            same = torch.equal(torch.get_rng_state(), after)
    finally:
        torch.set_rng_state(after)
    return kept if same else None


def masked_attention(
    kept: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Return the result of ``scaled_dot_product_attention`` with a given dropout mask.

    Args:
        kept: boolean array (..., queries, keys), True for weights to keep.
        query: tensor (..., queries, width); this argument and the following ones are those of PyTorch's function.
        key: (..., keys, width).
        value: (..., keys, width of a value).
        attn_mask: booleans, True for keys that take part, or numbers that are added to the scores.
        dropout_p: probability with which a weight was dropped.
        is_causal: whether later keys are masked.
        scale: factor of the scores.
        enable_gqa: whether heads of keys and values are repeated.
    """
    if enable_gqa:
        times = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    scores = query @ key.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    noise = torch.from_numpy(kept).to(query.dtype).div_(1 - dropout_p)
    return scores.softmax(-1) * noise @ value
