"""Finds DTensors that a function reaches other than by its arguments: closures, globals, defaults, attributes."""

from __future__ import annotations

import types
from contextlib import suppress
from functools import partial
from typing import Any

from mindspore import Tensor, nn

from hyper_parallel.core.dtensor.dtensor import DTensor

__all__ = ["reaches_dtensor"]

_FRAMEWORKS = ("mindspore", "numpy", "builtins", "hyper_parallel")
_CONTAINERS = (list, tuple, set, frozenset)


def reaches_dtensor(root: Any) -> bool:
    """Return True if a function, method, cell or object reaches a DTensor.

    The search follows closures, defaults, the globals that code names (not those of MindSpore's own modules), bound
    objects, partial functions, containers, and the attributes of cells and of objects of the program's classes.
    """
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, DTensor):
            return True
        if id(value) not in seen:
            seen.add(id(value))
            waiting.extend(_reached(value))
    return False


def _reached(value: Any) -> list[Any]:  # noqa: PLR0911 - one per kind of value
    if isinstance(value, _CONTAINERS):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.FunctionType):
        return _reached_by_function(value)
    if isinstance(value, nn.Cell):
        return list(vars(value).values()) + ([] if _is_frameworks(type(value)) else [type(value).construct])
    if isinstance(value, (type, types.ModuleType, Tensor)) or _is_frameworks(type(value)):
        return []
    return list(getattr(value, "__dict__", {}).values())


def _reached_by_function(function: types.FunctionType) -> list[Any]:
    reached = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # the variable is not assigned yet
            reached.append(cell.cell_contents)
    if not _is_frameworks(function):
        reached += [function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__]
    return [*reached, *vars(function).values()]


def _names(code: types.CodeType) -> set[str]:
    """Return the names in ``code`` and in the functions that it defines."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _is_frameworks(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] in (
        "mindspore",
        "numpy",
        "builtins",
        "hyper_parallel",
    )
