"""Rewrites functions whose C++ code reads sizes as numbers in terms of functions that accept symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hyper_parallel.verify.frameworks.torch.primitive_table import REWRITTEN

__all__ = ["SYMBOLIC", "SymbolicCalls"]


def _products(
    x: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the products of a cell's input and state with its weights."""
    return F.linear(x, w_ih, b_ih), F.linear(hx, w_hh, b_hh)


def _cell(activation: Callable[[Tensor], Tensor], x: Tensor, hx: Tensor, *weights: Tensor, **biases: Tensor) -> Tensor:
    of_input, of_state = _products(x, hx, *weights, **biases)
    return activation(of_input + of_state)


def _gru_cell(x: Tensor, hx: Tensor, *weights: Tensor, **biases: Tensor) -> Tensor:
    of_input, of_state = _products(x, hx, *weights, **biases)
    reset, update, new = of_input.chunk(3, 1)
    of_reset, of_update, of_new = of_state.chunk(3, 1)
    kept = (update + of_update).sigmoid()
    fresh = (new + (reset + of_reset).sigmoid() * of_new).tanh()
    return (hx - fresh) * kept + fresh


def _lstm_cell(x: Tensor, hx: Sequence[Tensor], *weights: Tensor, **biases: Tensor) -> tuple[Tensor, Tensor]:
    of_input, of_state = _products(x, hx[0], *weights, **biases)
    taken, kept, new, shown = (of_input + of_state).chunk(4, 1)
    state = kept.sigmoid() * hx[1] + taken.sigmoid() * new.tanh()
    return shown.sigmoid() * state.tanh(), state


def _one_hot(x: Tensor, num_classes: Any) -> Tensor:
    return (x.unsqueeze(-1) == torch.arange(num_classes, device=x.device)).to(torch.int64)


def _block_diag(*tensors: Tensor) -> Tensor:
    blocks = [block if block.ndim == 2 else block.reshape(1, -1) for block in tensors]
    columns, before, rows = sum(block.shape[1] for block in blocks), 0, []
    for block in blocks:
        rows.append(F.pad(block, (before, columns - before - block.shape[1])))
        before = before + block.shape[1]
    return torch.cat(rows)


def _sgn(x: Tensor) -> Tensor:
    return torch.sgn(x) if x.is_complex() else torch.sign(x)


def _cat(tensors: list[Tensor] | tuple[Tensor, ...], dim: int = 0) -> Tensor:
    """Concatenate tensors; as in PyTorch, empty vectors are ignored."""
    return torch.cat([each for each in tensors if each.ndim != 1 or not _is_zero(each.shape[0])] or tensors, dim)


def _is_zero(size: Any) -> bool:
    return isinstance(size, int) and not size


SYMBOLIC: dict[Any, Callable[..., Any]] = {
    torch.rnn_tanh_cell: lambda *args: _cell(torch.tanh, *args),
    torch.rnn_relu_cell: lambda *args: _cell(torch.relu, *args),
    torch.gru_cell: _gru_cell,
    torch.lstm_cell: _lstm_cell,
    F.one_hot: _one_hot,
    torch.block_diag: _block_diag,
    torch.conv_tbc: REWRITTEN[torch.ops.aten.conv_tbc.default],
    torch.sgn: _sgn,
    torch.cat: _cat,
}


class SymbolicCalls(TorchFunctionMode):
    """Replaces calls of functions that need sizes as numbers by calls of functions that accept symbolic sizes."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, or its replacement."""
        del types
        return SYMBOLIC.get(func, func)(*args, **(kwargs or {}))
