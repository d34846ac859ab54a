"""The registry of MindSpore's operators: spellings, kernels and decompositions.

A family file declares three kinds of things:

- ``spelling``: an operator of MindSpore that is a canonical one (``spellings`` takes many as text);
- ``kernel``: a canonical operator on plain local tensors, with its special properties as arguments;
- ``decomposition``: an operator of MindSpore that is composed of canonical ones.

MindSpore passes operators by name; a tensor method that differs from the function of the same name is passed as
``METHOD + name``.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Any

from mindspore import Parameter, Tensor

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard import rules
from hyper_parallel.core.shard.dispatch import Dispatcher, no_function
from hyper_parallel.core.shard.entry import Binder, OpEntry, binder
from hyper_parallel.core.shard.rule import Decomposition, find_rule
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.mindspore import ops as families
from hyper_parallel.platform.mindspore.ops.empty_shards import OnEmpty, empty_safe, set_on_elements
from hyper_parallel.platform.mindspore.ops.kernels import BY_NUMBER, copied, requires_grad, write_over
from hyper_parallel.transport.frontends.mindspore_comm.host import on_accelerator

__all__ = [
    "METHOD",
    "Spelling",
    "computes_on_cpu",
    "decomposition",
    "expect",
    "getitem_entry",
    "handlers",
    "kernel",
    "kernels",
    "number",
    "replicated",
    "setitem_entry",
    "spelling",
    "spellings",
    "unless_constant",
    "write_back",
    "writing_kernels",
]

METHOD = "Tensor."
"""The prefix of tensor methods that differ from the function of the same name."""

Handler = Callable[[Dispatcher, Any, tuple[Any, ...], dict[str, Any]], Any]
"""Handles an intercepted operator: ``handler(dispatcher, primitive, args, kwargs)``."""

_KERNELS: dict[str, Callable[..., Any]] = {}
_WRITING: dict[str, Callable[..., Any]] = {}
_SPELLINGS: dict[str, tuple[str, str | None, bool]] = {}
_DECOMPOSITIONS: dict[str, Handler] = {}

# Names that callers may use as keywords.
KEYWORDS = {
    "input": "x",
    "self": "x",
    "other": "y",
    "axis": "dim",
    "dims": "dim",
    "keep_dims": "keepdim",
    "keepdims": "keepdim",
    "exponent": "y",
    "mat2": "y",
    "vec": "y",
    "ddof": "correction",
    "min_value": "min",
    "max_value": "max",
}

# Attributes of legacy primitives that do not affect values.
NEUTRAL = frozenset({"name", "use_lock", "dtype"})

# Parameters that rules do not have and that have no effect here: random numbers depend on the global index, and local
# tensors stay on the mesh's device.
IGNORED = frozenset({"seed", "offset", "device"})


# -- registration ------------------------------------------------------------------------------------------------------


def spelling(op: str, *names: str, signature: str | None = None, in_place: bool = False) -> None:
    """Register ``names`` as operators of MindSpore that are canonical operator ``op``.

    Args:
        op: a canonical operator.
        names: names under which MindSpore dispatches the operator.
        signature: MindSpore's parameters in their order, under canonical names; None where they are the rule's.
        in_place: the first operand is written and returned. CPU kernels compute in-place operators and leave the
            tensor as it was, so the result of the canonical operator is written.

    Raises:
        ValueError: a name is registered already.
    """
    _refuse_twice(names, _SPELLINGS)
    _SPELLINGS.update(dict.fromkeys(names, (op, signature, in_place)))


def spellings(text: str, *, in_place: bool = False) -> None:
    """Register a :func:`spelling` per pair of words: MindSpore's name, and the canonical operator."""
    words = text.split()
    for name, op in zip(words[::2], words[1::2], strict=True):
        spelling(op, name, in_place=in_place)


