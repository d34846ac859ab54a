"""Calls of random programs as source: what is alike in the languages of both frameworks."""

from __future__ import annotations

import cmath
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["call_source", "value_source"]

_OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "pow": "**", "matmul": "@", "lt": "<", "ge": ">=", "eq": "==",
    "and_": "&", "or_": "|",
}  # fmt: skip
_IN_PLACE = {"iadd": "+=", "isub": "-=", "imul": "*=", "itruediv": "/="}


def call_source(name: str, args: Sequence[str], kwargs: Mapping[str, str], methods: Sequence[str] = ()) -> str:
    """Return the call of a function, method or operator as source, from its arguments as source.

    Args:
        name: ``operator.add``, ``Tensor.sum``, or a function by its whole name.
        args: positional arguments.
        kwargs: arguments by name.
        methods: prefixes of methods other than ``Tensor.``.
    """
    home, _, rest = name.partition(".")
    if home == "operator" and (text := _operator_source(rest, args)):
        return text
    passed = [*args, *(f"{key}={value}" for key, value in kwargs.items())]
    for prefix in (*methods, "Tensor."):
        if name.startswith(prefix):
            return f"{args[0]}.{name.removeprefix(prefix)}({', '.join(passed[1:])})"
    return f"{name}({', '.join(passed)})"


def _operator_source(name: str, args: Sequence[str]) -> str:
    """Return an expression or a statement with an operator of Python; nothing where that is only a function."""
    if name == "getitem":
        return f"{args[0]}[{args[1]}]"
    if name == "setitem":
        return f"{args[0]}[{args[1]}] = {args[2]}"
    sign = _OPERATORS.get(name) or _IN_PLACE.get(name)
    return f"{args[0]} {sign} {args[1]}" if sign else ""


def value_source(value: Any) -> str:
    """Return an argument that is neither a tensor nor a dtype as source."""
    if value is ...:
        return "..."
    if isinstance(value, (float, complex)) and not cmath.isfinite(value):
        return f"{type(value).__name__}({str(value)!r})"
    return repr(value)
