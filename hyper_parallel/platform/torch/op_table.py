"""PyTorch's names: which call is which canonical operator.

A spelling is one line. Signatures are written in canonical parameter names where they differ from the rule's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from types import BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.core.shard import rules
from hyper_parallel.core.shard.entry import OpEntry, binder
from hyper_parallel.core.shard.rule import find_rule
from hyper_parallel.errors import LayoutError
from hyper_parallel.platform.torch import (
    op_table_aten,
    op_table_bins,
    op_table_foreach,
    op_table_fused,
    op_table_index,
    op_table_linalg,
    op_table_loss,
    op_table_nn,
    op_table_order,
    op_table_pieces,
    op_table_pointwise,
    op_table_random,
    op_table_recurrent,
    op_table_reduce,
    op_table_scaler,
    op_table_shape,
    op_table_spatial,
)
from hyper_parallel.platform.torch.op_line import Line
from hyper_parallel.platform.torch.op_table_pointwise import routed

__all__ = ["LOCAL", "functions", "local_op", "overloads"]

rules.load()

# Families whose spellings follow from name patterns, and families that list their lines.
PATTERNS = (op_table_pointwise, op_table_reduce, op_table_random, op_table_loss, op_table_foreach)
LISTS = (
    op_table_shape,
    op_table_index,
    op_table_nn,
    op_table_bins,
    op_table_spatial,
    op_table_linalg,
    op_table_order,
    op_table_pieces,
)
ROUTES = (op_table_nn, op_table_spatial, op_table_recurrent, op_table_pieces, op_table_fused, op_table_scaler)


def _spelling(
    table: dict[Any, OpEntry],
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
    table[func] = OpEntry(
        name,
        func,
        binder(signature or rule.signature),
        rule,
        LOCAL.get(op, func),
        canonical=canonical,
        in_place=in_place,
    )


def _lines(table: dict[Any, OpEntry], lines: Iterable[Line]) -> None:
    for line in lines:
        for func in line.funcs:
            _spelling(table, line.op, func, line.signature, canonical=line.canonical, in_place=line.in_place)


def _by_name(op: str, func: Callable[..., Any]) -> Callable[..., Any]:
    """``func`` with canonical parameter names: those written in C have names of their own."""
    if isinstance(func, (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)):
        return op_table_pointwise.keyword_call(func, find_rule(op).signature)  # type: ignore[union-attr] # it is loaded
    return func


# The first family that implements an operator counts: later ones may spell it in passing.
LOCAL: dict[str, Callable[..., Any]] = {
    op: _by_name(op, func)
    for family in reversed((*PATTERNS, *LISTS, op_table_recurrent))
    for op, func in family.LOCAL.items()
}


@cache
def functions() -> dict[Any, OpEntry]:
    """Entries by Python function or method."""
    table: dict[Any, OpEntry] = {}
    for family in PATTERNS:
        family.add_functions(table, partial(_spelling, table))
    for listed in LISTS:
        _lines(table, listed.FUNCTIONS)
    table.update(op_table_index.by_value())
    for routes in ROUTES:
        routes.add_routes(table)
    _add_writing(table)
    return table


# Methods that write what their namesake without underscore returns, and have no rule of their own.
WRITING = (
    "addbmm addmm addmv addr baddbmm cumprod cumsum index_add index_copy index_fill index_put index_reduce "
    "masked_scatter put scatter scatter_add scatter_reduce tril triu conj_physical float_power"
)


def _add_writing(table: dict[Any, OpEntry]) -> None:
    for name in WRITING.split():
        func, plain = getattr(Tensor, f"{name}_"), table.get(getattr(Tensor, name))
        if func not in table and plain is not None:
            routed(table, func, plain.binder.text, partial(_write, plain, f"{name}_"))


def _write(plain: OpEntry, name: str, ops: Any, **given: Any) -> Any:
    """Compute, then copy: shape and dtype stay."""
    del ops
    named = {one: given.pop(one) for one, kind in plain.binder.parameters.items() if kind.kind is kind.KEYWORD_ONLY}
    x, *rest = given.values()
    # Backward may need what is overwritten.
    read = x.clone() if x.requires_grad and torch.is_grad_enabled() else x
    found = plain.func(read, *rest, **named)
    if found.shape != x.shape or found.dtype != x.dtype:
        msg = f"{name}: the result is {found.dtype} {list(found.shape)}, and x is {x.dtype} {list(x.shape)}"
        raise LayoutError(msg)
    return x.copy_(found)


@cache
def overloads() -> dict[Any, OpEntry]:
    """Entries by operator overload."""
    table: dict[Any, OpEntry] = {}
    for family in PATTERNS:
        family.add_overloads(partial(_spelling, table))
    for listed in (op_table_aten, op_table_bins, op_table_spatial, op_table_linalg, op_table_order, op_table_pieces):
        _lines(table, listed.OVERLOADS)
    table.update(op_table_index.overloads_by_value())
    return table


@cache
def local_op(op: str) -> Callable[..., Any]:
    """The canonical operator on plain tensors: the family's own, or else a spelling that takes the same arguments.

    Raises:
        KeyError: there is neither.
    """
    if op in LOCAL:
        return LOCAL[op]
    for table in (functions(), overloads()):
        for func, entry in table.items():
            if entry.rule.op == op and entry.composed is None:
                return op_table_pointwise.keyword_call(func, entry.binder.text)
    raise KeyError(op)