def kernel(
    *ops: str,
    reliable_on_empty: bool = False,
    writes: bool = False,
    empty: Any = None,
    empty_shape: str | Callable[..., Any] | None = None,
    empty_unchanged: bool = False,
    empty_handled_with: str | None = None,
    on_elements: Callable[..., Any] | None = None,
    no_gradient: tuple[int, ...] = (),
    off_graph: bool | Callable[[dict[str, Any]], bool] = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function of plain tensors, with canonical parameter names, as canonical operators ``ops``.

    Args:
        ops: canonical operators.
        reliable_on_empty: whether the function is correct on empty tensors; otherwise it is wrapped.
        writes: the function writes into its first argument itself.
        empty: the result of a reduction over no element.
        empty_shape: see :attr:`OnEmpty.shape`.
        empty_unchanged: writing no element returns the first operand.
        empty_handled_with: a keyword; a call that passes it is correct on empty tensors.
        on_elements: an equivalent function for calls without empty operands, if there is one.
        no_gradient: positions of the operands that no gradient reaches; see :attr:`OnEmpty.no_gradient`.
        off_graph: see :attr:`OnEmpty.off_graph`.

    Raises:
        ValueError: an operator has a kernel already.
    """
    _refuse_twice(ops, _KERNELS)
    special = OnEmpty(empty, empty_shape, empty_unchanged, no_gradient, off_graph, empty_handled_with)

    def register(compute: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            safe = compute if reliable_on_empty else empty_safe(op, compute, special)
            if on_elements is not None:
                set_on_elements(safe, on_elements)
            _KERNELS[op] = safe
            _WRITING[op] = safe if writes else write_back(safe)
        return compute

    return register


def decomposition(*names: str, with_dispatcher: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register ``run(ops, primitive, *args, **kwargs)`` for ``names``.

    Args:
        names: names under which MindSpore dispatches them.
        with_dispatcher: ``run`` is called with the dispatcher in place of ``ops``, which cannot write in place.

    ``ops`` are the canonical operators as functions of DTensors; ``primitive`` is the legacy primitive that was called,
    or None.

    Raises:
        ValueError: a name is registered already.
    """
    _refuse_twice(names, _DECOMPOSITIONS)

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        parameters = tuple(inspect.signature(run).parameters.values())[2:]

        def handler(dispatcher: Dispatcher, primitive: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if kwargs:
                kwargs = _renamed(names[0], parameters, kwargs)
            return run(dispatcher if with_dispatcher else dispatcher.ops, primitive, *args, **kwargs)

        _DECOMPOSITIONS.update(dict.fromkeys(names, handler))
        return run

    return register


def _renamed(operator: str, parameters: tuple[inspect.Parameter, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keywords under the names of a decomposition's parameters.

    Raises:
        UnsupportedOperatorError: the decomposition has no such parameter.
    """
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return kwargs
    names = {parameter.name for parameter in parameters}
    renamed = {}
    for name, value in kwargs.items():
        meaning = KEYWORDS.get(name, name)
        alike = (name, meaning, *(other for other, same in KEYWORDS.items() if same == meaning))
        own = next((other for other in alike if other in names), None)
        if own is None:
            raise UnsupportedOperatorError(_no_rule(operator, name, value))
        renamed[own] = value
    return renamed


def _refuse_twice(names: tuple[str, ...], registered: dict[str, Any]) -> None:
    if twice := [name for name in names if name in registered]:
        msg = f"registered already: {', '.join(twice)}"
        raise ValueError(msg)


# -- what was registered -----------------------------------------------------------------------------------------------


@cache
def _load() -> None:
    """Import every family, which registers it."""
    rules.load()
    for module in pkgutil.iter_modules(families.__path__):
        importlib.import_module(f"{families.__name__}.{module.name}")


def kernels() -> dict[str, Callable[..., Any]]:
    """Return the kernels by canonical operator."""
    _load()
    return _KERNELS


def writing_kernels() -> dict[str, Callable[..., Any]]:
    """Return the kernels that write their result into the first argument, by canonical operator."""
    _load()
    return _WRITING


@cache
def handlers() -> dict[str, Handler]:
    """Return the handlers of operators, by their names in MindSpore."""
    _load()
    table: dict[str, Handler] = {
        name: Spelling(name, op, signature, in_place=in_place) for name, (op, signature, in_place) in _SPELLINGS.items()
    }
    return {**table, **_DECOMPOSITIONS}


@cache
def setitem_entry() -> OpEntry:
    """Return the entry of writing by index, whose index must be normalized first."""
    return Spelling("setitem", "setitem", in_place=True).entry


@cache
def getitem_entry() -> OpEntry:
    """Return the entry of reading by an index without tensors."""
    return Spelling("getitem", "getitem").entry


def write_back(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``compute`` with its result written into its first argument, which in-place kernels on CPU do not do.

    Empty shards are written, too: the written values have a gradient, whose collectives every rank must run.
    """

    def write(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # Backward may need the values from before the write; the tensor itself has the new ones.
        result = compute(copied(x) if requires_grad(x) else x, *args, **kwargs)
        if result.dtype != x.dtype:
            msg = f"a result of {result.dtype} cannot be written into a tensor of {x.dtype}; use the out-of-place form"
            raise UnsupportedOperatorError(msg)
        write_over(x, result)
        return x

    return write


class Spelling:
    """One spelling: converts MindSpore's arguments to those of the rule, and dispatches the call.

    Attributes:
        entry: the dispatcher's entry of the canonical operator.
        name: MindSpore's name of the operator.
        own: MindSpore's signature under canonical names, or None where it is the rule's.
    """

    __slots__ = ("_names", "_positional", "_takes_dtype", "entry", "name", "own")

    def __init__(self, name: str, op: str, signature: str | None = None, *, in_place: bool = False) -> None:
        """Tie ``name`` to the rule of ``op``.

        Raises:
            ValueError: there is no such rule.
        """
        rule = find_rule(op)
        if rule is None:
            msg = f"spelling {name}: canonical operator {op!r} has no rule"
            raise ValueError(msg)
        local = no_function if isinstance(rule, Decomposition) else (_WRITING if in_place else _KERNELS)[op]
        bound = binder(rule.signature)
        canonical = bound.starred is not None or in_place
        self.name, self.own = name, None if signature is None else binder(signature)
        self.entry = OpEntry(op, local, bound, rule, local, canonical=canonical, in_place=in_place)
        self._names = frozenset(bound.names if self.own is None else self.own.names)
        self._takes_dtype = "dtype" in bound.names
        keyword_only = any(parameter.kind is parameter.KEYWORD_ONLY for parameter in bound.parameters.values())
        self._positional = _positional(bound) if keyword_only and bound.starred is None else None

    def __call__(self, dispatcher: Dispatcher, primitive: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Dispatch; attributes of ``primitive`` count as keyword arguments."""
        if primitive is not None:
            kwargs = self._with_attributes(primitive, args, kwargs)
        if kwargs:
            kwargs = {
                name if name in self._names else KEYWORDS.get(name, name): value for name, value in kwargs.items()
            }
        if self.own is not None:
            args, kwargs = self._canonical(args, kwargs)
        elif self._positional is not None and len(args) > self._positional:
            # MindSpore fills in by position what the rule takes by name only.
            names, optional = self.entry.binder.names[self._positional :], self.entry.binder.named_are_optional
            extra = zip(names, args[self._positional :], strict=False)
            passed = {name: value for name, value in extra if value is not None or not optional}
            args, kwargs = args[: self._positional], {**passed, **kwargs}
        if self._takes_dtype:
            args, kwargs = self._with_dtype(args, kwargs)
        return dispatcher.dispatch(self.entry, args, kwargs)

    @property
    def as_written(self) -> OpEntry | None:
        """The entry, if its calls can be cached by MindSpore's positional arguments, which are then those of the rule.

        Arguments that must be converted, such as the number of a dtype, never match a cached call.
        """
        return None if self.own is not None or self.entry.composed is not None else self.entry

    def _with_attributes(self, primitive: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keywords of the call with the attributes of ``primitive``.

        Generated primitives append their attributes to the arguments by themselves; hand-written ones keep them.

        Raises:
            UnsupportedOperatorError: an attribute that the spelling does not know.
        """
        if "auto_generate" in type(primitive).__module__:
            return kwargs
        names = (self.entry.binder if self.own is None else self.own).names
        keywords = dict(kwargs)
        for attribute, value in getattr(primitive, "init_attrs", {}).items():
            name = attribute if attribute in names else KEYWORDS.get(attribute, attribute)
            if name in names:
                if name not in names[: len(args)]:
                    keywords.setdefault(name, value)
            elif attribute not in NEUTRAL:
                raise UnsupportedOperatorError(_no_rule(self.name, attribute, value))
        return keywords

    def _with_dtype(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with a dtype in place of its number, which MindSpore's Python layer passes."""
        if type(kwargs.get("dtype")) is int:
            return args, {**kwargs, "dtype": BY_NUMBER[kwargs["dtype"]]}
        position = self.entry.binder.names.index("dtype")
        if len(args) > position and type(args[position]) is int:
            return (*args[:position], BY_NUMBER[args[position]], *args[position + 1 :]), kwargs
        return args, kwargs

    def _canonical(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the first argument alone, and the others by the rule's names.

        Raises:
            UnsupportedOperatorError: a parameter that the rule does not know is not at its default.
        """
        own = self.own
        assert own is not None
        bound = own.bind(args, kwargs)
        known = self.entry.binder.parameters
        for name in [name for name in bound if name not in known]:
            value = bound.pop(name)
            if name not in IGNORED and value != own.parameters[name].default:
                raise UnsupportedOperatorError(_no_rule(self.name, name, value))
        first = own.names[0]
        return (bound.pop(first),), bound


def _positional(bound: Binder) -> int:
    return sum(parameter.kind is not parameter.KEYWORD_ONLY for parameter in bound.parameters.values())


def _no_rule(operator: str, name: str, value: Any) -> str:
    return f"operator {operator}: {name}={value!r} has no sharding rule; redistribute the operands and use to_local()"


# -- what decompositions share -----------------------------------------------------------------------------------------


def expect(operator: str, name: str, value: Any, served: Any) -> None:
    """Refuse an option that has no rule.

    Raises:
        UnsupportedOperatorError: ``value`` is not ``served``, the only value with a rule.
    """
    if value != served:
        msg = (
            f"operator {operator}: {name}={value!r} has no sharding rule, {name}={served!r} has; "
            "redistribute the operands and use to_local()"
        )
        raise UnsupportedOperatorError(msg)


def unless_constant(tensor: Any, constant: int) -> Any:
    """Return ``tensor``, or None for the constant that MindSpore's Python layer makes of a missing weight or bias."""
    if tensor is None or isinstance(tensor, (DTensor, Parameter)) or requires_grad(tensor):
        return tensor
    return None if bool((tensor.asnumpy() == constant).all()) else tensor


def number(value: Any) -> Any:
    """Return the Python number in a plain tensor of one element; return anything else unchanged."""
    return value.asnumpy().item() if isinstance(value, Tensor) else value


def replicated(plain: Tensor, like: DTensor) -> Any:
    """Return a replicated DTensor on the mesh of ``like``."""
    layout = Layout.of(like.device_mesh, ((),) * plain.ndim, (), tuple(plain.shape))
    return like._platform.wrap(plain, layout)


def computes_on_cpu() -> bool:
    """Return True if this process computes on the CPU, where MindSpore uses older semantics for some methods.

    The process decides, not the tensor: a tensor made from an array is on the host until it is used.
    """
    return not on_accelerator()
