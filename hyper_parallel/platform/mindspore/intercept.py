"""Where MindSpore's calls on DTensors arrive.

MindSpore asks ``__fallback__`` of a tensor subclass before it selects a kernel, with the operator's name and the
arguments as the caller or its Python layer wrote them. Everything arrives here: functions, methods, operators and
legacy primitives. What has no table line is refused; nothing runs on local tensors by accident.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from mindspore import Tensor
from mindspore._c_expression import NoFallbackGuard, TensorOverloadCall
from mindspore.ops import Primitive

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.skip_dispatch import any_block, local_operands, outside_blocks, skipped
from hyper_parallel.core.shard.custom.distributed_op import user_op
from hyper_parallel.core.shard.dispatch import Dispatcher
from hyper_parallel.errors import UnsupportedOperatorError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["Interception", "call", "fallback", "holds_dtensor", "interception", "start"]

METHOD = "Tensor."  # starts the names of lines of methods
LEGACY_PARTS = 3  # a legacy primitive arrives as [primitive, name, arguments]


class Interception(NamedTuple):
    """What interception works with; made once, by the platform's construction.

    Attributes:
        dispatcher: the hot path.
        lines: what to call per operator name.
        methods: the same for tensor methods that differ from functions of their operator name.
    """

    dispatcher: Dispatcher
    lines: dict[str, Any]
    methods: dict[str, Any]


_STARTED: dict[str, Interception] = {}


def start(platform: Platform, lines: dict[str, Any]) -> Interception:
    """Make the interception of ``platform``; called once, before the platform is handed out."""
    methods = {name.removeprefix(METHOD): line for name, line in lines.items() if name.startswith(METHOD)}
    _STARTED["mindspore"] = Interception(Dispatcher(platform), lines, methods)
    # A plain tensor or a Parameter may stand first, where MindSpore looks for the handler.
    Tensor.__fallback__ = fallback
    return _STARTED["mindspore"]


def interception() -> Interception:
    """The one interception of the process."""
    return _STARTED["mindspore"]


def fallback(_self: Any, func: Any, args: Any, kwargs: dict[str, Any] | None = None) -> Any:
    """What MindSpore calls instead of an operator on tensors of which one is a DTensor or a Parameter."""
    name, kwargs = func.name, kwargs or {}
    primitive, given = None, args
    if len(args) == LEGACY_PARTS and isinstance(args[0], Primitive) and args[1] == name:
        primitive, given = args[0], args[2]
    if name == "typeof" or not (holds_dtensor(given) or (kwargs and holds_dtensor(kwargs.values()))):
        with NoFallbackGuard():
            return func(*args, **kwargs)
    doors = _STARTED["mindspore"]
    line = doors.lines.get(name)
    if type(func) is TensorOverloadCall:
        line = doors.methods.get(name, line)
    if line is not None:
        if any_block() and not skipped(func, name):
            with outside_blocks():  # it was named: so is what it is composed of
                return line(doors.dispatcher, primitive, tuple(given), kwargs)
        return line(doors.dispatcher, primitive, tuple(given), kwargs)
    if skipped(func, name):
        return _rebuilt(func, primitive)(*local_operands(tuple(given)), **local_operands(kwargs))
    user = user_op(name)
    if user is not None:
        return user.run(doors.dispatcher, _rebuilt(func, primitive), tuple(given), kwargs)
    raise UnsupportedOperatorError(_message(name, tuple(given), kwargs))


def call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, primitive: Any = None) -> Any:
    """Dispatch what MindSpore does without asking, under a name of the table.

    Raises:
        UnsupportedOperatorError: it has no table line.
    """
    doors = _STARTED["mindspore"]
    line = doors.lines.get(name)
    if line is None:
        raise UnsupportedOperatorError(_message(name, args, kwargs or {}))
    return line(doors.dispatcher, primitive, args, kwargs or {})


def _rebuilt(func: Any, primitive: Any) -> Callable[..., Any]:
    """The caller's operator, to be called on local tensors with the arguments that came."""
    if primitive is None:
        return func
    return lambda *given, **named: func(primitive, func.name, given, **named)


def holds_dtensor(values: Any) -> bool:
    """True when a DTensor is among ``values`` or in a sequence among them."""
    for one in values:
        if isinstance(one, DTensor):
            return True
        if type(one) in (list, tuple) and holds_dtensor(one):
            return True
    return False


def _message(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    seen = ", ".join(f"{one._layout.notation(one.dtype)}" for one in _dtensors((args, tuple(kwargs.values()))))
    return (
        f"operator {name} has no sharding rule (layouts: {seen}); "
        "add one with hyper_parallel.DistributedOp, or let it run whole on every rank: "
        f"hyper_parallel.ReplicatedOp({name!r})"
    )


def _dtensors(tree: Any) -> list[Any]:
    if isinstance(tree, DTensor):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [one for item in tree for one in _dtensors(item)]
    return []
