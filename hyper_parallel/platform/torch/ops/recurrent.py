"""PyTorch's recurrent layers and cells."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.torch.ops.registry import decomposition, kernel, signature_of


def _recurrent(op: str) -> None:
    function = getattr(torch, op)
    kernel(op)(function)

    @decomposition(function, signature=signature_of(op))
    def run(ops: Any, x: Any, hx: Any, params: Any = None, **rest: Any) -> Any:
        """Call the operator; plain states of zero, which modules make, count as replicated."""
        # Packed sequences come with batch sizes in place of states, or with states in place of parameters.
        if params is not None and isinstance(hx if op == "lstm" else params, Tensor):
            msg = f"{op}: packed sequences of DTensors are not supported; pad them, and mask what the padding gives"
            raise UnsupportedOperatorError(msg)
        weights = [*(params or ()), *rest.values()]
        mesh = next(tensor.layout.mesh for tensor in (x, *_sequence(hx), *weights) if isinstance(tensor, DTensor))
        states = [_replicated_if_zero(ops, state, mesh) for state in _sequence(hx)]
        state = states if isinstance(hx, (list, tuple)) else states[0]
        return getattr(ops, op)(x, state, **({} if params is None else {"params": params}), **rest)


def _sequence(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _replicated_if_zero(ops: Any, state: Any, mesh: Any) -> Any:
    if isinstance(state, DTensor) or not isinstance(state, Tensor) or state.requires_grad or bool(state.any()):
        return state
    shape = tuple(state.shape)
    return ops.platform.wrap(state, Layout.of(mesh, ((),) * len(shape), (), shape))


for _op in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    _recurrent(_op)
    _recurrent(f"{_op}_cell")
