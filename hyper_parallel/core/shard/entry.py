"""Maps framework functions to canonical operators: :class:`OpEntry`, and :class:`Binder` for their arguments.

A signature is text in Python's own syntax, ``"x, *shape"`` or ``"x, dim=None, keepdim=False, *, dtype=None"``, and
calls that do not match it raise Python's own errors.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable
from functools import cache
from typing import Any

from hyper_parallel._caches import Owners, register
from hyper_parallel.core.shard.rule import Decomposition, Rule

__all__ = ["ENTRIES", "Binder", "KeywordCall", "OpEntry", "Run", "binder"]

Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]

_SCALARS = frozenset({int, float, bool, complex})
_NO_TYPES: frozenset[type] = frozenset()
EMPTY = inspect.Parameter.empty
KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, KEYWORD_ONLY)
# Frameworks' names of the operands that rules call x and y.
ALIASES = {"input": "x", "self": "x", "other": "y", "A": "x", "B": "y"}


class Binder:
    """Binds positional and keyword arguments to the parameters of one signature.

    A starred parameter (``*shape``) accepts one sequence or several numbers, as tensor methods do.
    """

    def __init__(self, text: str) -> None:
        """Parse ``text`` as the parameter list of a function."""
        self.text = text
        self.signature = _parse(text)
        self.parameters = self.signature.parameters
        self.names = tuple(self.parameters)
        self._defaults = {
            name: parameter.default for name, parameter in self.parameters.items() if parameter.kind in _NAMED
        }
        self._least = 1 + max(
            (place for place, default in enumerate(self._defaults.values()) if default is EMPTY), default=-1
        )
        """Number of required positional arguments."""
        self._required = tuple(name for name, default in self._defaults.items() if default is EMPTY)
        self._positional = tuple(
            name for name, parameter in self.parameters.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        )
        self.most_positional: float = len(self._positional)
        """Largest number of positional arguments; unlimited if one is starred."""
        self.starred = next(
            (name for name, parameter in self.parameters.items() if parameter.kind is parameter.VAR_POSITIONAL), None
        )
        if self.starred is not None:
            self.most_positional = math.inf
        self.named_are_optional = all(
            parameter.default is None for parameter in self.parameters.values() if parameter.kind is KEYWORD_ONLY
        )
        """Whether None is the default of each keyword-only parameter."""

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Bind a call.

        Args:
            args: positional arguments.
            kwargs: keyword arguments, by the parameter's own name or a framework's name for it.

        Returns:
            the value of every parameter by name, defaults included.

        Raises:
            TypeError: the call does not match the signature.
        """
        if not kwargs.keys() <= self.parameters.keys():
            own = self.parameters
            kwargs = {name if name in own else ALIASES.get(name, name): value for name, value in kwargs.items()}
        if self.starred is None:
            values = self._bind_fast(args, kwargs)
            if values is not None:
                return values
        if self.starred is not None and self.starred in kwargs:
            rest = {name: value for name, value in kwargs.items() if name != self.starred}
            bound = self.signature.bind(*args, *kwargs[self.starred], **rest)
        else:
            bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = dict(bound.arguments)
        if self.starred is not None:
            values[self.starred] = _one_sequence(values[self.starred])
        return values

    def _bind_fast(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Bind a call to a signature without a starred parameter, or return None if it does not match.

        ``inspect`` does the same but takes ten times as long; it is used for the error messages.
        """
        values = {**self._defaults, **dict(zip(self._positional, args, strict=False)), **kwargs}
        if not kwargs and self._least <= len(args) <= len(self._positional):
            return values
        fits = len(args) <= len(self._positional) and len(values) == len(self._defaults)
        if not fits or (kwargs and not kwargs.keys().isdisjoint(self._positional[: len(args)])):
            return None
        return None if any(values[name] is EMPTY for name in self._required) else values


def _one_sequence(value: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(value) == 1 and isinstance(value[0], (list, tuple)):
        return tuple(value[0])
    return value


@cache
def binder(text: str) -> Binder:
    """Return the (cached) binder of the signature ``text``."""
    return Binder(text)


register("signatures", binder)


def _parse(text: str) -> inspect.Signature:
    arguments = ast.parse(f"def f({text}): pass").body[0].args  # type: ignore[attr-defined] # it is a function
    kinds = inspect.Parameter
    parameters = []
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [EMPTY] * (len(plain) - len(arguments.defaults)) + [
        ast.literal_eval(node) for node in arguments.defaults
    ]
    for argument, default in zip(plain, defaults, strict=True):
        parameters.append(kinds(argument.arg, kinds.POSITIONAL_OR_KEYWORD, default=default))
    if arguments.vararg is not None:
        parameters.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        default = EMPTY if value is None else ast.literal_eval(value)
        parameters.append(kinds(argument.arg, kinds.KEYWORD_ONLY, default=default))
    return inspect.Signature(parameters)


class KeywordCall:
    """A framework's function that takes canonical keyword arguments.

    Args:
        function: the function.
        signature: its parameters in canonical names.
    """

    def __init__(self, function: Callable[..., Any], signature: str) -> None:
        parameters = binder(signature).parameters.values()
        self.function = function
        self.positional = tuple(parameter.name for parameter in parameters if parameter.kind is not KEYWORD_ONLY)
        self.named = tuple(parameter.name for parameter in parameters if parameter.kind is KEYWORD_ONLY)

    def __call__(self, **arguments: Any) -> Any:
        """Call the function."""
        return self.function(
            *[arguments[name] for name in self.positional], **{name: arguments[name] for name in self.named}
        )


ENTRIES: Owners[OpEntry] = Owners()
"""Every entry with its cached plans; the dispatcher sets the limit."""


class OpEntry:
    """The dispatch entry of one framework function, which is one spelling of an operator.

    Attributes:
        name: name of the function, as messages show it.
        func: the framework function; called on local tensors when ``canonical`` is False.
        binder: its parameters in canonical names.
        rule: the operator's rule.
        local: the canonical local implementation.
        canonical: always call ``local``, because ``func`` cannot run on local tensors.
        in_place: the first operand is written and returned.
        composed: for a decomposition: the function that runs instead of a plan.
        direct: for a decomposition: the entry of those calls that are planned as one operator, if there are any.
        unless: for a ``direct`` entry: a function of the bound arguments that returns True if ``composed_as`` must run
            the call instead. It may read values in the cache key, and arguments that the rule does not have.
        composed_as: for a ``direct`` entry: the decomposition.
        by_dtype: the key includes the operands' dtypes; "partial": only if an operand is partial.
        loose: scalar types whose value is not part of the cache key.
        cache: executors by key.
    """

    __slots__ = (
        "__weakref__",
        "binder",
        "by_dtype",
        "cache",
        "canonical",
        "composed",
        "composed_as",
        "direct",
        "func",
        "in_place",
        "local",
        "loose",
        "name",
        "rule",
        "unless",
    )

    def __init__(
        self,
        name: str,
        func: Callable[..., Any],
        binder: Binder,
        rule: Rule | Decomposition,
        local: Callable[..., Any],
        *,
        canonical: bool = False,
        in_place: bool = False,
    ) -> None:
        """Create the entry with an empty cache; the arguments are the attributes."""
        self.name, self.func, self.binder, self.rule, self.local = name, func, binder, rule, local
        self.canonical, self.in_place = canonical, in_place
        self.composed = rule.run if isinstance(rule, Decomposition) else None
        self.by_dtype = rule.by_dtype if isinstance(rule, Rule) else False
        self.loose = _SCALARS if isinstance(rule, Rule) and not rule.by_value else _NO_TYPES
        self.cache: dict[Any, Run] = {}
        ENTRIES.add(self)
        self.direct: OpEntry | None = None
        self.unless: Callable[[dict[str, Any]], bool] | None = None
        self.composed_as: Callable[..., Any] = func

    def plan_directly(self, rule: Rule, local: Callable[..., Any], unless: Callable[[dict[str, Any]], bool]) -> None:
        """Plan calls of this decomposition by ``rule``, running the entry's own function on local tensors.

        Args:
            rule: the rule for calls that are one operator.
            local: that operator's canonical local implementation.
            unless: see the attribute.
        """
        direct = OpEntry(self.name, self.func, self.binder, rule, local)
        direct.loose = _NO_TYPES  # its key includes every value, since ``unless`` may read it
        direct.unless, direct.composed_as = unless, self.composed  # type: ignore[assignment] # it is a decomposition
        self.direct = direct

    def target(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the argument that an in-place call writes to: the first parameter, by position or keyword."""
        return args[0] if args else next(iter(self.binder.bind(args, kwargs).values()))
