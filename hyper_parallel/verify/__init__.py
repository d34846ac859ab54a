"""Prove a parallel plan before it runs on accelerators."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Eager, and before anybody imports the modules of the same names: the package's attribute is the function.
from hyper_parallel.verify.launch import launch
from hyper_parallel.verify.simulate import simulate

if TYPE_CHECKING:
    from hyper_parallel.verify.case import ModelCase, ParallelPlan
    from hyper_parallel.verify.check import check_function
    from hyper_parallel.verify.model import verify_model

_HOMES = {
    "ModelCase": "hyper_parallel.verify.case",
    "ParallelPlan": "hyper_parallel.verify.case",
    "check_function": "hyper_parallel.verify.check",
    "verify_model": "hyper_parallel.verify.model",
}

__all__ = [
    "ModelCase",
    "ParallelPlan",
    "check_function",
    "launch",
    "simulate",
    "verify_model",
]


def __getattr__(name: str) -> Any:
    """Import the home of a public name when it is first asked for."""
    home = _HOMES.get(name)
    if home is None:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    """Public names, imported or not."""
    return sorted({*globals(), *__all__})
