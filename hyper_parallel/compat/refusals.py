"""Names that other programs import, and that raise when they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from hyper_parallel.errors import UnsupportedOnBackend

__all__ = ["refused_class", "refused_function"]


def refused_class(name: str, reason: str) -> type[Any]:
    """Return a class that can be named and subclassed, and that raises when an object of it is made.

    Args:
        name: of the class.
        reason: why there is none, and what to use instead.
    """

    def init(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        del self, args, kwargs
        raise UnsupportedOnBackend(f"{name}: {reason}")

    return type(name, (), {"__doc__": f"Refused: {reason}.", "__init__": init, "__module__": __name__})


def refused_function(name: str, reason: str) -> Callable[..., NoReturn]:
    """Return a function that raises when it is called. Arguments as for :func:`refused_class`."""

    def call(*args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        raise UnsupportedOnBackend(f"{name}: {reason}")

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"Refused: {reason}."
    return call
