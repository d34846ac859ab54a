"""``torch.compile`` and DTensors: calls on them are not traced, so the graph breaks there.

PyTorch's tracer cannot record a call on a DTensor, because autograd records operations on the local tensor, below the
wrapper that the tracer sees. Such calls therefore run uncompiled, between the graphs of the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.torch.versions import TracingContext, call_compile, get_isolation, group_resolvers
from hyper_parallel.transport.base import active_transport

__all__ = ["compile_around_dtensors", "configure_loaded_compiler", "end_graph_at", "reset_keeping_settings"]

_PACKAGE = "hyper_parallel"
# Functions of PyTorch that call a wrapper of this package, which may be part of a graph.
_TRACED = tuple(f"torch.distributed._functional_collectives.{name}" for name in group_resolvers())


def compile_around_dtensors(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``torch.compile`` that does not compile this package's functions, and keeps simulated ranks apart."""

    @wraps(original)
    def compile(*args: Any, **kwargs: Any) -> Any:  # noqa: A001 - PyTorch's name
        _leave_to_python()
        return call_compile(original, args, kwargs, simulated=_simulated())

    return compile


def reset_keeping_settings(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch._dynamo.reset`` that keeps this package's settings of the compiler."""

    @wraps(original)
    def reset() -> None:
        original()
        _leave_to_python()

    return reset


def end_graph_at(layout: str) -> None:
    """End the graph that is being traced, if there is one: the call on the DTensor then runs uncompiled.

    Args:
        layout: layout of the DTensor, for the message of ``fullgraph=True``.

    Raises:
        Unsupported: PyTorch's own exception, with which its tracer ends a graph.
    """
    if TracingContext.try_get() is None:
        return
    _leave_to_python()
    from hyper_parallel.platform.torch.versions import Unsupported  # PyTorch loads its tracer when it first compiles

    raise Unsupported(
        f"a graph of torch.compile cannot hold a DTensor, but the traced code uses one ({layout}); leave out "
        "fullgraph=True, and calls on DTensors run between the graphs, or compile functions of local tensors: "
        "hyper_parallel.local_map(torch.compile(function, fullgraph=True), ...)"
    )


def configure_loaded_compiler() -> None:
    """Apply the settings for ``torch.compile`` if the compiler was loaded before this package."""
    if "torch._dynamo" in sys.modules:
        _leave_to_python()


def _simulated() -> bool:
    """Whether this is a simulated rank, whose compiled code the other ranks of the process would use."""
    active = active_transport()
    return active is not None and active.backend == "simulated" and not getattr(active, "own_process", False)


def _leave_to_python() -> None:
    """Make PyTorch's tracer skip the functions of this package, and refuse to share compiled code between ranks."""
    from hyper_parallel.platform.torch.versions import (  # PyTorch loads its tracer when it first compiles
        UserFunctionVariable,
        callback_handler,
        trace_rules,
    )

    rules: dict[str, Any] = trace_rules.manual_torch_name_rule_map
    if _TRACED[0] not in rules:
        trace_rules.add(_PACKAGE)
        rules.update(dict.fromkeys(_TRACED, UserFunctionVariable))
        trace_rules.clear_lru_cache()
    if "install_callbacks" not in vars(callback_handler):
        callback_handler.install_callbacks = _requiring_own_code(callback_handler.install_callbacks)


def _requiring_own_code(install: Callable[..., Any]) -> Callable[..., Any]:
    """Check every compilation as it begins; PyTorch's callbacks do not run for one that begins inside another."""

    @wraps(install)
    def run(trigger: Any, *args: Any, **kwargs: Any) -> Any:
        _require_own_code(trigger)
        return install(trigger, *args, **kwargs)

    return run


def _require_own_code(trigger: Any) -> None:
    """Refuse to trace code that simulated ranks would share: constants such as their rank are part of it."""
    running = get_isolation()
    # Backward is compiled later, from a graph that was traced for its rank.
    if trigger.name == "DYNAMO" and running < 0 and _simulated():
        msg = (
            "torch.compile was called outside of the function that each simulated rank runs, so that ranks would share "
            "compiled code, in which the rank is a constant; call torch.compile in that function, or run the program "
            "on real processes"
        )
        raise UnsupportedOperatorError(msg)
