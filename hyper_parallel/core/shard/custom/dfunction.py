"""A user's differentiable function on local tensors, dispatched by the layouts of its DTensor arguments."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from hyper_parallel._caches import register
from hyper_parallel._tree import leaves, tree_map
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import Cause
from hyper_parallel.core.shard.custom.distributed_op import UserOp, mutates, user_op, writes
from hyper_parallel.core.shard.entry import Binder, OpEntry
from hyper_parallel.core.shard.executor import marks_in
from hyper_parallel.core.shard.op_plan import replicated_layout
from hyper_parallel.core.shard.refusals import common_mesh, lost_write_error, plain_tensor_error, read_only_error
from hyper_parallel.core.shard.rule import Rule, find_rule
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.select import platform_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hyper_parallel.core.shard.dispatch import Dispatcher
    from hyper_parallel.core.shard.rule import OpCall
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["DFunction", "ReplicatedOp"]


_NATIVE: dict[tuple[type, str], Any] = {}
_ENTRIES: dict[tuple[type, str, Rule], OpEntry] = {}
_MAX_CLASSES = 1024
_LOCK = threading.Lock()
register("functions of DFunction", _NATIVE, lambda: _MAX_CLASSES)
register("operators of DFunction", _ENTRIES, lambda: _MAX_CLASSES)


class DFunction:
    """Custom forward and backward on local tensors.

    Subclass with static ``forward(ctx, *args, **kwargs)`` and ``backward(ctx, *grads)``, as for the framework's own
    custom function. ``backward`` returns one gradient (or None) per argument of ``forward``, in the order of its
    signature. ``_op_name`` names the operator whose rule determines the layouts: a canonical operator or a
    :class:`~hyper_parallel.core.shard.custom.distributed_op.DistributedOp`.

    Raises:
        ValueError: called with DTensors, but the class has no ``_op_name``.
        UnsupportedOperatorError: no rule is registered under ``_op_name``.
    """

    _op_name: str | None = None

    @staticmethod
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute on local tensors."""
        raise NotImplementedError

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients of the arguments, given those of the outputs."""
        raise NotImplementedError

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Run the function.

        Args:
            args: arguments of ``forward``, after ``ctx``.
            kwargs: its keyword arguments.

        Returns:
            plain tensors for plain tensors; for DTensors, DTensors in the layouts from the rule of ``_op_name``.

        Raises:
            TypeError: no argument is a tensor.
        """
        tensors = list(_tensors((*args, *kwargs.values())))
        if not tensors:
            msg = f"{cls.__name__}.apply: no tensor among the arguments"
            raise TypeError(msg)
        distributed = [platform for platform, tensor in tensors if isinstance(tensor, DTensor)]
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


