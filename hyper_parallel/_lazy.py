"""Public names that are imported when first used: what keeps ``import hyper_parallel`` fast and free of frameworks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["lazy"]


def lazy(
    namespace: dict[str, Any], homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package.

    Args:
        namespace: ``globals()`` of the package.
        homes: module to the public names that live there. ``__all__`` and the imports under ``TYPE_CHECKING`` repeat
            them, because type checkers read those as text.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def find(name: str) -> Any:
        """Import the home of a public name when it is first asked for."""
        home = home_of.get(name)
        if home is None:
            msg = f"module {namespace['__name__']!r} has no attribute {name!r}"
            raise AttributeError(msg)
        value = namespace[name] = getattr(importlib.import_module(home), name)
        return value

    def names() -> list[str]:
        """Public names, imported or not."""
        return sorted({*namespace, *home_of})

    return find, names
