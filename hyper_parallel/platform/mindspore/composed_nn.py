"""MindSpore's layers and fused operators as canonical ones.

Most of these have kernels on NPU only. What they compute there is composed here of operators that every device has, so
that values and placements can be verified; they have never run on a device, and their kernels are not called.
"""

from __future__ import annotations

import math
from typing import Any

import mindspore

from hyper_parallel.errors import LayoutError
from hyper_parallel.platform.mindspore.primitives import composed, expect

__all__: list[str] = []

LAYOUTS = {0: "BSH", 1: "BNSD", 2: "SBH", 3: "BSND"}
UNLIMITED = 2147483647
# Sparse modes of the masks: what is given, all of it, and causal from the first or the last key.
DEFAULT, WHOLE, CAUSAL = 0, 1, 2


# -- attention ---------------------------------------------------------------------------------------------------------


@composed("FlashAttentionScore")
def _flash(
    ops: Any, _: Any, q: Any, k: Any, v: Any, shift: Any, drop: Any, padding: Any, mask: Any, prefix: Any,
    lengths: Any, key_lengths: Any, heads: int, keep: float, scale: float, before: int, after: int, precise: int,
    layout: Any, sparse: int,
) -> Any:  # fmt: skip
    """The attention is the last of four results; nobody in MindSpore reads the others outside its own backward."""
    del precise
    absent = {"drop_mask": drop, "padding_mask": padding, "prefix": prefix, "actual_seq_qlen": lengths,
              "actual_seq_kvlen": key_lengths}  # fmt: skip
    _plain("FlashAttentionScore", absent, keep, before, after)
    return (
        None,
        None,
        None,
        _attention(ops, "FlashAttentionScore", (q, k, v), heads, scale, layout, sparse, mask, shift),
    )


@composed("SpeedFusionAttention")
def _fusion(
    ops: Any, _: Any, q: Any, k: Any, v: Any, heads: int, layout: Any, seed: Any, offset: Any, shift: Any, padding: Any,
    mask: Any, scale: float, keep: float, before: int, after: int, precise: int, prefix: Any, lengths: Any,
    key_lengths: Any, sparse: int, parallel: bool, sync: bool, kind: int, start: Any, key_start: Any,
) -> Any:  # fmt: skip
    """The attention is the first result."""
    del seed, offset, precise, parallel, sync
    absent = {"padding_mask": padding, "prefix": prefix, "actual_seq_qlen": lengths, "actual_seq_kvlen": key_lengths,
              "q_start_idx": start, "kv_start_idx": key_start}  # fmt: skip
    _plain("SpeedFusionAttention", absent, keep, before, after)
    expect("SpeedFusionAttention", "pse_type", kind, 1)
    out = _attention(ops, "SpeedFusionAttention", (q, k, v), heads, scale, layout, sparse, mask, shift)
    return (out, *(None,) * 6)


