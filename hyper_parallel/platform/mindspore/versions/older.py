"""Adds to older versions of MindSpore what newer ones have, so that the same patches and hooks work.

Before 2.10:

- A forward hook of a Cell does not run if the forward raises. The argument ``always_call`` is added here.
- MindSpore prints the error of ``__fallback__`` and raises another, *Python fallback failed*. With the patch here,
  calls raise the original error.

Before 2.9:

- A forward hook of a Cell cannot be registered ahead of existing ones. The argument ``prepend`` is added here.
- ``Tensor.masked_fill`` with a number rounds float64 to float32, or has no kernel; its gradient is rounded, and is NaN
  where a NaN is masked. ``mint.where`` is called here instead.
- ``mindspore.recompute`` never stops early and takes no ``context_fn``. Here the recomputed function enters the
  contexts itself.
- Nodes of the graph have no unique id. Operations are identified here by the number of their call.
- ``GradOperation``, ``mindspore.grad`` and ``value_and_grad`` call methods of the operation and of the executor. Newer
  ones call three functions of ``mindspore.ops.composite.base``: the forward, the forward with a seed, the backward.
  Here the three functions are added, and the methods are replaced by methods that call them.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from inspect import getattr_static
from types import FunctionType, MethodDescriptorType
from typing import Any

import mindspore
from mindspore import Tensor, mint, nn
from mindspore.ops import GradOperation, functional
from mindspore.ops.composite import base
from mindspore.ops.function.grad import grad_func

from hyper_parallel.platform.mindspore.versions import Grad, PyNativeExecutor, make_subclass, pynative_executor

__all__ = [
    "accepting_always_call",
    "accepting_prepend",
    "calling_hooks_after_failures",
    "filling_by_where",
    "identity",
    "offer_functions",
    "recompute_to_the_end",
    "remembering_errors",
    "reveal_errors",
    "revealing_errors",
]

_NAMES = ("_pynative_func_grad_forward", "_pynative_forward_run", "_pynative_func_grad_backward")
_CURRENT: ContextVar[tuple[Any, Any, Any]] = ContextVar("the differentiation: operation, inner operation, weights")
_Base: Any = base
_PLAIN: dict[bool, Any] = {}
_LAST: ContextVar[tuple[Any, tuple[Any, ...], Any] | None] = ContextVar("the last forward", default=None)
"""The function whose forward ended last, its arguments and its outputs; None once its backward runs."""
_OPERATORS = frozenset(
    f"__{kind}{name}__" for kind in ("", "i") for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
)
_RAISED: ContextVar[BaseException | None] = ContextVar("the last error", default=None)
"""The error that ``__fallback__`` has raised last."""
_ALWAYS = "_hyper_parallel_always_called"
_RAN: ContextVar[set[int] | None] = ContextVar("the hooks that have run in the innermost call of a Cell", default=None)


def offer_functions() -> None:
    """Add the three functions if MindSpore lacks them; repeated calls do nothing."""
    if hasattr(_Base, _NAMES[0]):
        return
    for name, function in zip(_NAMES, (_pynative_func_grad_forward, _forward_with_seed, _backward), strict=True):
        for module in (base, grad_func):
            setattr(module, name, function)
    for operation in (GradOperation, Grad):
        setattr(operation, _NAMES[1], _method)
    for name, has_aux in (("grad", False), ("grad_aux", True)):
        _PLAIN[has_aux] = vars(PyNativeExecutor)[name]
        setattr(PyNativeExecutor, name, _executed(has_aux=has_aux))
    PyNativeExecutor.end_graph = _noting_outputs(PyNativeExecutor.end_graph)


def _method(self: Any, fn: Any, grad: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the forward, as ``_pynative_forward_run`` of an operation; for ``GradOperation``, return no outputs."""
    token = _CURRENT.set((self, grad, weights))
    try:
        run_args, out = _Base._pynative_forward_run(fn, self.sens_param, *args, **kwargs)  # noqa: SLF001 - offered above
    finally:
        _CURRENT.reset(token)
    return run_args if isinstance(self, GradOperation) else (run_args, out)


