"""Gives older versions of MindSpore what newer ones have, so that patches and hooks are the same.

Before 2.9, hooks of a Cell's forward cannot be registered before others: ``prepend`` is added. Before 2.10, a hook of a
Cell's forward does not run if the forward raises: ``always_call`` is added. From 2.9 on,
``GradOperation``, ``mindspore.grad`` and ``value_and_grad`` call three functions of ``mindspore.ops.composite.base``:
the forward, the forward with a seed, the backward. Before, they call methods of the operation and of the executor:
these methods call the three functions, which do what the methods did.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any

from mindspore import nn
from mindspore.ops import GradOperation
from mindspore.ops.composite import base
from mindspore.ops.function.grad import grad_func

from hyper_parallel.platform.mindspore.versions import Grad, PyNativeExecutor, pynative_executor

__all__ = ["accepting_always_call", "accepting_prepend", "calling_hooks_after_failures", "offer_functions"]

_NAMES = ("_pynative_func_grad_forward", "_pynative_forward_run", "_pynative_func_grad_backward")
_CURRENT: ContextVar[tuple[Any, Any, Any]] = ContextVar("the differentiation: operation, inner operation, weights")
_Base: Any = base
_PLAIN: dict[bool, Any] = {}
_ALWAYS = "_hyper_parallel_always_called"
_RAN: ContextVar[set[int] | None] = ContextVar("the hooks that have run in the innermost call of a Cell", default=None)


def offer_functions() -> None:
    """Install the three functions if MindSpore lacks them; repeated calls do nothing."""
    if hasattr(_Base, _NAMES[0]):
        return
    for name, function in zip(_NAMES, (_forward, _forward_with_seed, _backward), strict=True):
        for module in (base, grad_func):
            setattr(module, name, function)
    for operation in (GradOperation, Grad):
        setattr(operation, _NAMES[1], _method)
    for name, has_aux in (("grad", False), ("grad_aux", True)):
        _PLAIN[has_aux] = vars(PyNativeExecutor)[name]
        setattr(PyNativeExecutor, name, _executed(has_aux=has_aux))


def _method(self: Any, fn: Any, grad: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
    """``_pynative_forward_run`` of an operation: run the forward; that of ``GradOperation`` returns no outputs."""
    token = _CURRENT.set((self, grad, weights))
    try:
        run_args, out = _Base._pynative_forward_run(fn, self.sens_param, *args, **kwargs)  # noqa: SLF001 - offered above
    finally:
        _CURRENT.reset(token)
    return run_args if isinstance(self, GradOperation) else (run_args, out)


def _forward(fn: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``fn`` on the tape, unless it has run there already; return its outputs."""
    operation, grad, weights = _CURRENT.get()
    position = None if isinstance(operation, GradOperation) else operation.grad_position
    if pynative_executor.check_run(grad, fn, weights, position, *args, *kwargs.values(), create_graph=True):
        return fn(*args, **kwargs)
    if isinstance(fn, nn.Cell):
        requires_grad, fn.requires_grad = fn.requires_grad, True
        try:
            return fn(*args, **kwargs)
        finally:
            fn.requires_grad = requires_grad
    pynative_executor.set_grad_flag(True)
    pynative_executor.new_graph(fn, *args, **kwargs)
    out = fn(*args, **kwargs)
    pynative_executor.end_graph(fn, out, *args, **kwargs)
    return out


def _forward_with_seed(fn: Any, sens_param: bool, *args: Any, **kwargs: Any) -> Any:
    """Run the forward; with ``sens_param`` the last argument, or the one called ``sens``, is the seed of backward."""
    seeds: tuple[Any, ...] = ()
    if sens_param:
        if "sens" in kwargs:
            seeds = (kwargs.pop("sens"),)
        else:
            args, seeds = args[:-1], args[-1:]
    out = _Base._pynative_func_grad_forward(fn, *args, **kwargs)  # noqa: SLF001 - as above
    return (*args, *kwargs.values(), *seeds), out


def _backward(fn: Any, grad_op: Any, weights: Any, grad_position: Any, has_aux: bool, *run_args: Any) -> Any:
    """Return the gradients of the forward that ran last."""
    return _PLAIN[has_aux](pynative_executor, fn, grad_op, weights, grad_position, *run_args)


def _executed(*, has_aux: bool) -> Any:
    def grad(self: Any, obj: Any, grad: Any, weights: Any, grad_position: Any, *args: Any) -> Any:
        del self  # there is one
        return _Base._pynative_func_grad_backward(obj, grad, weights, grad_position, has_aux, *args)  # noqa: SLF001

    return grad


def accepting_prepend(hooks: str, register: Callable[..., Any]) -> Callable[..., Any]:
    """Give a method that registers forward hooks the argument ``prepend``: the hook runs before those in ``hooks``."""

    @wraps(register)
    def run(self: Any, hook_fn: Callable[..., Any], *args: Any, prepend: bool = False, **options: Any) -> Any:
        handle = register(self, hook_fn, *args, **options)
        if prepend:
            getattr(self, hooks).move_to_end(handle.handle_id, last=False)
        return handle

    return run


def accepting_always_call(register: Callable[..., Any]) -> Callable[..., Any]:
    """Give ``Cell.register_forward_hook`` the argument ``always_call``: the hook runs also if the forward raises."""

    @wraps(register)
    def run(self: Any, hook_fn: Callable[..., Any], *args: Any, always_call: bool = False, **options: Any) -> Any:
        if not always_call:
            return register(self, hook_fn, *args, **options)

        @wraps(hook_fn)
        def noted(*args: Any) -> Any:
            if (ran := _RAN.get()) is not None:
                ran.add(id(noted))
            return hook_fn(*args)

        handle = register(self, noted, *args, **options)
        object.__setattr__(self, _ALWAYS, {**vars(self).get(_ALWAYS, {}), handle.handle_id: noted})
        return handle

    return run


def calling_hooks_after_failures(call: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``Cell.__call__`` run the hooks of ``always_call`` that have not run when it raises, with None as output."""

    @wraps(call)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _ALWAYS not in vars(self):
            return call(self, *args, **kwargs)
        ran: set[int] = set()
        token = _RAN.set(ran)
        try:
            return call(self, *args, **kwargs)
        except BaseException:
            for number, hook in vars(self)[_ALWAYS].items():
                if number in self._forward_hook and id(hook) not in ran:
                    named = (kwargs,) if number in self._forward_hook_with_kwargs else ()
                    hook(self, args, *named, None)
            raise
        finally:
            _RAN.reset(token)

    return run