@composed("PromptFlashAttention")
def _prompt(
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
    # The number of later keys that a query sees is 0 by default, and means nothing without a mask.
    _plain("PromptFlashAttention", absent, 1.0, before, UNLIMITED if after == 0 and mask is None else after)
    return _attention(ops, "PromptFlashAttention", (q, k, v), heads, scale, layout, sparse, mask, shift)


def _plain(operator: str, absent: dict[str, Any], keep: float, before: int, after: int) -> None:
    """Refuse what the reference does not compute."""
    for name, given in absent.items():
        if given is not None:
            expect(operator, name, "a tensor", None)
    expect(operator, "keep_prob", keep, 1.0)
    expect(operator, "pre_tokens", before, UNLIMITED)
    expect(operator, "next_tokens", after, UNLIMITED)


def _attention(
    ops: Any, operator: str, qkv: tuple[Any, Any, Any], heads: int, scale: float, layout: Any, sparse: int, mask: Any,
    shift: Any,
) -> Any:  # fmt: skip
    """By ``scaled_dot_product_attention`` on ``BNSD``; masks say what to leave out."""
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
    q, k, v = (_to_heads(ops, one, name, width) for one in qkv)
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


# Per layout: the order of dims that brings it to BNSD, once its last dim is heads and width.
ORDERS = {"BSH": (0, 2, 1, 3), "BSND": (0, 2, 1, 3), "SBH": (1, 2, 0, 3), "BNSD": (0, 1, 2, 3)}
BACK = {"BSH": (0, 2, 1, 3), "BSND": (0, 2, 1, 3), "SBH": (2, 0, 1, 3), "BNSD": (0, 1, 2, 3)}


def _to_heads(ops: Any, x: Any, layout: str, width: int) -> Any:
    if layout.endswith("H"):
        x = ops.view(x, (*x.shape[:2], x.shape[2] // width, width))
    return x if layout == "BNSD" else ops.permute(x, ORDERS[layout])


def _from_heads(ops: Any, x: Any, layout: str) -> Any:
    x = x if layout == "BNSD" else ops.permute(x, BACK[layout])
    return ops.view(x, (*x.shape[:2], x.shape[2] * x.shape[3])) if layout.endswith("H") else x


@composed("RotaryPositionEmbedding")
def _rotary(ops: Any, _: Any, x: Any, cos: Any, sin: Any, mode: int = 0) -> Any:
    """Pairs of features turned: halves apart (0), or neighbours (1)."""
    if mode == 0:
        first, second = ops.chunk(x, 2, -1)
        turned = ops.cat([ops.neg(second), first], -1)
    else:
        pairs = ops.view(x, (*x.shape[:-1], x.shape[-1] // 2, 2))
        turned = ops.stack([ops.neg(ops.select(pairs, -1, 1)), ops.select(pairs, -1, 0)], -1)
        turned = ops.view(turned, tuple(x.shape))
    return ops.add(ops.mul(x, cos), ops.mul(turned, sin))


# -- normalisation -----------------------------------------------------------------------------------------------------


@composed("AddRmsNorm")
def _add_rms_norm(ops: Any, _: Any, x: Any, y: Any, gamma: Any, eps: float = 1e-6) -> Any:
    """With the reciprocal root of the mean square, and the sum."""
    total = ops.add(x, y)
    scale = ops.rsqrt(ops.add(ops.mean(ops.square(total), tuple(range(-len(gamma.shape), 0)), True), eps))
    return ops.mul(ops.mul(total, scale), gamma), scale, total


@composed("AddLayerNormV2")
def _add_layer_norm(
    ops: Any, _: Any, x: Any, y: Any, gamma: Any, beta: Any, eps: float = 1e-5, additional_out: bool = False
) -> Any:
    """With mean, reciprocal deviation, and the sum."""
    del additional_out  # the sum is returned whether it is asked for or not
    total = ops.add(x, y)
    out, mean, scale = ops.native_layer_norm(total, tuple(gamma.shape), gamma, beta, eps)
    return out, mean, scale, total


# -- dropout of channels -----------------------------------------------------------------------------------------------


@composed("Dropout2dExt")
def _dropout2d(ops: Any, _: Any, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False, *__: Any) -> Any:
    """Whole channels at once."""
    dropped = ops.mul(x, _channels(ops, x, p)) if training else x
    return x.copy_(dropped) if inplace else dropped


@composed("Dropout2D", "Dropout3D")
def _dropout_with_mask(ops: Any, primitive: Any, x: Any, *_: Any) -> Any:
    """The legacy primitives return the mask as well."""
    kept = _channels(ops, x, 1 - primitive.keep_prob)
    return ops.mul(x, kept), ops.expand(ops.ne(kept, 0), tuple(x.shape))


def _channels(ops: Any, x: Any, p: float) -> Any:
    ones = ops.new_ones(x, (*x.shape[:2], *(1,) * (len(x.shape) - 2)))
    return ops.dropout(ones, p, True)


# -- losses ------------------------------------------------------------------------------------------------------------


def _reduced(ops: Any, rows: Any, reduction: Any) -> Any:
    reduction = {0: "sum", 1: "mean", 2: "none"}.get(reduction, reduction)
    return {"none": lambda: rows, "mean": lambda: ops.mean(rows), "sum": lambda: ops.sum(rows)}[reduction]()


@composed("PReLU")
def _prelu(ops: Any, _: Any, x: Any, weight: Any) -> Any:
    """The weight as it broadcasts: one number, or one per channel, which is the second dim."""
    channels = x.shape[1] if len(x.shape) > 1 else 1
    count = math.prod(weight.shape)
    if count not in (1, channels):
        msg = (
            f"operator PReLU: {count} weights for {list(x.shape)}, which has {channels} channels; give one, or so many"
        )
        raise LayoutError(msg)
    inner = (1,) * max(len(x.shape) - 2, 0) if count > 1 else ()
    return ops.prelu(x, ops.view(weight, (-1, *inner)))


@composed("SoftMarginLoss")
def _soft_margin(ops: Any, primitive: Any, x: Any, target: Any, reduction: Any = None) -> Any:
    name = primitive.init_attrs["reduction"] if reduction is None else reduction
    return ops.soft_margin_loss(x, target, reduction={0: "sum", 1: "mean", 2: "none"}.get(name, name))


@composed("KLDivLoss")
def _kl_div(ops: Any, primitive: Any, x: Any, target: Any) -> Any:
    """The target is a constant to MindSpore's derivative.

    Where it is not positive the kernel loses nothing, and yet has the derivative that it has elsewhere.
    """
    name, target = primitive.init_attrs["reduction"], ops.detach(target)
    rows = ops.where(ops.gt(target, 0), ops.kl_div(x, target, reduction="none"), 0)
    slope = ops.where(ops.lt(target, 0), ops.mul(target, x), 0)
    rows = ops.sub(rows, ops.sub(slope, ops.detach(slope)))
    if name == "none":
        return rows
    loss = ops.mean(rows) if name == "mean" else ops.sum(rows)
    return ops.div(loss, x.shape[0]) if name == "batchmean" else loss


@composed("SigmoidCrossEntropyWithLogits")
def _with_logits(ops: Any, _: Any, x: Any, target: Any) -> Any:
    """The target is a constant to MindSpore's derivative."""
    return ops.binary_cross_entropy_with_logits(x, ops.detach(target), reduction="none")


@composed("SoftmaxCrossEntropyWithLogits")
def _softmax_cross_entropy(ops: Any, _: Any, x: Any, target: Any) -> Any:
    """With the derivative by ``x``, as the primitive returns it; it is also the one that backward uses.

    For targets that do not add up to 1 that is not the loss' own derivative, but MindSpore's. Its derivative takes the
    target and the second output for constants.
    """
    rows, fixed = ops.log_softmax(ops.detach(x), -1), ops.detach(target)
    slope = ops.sub(ops.exp(rows), fixed)
    loss = ops.neg(ops.sum(ops.mul(rows, fixed), -1))
    nothing = ops.sub(x, ops.detach(x))
    return ops.add(loss, ops.sum(ops.mul(nothing, slope), -1)), slope


@composed("CosineEmbeddingLoss")
def _cosine_embedding(ops: Any, _: Any, x: Any, y: Any, target: Any, margin: float = 0.0, reduction: Any = 1) -> Any:
    """``1 - cos`` where the target is 1, what exceeds the margin where it is -1."""
    tiny = 1e-12  # what the kernel adds to both squared lengths
    lengths = [ops.add(ops.sum(ops.square(one), -1), tiny) for one in (x, y)]
    cosine = ops.div(ops.sum(ops.mul(x, y), -1), ops.sqrt(ops.mul(*lengths)))
    alike = ops.where(ops.eq(target, 1), ops.rsub(cosine, 1), 0)
    apart = ops.where(ops.eq(target, -1), ops.relu(ops.sub(cosine, margin)), 0)
    return _reduced(ops, ops.add(alike, apart), reduction)
