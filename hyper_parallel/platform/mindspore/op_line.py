"""A line of the table: one of MindSpore's spellings of a canonical operator."""

from __future__ import annotations

from functools import cache
from typing import Any

from hyper_parallel.core.shard import rules
from hyper_parallel.core.shard.dispatch import Dispatcher, no_function
from hyper_parallel.core.shard.entry import Binder, OpEntry, binder
from hyper_parallel.core.shard.rule import Decomposition, find_rule
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.mindspore.local_ops import LOCAL, WRITING
from hyper_parallel.platform.mindspore.tensors import BY_NUMBER

__all__ = ["Line", "line_of"]

rules.load()

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

# What a legacy primitive was constructed with and what changes no value.
NEUTRAL = frozenset({"name", "use_lock", "dtype"})

# Parameters that a rule does not know and that change nothing here: random numbers go by global index, locals stay on
# the mesh's device.
IGNORED = frozenset({"seed", "offset", "device"})


class Line:
    """One spelling: brings arguments into the rule's names and dispatches."""

    __slots__ = ("entry", "limit", "name", "names", "own", "typed")

    def __init__(self, name: str, op: str, signature: str | None = None, *, in_place: bool = False) -> None:
        """Tie ``name`` to the rule of ``op``; ``signature`` has MindSpore's order.

        Raises:
            ValueError: there is no such rule.
        """
        rule = find_rule(op)
        if rule is None:
            msg = f"table line for {name}: canonical operator {op!r} has no rule"
            raise ValueError(msg)
        local = no_function if isinstance(rule, Decomposition) else (WRITING if in_place else LOCAL)[op]
        bound = binder(rule.signature)
        canonical = bound.starred is not None or in_place
        self.name, self.own = name, None if signature is None else binder(signature)
        self.entry = OpEntry(op, local, bound, rule, local, canonical=canonical, in_place=in_place)
        self.names = frozenset(bound.names if self.own is None else self.own.names)
        self.typed = "dtype" in bound.names
        keyword_only = any(one.kind is one.KEYWORD_ONLY for one in bound.parameters.values())
        self.limit = _positional(bound) if keyword_only and bound.starred is None else None

    def __call__(self, dispatcher: Dispatcher, primitive: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Dispatch; what a primitive was constructed with counts as given by keyword."""
        if primitive is not None:
            kwargs = self._constructed(primitive, args, kwargs)
        if kwargs:
            kwargs = {name if name in self.names else KEYWORDS.get(name, name): value for name, value in kwargs.items()}
        if self.own is not None:
            args, kwargs = self._canonical(args, kwargs)
        elif self.limit is not None and len(args) > self.limit:
            # MindSpore fills in by position what the rule takes by name only.
            extra = zip(self.entry.binder.names[self.limit :], args[self.limit :], strict=False)
            args, kwargs = args[: self.limit], {**dict(extra), **kwargs}
        if self.typed:
            args, kwargs = self._with_dtype(args, kwargs)
        return dispatcher.dispatch(self.entry, args, kwargs)

    def _constructed(self, primitive: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keywords of the call with the attributes of ``primitive``.

        Generated primitives append their attributes to the arguments by themselves; hand-written ones keep them.

        Raises:
            UnsupportedOperatorError: an attribute that the line does not know.
        """
        if "auto_generate" in type(primitive).__module__:
            return kwargs
        names = (self.entry.binder if self.own is None else self.own).names
        found = dict(kwargs)
        for attribute, value in getattr(primitive, "init_attrs", {}).items():
            name = attribute if attribute in names else KEYWORDS.get(attribute, attribute)
            if name in names:
                if name not in names[: len(args)]:
                    found.setdefault(name, value)
            elif attribute not in NEUTRAL:
                msg = (
                    f"operator {self.name}: {attribute}={value!r} has no sharding rule; "
                    "redistribute the operands and use to_local()"
                )
                raise UnsupportedOperatorError(msg)
        return found

    def _with_dtype(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """MindSpore's Python layer passes dtypes by number."""
        if type(kwargs.get("dtype")) is int:
            return args, {**kwargs, "dtype": BY_NUMBER[kwargs["dtype"]]}
        at = self.entry.binder.names.index("dtype")
        if len(args) > at and type(args[at]) is int:
            return (*args[:at], BY_NUMBER[args[at]], *args[at + 1 :]), kwargs
        return args, kwargs

    def _canonical(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The first argument alone, and the others by the rule's names.

        Raises:
            UnsupportedOperatorError: a parameter that the rule does not know is not at its default.
        """
        own = self.own
        assert own is not None  # noqa: S101 - the caller's condition
        bound = own.bind(args, kwargs)
        known = self.entry.binder.parameters
        for name in [one for one in bound if one not in known]:
            value = bound.pop(name)
            if name not in IGNORED and value != own.parameters[name].default:
                msg = (
                    f"operator {self.name}: {name}={value!r} has no sharding rule; "
                    "redistribute the operands and use to_local()"
                )
                raise UnsupportedOperatorError(msg)
        first = own.names[0]
        return (bound.pop(first),), bound


def _positional(bound: Binder) -> int:
    return sum(one.kind is not one.KEYWORD_ONLY for one in bound.parameters.values())


@cache
def line_of(op: str, *, in_place: bool = False) -> Line:
    """The line of canonical operator ``op`` under its own name."""
    return Line(op, op, in_place=in_place)
