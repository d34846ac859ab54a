"""PyTorch's names of diagonals, writes into part of a tensor, and copying views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.core.shard.entry import OpEntry, binder
from hyper_parallel.core.shard.rule import find_rule
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.torch.op_line import Line, both
from hyper_parallel.platform.torch.op_table_pointwise import by_name, routed

__all__ = ["FUNCTIONS", "LOCAL", "OVERLOADS", "add_routes"]

aten = torch.ops.aten

DIAGONALS = [both("diag_embed"), both("diag"), both("diagflat")]

MOVES = [
    both("as_strided"),
    both("as_strided_scatter"),
    both("rot90"),
]

PARTS = [
    both("select_scatter"),
    both("slice_scatter"),
    both("diagonal_scatter"),
    both("index_copy"),
    both("index_fill"),
    both("index_reduce"),
    both("scatter_reduce"),
    both("take"),
    both("put"),
    both("masked_scatter"),
]

FUNCTIONS = [*DIAGONALS, *MOVES, *PARTS]

OVERLOADS = [
    Line("diag_embed", (aten.diag_embed.default,)),
    Line("select_scatter", (aten.select_scatter.default,)),
    Line("slice_scatter", (aten.slice_scatter.default,)),
    Line("diagonal_scatter", (aten.diagonal_scatter.default,)),
    Line("index_copy", (aten.index_copy.default,)),
    Line("index_fill", (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)),
    Line("scatter_reduce", (aten.scatter_reduce.two,)),
    Line("take", (aten.take.default,)),
    Line("put", (aten.put.default,)),
    Line("masked_scatter", (aten.masked_scatter.default,)),
]


# -- calls that are other calls ----------------------------------------------------------------------------------------

# Functions that copy what others look at, by the operator of the view.
COPIES = {
    "as_strided_copy": "as_strided", "diagonal_copy": "diagonal", "expand_copy": "expand", "narrow_copy": "narrow",
    "permute_copy": "permute", "select_copy": "select", "slice_copy": "slice", "split_copy": "split",
    "split_with_sizes_copy": "split", "squeeze_copy": "squeeze", "t_copy": "t", "transpose_copy": "transpose",
    "unbind_copy": "unbind", "unfold_copy": "unfold", "unsqueeze_copy": "unsqueeze", "view_copy": "view",
    "view_as_real_copy": "view_as_real", "view_as_complex_copy": "view_as_complex",
}  # fmt: skip


def _copying(op: str) -> Callable[..., Any]:
    names = binder(find_rule(op).signature)  # type: ignore[union-attr] # the rules are loaded

    def run(ops: Any, x: Any, **rest: Any) -> Any:
        starred = () if names.starred is None else rest.pop(names.starred)
        made = getattr(ops, op)(x, *starred, **rest)
        return tuple(one.clone() for one in made) if isinstance(made, tuple) else made.clone()

    return run


def _meshgrid(ops: Any, tensors: Any, indexing: str | None) -> Any:
    """One grid per vector, each stretched along the others' dims."""
    given = [ops.view(one, (-1,)) for one in tensors]
    swapped = indexing == "xy" and len(given) > 1
    order = [1, 0, *range(2, len(given))] if swapped else list(range(len(given)))
    shape = tuple(given[one].shape[0] for one in order)
    made = []
    for at, one in enumerate(given):
        alone = [1] * len(given)
        alone[order.index(at)] = -1
        made.append(ops.expand(ops.view(one, tuple(alone)), shape))
    return tuple(made)


def _narrow(ops: Any, x: Any, dim: int, start: Any, length: int) -> Any:
    return ops.narrow(x, dim, int(start) if isinstance(start, Tensor) else start, length)


def _fill_diagonal(ops: Any, x: Any, fill_value: Any, wrap: bool) -> Any:
    """The main diagonal of a matrix, written where it is."""
    if x.ndim != 2 or (wrap and x.shape[0] > x.shape[1]):
        msg = f"fill_diagonal_: only one diagonal of a matrix can be filled, x has shape {list(x.shape)}"
        raise UnsupportedOperatorError(msg)
    return x.masked_fill_(ops.tril(ops.triu(torch.ones_like(x, dtype=torch.bool))), fill_value)


def add_routes(table: dict[Any, OpEntry]) -> None:
    """Add the functions that are made of others."""
    for name, op in COPIES.items():
        for home in (torch, Tensor):
            if hasattr(home, name):
                routed(table, getattr(home, name), find_rule(op).signature, _copying(op))  # type: ignore[union-attr]
    for func in (torch.narrow, Tensor.narrow):
        routed(table, func, "x, dim, start, length", _narrow)
    routed(table, torch.meshgrid, "*tensors, indexing=None", _meshgrid)
    routed(table, Tensor.fill_diagonal_, "x, fill_value, wrap=False", _fill_diagonal)


LOCAL: dict[str, Callable[..., Any]] = {
    **by_name([*FUNCTIONS, *OVERLOADS]),
    "diag_embed": lambda x, offset=0, dim1=-2, dim2=-1: torch.diag_embed(x, offset, dim1, dim2),
    "as_strided": lambda x, size, stride, storage_offset=None: torch.as_strided(x, size, stride, storage_offset),
    "take": lambda x, index: torch.take(x, index),
}
