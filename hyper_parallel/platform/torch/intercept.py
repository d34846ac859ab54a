"""Intercepts PyTorch calls on DTensors: at function level, and at operator level for functions without a rule.

A function without a rule runs as PyTorch wrote it, in C++, and its operators arrive one by one below autograd.
The dispatch state from before autograd is then restored, so that autograd records each local operation: composite
functions are decomposed and stay differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType, MethodDescriptorType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.overrides import enable_reentrant_dispatch

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.skip_dispatch import local_operands, open_blocks, outside_blocks, skipped
from hyper_parallel.core.shard.custom.distributed_op import mutates, user_op
from hyper_parallel.core.shard.dispatch import Dispatcher
from hyper_parallel.core.shard.entry import OpEntry
from hyper_parallel.core.shard.op_plan import replicated_layout
from hyper_parallel.errors import LayoutError, UnsupportedOperatorError
from hyper_parallel.platform.torch.ops.python_api import unwrapped
from hyper_parallel.platform.torch.versions import DisableTorchFunctionSubclass, tree_leaves, tree_map

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["GRAPH_FUNCTIONS", "RECORDED", "Interception", "function", "interception", "operator", "start"]

RECORDED = "_hyper_parallel_recorded"
"""Attribute in which a replacement of a function of PyTorch keeps the original while a program is recorded."""

_disabled = DisableTorchFunctionSubclass  # documented in PyTorch's extending guide


class Interception(NamedTuple):
    """The dispatcher and its tables; created once, with the platform.

    Attributes:
        dispatcher: the dispatcher of calls on DTensors.
        functions: entries by Python function or method.
        overloads: entries by operator overload.
    """

    dispatcher: Dispatcher
    functions: dict[Any, OpEntry]
    overloads: dict[Any, OpEntry]


_STARTED: dict[str, Interception] = {}

# Functions of autograd graphs, which are neither operators nor composed of them.
GRAPH_FUNCTIONS: dict[Any, Callable[..., Any]] = {}


def start(platform: Platform) -> Interception:
    """Make the interception of ``platform``; called once, before the platform is returned."""
    from hyper_parallel.platform.torch.ops import registry

    _STARTED["torch"] = Interception(Dispatcher(platform), registry.functions(), registry.overloads())
    return _STARTED["torch"]


def interception() -> Interception:
    """Return the interception of this process."""
    return _STARTED["torch"]


def function(  # noqa: PLR0911 - one return per kind of call
    func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Dispatch a call of the Python API."""
    tables = interception()
    entry = tables.functions.get(func)
    if "out" in kwargs:
        rest = {name: value for name, value in kwargs.items() if name != "out"}
        name = entry.name if entry is not None else getattr(func, "__name__", str(func))
        result = function(func, types, args, rest)
        if func in _CONSTANTS:
            result = _with_constants_replicated(result, kwargs)
        return _into(tables.dispatcher.dtensor_type, name, kwargs["out"], result)
    if entry is not None:
        return tables.dispatcher.dispatch(entry, args, kwargs)
    if hasattr(func, RECORDED):
        return function(getattr(func, RECORDED), types, args, kwargs)
    user = user_op(getattr(func, "__name__", ""))
    if user is not None and not skipped(func):
        return user.run(tables.dispatcher, func, args, kwargs)
    whole = GRAPH_FUNCTIONS.get(func)
    if whole is not None:
        return whole(*args, **kwargs)
    if skipped(func):
        return func(*local_operands(args), **local_operands(kwargs))
    if open_blocks():
        with outside_blocks():  # a function in ``no_skip``: its operators are dispatched, too
            return _made_of_others(func, args, kwargs)
    return _made_of_others(func, args, kwargs)


