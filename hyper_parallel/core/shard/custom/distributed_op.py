"""Operators that users add at run time: the registry, and :class:`DistributedOp`, a rule on layouts."""

from __future__ import annotations

import abc
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hyper_parallel._tree import leaves
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.entry import Binder, OpEntry
from hyper_parallel.core.shard.refusals import duplicate_rule_error, missing_shape_error
from hyper_parallel.core.shard.rule import (
    FixedLayouts,
    LayoutOptions,
    OpCall,
    Operand,
    Ref,
    Rule,
    Strategies,
    find_rule,
)
from hyper_parallel.errors import LayoutError

if TYPE_CHECKING:
    from hyper_parallel.core.shard.dispatch import Dispatcher

__all__ = ["DistributedOp", "UserOp", "mutates", "registry_version", "user_op", "writes"]

_USER_OPS: dict[str, UserOp] = {}
_LOCK = threading.Lock()
_registry_version = 0  # the number of changes of the registry; guarded by the lock


class UserOp(abc.ABC):
    """An operator that is registered at run time.

    Args:
        op_name: name of the function (``func.__name__``), of the operator overload (``aten.gelu.default``), of the
            MindSpore primitive, or a ``DFunction._op_name``.

    Raises:
        ValueError: the operator already has a rule.
    """

    _registrar = "UserOp"

    def __init__(self, op_name: str) -> None:
        """Register under ``op_name``."""
        self.op_name = op_name
        self._entries: dict[Any, OpEntry] = {}
        global _registry_version  # noqa: PLW0603 - under the lock
        with _LOCK:
            if op_name in _USER_OPS or find_rule(op_name) is not None:
                raise duplicate_rule_error(op_name, self._registrar)
            _USER_OPS[op_name] = self
            _registry_version += 1

    def unregister(self) -> None:
        """Remove the operator from the registry."""
        global _registry_version  # noqa: PLW0603 - under the lock
        with _LOCK:
            if _USER_OPS.get(self.op_name) is self:
                del _USER_OPS[self.op_name]
                _registry_version += 1

    @abc.abstractmethod
    def strategies(self, func: Callable[..., Any], call: OpCall) -> Strategies | FixedLayouts | LayoutOptions:
        """Return the layouts that a call of ``func`` may use."""

    def run(
        self, dispatcher: Dispatcher, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Dispatch a call of ``func`` as this operator."""
        return dispatcher.dispatch(self.entry(func), args, kwargs)

    def entry(self, func: Callable[..., Any]) -> OpEntry:
        """The dispatch entry of ``func`` for this operator; it caches the plans."""
        entry = self._entries.get(func)
        if entry is None:
            rule = Rule(self.op_name, "*args", partial(self.strategies, func), by_dtype=True)
            entry = OpEntry(
                self.op_name, func, _OwnSignatureBinder(func), rule, func, in_place=writes(func, self.op_name)
            )
            self._entries[func] = entry
        return entry


class DistributedOp(UserOp):
    """A user's rule for one operator: subclass, implement :meth:`infer_layout`, instantiate once to register.

    The operands keep their layouts. The gradient of an operand is summed over each axis on which it is replicated but
    another operand is not. Local results must have the layouts that :meth:`infer_layout` returns.

    Args:
        op_name: name of the function (``func.__name__``), of the MindSpore primitive, or a ``DFunction._op_name``.

    Raises:
        ValueError: the operator already has a rule.
    """

    _registrar = "DistributedOp"

    def infer_layout(self, layouts: Sequence[Layout], extra_args: Sequence[Any] | None = None) -> Any:
        """Return the layout of the output, or a tuple of layouts.

        A layout with a global shape is used unchanged. A layout without one means even shards; every sharded dim of
        every operand must then divide evenly.

        Args:
            layouts: layouts of the tensor arguments, in order, with their global shapes.
            extra_args: the other arguments, in order.

        Returns:
            a layout, or a sequence with one per output.
        """
        msg = f"{type(self).__name__}.infer_layout is not implemented"
        raise NotImplementedError(msg)

    def preprocess(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments to dispatch; by default those of the caller."""
        return args, kwargs

    def get_expand_impl(
        self, func: Callable[..., Any], outputs: Sequence[Layout], layouts: Sequence[Layout], extra_args: Sequence[Any]
    ) -> Callable[..., Any] | None:
        """Return a local implementation to call instead of ``func``, or None for ``func`` itself."""
        del func, outputs, layouts, extra_args
        return None

    def wrap_output(self, output: Any, layouts: Sequence[Layout]) -> Any:
        """Return the result of the call, given its output as DTensors; by default that output."""
        del layouts
        return output

    def strategies(self, func: Callable[..., Any], call: OpCall) -> FixedLayouts:
        """The layouts that :meth:`infer_layout` returns, checked."""
        layouts = tuple(operand.layout for operand in call.operands)
        extra = tuple(_plain_arguments(call.args))
        inferred = self.infer_layout(layouts, extra)
        many = not isinstance(inferred, Layout)
        outputs = tuple(inferred) if many else (inferred,)
        if not all(isinstance(layout, Layout) for layout in outputs):
            msg = f"{self.op_name}: infer_layout must return a Layout or a sequence of them, got {inferred!r}"
            raise LayoutError(msg)
        even = all(_is_even(operand) for operand in call.operands)
        for layout in outputs:
            if layout.shape is None and not even:
                reason = ", which cannot be derived from uneven shards"
                raise missing_shape_error(f"{self.op_name}: infer_layout returned", layout, reason)
        impl = self.get_expand_impl(func, outputs, layouts, extra)
        return FixedLayouts(outputs, many=many, impl=impl)

    def run(
        self, dispatcher: Dispatcher, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Dispatch a call of ``func`` as this operator."""
        args, kwargs = self.preprocess(args, kwargs)
        tensors = [leaf for leaf in dispatcher.tensors((*args, *kwargs.values())) if isinstance(leaf, DTensor)]
        return self.wrap_output(super().run(dispatcher, func, args, kwargs), [tensor.layout for tensor in tensors])


def user_op(name: str) -> UserOp | None:
    """The operator that a user registered under ``name``, or None."""
    return _USER_OPS.get(name)


def registry_version() -> int:
    """A number that changes whenever an operator is registered or unregistered."""
    return _registry_version


def writes(func: Any, name: str) -> bool:
    """Whether an operator writes its first operand and returns it; read from its schema, or from its name."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        own = getattr(func, "__name__", name)  # the function's own name may differ from the operator's
        return own.endswith("_") and not own.endswith("__")
    operand = schema.arguments[0].alias_info if schema.arguments else None
    result = schema.returns[0].alias_info if len(schema.returns) == 1 else None
    return operand is not None and operand.is_write and result is not None and result.is_write


def mutates(func: Any, name: str) -> bool:
    """Whether an operator writes any operand; read from its schema, or from its name."""
    return bool(getattr(getattr(func, "_schema", None), "is_mutable", False)) or writes(func, name)


class _OwnSignatureBinder(Binder):
    """Binds arguments by the function's own signature, or by position if it has none."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.text, self.starred = "…", None
        self.own = _signature(func)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name."""
        if self.own is None:
            return {**{f"arg{index}": arg for index, arg in enumerate(args)}, **kwargs}
        bound = self.own.bind(*args, **kwargs)
        named = dict(bound.arguments)
        parameters = self.own.parameters.items()
        rest = next((name for name, parameter in parameters if parameter.kind is parameter.VAR_KEYWORD), None)
        return {**named, **named.pop(rest, {})} if rest is not None else named


def _signature(func: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(func)
    except (TypeError, ValueError):
        return None  # C functions often have none


def _plain_arguments(args: dict[str, Any]) -> Iterator[Any]:
    """Yield the non-tensor arguments; a sequence without tensors counts as one argument."""
    for argument in args.values():
        for value in argument.values() if isinstance(argument, dict) else (argument,):
            if any(isinstance(leaf, Ref) for leaf in leaves(value)):
                yield from (leaf for leaf in leaves(value) if not isinstance(leaf, Ref))
            else:
                yield value


def _is_even(operand: Operand) -> bool:
    layout = operand.layout
    return all(size % layout.shard_count(dim) == 0 for dim, size in enumerate(operand.shape))
