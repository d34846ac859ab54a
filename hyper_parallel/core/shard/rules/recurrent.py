"""Recurrent layers and cells: samples may be sharded; time, features and weights must be whole."""

from __future__ import annotations

from hyper_parallel.core.shard.labels import Labels, nonempty_rows
from hyper_parallel.core.shard.rule import OpCall, Operand, Rule, Strategies, register_rule
from hyper_parallel.core.shard.sample import real, sample

LAYERS = "x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first"
CELL = "x, hx, weight_ih, weight_hh, bias_ih=None, bias_hh=None"


def _states(call: OpCall) -> list[Operand]:
    hx = call["hx"]
    return [hx] if isinstance(hx, Operand) else list(hx)


def _weights(count: int, call: OpCall) -> tuple[tuple[None, ...], ...]:
    return tuple((None,) * weight.ndim for weight in call.operands[count:])


def _layers(call: OpCall) -> Strategies:
    """``[t]n[c], [l]n[h] -> [t]n[h], [l]n[h]`` (``n[t][c]`` with ``batch_first``); weights must be whole."""
    x, states = call["x"], _states(call)
    if call["dropout"] > 0 and call["train"] and call["num_layers"] > 1:
        msg = (
            "dropout between layers would sample another mask on every rank; "
            "use dropout=0.0, or one module per layer with F.dropout between them"
        )
        raise ValueError(msg)
    sequence_dims = ("n", None, None) if call["batch_first"] else (None, "n", None)
    batch_dim = sequence_dims.index("n")
    if x.ndim != 3 or any(state.ndim != 3 or state.shape[1] != x.shape[batch_dim] for state in states):
        msg = f"x {list(x.shape)} and hx {[list(state.shape) for state in states]} need the same samples"
        raise ValueError(msg)
    state_dims = (None, "n", None)
    inputs = (sequence_dims, *(state_dims for _ in states), *_weights(1 + len(states), call))
    rows = nonempty_rows(Labels(inputs, (sequence_dims, *(state_dims for _ in states)), None))
    features = states[0].shape[-1] * (2 if call["bidirectional"] else 1)
    return Strategies(rows, ((*x.shape[:-1], features), *(state.shape for state in states)), many=True)


def _cell(call: OpCall) -> Strategies:
    """``n[c], n[h] -> n[h]``; weights must be whole."""
    x, states = call["x"], _states(call)
    batch = ("n",) * (x.ndim - 1)
    inputs = (*((*batch, None) for _ in (x, *states)), *_weights(1 + len(states), call))
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