def _made_of_others(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function of PyTorch that has no rule: the operators that it calls are dispatched."""
    python = unwrapped(func)
    if python is not None:
        return python(*args, **kwargs)
    if torch.is_inference_mode_enabled() and not _writes(func):  # PyTorch decomposes nothing in this mode
        with torch.inference_mode(mode=False), torch.no_grad():
            return _made_of_others(func, *tree_map(_outside_inference, (args, kwargs)))
    with _disabled():
        result = func(*args, **kwargs)
    return _with_constants_replicated(result, (args, kwargs)) if isinstance(func, _C_FUNCTIONS) else result


def _outside_inference(value: Any) -> Any:
    """Return ``value``; for a DTensor made in inference mode, return one over its local tensor that is not."""
    if not isinstance(value, DTensor) or not value.is_inference():
        return value
    other: Any = interception().dispatcher.platform.wrap(value._local, value._layout)
    other.__class__ = value.__class__
    vars(other).update(vars(value))
    return other


def _writes(func: Callable[..., Any]) -> bool:
    """Whether the name is that of an in-place write, which tensors of inference mode allow only in that mode."""
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


_C_FUNCTIONS = (BuiltinFunctionType, MethodDescriptorType)
# Types of results that neither are nor contain plain tensors.
_FINISHED = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size})


def _with_constants_replicated(result: Any, arguments: Any) -> Any:
    """Wrap plain tensors that a C++ function made from sizes alone: they are equal on every rank."""
    if type(result) in _FINISHED:
        return result
    platform = interception().dispatcher.platform
    leaves = tree_leaves(arguments)
    mesh = next((leaf._layout.mesh for leaf in leaves if isinstance(leaf, DTensor)), None)

    def wrap(leaf: Any) -> Any:
        if isinstance(leaf, DTensor) or not platform.is_tensor(leaf) or any(leaf is other for other in leaves):
            return leaf
        return leaf if mesh is None else platform.wrap(leaf, replicated_layout(mesh, leaf.shape))

    return tree_map(wrap, result)


# Functions that make tensors from numbers alone, which are equal on every rank.
_CONSTANTS = frozenset((torch.arange, torch.eye, torch.full, torch.linspace, torch.logspace, torch.ones, torch.zeros))

# With ``out=`` PyTorch returns None from these.
_WITHOUT_RESULT = frozenset({"split_copy", "split_with_sizes_copy", "unbind_copy"})


def _into(kind: Any, name: str, out: Any, result: Any) -> Any:
    """Handle ``out=``: redistribute the result to the layout of ``out`` and copy it."""
    if out is None:
        return result
    many = isinstance(result, (list, tuple))
    if many and isinstance(out, (list, tuple)) and len(out) == len(result):
        written = [_written(kind, name, *pair) for pair in zip(out, result, strict=True)]
        if name in _WITHOUT_RESULT:
            return None
        # PyTorch has a named tuple of its own for these.
        return getattr(torch.return_types, f"{type(result).__name__}_out", tuple)(written)
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


def operator(func: OpOverload[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dispatch an operator overload that arrived from C++."""
    del types
    tables = interception()
    entry = tables.overloads.get(func)
    if entry is None:
        user = user_op(str(func))
        if user is None:
            raise UnsupportedOperatorError(_message(func, args, kwargs))
        with enable_reentrant_dispatch():
            return user.run(tables.dispatcher, func, args, kwargs)
    with enable_reentrant_dispatch():
        return tables.dispatcher.dispatch(entry, args, kwargs)


# PyTorch reads the wrapper's sizes in C++; they cannot change in place. What to write instead, by function.
_RESHAPING = {
    **{f"{name}_": f"x = x.{name}(...)" for name in ("squeeze", "unsqueeze", "t", "transpose", "swapaxes", "swapdims")},
    "resize_": "x = x.new_empty(...)",
    "resize_as_": "x = torch.empty_like(y)",
}


def _message(func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    layouts = ", ".join(
        leaf._layout.notation(leaf.dtype) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)
    )
    name = str(func).split(".")[1]
    if name == "alias":
        return (
            f"forward-mode differentiation (torch.func.jvp, torch.autograd.forward_ad) does not support DTensors "
            f"({layouts}); use torch.autograd.functional.jvp, which runs backward twice"
        )
    if name in _RESHAPING:
        return (
            f"{name}() of a DTensor ({layouts}): the shape of a DTensor cannot change in place; "
            f"write {_RESHAPING[name]} instead"
        )
    if name == "set_":
        return (
            f"torch.Tensor.set_(x, y) of DTensors ({layouts}) would act on wrappers, which have no storage; "
            "write x.set_(y)"
        )
    msg = f"operator {func} has no sharding rule (layouts: {layouts}); add one with hyper_parallel.DistributedOp"
    if name.endswith("_backward"):
        msg = (
            f"operator {func} has no sharding rule (layouts: {layouts}), and torch.func differentiates with it; use "
            "torch.autograd.grad instead of torch.func.grad and torch.func.vjp"
        )
    if mutates(func, str(func)) or torch.Tag.nondeterministic_seeded in func.tags:
        return msg  # ReplicatedOp would lose a write, and ranks would sample different numbers
    return f"{msg}, or run it replicated: hyper_parallel.ReplicatedOp({str(func)!r})"
