"""Intercepts MindSpore's calls on DTensors.

MindSpore calls ``__fallback__`` of a tensor subclass before it selects a kernel, with the operator's name and the
arguments that the caller, or MindSpore's Python layer, passed. Functions, methods, operators and legacy primitives all
arrive here. An operator that is not registered is refused; nothing runs on local tensors by accident.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from mindspore.ops import Primitive

from hyper_parallel._tree import leaves
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.skip_dispatch import local_operands, open_blocks, outside_blocks, skipped
from hyper_parallel.core.shard.custom.distributed_op import user_op
from hyper_parallel.core.shard.dispatch import CACHE_MISS, Dispatcher
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.mindspore.mixed_precision import ACTIVE, COMPOSED, cast_operands, switched_off
from hyper_parallel.platform.mindspore.ops.registry import METHOD
from hyper_parallel.platform.mindspore.versions import NoFallbackGuard, TensorOverloadCall

if TYPE_CHECKING:
    from collections.abc import Callable

    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["Interception", "at_once", "call", "fallback", "holds_dtensor", "interception", "start"]

LEGACY_PARTS = 3  # a legacy primitive arrives as [primitive, name, arguments]


class Interception(NamedTuple):
    """The tables of interception, built once when the platform is constructed.

    Attributes:
        dispatcher: the dispatcher of calls on DTensors.
        handlers: handlers of operators, by name.
        methods: handlers of the tensor methods that behave differently from the function with the same operator name.
        repeated: by operator name, a function that runs cached calls, for operators whose arguments are dispatched as
            they were passed.
        repeated_methods: the same for operators that are called as tensor methods.
    """

    dispatcher: Dispatcher
    handlers: dict[str, Any]
    methods: dict[str, Any]
    repeated: dict[str, Callable[[Any], Any]]
    repeated_methods: dict[str, Callable[[Any], Any]]


_STARTED: dict[str, Interception] = {}


def start(platform: Platform, handlers: dict[str, Any]) -> Interception:
    """Make the interception of ``platform``; called once, before the platform is returned."""
    methods = {name.removeprefix(METHOD): handler for name, handler in handlers.items() if name.startswith(METHOD)}
    dispatcher = Dispatcher(platform)
    entries = {name: handler.as_written for name, handler in handlers.items() if hasattr(handler, "as_written")}
    repeated = {name: dispatcher.dispatch_cached(entry) for name, entry in entries.items() if entry is not None}
    repeated_methods = {name: again for name, again in repeated.items() if name not in methods}
    _STARTED["mindspore"] = Interception(dispatcher, handlers, methods, repeated, repeated_methods)
    return _STARTED["mindspore"]


def interception() -> Interception:
    """Return the interception of this process."""
    return _STARTED["mindspore"]


def fallback(_self: Any, func: Any, args: Any, kwargs: dict[str, Any] | None = None) -> Any:
    """Handle an operator that MindSpore calls with a DTensor or a Parameter among its operands."""
    name, started = func.name, _STARTED["mindspore"]
    if not kwargs and not open_blocks() and not ACTIVE:
        again = (started.repeated_methods if type(func) is TensorOverloadCall else started.repeated).get(name)
        result = CACHE_MISS if again is None else again(args)
        if result is not CACHE_MISS:
            return result
    kwargs = kwargs or {}
    primitive, operands = None, args
    if len(args) == LEGACY_PARTS and isinstance(args[0], Primitive) and args[1] == name:
        primitive, operands = args[0], args[2]
    if name == "typeof" or not (holds_dtensor(operands) or (kwargs and holds_dtensor(kwargs.values()))):
        with NoFallbackGuard():
            return func(*args, **kwargs)
    handler = started.handlers.get(name)
    if type(func) is TensorOverloadCall:
        handler = started.methods.get(name, handler)
    if handler is not None:
        if open_blocks() and not skipped(func, name):
            with outside_blocks():  # the operator is in ``no_skip``, so its components are, too
                return _handled(handler, started, func, primitive, tuple(operands), kwargs)
        return _handled(handler, started, func, primitive, tuple(operands), kwargs)
    if skipped(func, name):
        return _rebuilt(func, primitive)(*local_operands(tuple(operands)), **local_operands(kwargs))
    user = user_op(name)
    if user is not None:
        return user.run(started.dispatcher, _rebuilt(func, primitive), tuple(operands), kwargs)
    raise UnsupportedOperatorError(_message(name, tuple(operands), kwargs))


def at_once(name: str, args: Any, primitive: Any = None) -> Any:
    """Handle a registered function or legacy primitive without MindSpore's search for :func:`fallback`.

    Args:
        name: name of the operator.
        args: positional arguments as MindSpore passes them on, with a DTensor among them.
        primitive: the legacy primitive, or None.

    Returns:
        the result of :func:`fallback`; :data:`CACHE_MISS` if the call must go through :func:`fallback` itself.
    """
    if open_blocks():
        return CACHE_MISS
    started = _STARTED["mindspore"]
    again = started.repeated.get(name) if primitive is None and not ACTIVE else None
    result = CACHE_MISS if again is None else again(args)
    if result is CACHE_MISS and (handler := started.handlers.get(name)) is not None:
        return _handled(handler, started, name, primitive, tuple(args), {})
    return result


def call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, primitive: Any = None) -> Any:
    """Dispatch an operator that MindSpore runs without ``__fallback__``, by its registered name.

    Raises:
        UnsupportedOperatorError: nothing is registered under ``name``.
    """
    started = _STARTED["mindspore"]
    handler = started.handlers.get(name)
    if handler is None:
        raise UnsupportedOperatorError(_message(name, args, kwargs or {}))
    return _handled(handler, started, name, primitive, args, kwargs or {})


def _handled(
    handler: Any, started: Interception, func: Any, primitive: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call the handler of ``func``, an operator or the name of one.

    In a cell of mixed precision, the operands are cast first, as MindSpore would cast them.
    """
    if not ACTIVE or ACTIVE[-1] is None:
        return handler(started.dispatcher, primitive, args, kwargs)
    name = func if isinstance(func, str) else func.name
    cast = partial(cast_operands, started.dispatcher.ops, name, is_method=type(func) is TensorOverloadCall)
    with switched_off():
        result = handler(started.dispatcher, primitive, cast(args), cast(kwargs))
        return cast((result,))[0] if name in COMPOSED else result


def _rebuilt(func: Any, primitive: Any) -> Callable[..., Any]:
    """Return the caller's operator, to be called on local tensors with the same arguments."""
    if primitive is None:
        return func
    return lambda *args, **kwargs: func(primitive, func.name, args, **kwargs)


def holds_dtensor(values: Any) -> bool:
    """True when a DTensor is among ``values`` or in a sequence among them."""
    for value in values:
        if isinstance(value, DTensor):
            return True
        if type(value) in (list, tuple) and holds_dtensor(value):
            return True
    return False


def _message(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    operands = [leaf for leaf in leaves((args, tuple(kwargs.values()))) if isinstance(leaf, DTensor)]
    layouts = ", ".join(operand._layout.notation(operand.dtype) for operand in operands)
    return (
        f"operator {name} has no sharding rule (layouts: {layouts}); "
        "add one with hyper_parallel.DistributedOp, or run it replicated: "
        f"hyper_parallel.ReplicatedOp({name!r})"
    )
