"""Binding a call to canonical parameter names, from a signature written as text.

``"x, *shape"``, ``"x, dim=None, keepdim=False, *, dtype=None"``: Python's own syntax, and Python's own errors.
"""

from __future__ import annotations

import ast
import inspect
from functools import cache
from typing import Any

__all__ = ["Binder", "binder"]

EMPTY = inspect.Parameter.empty
# What both frameworks call the operands where rules say x and y.
ALIASES = {"input": "x", "self": "x", "other": "y", "A": "x", "B": "y"}


class Binder:
    """Binds positional and keyword arguments to the parameters of one signature.

    A starred parameter (``*shape``) takes one sequence or several numbers alike, as tensor methods do.
    """

    def __init__(self, text: str) -> None:
        """Parse ``text`` as the parameter list of a function."""
        self.text = text
        self.signature = _parse(text)
        self.parameters = self.signature.parameters
        self.names = tuple(self.parameters)
        self.starred = next(
            (name for name, one in self.signature.parameters.items() if one.kind is one.VAR_POSITIONAL), None
        )

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Every parameter's value by name, defaults filled in.

        Raises:
            TypeError: the call does not fit the signature.
        """
        if not kwargs.keys() <= self.parameters.keys():
            kwargs = {name if name in self.parameters else ALIASES.get(name, name): it for name, it in kwargs.items()}
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


def _one_sequence(value: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(value) == 1 and isinstance(value[0], (list, tuple)):
        return tuple(value[0])
    return value


@cache
def binder(text: str) -> Binder:
    """The binder of ``text``; one per text."""
    return Binder(text)


def _parse(text: str) -> inspect.Signature:
    arguments = ast.parse(f"def f({text}): pass").body[0].args  # type: ignore[attr-defined] # it is a function
    kinds = inspect.Parameter
    found = []
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [EMPTY] * (len(plain) - len(arguments.defaults)) + [ast.literal_eval(one) for one in arguments.defaults]
    for one, default in zip(plain, defaults, strict=True):
        found.append(kinds(one.arg, kinds.POSITIONAL_OR_KEYWORD, default=default))
    if arguments.vararg is not None:
        found.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        default = EMPTY if value is None else ast.literal_eval(value)
        found.append(kinds(one.arg, kinds.KEYWORD_ONLY, default=default))
    return inspect.Signature(found)
