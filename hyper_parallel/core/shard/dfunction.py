"""A user's own differentiable function that works on locals, and is dispatched by layout."""

from __future__ import annotations

import inspect
import threading
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.binder import Binder
from hyper_parallel.core.shard.dispatch import Entry
from hyper_parallel.core.shard.distributed_op import user_op
from hyper_parallel.core.shard.rule import Rule, find_rule
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.select import platform_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["DFunction"]

_NATIVE: dict[tuple[type, str], Any] = {}
_LOCK = threading.Lock()


class DFunction:
    """Custom forward and backward on local tensors.

    Subclass with static ``forward(ctx, *args, **kwargs)`` and ``backward(ctx, *grads)``, as for the framework's own
    custom function; backward returns one gradient (or None) per argument of ``forward``, in the order of its
    signature. ``_op_name`` names the operator whose rule says how layouts behave: a canonical operator or a
    :class:`~hyper_parallel.core.shard.distributed_op.DistributedOp`.

    Raises:
        ValueError: DTensors meet a class without ``_op_name``.
        UnsupportedOperatorError: no rule is registered under ``_op_name``.
    """

    _op_name: str | None = None

    @staticmethod
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute on local tensors."""
        raise NotImplementedError

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of the arguments, given those of the outputs."""
        raise NotImplementedError

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Run on plain tensors directly, on DTensors under ``_op_name``."""
        tensors = list(_leaves((args, tuple(kwargs.values()))))
        if not tensors:
            msg = f"{cls.__name__}.apply: no tensor among the arguments"
            raise TypeError(msg)
        platform = platform_of(next((one for one in tensors if isinstance(one, DTensor)), tensors[0]))
        native = _native(cls, platform)
        if any(isinstance(one, DTensor) for one in tensors):
            return cls._dispatched(platform, native, args, kwargs)
        return native(*args, **kwargs)

    @classmethod
    def _dispatched(
        cls, platform: Platform, native: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not cls._op_name:
            msg = (
                f"{cls.__name__}: DTensor arguments need the class attribute _op_name, the operator whose rule applies"
            )
            raise ValueError(msg)
        dispatcher = platform.dispatcher
        user = user_op(cls._op_name)
        if user is not None:
            return user.run(dispatcher, native, args, kwargs)
        rule = find_rule(cls._op_name)
        if not isinstance(rule, Rule):
            msg = (
                f"{cls.__name__}: no rule is registered for _op_name {cls._op_name!r}; "
                "register a DistributedOp of that name"
            )
            raise UnsupportedOperatorError(msg)
        entry = Entry(cls._op_name, native, _SignatureBinder(cls, rule), rule, native)
        return dispatcher.dispatch(entry, args, kwargs)


class _SignatureBinder(Binder):
    """Binds by the user's ``forward``; its parameters stand for the rule's, in order."""

    def __init__(self, cls: type[DFunction], rule: Rule) -> None:
        super().__init__(rule.signature)
        self.forward = _signature(cls)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The rule's parameters by name."""
        bound = self.forward.bind(*args, **kwargs)
        bound.apply_defaults()
        return super().bind(tuple(bound.arguments.values()), {})


def _signature(cls: type[DFunction]) -> inspect.Signature:
    whole = inspect.signature(cls.forward)
    return whole.replace(parameters=list(whole.parameters.values())[1:])


def _native(cls: type[DFunction], platform: Platform) -> Callable[..., Any]:
    """``cls`` as a function of the framework; keywords are bound to positions, which is all its ``apply`` takes."""
    key = (cls, platform.platform_type)
    with _LOCK:
        if key not in _NATIVE:
            _NATIVE[key] = _make_native(cls, platform)
        found: Callable[..., Any] = _NATIVE[key]
    return found


def _make_native(cls: type[DFunction], platform: Platform) -> Callable[..., Any]:
    signature = _signature(cls)
    native: Any = type(cls.__name__, (platform.Function,), {
        "forward": staticmethod(cls.forward),
        "backward": staticmethod(cls.backward),
    })  # fmt: skip

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            if bound.kwargs:
                msg = (
                    f"{cls.__name__}.apply: keyword-only arguments {sorted(bound.kwargs)} cannot be tracked; "
                    "make them positional"
                )
                raise TypeError(msg)
            args = bound.args
        return native.apply(*args)

    call.__name__ = cls.__name__
    call.__signature__ = signature  # type: ignore[attr-defined] # what users' rules bind by
    return call


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _leaves(item)
    elif isinstance(tree, DTensor) or type(tree).__name__ in {"Tensor", "Parameter"} or hasattr(tree, "dtype"):
        yield tree
