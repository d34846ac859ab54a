"""PyTorch's names: which call is which canonical operator.

A spelling is one line. Signatures are written in canonical parameter names where they differ from the rule's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

from hyper_parallel.core.shard import rules
from hyper_parallel.core.shard.binder import binder
from hyper_parallel.core.shard.dispatch import Entry
from hyper_parallel.core.shard.rule import find_rule
from hyper_parallel.platform.torch import (
    op_table_aten,
    op_table_bins,
    op_table_foreach,
    op_table_index,
    op_table_loss,
    op_table_nn,
    op_table_pointwise,
    op_table_random,
    op_table_reduce,
    op_table_shape,
)
from hyper_parallel.platform.torch.op_line import Line

__all__ = ["LOCAL", "functions", "overloads"]

rules.load()

# Families whose spellings follow from name patterns, and families that list their lines.
PATTERNS = (op_table_pointwise, op_table_reduce, op_table_random, op_table_loss, op_table_foreach)
LISTS = (op_table_shape, op_table_index, op_table_nn, op_table_bins)


def _spelling(
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
        name,
        func,
        binder(signature or rule.signature),
        rule,
        LOCAL.get(op, func),
        canonical=canonical,
        in_place=in_place,
    )


def _lines(table: dict[Any, Entry], lines: Iterable[Line]) -> None:
    for line in lines:
        for func in line.funcs:
            _spelling(table, line.op, func, line.signature, canonical=line.canonical, in_place=line.in_place)


LOCAL: dict[str, Callable[..., Any]] = {op: func for family in (*PATTERNS, *LISTS) for op, func in family.LOCAL.items()}


@cache
def functions() -> dict[Any, Entry]:
    """Entries by Python function or method."""
    table: dict[Any, Entry] = {}
    for family in PATTERNS:
        family.add_functions(table, partial(_spelling, table))
    for listed in LISTS:
        _lines(table, listed.FUNCTIONS)
    table.update(op_table_index.by_value())
    return table


@cache
def overloads() -> dict[Any, Entry]:
    """Entries by operator overload."""
    table: dict[Any, Entry] = {}
    for family in PATTERNS:
        family.add_overloads(partial(_spelling, table))
    _lines(table, op_table_aten.OVERLOADS)
    _lines(table, op_table_bins.OVERLOADS)
    table.update(op_table_index.overloads_by_value())
    return table
