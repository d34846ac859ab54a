"""Attention, rotary positions and recurrent layers of MindSpore.

MindSpore's fused operators have kernels on NPU only. Here they are composed of operators that every device has, so that
values and placements can be verified. The fused kernels are not called, and nothing here has run on an NPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import mindspore
from mindspore import Tensor, mint, ops

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.platform.mindspore.ops.matmul import matmul
from hyper_parallel.platform.mindspore.ops.registry import decomposition, expect, kernel

__all__ = ["with_states"]


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
    """Softmax attention; ``first_query``, the position of the first query among all, makes it causal."""
    if enable_gqa and q.shape[-3] != k.shape[-3]:
        k, v = (_repeated_heads(heads, q.shape[-3] // heads.shape[-3]) for heads in (k, v))
    scores = matmul(q, mint.transpose(k, -2, -1)) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal or first_query is not None:
        rows = ops.arange(q.shape[-2]).reshape((-1, 1)) + (first_query or 0)
        attn_mask = ops.arange(k.shape[-2]).reshape((1, -1)) <= rows
    if attn_mask is None:
        return matmul(ops.softmax(scores, -1), v)
    if attn_mask.dtype == mindspore.bool_:
        scores = mint.where(attn_mask, scores, ops.full_like(scores, -math.inf))
    else:
        scores = scores + attn_mask
    # MindSpore's softmax on CPU writes -inf to every row after one that is all -inf.
    sees_nothing = (scores == -math.inf).all(-1, keep_dims=True)
    weights = ops.softmax(scores.masked_fill(sees_nothing, 0.0), -1)
    return matmul(weights.masked_fill(sees_nothing, 0.0), v)


def _repeated_heads(x: Tensor, times: int) -> Tensor:
    *batch, heads, rows, width = x.shape
    wide = mint.broadcast_to(x.reshape((*batch, heads, 1, rows, width)), (*batch, heads, times, rows, width))
    return wide.reshape((*batch, heads * times, rows, width))


# -- decompositions ----------------------------------------------------------------------------------------------------

LAYOUTS = {0: "BSH", 1: "BNSD", 2: "SBH", 3: "BSND"}
UNLIMITED = 2147483647
# Sparse modes: the mask of the call, all keys, and causal from the first or the last key.
DEFAULT, WHOLE, CAUSAL = 0, 1, 2
# Per layout: the order of dims that brings it to BNSD, once H is split into heads and width.
TO_HEADS = {"BSH": (0, 2, 1, 3), "BSND": (0, 2, 1, 3), "SBH": (1, 2, 0, 3), "BNSD": (0, 1, 2, 3)}
FROM_HEADS = {"BSH": (0, 2, 1, 3), "BSND": (0, 2, 1, 3), "SBH": (2, 0, 1, 3), "BNSD": (0, 1, 2, 3)}


@decomposition("FlashAttentionScore")
def _flash_attention(
    ops: Any, _: Any, q: Any, k: Any, v: Any, shift: Any, drop: Any, padding: Any, mask: Any, prefix: Any,
    lengths: Any, key_lengths: Any, heads: int, keep: float, scale: float, before: int, after: int, precise: int,
    layout: Any, sparse: int,
) -> Any:  # fmt: skip
    """Return the attention as the last of four results; the others, which only MindSpore's backward uses, are None."""
    del precise
    absent = {"drop_mask": drop, "padding_mask": padding, "prefix": prefix, "actual_seq_qlen": lengths,
              "actual_seq_kvlen": key_lengths}  # fmt: skip
    _refuse_options("FlashAttentionScore", absent, keep, before, after)
    return (
        None,
        None,
        None,
        _fused_attention(ops, "FlashAttentionScore", (q, k, v), heads, scale, layout, sparse, mask, shift),
    )


@decomposition("SpeedFusionAttention")
def _fusion_attention(
    ops: Any, _: Any, q: Any, k: Any, v: Any, heads: int, layout: Any, seed: Any, offset: Any, shift: Any, padding: Any,
    mask: Any, scale: float, keep: float, before: int, after: int, precise: int, prefix: Any, lengths: Any,
    key_lengths: Any, sparse: int, parallel: bool, sync: bool, kind: int, start: Any, key_start: Any,
) -> Any:  # fmt: skip
    """Return the attention as the first of seven results; the others are None."""
    del seed, offset, precise, parallel, sync
    absent = {"padding_mask": padding, "prefix": prefix, "actual_seq_qlen": lengths, "actual_seq_kvlen": key_lengths,
              "q_start_idx": start, "kv_start_idx": key_start}  # fmt: skip
    _refuse_options("SpeedFusionAttention", absent, keep, before, after)
    expect("SpeedFusionAttention", "pse_type", kind, 1)
    out = _fused_attention(ops, "SpeedFusionAttention", (q, k, v), heads, scale, layout, sparse, mask, shift)
    return (out, *(None,) * 6)


@decomposition("PromptFlashAttention")
def _prompt_attention(
    ops: Any, _: Any, q: Any, k: Any, v: Any, mask: Any, lengths: Any, key_lengths: Any, shift: Any, first: Any,
    second: Any, third: Any, fourth: Any, fifth: Any, heads: int, scale: float, before: int, after: int, layout: Any,
    key_heads: int, sparse: int, precise: int,
) -> Any:  # fmt: skip
    """Attention in inference: without a mask every query sees every key."""
    del key_heads, precise
    absent = {
        "actual_seq_lengths": lengths,
        "actual_seq_lengths_kv": key_lengths,
        "dequant_scale1": first,
        "quant_scale1": second,
        "dequant_scale2": third,
        "quant_scale2": fourth,
        "quant_offset2": fifth,
    }
    # The number of later keys that a query sees is 0 by default, and is ignored without a mask.
    _refuse_options("PromptFlashAttention", absent, 1.0, before, UNLIMITED if after == 0 and mask is None else after)
    return _fused_attention(ops, "PromptFlashAttention", (q, k, v), heads, scale, layout, sparse, mask, shift)


