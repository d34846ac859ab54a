"""A user's own differentiable function that works on locals, and is dispatched by layout."""

from __future__ import annotations

import inspect
import threading
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.custom.distributed_op import user_op
from hyper_parallel.core.shard.entry import Binder, OpEntry
from hyper_parallel.core.shard.executor import marks_in
from hyper_parallel.core.shard.rule import Rule, find_rule
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.select import platform_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["DFunction"]

_NATIVE: dict[tuple[type, str], Any] = {}
_ENTRIES: dict[tuple[type, str, Rule], OpEntry] = {}
_LOCK = threading.Lock()


class DFunction:
    """Custom forward and backward on local tensors.

    Subclass with static ``forward(ctx, *args, **kwargs)`` and ``backward(ctx, *grads)``, as for the framework's own
    custom function; backward returns one gradient (or None) per argument of ``forward``, in the order of its
    signature. ``_op_name`` names the operator whose rule says how layouts behave: a canonical operator or a
    :class:`~hyper_parallel.core.shard.custom.distributed_op.DistributedOp`.

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
        tensors = list(_tensors((args, tuple(kwargs.values()))))
        if not tensors:
            msg = f"{cls.__name__}.apply: no tensor among the arguments"
            raise TypeError(msg)
        distributed = [platform for platform, one in tensors if isinstance(one, DTensor)]
        platform = distributed[0] if distributed else tensors[0][0]
        native = _native(cls, platform)
        if distributed:
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
        return dispatcher.dispatch(_entry(cls, platform, rule), args, kwargs)


def _localized(cls: type[DFunction], native: Callable[..., Any], rule: _SignatureBinder) -> Callable[..., Any]:
    """``native`` by the rule's names, for rules that replace arguments of the local call."""
    own = [one for one in rule.forward.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    names = {one.name for one in own}
    spelled = {known: one.name for known, one in zip(rule.names, own, strict=False) if known not in names}

    def call(**arguments: Any) -> Any:
        given = {spelled.get(name, name): value for name, value in arguments.items()}
        if len(own) == len(rule.forward.parameters):
            extra = [name for name in given if name not in names]
            said = [
                name for name in extra if name not in rule.parameters or given[name] != rule.parameters[name].default
            ]
            if said:
                msg = (
                    f"{cls.__name__}: with this layout operator {cls._op_name} computes a rank's part by the arguments "
                    f"{', '.join(said)}, which {cls.__name__}.forward does not take; redistribute the operands first"
                )
                raise UnsupportedOperatorError(msg)
            given = {name: value for name, value in given.items() if name in names}
        return native(**given)

    return call


class _SignatureBinder(Binder):
    """Binds by the user's ``forward``; its positions stand for the rule's, in order, its keywords by name.

    What the rule has no parameter for says nothing about layouts: it goes to ``forward`` under the name that it has
    there, unless it is a tensor.
    """

    def __init__(self, cls: type[DFunction], rule: Rule) -> None:
        super().__init__(rule.signature)
        self.forward = _signature(cls)
        kinds = [one.kind for one in self.parameters.values()]
        self.room = None if self.starred else sum(kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The rule's parameters by name, then those that only ``forward`` has."""
        bound = self.forward.bind(*args, **kwargs)
        bound.apply_defaults()
        own = self._own(bound)
        args, kwargs = bound.args, bound.kwargs
        if not any(marks_in(args[self.room :])):
            args = args[: self.room]
        named = {name: value for name, value in kwargs.items() if name in self.parameters or any(marks_in([value]))}
        return {**super().bind(args, named), **own}

    def _own(self, bound: inspect.BoundArguments) -> dict[str, Any]:
        """Arguments of ``forward`` that no parameter of the rule stands for."""
        named = {
            name: value
            for name, value in bound.arguments.items()
            if self.forward.parameters[name].kind
            not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        }
        beyond = list(named)[self.room :] if self.room is not None else []
        return {
            name: named[name] for name in beyond if name not in self.parameters and not any(marks_in([named[name]]))
        }


def _signature(cls: type[DFunction]) -> inspect.Signature:
    whole = inspect.signature(cls.forward)
    return whole.replace(parameters=list(whole.parameters.values())[1:])


def _entry(cls: type[DFunction], platform: Platform, rule: Rule) -> OpEntry:
    """``cls`` as a spelling of the rule's operator; its plans are kept."""
    key = (cls, platform.platform_type, rule)
    native = _native(cls, platform)
    with _LOCK:
        if key not in _ENTRIES:
            bound = _SignatureBinder(cls, rule)
            _ENTRIES[key] = OpEntry(rule.op, native, bound, rule, _localized(cls, native, bound))
        return _ENTRIES[key]


def _native(cls: type[DFunction], platform: Platform) -> Callable[..., Any]:
    """``cls`` as a function of the framework."""
    key = (cls, platform.platform_type)
    with _LOCK:
        if key not in _NATIVE:
            _NATIVE[key] = _make_native(cls, platform)
        found: Callable[..., Any] = _NATIVE[key]
    return found


def _make_native(cls: type[DFunction], platform: Platform) -> Callable[..., Any]:
    """Positions are all that a framework tracks: keywords follow the positions, in the order of the signature."""
    signature = _signature(cls)
    packed: dict[tuple[str, ...], Any] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        names = tuple(bound.kwargs)
        if names not in packed:
            packed[names] = _packed(cls, platform, names)
        return packed[names].apply(*bound.args, *bound.kwargs.values())

    call.__name__ = cls.__name__
    call.__signature__ = signature  # type: ignore[attr-defined] # what users' rules bind by
    return call


def _packed(cls: type[DFunction], platform: Platform, names: tuple[str, ...]) -> Any:
    """The framework's custom function whose last arguments are the keywords ``names`` of ``cls.forward``."""

    def forward(ctx: Any, *flat: Any) -> Any:
        ctx.hyper_parallel_arguments = len(flat)
        split = len(flat) - len(names)
        return cls.forward(ctx, *flat[:split], **dict(zip(names, flat[split:], strict=True)))

    def backward(ctx: Any, *grads: Any) -> Any:
        """As many gradients as arguments: defaults that ``backward`` says nothing about have none."""
        found = cls.backward(ctx, *grads)
        several = tuple(found) if isinstance(found, (list, tuple)) else (found,)
        count = ctx.hyper_parallel_arguments
        if any(one is not None for one in several[count:]):
            msg = f"{cls.__name__}.backward returned {len(several)} gradients, forward has {count} arguments"
            raise RuntimeError(msg)
        return (*several[:count], *(None,) * (count - len(several)))

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(cls.__name__, (platform.Function,), methods)


def _tensors(tree: Any) -> Iterator[tuple[Platform, Any]]:
    """Tensors in nested sequences, each with its platform."""
    if isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)
        return
    try:
        platform = platform_of(tree)
    except TypeError:
        return  # of no framework
    if platform.is_tensor(tree):
        yield platform, tree
