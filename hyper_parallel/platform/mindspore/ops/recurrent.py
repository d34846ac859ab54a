"""Recurrent layers of MindSpore: ``nn.RNN`` and ``nn.GRU`` are made of light operators, ``nn.LSTM`` of a primitive."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.platform.mindspore.ops.registry import decomposition, expect

__all__ = ["with_states"]


def with_states(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``construct`` of recurrent layers, whose first states are plain tensors of the global batch size."""

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
    """One layer in one direction, as ``nn.LSTM`` calls it; the weights lie in one row, biases last."""
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