def _call_by_rule_names(cls: type[DFunction], native: Callable[..., Any], rule: _SignatureBinder) -> Callable[..., Any]:
    """Return ``native`` with the rule's parameter names, for rules that replace arguments of the local call."""
    own = [
        parameter
        for parameter in rule.forward.parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    names = {parameter.name for parameter in own}
    own_name = {known: parameter.name for known, parameter in zip(rule.names, own, strict=False) if known not in names}

    def call(**arguments: Any) -> Any:
        named = {own_name.get(name, name): value for name, value in arguments.items()}
        if len(own) == len(rule.forward.parameters):
            missing = [
                name
                for name, value in named.items()
                if name not in names and (name not in rule.parameters or value != rule.parameters[name].default)
            ]
            if missing:
                msg = (
                    f"{cls.__name__}: with this layout operator {cls._op_name} passes rank-dependent values in "
                    f"{', '.join(missing)}, which {cls.__name__}.forward does not take; redistribute the operands first"
                )
                raise UnsupportedOperatorError(msg)
            named = {name: value for name, value in named.items() if name in names}
        return native(**named)

    return call


class _SignatureBinder(Binder):
    """Binds by the user's ``forward``: positional arguments match the rule's by order, keyword arguments by name.

    An argument that the rule lacks does not influence layouts. It reaches ``forward`` under its own name, unless it is
    a tensor.
    """

    def __init__(self, cls: type[DFunction], rule: Rule) -> None:
        super().__init__(rule.signature)
        self.forward = _signature(cls)
        positional = [
            parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for parameter in self.parameters.values()
        ]
        self.most_positions = None if self.starred else sum(positional)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the rule's parameters by name, followed by those that only ``forward`` has."""
        bound = self.forward.bind(*args, **kwargs)
        bound.apply_defaults()
        own = self._own(bound)
        args, kwargs = bound.args, bound.kwargs
        if not any(marks_in(args[self.most_positions :])):
            args = args[: self.most_positions]
        named = {name: value for name, value in kwargs.items() if name in self.parameters or any(marks_in([value]))}
        return {**super().bind(args, named), **own}

    def _own(self, bound: inspect.BoundArguments) -> dict[str, Any]:
        """The arguments of ``forward`` that the rule does not have."""
        named = {
            name: value
            for name, value in bound.arguments.items()
            if self.forward.parameters[name].kind
            not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        }
        beyond = list(named)[self.most_positions :] if self.most_positions is not None else []
        return {
            name: named[name] for name in beyond if name not in self.parameters and not any(marks_in([named[name]]))
        }


def _signature(cls: type[DFunction]) -> inspect.Signature:
    """The signature of ``cls.forward`` without ``ctx``."""
    signature = inspect.signature(cls.forward)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _entry(cls: type[DFunction], platform: Platform, rule: Rule) -> OpEntry:
    """The dispatch entry of ``cls`` for the rule's operator; it caches the plans."""
    key = (cls, platform.platform_type, rule)
    native = _native(cls, platform)
    with _LOCK:
        if key not in _ENTRIES:
            if len(_ENTRIES) >= _MAX_CLASSES:  # bounds the memory of classes that are not used again
                _ENTRIES.clear()
            binder = _SignatureBinder(cls, rule)
            _ENTRIES[key] = OpEntry(rule.op, native, binder, rule, _call_by_rule_names(cls, native, binder))
        return _ENTRIES[key]


def _native(cls: type[DFunction], platform: Platform) -> Callable[..., Any]:
    """``cls`` as a custom autograd function of the framework."""
    key = (cls, platform.platform_type)
    with _LOCK:
        if key not in _NATIVE:
            if len(_NATIVE) >= _MAX_CLASSES:
                _NATIVE.clear()
            _NATIVE[key] = _make_native(cls, platform)
        native: Callable[..., Any] = _NATIVE[key]
    return native


def _make_native(cls: type[DFunction], platform: Platform) -> Callable[..., Any]:
    """Return a callable that passes keyword arguments by position, since frameworks track only those."""
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
    call.__signature__ = signature  # type: ignore[attr-defined] # users' rules bind arguments by it
    return call


def _packed(cls: type[DFunction], platform: Platform, names: tuple[str, ...]) -> Any:
    """The framework's custom function whose last arguments are the keywords ``names`` of ``cls.forward``."""

    def forward(ctx: Any, *flat: Any) -> Any:
        ctx.hyper_parallel_arguments = len(flat)
        split = len(flat) - len(names)
        return cls.forward(ctx, *flat[:split], **dict(zip(names, flat[split:], strict=True)))

    def backward(ctx: Any, *grads: Any) -> Any:
        """Pad the gradients with None up to the number of arguments."""
        result = cls.backward(ctx, *grads)
        gradients = tuple(result) if isinstance(result, (list, tuple)) else (result,)
        count = ctx.hyper_parallel_arguments
        if any(gradient is not None for gradient in gradients[count:]):
            msg = f"{cls.__name__}.backward returned {len(gradients)} gradients, forward has {count} arguments"
            raise RuntimeError(msg)
        return (*gradients[:count], *(None,) * (count - len(gradients)))

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(cls.__name__, (platform.Function,), methods)


def _tensors(arguments: Any) -> Iterator[tuple[Platform, Any]]:
    """The tensors in nested sequences, each with its platform."""
    for leaf in leaves(arguments):
        try:
            platform = platform_of(leaf)
        except TypeError:
            continue  # not a tensor of any framework
        if platform.is_tensor(leaf):
            yield platform, leaf


class ReplicatedOp(UserOp):
    """Runs one operator replicated; instantiate it once to register the operator.

    Every rank gathers the operands and computes the complete result. The gathering is recorded as implicit, so
    ``strict()`` forbids it and the event log lists its cost. The operator must return the same result on every rank,
    so it must not be random.

    Args:
        op_name: name of the function (``func.__name__``), operator overload or MindSpore primitive.

    Raises:
        ValueError: the operator already has a rule.
    """

    _registrar = "ReplicatedOp"

    def strategies(self, func: Callable[..., Any], call: OpCall) -> NoReturn:
        """Refuse to plan: the outputs are known only after the call."""
        del func, call
        msg = f"{self.op_name}: it is a ReplicatedOp, so its outputs are known only after the call"
        raise UnsupportedOperatorError(msg)

    def run(
        self, dispatcher: Dispatcher, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Gather the operands, call ``func`` and wrap its outputs as replicated."""
        platform = dispatcher.platform
        operands = dispatcher.tensors((*args, *kwargs.values()))
        mesh: Any = common_mesh(
            self.op_name, (operand.device_mesh for operand in operands if isinstance(operand, DTensor))
        )
        plain = next((operand for operand in operands if not isinstance(operand, DTensor)), None)
        if plain is not None:
            raise plain_tensor_error(f"{self.op_name}: an operand", "operand", plain.shape, mesh)
        written = operands if mutates(func, self.op_name) else []
        self._require_writable(written)
        whole, named = tree_map(self._gathered, args), {name: tree_map(self._gathered, kwargs[name]) for name in kwargs}
        gathered = [
            (operand, local)
            for operand, local in zip(operands, dispatcher.tensors((*whole, *named.values())), strict=True)
            if local is not operand._local
        ]
        before = [platform.version(local) for _, local in gathered]
        result = func(*whole, **named)
        for (operand, local), version in zip(gathered, before, strict=True):
            if platform.version(local) != version:
                layout = operand.layout.notation(operand.dtype)
                raise lost_write_error(
                    self.op_name, f"an operand {layout}", "gathered", "use x = x.redistribute() first"
                )
        for operand in written:
            operand.drop_views()
        if writes(func, self.op_name):
            return operands[0]

        def wrap(leaf: Any) -> Any:
            return platform.wrap(leaf, replicated_layout(mesh, leaf.shape)) if platform.is_tensor(leaf) else leaf

        return tree_map(wrap, result)

    def _require_writable(self, operands: Iterable[Any]) -> None:
        for operand in operands:
            if not operand.layout.is_replicated:
                msg = f"{self.op_name}: operands written in place must be replicated; use x = x.redistribute() first"
                raise UnsupportedOperatorError(msg)
            if operand._readonly is not None:
                raise read_only_error(self.op_name, "an operand", operand._readonly)

    def _gathered(self, value: Any) -> Any:
        """The complete tensor if ``value`` is a DTensor, otherwise ``value``."""
        if not isinstance(value, DTensor):
            return value
        target = replicated_layout(value.device_mesh, value.shape)
        return value.local_for(target, (), Cause(self.op_name, "operand", implicit=True))
