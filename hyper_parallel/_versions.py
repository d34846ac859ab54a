"""Looks up private names of a framework when they are first imported; a missing name disables only its own feature.

Version numbers are never compared, because a nightly build may have names of either version. The tables are
``platform/torch/versions/`` and ``platform/mindspore/versions/``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from hyper_parallel.errors import UnsupportedOnBackend

__all__ = ["Missing", "Names", "Wanted", "named"]

_NOTHING = object()


@dataclass(frozen=True)
class Wanted:
    """A private name of a framework that this library uses.

    Attributes:
        paths: dotted paths of the name in different versions; the first one that exists is used.
        feature: the feature that does not work without the name.
        versions: versions that have the name; by default the tested versions.
        otherwise: replacement for versions that neither have the name nor need it.
    """

    paths: tuple[str, ...]
    feature: str
    versions: str = ""
    otherwise: Any = _NOTHING


class Missing:
    """Placeholder for a name that the installed version lacks; every use of it raises an error."""

    def __init__(self, message: str) -> None:
        self.message = message

    def refuse(self) -> NoReturn:
        """Raise the error.

        Raises:
            UnsupportedOnBackend: (a NotImplementedError) always.
        """
        raise UnsupportedOnBackend(self.message)

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raise the error."""
        self.refuse()

    def __mro_entries__(self, _bases: tuple[Any, ...]) -> tuple[type, ...]:
        """Let a class derive from the missing class: such a class can be defined, but its use raises the error."""
        return (type("Missing", (), {"__new__": self, "apply": self}),)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse()


class Names:
    """The names of one framework; each is looked up once, when a module first imports it.

    Args:
        framework: name of the framework in messages.
        package: top-level module of the framework.
        wanted: the private names, by their names in this library.
        tested: the versions that are tested.
    """

    def __init__(self, framework: str, package: str, wanted: Mapping[str, Wanted], tested: Sequence[str] = ()) -> None:
        self._framework = framework
        self._package = package
        self._wanted = wanted
        self._tested = tested
        self._found: dict[str, Any] = {}

    def find(self, name: str) -> Any:
        """Return the object, or a :class:`Missing`.

        Raises:
            AttributeError: the table has no such name.
        """
        if name not in self._wanted:
            msg = f"the table of {self._framework}'s private names has no {name!r}"
            raise AttributeError(msg)
        if name not in self._found:
            self._found[name] = self._ask(self._wanted[name])
        return self._found[name]

    def missing(self) -> list[str]:
        """Look up every name, and return a sentence on each feature that the installed version does not support."""
        found = [self.find(name) for name in self._wanted]
        return [value.message for value in found if isinstance(value, Missing)]

    def _ask(self, wanted: Wanted) -> Any:
        for path in wanted.paths:
            value = named(path)
            if value is not None:
                return value
        if wanted.otherwise is not _NOTHING:
            return wanted.otherwise
        version = importlib.import_module(self._package).__version__
        having = wanted.versions or " and ".join(self._tested)
        return Missing(
            f"{wanted.feature} needs {wanted.paths[0]}, which {self._framework} {version} does not have"
            + (f"; it is in {self._framework} {having}" if having else "")
        )


def named(path: str) -> Any:
    """Return the object at a dotted path, starting from the innermost module; None if there is none."""
    parts = path.split(".")
    for depth in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:depth]))
        except ImportError:
            continue
        for part in parts[depth:]:
            value = getattr(value, part, None)
        return value
    return None
