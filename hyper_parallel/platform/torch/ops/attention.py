"""PyTorch's scaled dot-product attention, with dropout as a separate operator, and recurrent layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel._tree import as_list
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.torch.ops.registry import decomposition, kernel, signature_of


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
    """``F.scaled_dot_product_attention``; ``first_query``, the position of the first query, makes it causal."""
    if first_query is not None:
        visible = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
        attn_mask = visible.tril(first_query)
    return F.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)


def _recurrent(op: str) -> None:
    function = getattr(torch, op)
    kernel(op)(function)

    @decomposition(function, signature=signature_of(op))
    def run(ops: Any, x: Any, hx: Any, params: Any = None, **rest: Any) -> Any:
        """Call the operator; plain states of zero, which modules make, count as replicated."""
        # Packed sequences pass batch sizes as the states, or states as the parameters.
        if params is not None and isinstance(hx if op == "lstm" else params, Tensor):
            msg = f"{op}: packed sequences of DTensors are not supported; pad them, and mask the results of the padding"
            raise UnsupportedOperatorError(msg)
        weights = [*(params or ()), *rest.values()]
        mesh = next(tensor.layout.mesh for tensor in (x, *as_list(hx), *weights) if isinstance(tensor, DTensor))
        states = [_replicated_if_zero(ops, state, mesh) for state in as_list(hx)]
        state = states if isinstance(hx, (list, tuple)) else states[0]
        return getattr(ops, op)(x, state, **({} if params is None else {"params": params}), **rest)


def _replicated_if_zero(ops: Any, state: Any, mesh: Any) -> Any:
    if isinstance(state, DTensor) or not isinstance(state, Tensor) or state.requires_grad or bool(state.any()):
        return state
    shape = tuple(state.shape)
    return ops.platform.wrap(state, Layout.of(mesh, ((),) * len(shape), (), shape))


for _op in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    _recurrent(_op)
    _recurrent(f"{_op}_cell")
