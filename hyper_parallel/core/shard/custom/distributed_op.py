"""Operators that users add by hand: a layout in, a layout out, for any call whose name they give."""

from __future__ import annotations

import abc
import inspect
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.entry import Binder, OpEntry
from hyper_parallel.core.shard.rule import Fixed, Listed, OpCall, Operand, Ref, Rule, Strategies, find_rule
from hyper_parallel.errors import LayoutError

if TYPE_CHECKING:
    from hyper_parallel.core.shard.dispatch import Dispatcher

__all__ = ["DistributedOp", "UserOp", "mutates", "registrations", "user_op", "writes"]

_USER_OPS: dict[str, UserOp] = {}
_LOCK = threading.Lock()
_generation = 0  # changed under the lock with what is registered


class UserOp(abc.ABC):
    """An operator that is registered while the program runs.

    Args:
        op_name: name of the function (``func.__name__``), of the operator overload (``aten.gelu.default``), of the
            MindSpore primitive, or a ``DFunction._op_name``.

    Raises:
        ValueError: an operator of this name has a rule already.
    """

    _kind = "UserOp"

    def __init__(self, op_name: str) -> None:
        """Register under ``op_name``."""
        self.op_name = op_name
        self._entries: dict[Any, OpEntry] = {}
        global _generation  # noqa: PLW0603 - under the lock
        with _LOCK:
            if op_name in _USER_OPS or find_rule(op_name) is not None:
                msg = f"{self._kind}: operator {op_name!r} already has a rule"
                raise ValueError(msg)
            _USER_OPS[op_name] = self
            _generation += 1

    def unregister(self) -> None:
        """Forget the operator, as if it had not been registered."""
        global _generation  # noqa: PLW0603 - under the lock
        with _LOCK:
            if _USER_OPS.get(self.op_name) is self:
                del _USER_OPS[self.op_name]
                _generation += 1

    @abc.abstractmethod
    def answer(self, func: Callable[..., Any], call: OpCall) -> Strategies | Fixed | Listed:
        """Where the operands of a call must lie, and where its outputs do."""

    def run(
        self, dispatcher: Dispatcher, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Dispatch a call of ``func`` under this operator."""
        return dispatcher.dispatch(self.entry(func), args, kwargs)

    def entry(self, func: Callable[..., Any]) -> OpEntry:
        """The dispatcher's entry for ``func``, a spelling of this operator; its plans are kept."""
        entry = self._entries.get(func)
        if entry is None:
            rule = Rule(self.op_name, "*args", partial(self.answer, func), by_dtype=True)
            entry = OpEntry(self.op_name, func, _FreeBinder(func), rule, func, in_place=writes(func, self.op_name))
            self._entries[func] = entry
        return entry


class DistributedOp(UserOp):
    """A user's rule for one operator: subclass, implement :meth:`infer_layout`, instantiate once to register.

    The operands stay where they are; an operand that is whole along an axis on which another one differs gets its
    gradient summed over that axis. Local results must be what the returned layouts say.

    Args:
        op_name: name of the function (``func.__name__``), of the MindSpore primitive, or a ``DFunction._op_name``.

    Raises:
        ValueError: an operator of this name has a rule already.
    """

    _kind = "DistributedOp"

    def infer_layout(self, layouts: Sequence[Layout], extra_args: Sequence[Any] | None = None) -> Any:
        """Layout of the output, or a tuple of layouts.

        Args:
            layouts: layouts of the tensor arguments, in order, with their global shapes.
            extra_args: the other arguments, in order.

        Layouts with a shape are taken as they are. A layout without one gets the global shape of even shards, which
        needs every sharded operand dim to divide.
        """
        msg = f"{type(self).__name__}.infer_layout is not implemented"
        raise NotImplementedError(msg)

    def preprocess(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Rewrite the arguments before anything else; by default they stay as they are."""
        return args, kwargs

    def get_expand_impl(
        self, func: Callable[..., Any], outputs: Sequence[Layout], layouts: Sequence[Layout], extra_args: Sequence[Any]
    ) -> Callable[..., Any] | None:
        """A local implementation to call instead of ``func``, or None for ``func`` itself."""
        del func, outputs, layouts, extra_args
        return None

    def wrap_output(self, output: Any, layouts: Sequence[Layout]) -> Any:
        """Last touch on the wrapped output; by default none."""
        del layouts
        return output

    def answer(self, func: Callable[..., Any], call: OpCall) -> Fixed:
        """The user's answer, checked."""
        layouts = tuple(operand.layout for operand in call.operands)
        extra = tuple(value for value in _flat(call.args) if not isinstance(value, Ref))
        answer = self.infer_layout(layouts, extra)
        many = not isinstance(answer, Layout)
        outputs = tuple(answer) if many else (answer,)
        if not all(isinstance(one, Layout) for one in outputs):
            msg = f"{self.op_name}: infer_layout must return a Layout or a sequence of them, got {answer!r}"
            raise LayoutError(msg)
        even = all(_even(operand) for operand in call.operands)
        for one in outputs:
            if one.shape is None and not even:
                msg = (
                    f"{self.op_name}: infer_layout returned {one!r} without a global shape, which cannot be derived "
                    "from uneven shards; return layout.with_shape(...)"
                )
                raise LayoutError(msg)
        impl = self.get_expand_impl(func, outputs, layouts, extra)
        return Fixed(outputs, many=many, impl=impl)

    def run(
        self, dispatcher: Dispatcher, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Dispatch a call of ``func`` under this operator."""
        args, kwargs = self.preprocess(args, kwargs)
        tensors = [one for one in dispatcher.tensors((*args, *kwargs.values())) if isinstance(one, DTensor)]
        return self.wrap_output(super().run(dispatcher, func, args, kwargs), [one.layout for one in tensors])


def user_op(name: str) -> UserOp | None:
    """The operator that a user registered under ``name``, or None."""
    return _USER_OPS.get(name)


def registrations() -> int:
    """Differs whenever an operator was registered or unregistered since."""
    return _generation


def writes(func: Any, name: str) -> bool:
    """Whether an operator writes into its first operand and returns it, as far as its schema or its name tells."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        own = getattr(func, "__name__", name)  # a function under the operator's name may have another
        return own.endswith("_") and not own.endswith("__")
    first = schema.arguments[0].alias_info if schema.arguments else None
    back = schema.returns[0].alias_info if len(schema.returns) == 1 else None
    return first is not None and first.is_write and back is not None and back.is_write


def mutates(func: Any, name: str) -> bool:
    """Whether an operator writes into any operand, as far as its schema or its name tells."""
    return bool(getattr(getattr(func, "_schema", None), "is_mutable", False)) or writes(func, name)


class _FreeBinder(Binder):
    """Binds by the function's own signature where it has one, by position where it has none."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.text, self.starred = "…", None
        self.own = _signature(func)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name."""
        if self.own is None:
            return {**{f"arg{index}": arg for index, arg in enumerate(args)}, **kwargs}
        bound = self.own.bind(*args, **kwargs)
        named = dict(bound.arguments)
        rest = next((name for name, one in self.own.parameters.items() if one.kind is one.VAR_KEYWORD), None)
        return {**named, **named.pop(rest, {})} if rest is not None else named


def _signature(func: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(func)
    except (TypeError, ValueError):
        return None  # functions of C often have none


def _flat(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in _flat(value)]
    if isinstance(tree, (list, tuple)) and any(isinstance(item, Ref) for item in tree):
        return [leaf for value in tree for leaf in _flat(value)]
    return [tree]


def _even(operand: Operand) -> bool:
    layout = operand.layout
    return all(size % layout.shard_count(dim) == 0 for dim, size in enumerate(operand.shape))
