"""PyTorch's recurrent layers and cells."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.entry import OpEntry
from hyper_parallel.core.shard.rules import recurrent
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.torch.op_table_pointwise import keyword_call, routed

__all__ = ["LOCAL", "add_routes"]

NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
LOCAL: dict[str, Callable[..., Any]] = {
    **{name: keyword_call(getattr(torch, name), recurrent.LAYERS) for name in NAMES},
    **{f"{name}_cell": keyword_call(getattr(torch, f"{name}_cell"), recurrent.CELL) for name in NAMES},
}


def _run(op: str, ops: Any, x: Any, hx: Any, params: Any = None, **rest: Any) -> Any:
    """The operator; states of zero, which modules make themselves, are equal on every rank."""
    if params is not None and isinstance(hx if op == "lstm" else params, Tensor):  # batch sizes, or states after them
        msg = f"{op}: packed sequences of DTensors are not supported; pad them, and mask what the padding gives"
        raise UnsupportedOperatorError(msg)
    weights = [*(params or ()), *rest.values()]
    mesh = next(one.layout.mesh for one in (x, *_sequence(hx), *weights) if isinstance(one, DTensor))
    states = [_replicated(ops, one, mesh) for one in _sequence(hx)]
    given = states if isinstance(hx, (list, tuple)) else states[0]
    return getattr(ops, op)(x, given, **({} if params is None else {"params": params}), **rest)


def _sequence(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _replicated(ops: Any, state: Any, mesh: Any) -> Any:
    if isinstance(state, DTensor) or not isinstance(state, Tensor) or state.requires_grad or bool(state.any()):
        return state
    shape = tuple(state.shape)
    return ops.platform.wrap(state, Layout.of(mesh, ((),) * len(shape), (), shape))


def add_routes(table: dict[Any, OpEntry]) -> None:
    """Add layers and cells."""
    for name in NAMES:
        routed(table, getattr(torch, name), recurrent.LAYERS, partial(_run, name))
        routed(table, getattr(torch, f"{name}_cell"), recurrent.CELL, partial(_run, f"{name}_cell"))
