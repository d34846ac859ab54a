"""``torch._foreach_*`` on lists of DTensors, as optimizers call them.

Where all operands of every element share one layout that owes nothing, one call runs on all locals. Otherwise each
element is an operation of its own, with its own placement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.entry import OpEntry
from hyper_parallel.platform.torch.op_table_pointwise import routed

__all__ = ["LOCAL", "add_functions", "add_overloads"]

LOCAL: dict[str, Callable[..., Any]] = {}

Spell = Callable[..., None]
UNARY = [
    "abs", "neg", "sqrt", "rsqrt", "exp", "expm1", "log", "log1p", "log2", "log10", "reciprocal", "sign", "floor",
    "ceil", "round", "trunc", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan", "sigmoid", "erf",
    "erfc", "lgamma", "frac",
]  # fmt: skip
BINARY = ["add", "sub", "mul", "div", "pow", "maximum", "minimum", "clamp_min", "clamp_max", "lerp"]
TERNARY = ["addcmul", "addcdiv"]
SIGNATURE = "x, y=None, third=None, fourth=None, *, alpha=None, value=None, scalars=None, weight=None"


def _element(name: str) -> Callable[..., Any]:
    """The operation on one element."""
    if name == "clamp_min":
        return lambda x, y: torch.clamp(x, min=y)
    if name == "clamp_max":
        return lambda x, y: torch.clamp(x, max=y)
    if name in TERNARY:
        plain = getattr(torch, name)
        return lambda x, y, z, value=1: plain(x, y, z, value=value)
    func: Callable[..., Any] = getattr(torch, name)
    return func


def _element_in_place(name: str) -> Callable[..., Any]:
    """The operation on one element, which is written."""
    if name == "clamp_min":
        return lambda x, y: x.clamp_(min=y)
    if name == "clamp_max":
        return lambda x, y: x.clamp_(max=y)
    if name in TERNARY:
        return lambda x, y, z, value=1: getattr(x, f"{name}_")(y, z, value=value)
    return lambda x, *args, **kwargs: getattr(x, f"{name}_")(*args, **kwargs)


def _shared(columns: list[Any]) -> bool:
    """True when each element's operands have one layout that owes nothing, and may be written."""
    lists = [column for column in columns if isinstance(column, (list, tuple))]
    if any(isinstance(column, DTensor) for column in columns):
        return False
    return all(_one_layout(row) for row in zip(*lists, strict=True))


def _one_layout(row: tuple[Any, ...]) -> bool:
    layout = getattr(row[0], "_layout", None)
    if layout is None or layout.partials or row[0]._readonly is not None:
        return False
    return all(getattr(one, "_layout", None) is layout for one in row[1:] if isinstance(one, Tensor))


def _locals_of(column: Any) -> Any:
    if isinstance(column, (list, tuple)):
        return [one._local if isinstance(one, DTensor) else one for one in column]
    return column


def _rows(columns: list[Any], count: int) -> Iterator[list[Any]]:
    for index in range(count):
        yield [column[index] if isinstance(column, (list, tuple)) else column for column in columns]


def _runner(func: Callable[..., Any], element: Callable[..., Any], *, in_place: bool) -> Callable[..., Any]:
    def run(ops: Any, **given: Any) -> Any:
        named = {name: given.pop(name) for name in ("alpha", "value", "scalars", "weight")}
        named = {name: value for name, value in named.items() if value is not None}
        columns = [column for column in given.values() if column is not None]
        first = columns[0]
        if not first:
            return None if in_place else []
        if _shared([*columns, *named.values()]):
            outs = func(*map(_locals_of, columns), **named)
            return _written(first) if in_place else _wrapped(ops.platform, outs, first)
        columns.extend(named.pop(name) for name in ("scalars", "weight") if name in named)
        found = [element(*row, **named) for row in _rows(columns, len(first))]
        return None if in_place else found

    return run


def _written(first: Any) -> None:
    for one in first:
        one.drop_views()


def _wrapped(platform: Any, outs: Any, first: Any) -> list[Any]:
    return [platform.wrap(out, one._layout) for out, one in zip(outs, first, strict=True)]


def _norm(ops: Any, x: Any, ord: Any, dtype: Any) -> list[Any]:  # noqa: A002 - the framework's name
    del ops
    return [torch.linalg.vector_norm(one, ord, dtype=dtype) for one in x]


def _copy(ops: Any, x: Any, y: Any, non_blocking: Any) -> None:
    del ops
    for one, other in zip(x, y, strict=True):
        one.copy_(other, non_blocking)


def _zero(ops: Any, x: Any) -> None:
    del ops
    for one in x:
        one.zero_()


def add_functions(table: dict[Any, OpEntry], spell: Spell) -> None:
    """Add every spelling of the Python API."""
    del spell
    for name in (*UNARY, *BINARY, *TERNARY):
        func = getattr(torch, f"_foreach_{name}")
        routed(table, func, SIGNATURE, _runner(func, _element(name), in_place=False))
        func = getattr(torch, f"_foreach_{name}_")
        routed(table, func, SIGNATURE, _runner(func, _element_in_place(name), in_place=True))
    routed(table, torch._foreach_norm, "x, ord=2, dtype=None", _norm)  # noqa: SLF001 - as optimizers call it
    routed(table, torch._foreach_copy_, "x, y, non_blocking=False", _copy)
    routed(table, torch._foreach_zero_, "x", _zero)


def add_overloads(spell: Spell) -> None:
    """Lists arrive at function level only."""
    del spell
