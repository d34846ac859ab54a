"""Imported by a fork server to import the packages of a program, so that its ranks start with them.

A package that reads its rank during import must not be imported here, because there is no rank.
"""

from __future__ import annotations

import os
import sys
from typing import Any

__all__ = ["ASKED", "VARIABLE"]

VARIABLE = "HYPER_PARALLEL_WARM_PACKAGES"
"""Environment variable with the comma-separated names."""

_RANK = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"})

ASKED: list[str] = []
"""Packages that read their rank during import."""


class _Noting(os._Environ):  # type: ignore[type-arg]  # noqa: SLF001 - the type of os.environ
    """An environment that records reads of the rank."""

    asked = False

    def __getitem__(self, key: Any) -> Any:
        """Return the value of a variable."""
        if key in _RANK:
            _Noting.asked = True
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        """Whether a variable is set."""
        if key in _RANK:
            _Noting.asked = True
        return super().__contains__(key)


def _import_all(names: list[str]) -> None:
    plain = os.environ.__class__
    os.environ.__class__ = _Noting
    try:
        for name in names:
            _Noting.asked = False
            known = set(sys.modules)
            try:
                _import(name)
            except Exception:  # noqa: BLE001 - the program's import will raise it again
                _forget(name.partition(".")[0], known)
            if _Noting.asked:
                ASKED.append(name.partition(".")[0])
    finally:
        os.environ.__class__ = plain


def _forget(package: str, known: set[str]) -> None:
    """Remove submodules of a package whose import failed, because they would break its next import."""
    for name in set(sys.modules) - known:
        if name.partition(".")[0] == package:
            del sys.modules[name]


def _import(name: str) -> None:
    """Import a module, or look up a name in one, which triggers lazy imports."""
    top, *rest = name.split(".")
    path, found = top, __import__(top)
    for part in rest:
        path = f"{path}.{part}"
        if not hasattr(found, part):
            __import__(path)
        found = getattr(found, part)


_import_all([name for name in os.environ.pop(VARIABLE, "").split(",") if name and name not in sys.modules])
