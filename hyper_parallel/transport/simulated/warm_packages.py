"""A fork server imports this module, which imports the packages of a program, so that its ranks start with them.

A package that reads its rank during import must not be imported here, because there is no rank. The modules that it
imports from other packages may be imported here; they take most of the time.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["ASKED", "VARIABLE"]

VARIABLE = "HYPER_PARALLEL_WARM_PACKAGES"
"""Environment variable with the comma-separated names."""

_RANK = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"})

ASKED: dict[str, list[str]] = {}
"""Packages that read their rank during import, each with the modules that it imports from other packages."""


class _Noting(os._Environ):  # type: ignore[type-arg]  # noqa: SLF001 - the type of os.environ
    """An environment that records the packages in which the rank is read."""

    asking: set[str]

    def __getitem__(self, key: Any) -> Any:
        """Return the value of a variable."""
        if key in _RANK:
            _Noting.asking |= set(_packages())
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        """Whether a variable is set."""
        if key in _RANK:
            _Noting.asking |= set(_packages())
        return super().__contains__(key)


class _Importers:
    """A finder that finds nothing, and records which package imports which module."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Record the import of a module that is not imported yet."""
        del path, target
        self.found.append((next(iter(_packages()), ""), name))
        return None


def _packages() -> list[str]:
    """Return the packages that are being imported, and before them those whose functions the innermost one calls."""
    names: list[str] = []
    frame, imports = inspect.currentframe(), False
    while frame is not None and frame.f_globals is globals():  # this function and its caller
        frame = frame.f_back
    while frame is not None and frame.f_globals is not globals():
        name = _package(frame.f_globals.get("__name__") or "")
        imports = imports or name == "importlib"  # what a module reads during import, its importer does not read
        if name not in sys.stdlib_module_names and (not imports or frame.f_code.co_name == "<module>"):
            names.append(name)
        frame = frame.f_back
    return names


def _package(module: str) -> str:
    return module.partition(".")[0]


def _import_all(names: list[str]) -> None:
    plain, before = os.environ.__class__, {_package(name) for name in sys.modules}
    importers = _Importers()
    os.environ.__class__ = _Noting
    sys.meta_path.insert(0, importers)
    try:
        for name in names:
            _Noting.asking = set()
            known = set(sys.modules)
            try:
                _import(name)
            except Exception:  # noqa: BLE001 - the program's import will raise it again
                _forget(_package(name), known)
            if _Noting.asking:
                for package in {_package(name), *(_Noting.asking - before)}:
                    ASKED.setdefault(package, [])
    finally:
        sys.meta_path.remove(importers)
        os.environ.__class__ = plain
    asked_by = ((name, _package(name)) for importer, name in importers.found if importer in ASKED)
    modules = [name for name, package in asked_by if package not in ASKED and _is_imported(name)]
    ASKED.update(dict.fromkeys(ASKED, modules))


def _is_imported(module: str) -> bool:
    return module in sys.modules and _package(module) not in sys.stdlib_module_names


def _forget(package: str, known: set[str]) -> None:
    """Remove submodules of a package whose import failed, because they would break its next import."""
    for name in set(sys.modules) - known:
        if _package(name) == package:
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
