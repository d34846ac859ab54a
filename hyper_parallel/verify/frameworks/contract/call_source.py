"""Writes calls of random programs as Python source; used by both frameworks."""

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
    """Return the source of a call of a function, method or operator, from the sources of its arguments.

    Args:
        name: ``operator.add``, ``Tensor.sum``, or the qualified name of a function, such as ``torch.sum``.
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
    """Return an expression or statement with an operator of Python; empty if Python has no operator for ``name``."""
    if name == "getitem":
        return f"{args[0]}[{args[1]}]"
    if name == "setitem":
        return f"{args[0]}[{args[1]}] = {args[2]}"
    sign = _OPERATORS.get(name) or _IN_PLACE.get(name)
    return f"{args[0]} {sign} {args[1]}" if sign else ""


def value_source(value: Any) -> str:
    """Return the source of an argument that is neither a tensor nor a dtype."""
    if value is ...:
        return "..."
    if isinstance(value, (float, complex)) and not cmath.isfinite(value):
        return f"{type(value).__name__}({str(value)!r})"
    return repr(value)
