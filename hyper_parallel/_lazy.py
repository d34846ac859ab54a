"""Public names that are imported on first use, so that ``import hyper_parallel`` is fast and imports no framework."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["OTHER_HOMES", "lazy_exports", "names_from_elsewhere"]

OTHER_HOMES: dict[str, dict[str, str]] = {}
"""By module that other programs import from: the names that this library defines elsewhere, each with its module.

``compat`` fills this table."""


def lazy_exports(
    namespace: dict[str, Any], modules: Mapping[str, Sequence[str] | None]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    Args:
        namespace: ``globals()`` of the package.
        modules: by module, the public names that it defines; or None for all names in its ``__all__``. A module with
            None is imported when a name is found nowhere else. The imports under ``TYPE_CHECKING`` repeat the names
            (``import X as X``, which re-exports), because type checkers do not run this function. A package without
            ``__all__`` gets one at run time, with all these names.
    """
    module_of = {name: module for module, names in modules.items() for name in names or ()}
    unlisted = [module for module, names in modules.items() if names is None]

    def find(name: str) -> Any:
        """Import the module of a public name when it is first used."""
        if name not in module_of:
            list_all()
        if name == "__all__":
            value: Any = sorted(module_of)
        elif name in module_of:
            value = getattr(importlib.import_module(module_of[name]), name)
        else:
            value = names_from_elsewhere(namespace["__name__"])(name)
        namespace[name] = value
        return value

    def list_all() -> None:
        while unlisted:
            module = unlisted.pop()
            module_of.update(dict.fromkeys(importlib.import_module(module).__all__, module))

    def names() -> list[str]:
        """Return all public names, imported or not."""
        list_all()
        return sorted({*namespace, *module_of})

    return find, names


def names_from_elsewhere(module: str) -> Callable[[str], Any]:
    """Return ``__getattr__`` of ``module``, which finds the names that :data:`OTHER_HOMES` has for it."""

    def find(name: str) -> Any:
        home = OTHER_HOMES.get(module, {}).get(name)
        if home is None:
            msg = f"module {module!r} has no attribute {name!r}"
            raise AttributeError(msg)
        return getattr(importlib.import_module(home), name)

    return find
