"""Backward hooks of cells, in an order that ``prepend`` may change: one hook of MindSpore's runs a list of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.platform.contract.modules import HookHandle

__all__ = ["register"]

_LISTS = "_hyper_parallel_backward_hooks"


def register(cell: Any, kind: str, hook: Callable[..., Any], *, prepend: bool) -> HookHandle:
    """Add a ``hook`` (of the gradients in and out) or a ``pre_hook`` (of those out), last or first."""
    lists: dict[str, list[Callable[..., Any]]] = cell.__dict__.setdefault(_LISTS, {})
    hooks = lists.get(kind)
    if hooks is None:
        hooks = lists[kind] = []
        if kind == "hook":
            cell.register_backward_hook(_running(hooks))
        else:
            cell.register_backward_pre_hook(_running_before(hooks))

    def entry(*args: Any) -> Any:  # an object of its own, so that one function may be registered twice
        return hook(*args)

    hooks.insert(0 if prepend else len(hooks), entry)
    return HookHandle("backward hook" if kind == "hook" else "backward pre-hook", cell, lambda: hooks.remove(entry))


def _running(hooks: list[Callable[..., Any]]) -> Callable[..., Any]:
    def run(cell: Any, grad_input: Any, grad_output: Any) -> Any:
        changed = False
        for hook in list(hooks):
            given = hook(cell, grad_input, grad_output)
            if given is not None:
                grad_input, changed = given if isinstance(given, tuple) else (given,), True
        return grad_input if changed else None

    return run


def _running_before(hooks: list[Callable[..., Any]]) -> Callable[..., Any]:
    def run(cell: Any, grad_output: Any) -> Any:
        changed = False
        for hook in list(hooks):
            given = hook(cell, grad_output)
            if given is not None:
                grad_output, changed = given if isinstance(given, tuple) else (given,), True
        return grad_output if changed else None

    return run
