"""Calls a function once a module has been imported: for modules of PyTorch that take too long to import beforehand."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["after_import"]

_Action = Callable[[ModuleType], None]


class _Finder(MetaPathFinder):
    """Finds a module as usual, with a loader that calls ``action`` when the module has run.

    Args:
        name: full name of the module.
        action: called with the module, once.
    """

    def __init__(self, name: str, action: _Action) -> None:
        self.name, self.action = name, action
        self._finding = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the usual spec of the one module; None for any other."""
        del path, target
        if fullname != self.name or self._finding:
            return None
        self._finding = True
        try:
            spec = find_spec(fullname)
        finally:
            self._finding = False
        loader: Any = getattr(spec, "loader", None)
        if loader is not None:
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                sys.meta_path.remove(self)
                self.action(module)

            loader.exec_module = exec_module
        return spec


def after_import(name: str, action: _Action) -> None:
    """Call ``action`` with the module ``name``: now if it is imported, else as soon as it is.

    Args:
        name: full name of the module.
        action: takes the module.
    """
    module = sys.modules.get(name)
    if module is not None:
        action(module)
    else:
        sys.meta_path.insert(0, _Finder(name, action))
