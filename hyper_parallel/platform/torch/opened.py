"""Functions that PyTorch wrote in Python, run on DTensors as they are written: what they call arrives one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import CellType, FunctionType
from typing import Any, cast

__all__ = ["opened"]


@cache
def opened(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """A function that PyTorch wrote in Python, without its own hand-over: what it calls arrives here one by one."""
    return _open(cast("FunctionType", func), {}) if _python_written(func) else None


_PYTHON_WRITTEN = frozenset({"torch.functional", "torch.nn.functional"})


def _python_written(func: Any) -> bool:
    return type(func) is FunctionType and func.__module__ in _PYTHON_WRITTEN


def _open(func: FunctionType, known: dict[Any, Any]) -> FunctionType:
    """``func`` over a copy of its module, in which nothing is handed over but calls of other public functions."""
    if func in known:
        return cast("FunctionType", known[func])
    space: dict[str, Any] = known.setdefault(id(func.__globals__), {})
    cells = None if func.__closure__ is None else tuple(CellType(_inner(one, known)) for one in func.__closure__)
    known[func] = opened = FunctionType(func.__code__, space, func.__name__, func.__defaults__, cells)
    opened.__kwdefaults__ = func.__kwdefaults__
    if not space:
        space.update(func.__globals__)
        for name, value in func.__globals__.items():
            if name.startswith("has_torch_function"):
                space[name] = _never
            elif name.startswith("_") and _python_written(value):
                space[name] = _open(value, known)
    return opened


def _inner(cell: CellType, known: dict[Any, Any]) -> Any:
    """What a switch between two functions (``return_indices=``) holds: its private halves hand over to the switch."""
    held = cell.cell_contents
    if not _python_written(held):
        return held
    private = held.__name__.startswith("_") or held.__globals__.get("__name__") != held.__module__
    return _open(held, known) if private else held


def _never(*_: Any) -> bool:
    return False
