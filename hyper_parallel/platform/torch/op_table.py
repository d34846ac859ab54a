"""PyTorch's names: which call is which canonical operator.

A spelling is one line. Signatures are written in canonical parameter names where they differ from the rule's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from hyper_parallel.core.shard import rules
from hyper_parallel.core.shard.binder import binder
from hyper_parallel.core.shard.dispatch import Entry
from hyper_parallel.core.shard.rule import find_rule

__all__ = ["LOCAL", "functions", "overloads"]

rules.load()

aten = torch.ops.aten

UNARY = "abs neg exp sqrt rsqrt sin cos tanh sigmoid relu silu gelu erf log reciprocal square sign floor ceil round"
BINARY = "add sub mul div pow maximum minimum"


def _spelling(  # noqa: PLR0913 - a table line
    table: dict[Any, Entry],
    op: str,
    func: Callable[..., Any],
    signature: str | None = None,
    *,
    canonical: bool = False,
    in_place: bool = False,
) -> None:
    rule = find_rule(op)
    if rule is None:
        msg = f"table line for {func}: canonical operator {op!r} has no rule"
        raise ValueError(msg)
    name = getattr(func, "__name__", str(func))
    table[func] = Entry(
        name, func, binder(signature or rule.signature), rule, LOCAL.get(op, func), canonical=canonical, in_place=in_place
    )


LOCAL: dict[str, Callable[..., Any]] = {
    "view": lambda x, shape: x.reshape(shape),
    "linear": F.linear,
    "layer_norm": lambda x, normalized_shape, weight, bias, eps: F.layer_norm(x, normalized_shape, weight, bias, eps),
}


@cache
def functions() -> dict[Any, Entry]:
    """Entries by Python function or method."""
    table: dict[Any, Entry] = {}
    for name in UNARY.split():
        for func in {getattr(torch, name, None), getattr(Tensor, name, None), getattr(F, name, None)} - {None}:
            _spelling(table, name, func)
    for name in BINARY.split():
        for func in {getattr(torch, name), getattr(Tensor, name)}:
            _spelling(table, name, func)
    for name in "add sub mul".split():
        _spelling(table, name, getattr(Tensor, f"{name}_"), in_place=True)
    _spelling(table, "linear", F.linear)
    for func in (Tensor.view, Tensor.reshape):
        _spelling(table, "view", func, "x, *shape", canonical=True)
    _spelling(table, "layer_norm", F.layer_norm)
    _spelling(table, "sum", torch.sum)
    _spelling(table, "sum", Tensor.sum)
    return table


@cache
def overloads() -> dict[Any, Entry]:
    """Entries by operator overload."""
    table: dict[Any, Entry] = {}
    return table
