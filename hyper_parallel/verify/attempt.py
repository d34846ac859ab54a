"""Calls a function and returns an exception of any type as its result: operators reject input in different ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

__all__ = ["Raised", "attempt"]

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Raised:
    """A call that ended with an exception.

    Attributes:
        error: the exception.
    """

    error: Exception

    def __str__(self) -> str:
        """Return the type and the message."""
        return f"{type(self.error).__name__}: {self.error}"


def attempt(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | Raised:
    """Return the result of ``fn(*args, **kwargs)``, or the exception that it raises."""
    try:
        return fn(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - an exception of any type is a result of the call
        return Raised(error)