def _refuse_options(operator: str, absent: dict[str, Any], keep: float, before: int, after: int) -> None:
    """Refuse options that the composition does not compute."""
    for name, value in absent.items():
        if value is not None:
            expect(operator, name, "a tensor", None)
    expect(operator, "keep_prob", keep, 1.0)
    expect(operator, "pre_tokens", before, UNLIMITED)
    expect(operator, "next_tokens", after, UNLIMITED)


def _fused_attention(
    ops: Any, operator: str, qkv: tuple[Any, Any, Any], heads: int, scale: float, layout: Any, sparse: int, mask: Any,
    shift: Any,
) -> Any:  # fmt: skip
    """Call ``scaled_dot_product_attention`` on ``BNSD``; MindSpore's masks are true where scores are masked out."""
    name = LAYOUTS.get(layout, layout)
    expect(
        operator,
        "input_layout",
        name if name in LAYOUTS.values() else layout,
        name if name in LAYOUTS.values() else "BNSD",
    )
    if sparse not in (DEFAULT, WHOLE, CAUSAL):
        expect(operator, "sparse_mode", sparse, DEFAULT)
    width = qkv[0].shape[-1] if name in ("BNSD", "BSND") else qkv[0].shape[-1] // heads
    q, k, v = (_to_heads(ops, operand, name, width) for operand in qkv)
    expect(operator, "head_num", heads, q.shape[1])
    bias = shift
    if sparse != CAUSAL and mask is not None:
        hidden = ops.cast(mask, dtype=mindspore.bool_)
        bias = ops.logical_not(hidden) if shift is None else ops.masked_fill(shift, hidden, -math.inf)
    if sparse == CAUSAL:
        expect(operator, "real_shift", shift if shift is None else "a tensor", None)
    out = ops.scaled_dot_product_attention(
        q, k, v, bias, is_causal=sparse == CAUSAL, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return _from_heads(ops, out, name)


def _to_heads(ops: Any, x: Any, layout: str, width: int) -> Any:
    if layout.endswith("H"):
        x = ops.view(x, (*x.shape[:2], x.shape[2] // width, width))
    return x if layout == "BNSD" else ops.permute(x, TO_HEADS[layout])


def _from_heads(ops: Any, x: Any, layout: str) -> Any:
    x = x if layout == "BNSD" else ops.permute(x, FROM_HEADS[layout])
    return ops.view(x, (*x.shape[:2], x.shape[2] * x.shape[3])) if layout.endswith("H") else x


@decomposition("RotaryPositionEmbedding")
def _rotary(ops: Any, _: Any, x: Any, cos: Any, sin: Any, mode: int = 0) -> Any:
    """Rotate pairs of features: each of the first half with one of the second (0), or neighbours (1)."""
    if mode == 0:
        first, second = ops.chunk(x, 2, -1)
        rotated = ops.cat([ops.neg(second), first], -1)
    else:
        pairs = ops.view(x, (*x.shape[:-1], x.shape[-1] // 2, 2))
        rotated = ops.stack([ops.neg(ops.select(pairs, -1, 1)), ops.select(pairs, -1, 0)], -1)
        rotated = ops.view(rotated, tuple(x.shape))
    return ops.add(ops.mul(x, cos), ops.mul(rotated, sin))


def with_states(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``construct`` of recurrent layers, whose initial states would be plain tensors of the global batch size."""

    @wraps(plain)
    def construct(self: Any, x: Any, hx: Any = None, seq_length: Any = None) -> Any:
        if hx is None and isinstance(x, DTensor):
            batch = x.shape[0] if self.batch_first else x.shape[1]
            layers = self.num_layers * (2 if self.bidirectional else 1)
            size: Any = (layers, batch, self.hidden_size)
            hx = (x.new_zeros(size), x.new_zeros(size)) if self.is_lstm else x.new_zeros(size)
        return plain(self, x, hx, seq_length)

    return construct


@decomposition("LSTM")
def _lstm(ops: Any, primitive: Any, x: Any, h: Any, c: Any, weights: Any) -> Any:
    """One layer in one direction, as ``nn.LSTM`` calls it; the weights are one flat vector, biases last."""
    attributes = primitive.init_attrs
    for name, served in (("num_layers", 1), ("bidirectional", False), ("dropout", 0.0)):
        expect("LSTM", name, attributes[name], served)
    inputs, hidden = attributes["input_size"], attributes["hidden_size"]
    flat, at = ops.view(weights, (-1,)), 0
    parts = []
    for shape in ((4 * hidden, inputs), (4 * hidden, hidden), (4 * hidden,))[: 3 if attributes["has_bias"] else 2]:
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        parts.append(ops.view(ops.narrow(flat, 0, at, count), shape))
        at += count
    by_input = ops.linear(x, parts[0], *parts[2:])
    h, c = ops.select(h, 0, 0), ops.select(c, 0, 0)
    outputs = []
    for step in range(x.shape[0]):
        gates = ops.add(ops.select(by_input, 0, step), ops.linear(h, parts[1]))
        into, forget, cell, out = ops.chunk(gates, 4, -1)
        c = ops.add(ops.mul(ops.sigmoid(forget), c), ops.mul(ops.sigmoid(into), ops.tanh(cell)))
        h = ops.mul(ops.sigmoid(out), ops.tanh(c))
        outputs.append(h)
    return ops.stack(outputs, 0), ops.unsqueeze(h, 0), ops.unsqueeze(c, 0), None, None
