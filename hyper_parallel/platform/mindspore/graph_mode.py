"""MindSpore's graph mode: functions that reach DTensors run in PyNative mode instead.

A graph is compiled from the shapes of local tensors, which it would treat as the global ones. Scripts that set
``ms.GRAPH_MODE`` at their top run unchanged: each call of a Cell, and each gradient, is checked when it runs. Functions
that a program compiles itself with ``ms.jit`` are refused (``captured.py``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from mindspore import context, nn

from hyper_parallel.errors import MixedTensorError, UnsupportedOperatorError
from hyper_parallel.platform.mindspore import intercept
from hyper_parallel.platform.mindspore.captured import reaches_dtensor
from hyper_parallel.platform.mindspore.versions import get_mode, process_context

__all__ = ["cells_uncompiled", "gradients_uncompiled"]


def cells_uncompiled(compile_and_run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the call of a Cell in graph mode: a Cell that reaches DTensors is called in PyNative mode."""

    @wraps(compile_and_run)
    def run(self: nn.Cell, *args: Any, **kwargs: Any) -> Any:
        if not _reaches(self, args, kwargs):
            return compile_and_run(self, *args, **kwargs)
        with _pynative():
            return self(*args, **kwargs)

    return run


def gradients_uncompiled(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the call of a gradient operator: for a function that reaches DTensors it runs in PyNative mode."""

    @wraps(make)
    def call(self: Any, function: Any, *options: Any, **named: Any) -> Any:
        if get_mode() != context.GRAPH_MODE:  # get_context("mode") is much slower
            return make(self, function, *options, **named)
        compiled = make(self, function, *options, **named)

        @wraps(compiled)
        def after_grad(*args: Any, **kwargs: Any) -> Any:
            # With MS_JIT=0 nothing is compiled, and MindSpore's own function would call itself endlessly.
            compiles = os.getenv("MS_JIT") != "0"
            if compiles and not _reaches(function, [options, list(named.values()), args], kwargs):
                return compiled(*args, **kwargs)
            with _pynative():
                return make(self, function, *options, **named)(*args, **kwargs)

        return after_grad

    return call


def _reaches(function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function or Cell, or one of its arguments, reaches a DTensor."""
    if isinstance(function, nn.Cell) and intercept.holds_dtensor(function.get_parameters()):
        return True
    return reaches_dtensor([function, args, kwargs])


@contextmanager
def _pynative() -> Iterator[None]:
    """Set PyNative mode, and graph mode again afterwards.

    Raises:
        UnsupportedOperatorError: plain tensors were mixed with DTensors; the message says that nothing was compiled.
    """
    settings = process_context()  # set_context would check and set much more
    switches = settings._context_switches.context_stack  # noqa: SLF001 - it grows at each change of mode
    count = len(switches)
    settings.set_mode(context.PYNATIVE_MODE)
    try:
        yield
    except MixedTensorError as error:
        msg = f"graph mode: a Cell or function that reaches DTensors runs uncompiled, as in ms.PYNATIVE_MODE: {error}"
        raise UnsupportedOperatorError(msg) from error
    finally:
        settings.set_mode(context.GRAPH_MODE)
        del switches[count:]
