"""Where PyTorch's calls on DTensors arrive: function level first, operator level for what has no rule there.

A function without a rule runs as PyTorch wrote it, in C++, and its operators arrive one by one below autograd's keys.
There the dispatch state from before autograd is restored, so that each local operation records itself: composite
functions decompose by themselves and stay differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.overrides import enable_reentrant_dispatch

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.skip import local_operands, skipped
from hyper_parallel.core.shard.dispatch import Dispatcher, Entry
from hyper_parallel.core.shard.distributed_op import user_op
from hyper_parallel.errors import LayoutError, UnsupportedOperatorError

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["GRAPH_FUNCTIONS", "Interception", "function", "interception", "operator", "start"]

_disabled = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001 - documented in PyTorch's extending guide


class Interception(NamedTuple):
    """What interception works with; made once, by the platform's construction.

    Attributes:
        dispatcher: the hot path.
        functions: entries by Python function or method.
        overloads: entries by operator overload.
    """

    dispatcher: Dispatcher
    functions: dict[Any, Entry]
    overloads: dict[Any, Entry]


_STARTED: dict[str, Interception] = {}

# Functions of whole graphs, which are neither operators nor made of them.
GRAPH_FUNCTIONS: dict[Any, Callable[..., Any]] = {}


def start(platform: Platform) -> Interception:
    """Make the interception of ``platform``; called once, before the platform is handed out."""
    from hyper_parallel.platform.torch import op_table

    _STARTED["torch"] = Interception(Dispatcher(platform), op_table.functions(), op_table.overloads())
    return _STARTED["torch"]


def interception() -> Interception:
    """The one interception of the process."""
    return _STARTED["torch"]


def function(  # noqa: PLR0911 - one line per door
    func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Dispatch a call of the Python API."""
    doors = interception()
    entry = doors.functions.get(func)
    if "out" in kwargs:
        rest = {name: value for name, value in kwargs.items() if name != "out"}
        name = entry.name if entry is not None else getattr(func, "__name__", str(func))
        return _into(doors.dispatcher.kind, name, kwargs["out"], function(func, types, args, rest))
    if entry is not None:
        return doors.dispatcher.dispatch(entry, args, kwargs)
    user = user_op(getattr(func, "__name__", ""))
    if user is not None and not skipped(func):
        return user.run(doors.dispatcher, func, args, kwargs)
    whole = GRAPH_FUNCTIONS.get(func)
    if whole is not None:
        return whole(*args, **kwargs)
    if skipped(func):
        return func(*local_operands(args), **local_operands(kwargs))
    opened = _opened(func)
    if opened is not None:
        return opened(*args, **kwargs)
    with _disabled():
        return func(*args, **kwargs)


def _into(kind: Any, name: str, out: Any, result: Any) -> Any:
    """A call with ``out=``: the result moves to the layout of what is written."""
    if out is None:
        return result
    many = isinstance(result, (list, tuple))
    if many and isinstance(out, (list, tuple)) and len(out) == len(result):
        written = [_written(kind, name, *pair) for pair in zip(out, result, strict=True)]
        # PyTorch has a named tuple of its own for these.
        return getattr(torch.return_types, f"{type(result).__name__}_out", type(result))(written)
    if many:
        msg = f"{name}: out must be {len(result)} DTensors, got {type(out).__name__}; write y = {name}(...) instead"
        raise UnsupportedOperatorError(msg)
    return _written(kind, name, out, result)


def _written(kind: Any, name: str, out: Any, result: Any) -> Any:
    if not isinstance(out, kind):
        msg = f"{name}: out must be one DTensor, got {type(out).__name__}; write y = {name}(...) instead"
        raise UnsupportedOperatorError(msg)
    if out.shape != result.shape:
        msg = f"{name}: out has shape {list(out.shape)}, the result has {list(result.shape)}"
        raise LayoutError(msg)
    if not torch.can_cast(result.dtype, out.dtype):
        msg = f"{name}: out has dtype {out.dtype}, and the result's {result.dtype} can't be cast to it"
        raise LayoutError(msg)
    return out.copy_(result)


@cache
def _opened(func: Callable[..., Any]) -> Callable[..., Any] | None:
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


def operator(func: OpOverload[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dispatch an operator overload that arrived from C++."""
    del types
    doors = interception()
    entry = doors.overloads.get(func)
    if entry is None:
        user = user_op(str(func))
        if user is None:
            raise UnsupportedOperatorError(_message(func, args, kwargs))
        with enable_reentrant_dispatch():
            return user.run(doors.dispatcher, func, args, kwargs)
    with enable_reentrant_dispatch():
        return doors.dispatcher.dispatch(entry, args, kwargs)


def _message(func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    seen = ", ".join(
        f"{one._layout.notation(one.dtype)}"  # noqa: SLF001
        for one in torch.utils._pytree.tree_leaves((args, kwargs))  # noqa: SLF001 - the public tree_leaves came later
        if isinstance(one, DTensor)
    )
    return (
        f"operator {func} has no sharding rule (layouts: {seen}); "
        "add one with hyper_parallel.DistributedOp, or let it run whole on every rank: "
        f"hyper_parallel.ReplicatedOp({str(func)!r})"
    )
