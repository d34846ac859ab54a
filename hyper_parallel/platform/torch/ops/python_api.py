"""Runs functions of PyTorch that are written in Python, so that the functions they call are intercepted."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import CellType, FunctionType
from typing import Any, cast

from hyper_parallel._caches import register

__all__ = ["unwrapped"]


@lru_cache(maxsize=4096)
def unwrapped(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return a Python function of PyTorch without its call of ``__torch_function__``; None for other functions."""
    return _unwrap(cast("FunctionType", function), {}) if _python_written(function) else None


register("functions written in Python", unwrapped)
_PYTHON_WRITTEN = frozenset({"torch.functional", "torch.nn.functional"})


def _python_written(function: Any) -> bool:
    return type(function) is FunctionType and function.__module__ in _PYTHON_WRITTEN


def _unwrap(function: FunctionType, copies: dict[Any, Any]) -> FunctionType:
    """``function`` over a copy of its module, in which only calls of other public functions are intercepted."""
    if function in copies:
        return cast("FunctionType", copies[function])
    module: dict[str, Any] = copies.setdefault(id(function.__globals__), {})
    closure = function.__closure__
    cells = None if closure is None else tuple(CellType(_unwrap_cell(cell, copies)) for cell in closure)
    copies[function] = copy = FunctionType(function.__code__, module, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    if not module:
        module.update(function.__globals__)
        for name, value in function.__globals__.items():
            if name.startswith("has_torch_function"):
                module[name] = _never
            elif name.startswith("_") and _python_written(value):
                module[name] = _unwrap(value, copies)
    return copy


def _unwrap_cell(cell: CellType, copies: dict[Any, Any]) -> Any:
    """Unwrap functions that ``boolean_dispatch`` closes over; private ones would call the dispatcher again."""
    value = cell.cell_contents
    if not _python_written(value):
        return value
    private = value.__name__.startswith("_") or value.__globals__.get("__name__") != value.__module__
    return _unwrap(value, copies) if private else value


def _never(*_: Any) -> bool:
    return False