def _pynative_func_grad_forward(fn: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``fn`` on the tape, unless it has run there already; return its outputs.

    ``differentiating()`` in ``patches.py`` recognises the frame of this function by its name.
    """
    operation, grad, weights = _CURRENT.get()
    position = None if isinstance(operation, GradOperation) else operation.grad_position
    if pynative_executor.check_run(grad, fn, weights, position, *args, *kwargs.values(), create_graph=True):
        return _outputs(fn, args, kwargs)
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


def _noting_outputs(end_graph: Callable[..., None]) -> Callable[..., None]:
    @wraps(end_graph)
    def run(self: Any, fn: Any, out: Any, *args: Any, **kwargs: Any) -> None:
        end_graph(self, fn, out, *args, **kwargs)
        _LAST.set((fn, (*args, *kwargs.values()), out))

    return run


def _outputs(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the outputs of the forward that is on the tape."""
    last, operands = _LAST.get(), (*args, *kwargs.values())
    if (
        last is not None
        and last[0] is fn
        and len(operands) == len(last[1])
        and all(map(operator.is_, operands, last[1]))
    ):
        return last[2]
    return fn(*args, **kwargs)


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
    _LAST.set(None)
    return _PLAIN[has_aux](pynative_executor, fn, grad_op, weights, grad_position, *run_args)


def _executed(*, has_aux: bool) -> Any:
    def grad(self: Any, obj: Any, grad: Any, weights: Any, grad_position: Any, *args: Any) -> Any:
        del self  # the executor is a singleton
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


def filling_by_where(dtensor: type, masked_fill: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``Tensor.masked_fill`` of a plain tensor call ``mint.where``, whose values and gradients are exact.

    Args:
        dtensor: the class of DTensors, whose handler MindSpore calls.
        masked_fill: the method.
    """

    @wraps(masked_fill)
    def run(self: Any, mask: Any, value: Any) -> Any:
        if any(isinstance(operand, dtensor) for operand in (self, mask, value)):
            return masked_fill(self, mask, value)  # MindSpore calls the handler
        if isinstance(value, (int, float, complex)):
            value = functional.scalar_to_tensor(value).astype(self.dtype)
        same = mask.dtype == mindspore.bool_ and getattr(value, "dtype", None) == self.dtype
        return mint.where(mask, value, self) if same else masked_fill(self, mask, value)

    return run


def recompute_to_the_end(fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call ``mindspore.recompute`` without stopping early; before 2.9 it never does, and ``fn`` enters contexts."""
    if "early_stop" in inspect.signature(mindspore.recompute).parameters:
        return mindspore.recompute(fn, *args, use_reentrant=False, early_stop=False, **options)
    contexts = options.pop("context_fn", None)
    run = fn if contexts is None else _in_contexts(fn, *contexts())
    return mindspore.recompute(run, *args, use_reentrant=False, **options)


def _in_contexts(fn: Callable[..., Any], first: Any, again: Any) -> Callable[..., Any]:
    waiting = [first]

    @wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        with waiting.pop() if waiting else again:
            return fn(*args, **kwargs)

    return run


def identity(node: Any) -> Any:
    """Return a key that is equal for all objects of the same node of the graph.

    Before 2.9, two objects of the same leaf have different keys, because only operations have numbers.
    """
    if hasattr(node, "_unique_id"):
        return node._unique_id()
    return node if node.is_leaf() else node._sequence_nr()


def reveal_errors(dtensor: Any, functions: tuple[tuple[Any, str], ...]) -> None:
    """Let methods of DTensors and ``functions`` raise the errors of ``__fallback__`` if MindSpore hides them.

    Args:
        dtensor: the class of DTensors.
        functions: owner and name of each function of MindSpore that calls ``__fallback__``.
    """
    if not _hides_errors():
        return
    for owner in (Tensor, dtensor):
        owner.__fallback__ = remembering_errors(owner.__fallback__)
    for name, method in [item for kind in Tensor.__mro__ for item in vars(kind).items()]:
        if isinstance(method, MethodDescriptorType) and (name in _OPERATORS or not name.startswith("_")):
            if isinstance(own := getattr_static(dtensor, name), FunctionType):
                setattr(dtensor, name, revealing_errors(own))
            if getattr_static(Tensor, name) is method:
                setattr(Tensor, name, revealing_errors(method))
    for owner, name in functions:
        setattr(owner, name, revealing_errors(getattr(owner, name)))


def _hides_errors() -> bool:
    def fail(*_: Any) -> None:
        raise LookupError

    probe = make_subclass(type("Probe", (Tensor,), {"__fallback__": fail}), Tensor([1.0], mindspore.float32))
    hook, sys.excepthook = sys.excepthook, lambda *_: None
    try:
        probe.exp()
    except LookupError:
        return False
    except RuntimeError:
        return True
    finally:
        sys.excepthook = hook
    return False


def remembering_errors(fallback: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the error that ``__fallback__`` raises for :func:`revealing_errors`."""

    @wraps(fallback)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return fallback(*args, **kwargs)
        except BaseException as error:
            _RAISED.set(error)
            raise

    return run


def revealing_errors(call: Callable[..., Any]) -> Callable[..., Any]:
    """Raise the error of ``__fallback__`` instead of the one that MindSpore raises in its place."""

    @wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RuntimeError as hiding:
            error = _RAISED.get()
            if error is None or not str(hiding).startswith("Python fallback failed"):
                raise
            _RAISED.set(None)
            raise error from None

    return run
