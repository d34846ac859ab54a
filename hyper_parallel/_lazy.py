"""Public names that are imported on first use, so that ``import hyper_parallel`` is fast and imports no framework."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["lazy"]


def lazy(
    namespace: dict[str, Any], homes: Mapping[str, Sequence[str] | None]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    Args:
        namespace: ``globals()`` of the package.
        homes: module to the public names that live there, or None for every name in the module's own ``__all__``
            (then it is imported when a name is found nowhere else). The imports under ``TYPE_CHECKING`` repeat the
            names (``import X as X``, which re-exports), because type checkers read those as text. A package without
            ``__all__`` gets one at run time, of all these names.
    """
    home_of = {name: home for home, names in homes.items() for name in names or ()}
    unlisted = [home for home, names in homes.items() if names is None]

    def find(name: str) -> Any:
        """Import the module of a public name when it is first used."""
        if name not in home_of:
            list_all()
        if name == "__all__":
            value: Any = sorted(home_of)
        elif name in home_of:
            value = getattr(importlib.import_module(home_of[name]), name)
        else:
            msg = f"module {namespace['__name__']!r} has no attribute {name!r}"
            raise AttributeError(msg)
        namespace[name] = value
        return value

    def list_all() -> None:
        while unlisted:
            home = unlisted.pop()
            home_of.update(dict.fromkeys(importlib.import_module(home).__all__, home))

    def names() -> list[str]:
        """Return all public names, imported or not."""
        list_all()
        return sorted({*namespace, *home_of})

    return find, names
