"""Attention and recurrent layers (PyTorch's documentation of ``scaled_dot_product_attention`` is the reference)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.core.shard.labels import Labels, broadcast_labels, nonempty_row, nonempty_rows
from hyper_parallel.core.shard.rule import (
    LocalCall,
    OpCall,
    Operand,
    R,
    Row,
    Rule,
    Strategies,
    decomposition,
    register_rule,
    rule,
)
from hyper_parallel.core.shard.sample import booleans, real, sample
from hyper_parallel.errors import short_dtype

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Layout


Names = tuple[str | None, ...]


@rule(
    "scaled_dot_product_attention",
    "q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False",
)
def attention(call: OpCall) -> Strategies:
    """``…hl[e], …h[s][e], …[s]f -> …hlf``, linear in ``v``: queries may be sharded (causal ones too), keys may not.

    Dropout is not included, because every rank would need its shard of one mask; see ``attention_with_dropout``.
    """
    q, k, v, mask = call["q"], call["k"], call["v"], call["attn_mask"]
    _check(call)
    grouped = call["enable_gqa"] and q.ndim > 2 and q.shape[-3] != k.shape[-3]
    first_matrix_dim = -3 if grouped else -2
    (qs, ks, vs), batch, sizes = broadcast_labels([operand.shape[:first_matrix_dim] for operand in (q, k, v)], "b")
    heads = [("hq",), ("hk",), ("hk",)] if grouped else [(), (), ()]
    out: Names = (*batch, *heads[0], "l", "f")
    shape = (*sizes, *(q.shape[-3:-2] if grouped else ()), q.shape[-2], v.shape[-1])
    inputs: list[Names] = [(*qs, *heads[0], "l", "e"), (*ks, *heads[1], "s", "e"), (*vs, *heads[2], "s", "f")]
    if isinstance(mask, Operand):
        inputs.append(_mask_dims(mask, out, shape, k.shape[-2]))
    # Sharding f may select a fused kernel that one device would not use, and which keeps its result for backward.
    narrowed = {"f"} if v.shape[-1] > q.shape[-1] else set()
    labels = Labels(tuple(inputs), (out,), whole=frozenset({"s", "e", "hq", "hk"} | narrowed), each=(2,))
    rows = list(nonempty_rows(labels))
    if grouped:
        rows.append(nonempty_row(_grouped_row(call, mask)))
    return Strategies(tuple(rows), (shape,), _local_mask if call["is_causal"] else None)


def _check(call: OpCall) -> None:
    q, k, v = call["q"], call["k"], call["v"]
    if min(operand.ndim for operand in (q, k, v)) < 2 or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        msg = "q, k and v must have shapes (..., L, E), (..., S, E) and (..., S, F)"
        raise ValueError(msg)
    if call["is_causal"] and call["attn_mask"] is not None:
        msg = "attn_mask and is_causal exclude each other"
        raise ValueError(msg)
    if call["enable_gqa"] and (q.ndim < 3 or k.shape[-3] != v.shape[-3] or q.shape[-3] % k.shape[-3]):
        msg = "enable_gqa: the heads of q must be a multiple of those of k and v"
        raise ValueError(msg)


def _mask_dims(mask: Operand, out: Names, shape: tuple[int, ...], keys: int) -> Names:
    scores = (*shape[:-1], keys)
    tail = scores[len(scores) - mask.ndim :]
    if mask.ndim > len(scores) or any(size not in (1, have) for size, have in zip(mask.shape, tail, strict=True)):
        msg = f"attn_mask {list(mask.shape)} does not broadcast to {list(scores)}"
        raise ValueError(msg)
    names = (*out[:-1], "s")[len(scores) - mask.ndim :]
    return tuple(name if size == have else None for name, size, have in zip(names, mask.shape, tail, strict=True))


def _grouped_row(call: OpCall, mask: Operand | None) -> Row:
    """Heads of q, k and v are sharded together: even shards keep every query head with its own key head."""
    dims = [call[name].ndim - 3 for name in ("q", "k", "v")]
    inputs = [Shard(dim) for dim in dims]
    even = [(index, dim) for index, dim in enumerate(dims)]
    out = Shard(max(call[name].ndim for name in ("q", "k", "v")) - 3)
    if not isinstance(mask, Operand):
        return Row(tuple(inputs), (out,), even=tuple(even))
    has_head_dim = mask.ndim >= 3 and mask.shape[-3] == call["q"].shape[-3]
    return Row((*inputs, Shard(mask.ndim - 3) if has_head_dim else R), (out,), even=tuple(even))


def _local_mask(call: OpCall, targets: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> LocalCall | None:
    del call, outputs
    queries = targets[0]
    if not queries.dim_axes[-2]:
        return None
    return LocalCall({"is_causal": False, "first_query": queries.local_box()[-2][0]})


@decomposition(
    "attention_with_dropout",
    "q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False",
)
def attention_with_dropout(
    ops: Any, q: Any, k: Any, v: Any, attn_mask: Any, dropout_p: float, is_causal: bool, scale: float | None,
    enable_gqa: bool,
) -> Any:  # fmt: skip
    """Attention as separate operators: dropout uses the library's generator and does not depend on the layout."""
    if is_causal and attn_mask is not None:
        msg = "scaled_dot_product_attention: attn_mask and is_causal exclude each other"
        raise ValueError(msg)
    if enable_gqa:
        k, v = (ops.repeat_interleave(tensor, q.shape[-3] // tensor.shape[-3], -3) for tensor in (k, v))
    scores = ops.mul(ops.matmul(q, ops.transpose(k, -2, -1)), q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        hidden = ops.triu(ops.ones_like(scores, dtype=ops.platform.str_to_dtype("bool")), 1)
        scores = ops.masked_fill(scores, hidden, -math.inf)
    elif attn_mask is not None and short_dtype(attn_mask.dtype) == "b8":
        scores = ops.masked_fill(scores, ops.logical_not(attn_mask), -math.inf)
    elif attn_mask is not None:
        scores = ops.add(scores, attn_mask)
    weights = _weights(ops, scores, masked=is_causal or attn_mask is not None)
    return ops.matmul(ops.dropout(weights, dropout_p, True), v)


def _weights(ops: Any, scores: Any, *, masked: bool) -> Any:
    """Softmax of scores; a query without visible keys gets zero weights."""
    if not masked:
        return ops.softmax(scores, -1)
    fully_masked = ops.all(ops.eq(scores, -math.inf), -1, True)
    return ops.masked_fill(ops.softmax(ops.masked_fill(scores, fully_masked, 0.0), -1), fully_masked, 0.0)


_ATTENTION = "scaled_dot_product_attention"
sample(_ATTENTION, real("abld"), real("absd"), real("absf"))
sample(_ATTENTION, real("hld"), real("hsd"), real("hsf"), real("ls").fixed)
sample(_ATTENTION, real("hld"), real("hsd"), real("hsf"), booleans("hl1"))
sample(_ATTENTION, real("abld"), real("abld"), real("abld"), is_causal=True)
sample(_ATTENTION, real("hld"), real("hsd"), real("hs", 6), real("ls").fixed)
sample(_ATTENTION, real("ld"), real("sd"), real("s", 6), scale=0.5)
sample(_ATTENTION, real("ld"), real("sd"), real("sf"), scale=0.5)
sample(_ATTENTION, real("b", 4, "ld"), real("b", 2, "sd"), real("b", 2, "sf"), enable_gqa=True)


sample("attention_with_dropout", real("hld"), real("hsd"), real("hsf"))


LAYERS = "x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first"
CELL = "x, hx, weight_ih, weight_hh, bias_ih=None, bias_hh=None"


def _states(call: OpCall) -> list[Operand]:
    hx = call["hx"]
    return [hx] if isinstance(hx, Operand) else list(hx)


def _layer_weights(count: int, call: OpCall) -> tuple[tuple[None, ...], ...]:
    return tuple((None,) * weight.ndim for weight in call.operands[count:])


def _layers(call: OpCall) -> Strategies:
    """``[t]n[c], [l]n[h] -> [t]n[h], [l]n[h]`` (``n[t][c]`` with ``batch_first``); weights must be replicated."""
    x, states = call["x"], _states(call)
    if call["dropout"] > 0 and call["train"] and call["num_layers"] > 1:
        msg = (
            "dropout between layers would sample a different mask on every rank; use dropout=0.0, or one module per "
            "layer with F.dropout between them"
        )
        raise ValueError(msg)
    sequence_dims = ("n", None, None) if call["batch_first"] else (None, "n", None)
    batch_dim = sequence_dims.index("n")
    if x.ndim != 3 or any(state.ndim != 3 or state.shape[1] != x.shape[batch_dim] for state in states):
        msg = f"x {list(x.shape)} and hx {[list(state.shape) for state in states]} must have the same number of samples"
        raise ValueError(msg)
    state_dims = (None, "n", None)
    inputs = (sequence_dims, *(state_dims for _ in states), *_layer_weights(1 + len(states), call))
    rows = nonempty_rows(Labels(inputs, (sequence_dims, *(state_dims for _ in states)), None))
    features = states[0].shape[-1] * (2 if call["bidirectional"] else 1)
    return Strategies(rows, ((*x.shape[:-1], features), *(state.shape for state in states)), many=True)


def _cell(call: OpCall) -> Strategies:
    """``n[c], n[h] -> n[h]``; weights must be replicated."""
    x, states = call["x"], _states(call)
    batch = ("n",) * (x.ndim - 1)
    inputs = (*((*batch, None) for _ in (x, *states)), *_layer_weights(1 + len(states), call))
    outputs = tuple((*batch, None) for _ in states)
    return Strategies(
        nonempty_rows(Labels(inputs, outputs, None)), tuple(state.shape for state in states), many=len(states) > 1
    )


for _name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    register_rule(Rule(_name, LAYERS, _layers))
    register_rule(Rule(f"{_name}_cell", CELL, _cell))


sample("rnn_tanh_cell rnn_relu_cell", real("bi"), real("bh"), real("hi"), real("hh"), real("h"), real("h"))
sample("gru_cell", real("bi"), real("b", 3), real(9, "i"), real(9, 3), real(9), real(9))
sample("lstm_cell", real("bi"), (real("b", 3), real("b", 3)), real(12, "i"), real(12, 3), real(12), real(12))
_LAYER = (True, 1, 0.0, True, False, False)
_RNN = (real(3, "i"), real(3, 3), real(3), real(3))
_GRU = (real(9, "i"), real(9, 3), real(9), real(9))
_LSTM = (real(12, "i"), real(12, 3), real(12), real(12))
sample("rnn_tanh rnn_relu", real("tbi"), real(1, "b", 3), _RNN, *_LAYER)
sample("gru", real("tbi"), real(1, "b", 3), _GRU, *_LAYER)
sample("lstm", real("tbi"), (real(1, "b", 3), real(1, "b", 3)), _LSTM, *_LAYER)
