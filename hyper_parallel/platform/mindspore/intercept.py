"""Where MindSpore's calls on DTensors arrive.

MindSpore asks ``__fallback__`` of a tensor subclass before it selects a kernel, with the operator's name and the
arguments as the caller or its Python layer wrote them. Everything arrives here: functions, methods, operators and
legacy primitives. What has no table line is refused; nothing runs on local tensors by accident.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from mindspore import Tensor
from mindspore._c_expression import NoFallbackGuard
from mindspore.ops import Primitive

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.dispatch import Dispatcher
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.select import get_mindspore_platform

__all__ = ["call", "dispatcher", "fallback", "holds_dtensor"]

LEGACY_PARTS = 3  # a legacy primitive arrives as [primitive, name, arguments]


@cache
def dispatcher() -> Dispatcher:
    """MindSpore's dispatcher."""
    return Dispatcher(get_mindspore_platform())


@cache
def _lines() -> dict[str, Any]:
    from hyper_parallel.platform.mindspore import op_table  # noqa: PLC0415 - the table imports the rules

    return op_table.lines()


def fallback(_self: Any, func: Any, args: Any, kwargs: dict[str, Any] | None = None) -> Any:
    """What MindSpore calls instead of an operator on tensors of which one is a DTensor or a Parameter."""
    name, kwargs = func.name, kwargs or {}
    primitive = None
    given = args
    if len(args) == LEGACY_PARTS and isinstance(args[0], Primitive) and args[1] == name:
        primitive, given = args[0], args[2]
    if name == "typeof" or not (holds_dtensor(given) or (kwargs and holds_dtensor(kwargs.values()))):
        with NoFallbackGuard():
            return func(*args, **kwargs)
    return call(name, primitive, tuple(given), kwargs)


def call(name: str, primitive: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dispatch MindSpore's operator ``name``.

    Raises:
        UnsupportedOperatorError: it has no table line.
    """
    line = _lines().get(name)
    if line is None:
        raise UnsupportedOperatorError(_message(name, args, kwargs))
    return line(dispatcher(), primitive, args, kwargs)


def holds_dtensor(values: Any) -> bool:
    """True when a DTensor is among ``values`` or in a sequence among them."""
    for one in values:
        if isinstance(one, DTensor):
            return True
        if type(one) in (list, tuple) and holds_dtensor(one):
            return True
    return False


def _message(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    seen = ", ".join(f"{one._layout.notation(one.dtype)}" for one in _dtensors((args, tuple(kwargs.values()))))  # noqa: SLF001
    return (
        f"operator {name} has no sharding rule (layouts: {seen}); "
        "add one with hyper_parallel.DistributedOp, or run it whole: x = x.redistribute() on every operand, then "
        "to_local(), the operation, and DTensor.from_local(result, mesh)"
    )


def _dtensors(tree: Any) -> list[Any]:
    if isinstance(tree, DTensor):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [one for item in tree for one in _dtensors(item)]
    return []


# A plain tensor or a Parameter may stand first, where MindSpore looks for the handler.
Tensor.__fallback__ = fallback
