"""Gives each simulated rank its own copies of the user's modules: ``__main__`` and what it imports from the project.

Module-level state belongs to one rank (for example, a process group created at import), so thread ranks must not share
it. Installed packages, the standard library, and modules imported before the simulation stay shared.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib import _bootstrap
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hyper_parallel.transport.base import HostOps
from hyper_parallel.transport.installed import FRAMEWORKS, is_installed

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["PROGRAM_MODULE", "OwnModules", "forget_own_modules"]

PROGRAM_MODULE = "__program__"
"""Module name of a user's file that is neither imported by name nor run as ``__main__``."""

_LIBRARY = str(Path(__file__).resolve().parents[2]) + os.sep
_LOCKS: dict[str, Any] = vars(_bootstrap)["_module_locks"]  # several ranks may be importing at the same time


class OwnModules:
    """:class:`HostOps` that also saves and restores the user's modules when the baton passes.

    Use it as a context manager around the simulation; inside, it records the user's modules.

    Args:
        ops: host operations of the framework.
    """

    def __init__(self, ops: HostOps) -> None:
        self._ops = ops
        self._names = {"__main__", PROGRAM_MODULE}
        self._searching = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def __enter__(self) -> Self:
        """Start watching imports."""
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *error: object) -> None:
        """Stop watching imports."""
        sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        """Find a module by the other finders, and record it if it is the user's."""
        if getattr(self._searching, "active", False):
            return None
        self._searching.active = True
        try:
            for finder in sys.meta_path:
                spec = finder.find_spec(name, path, target) if finder is not self else None
                if spec is not None:
                    if _is_users(spec):
                        self._names.add(name)
                    return spec
        finally:
            self._searching.active = False
        return None

    def save_state(self) -> tuple[Any, dict[str, ModuleType], dict[str, Any], str]:
        """Return the framework's state, the user's modules by name, locks of imports in progress, and the folder."""
        own = {name: sys.modules[name] for name in self._names if name in sys.modules}
        locks = {name: _LOCKS[name] for name in self._names if name in _LOCKS}
        return self._ops.save_state(), own, locks, os.getcwd()  # noqa: PTH109 - on every hand-over

    def restore_state(
        self,
        state: tuple[Any, dict[str, ModuleType], dict[str, Any], str],
        now: tuple[Any, dict[str, ModuleType], dict[str, Any], str] | None = None,
    ) -> None:
        """Restore the state that :meth:`save_state` returned."""
        inner, own, locks, folder = state
        self._ops.restore_state(inner, None if now is None else now[0])
        for values, current in ((own, sys.modules), (locks, _LOCKS)):
            for name in self._names:
                if name in values:
                    current[name] = values[name]
                else:
                    current.pop(name, None)
        if os.getcwd() != folder:  # noqa: PTH109 - on every hand-over
            os.chdir(folder)


@contextlib.contextmanager
def forget_own_modules() -> Iterator[None]:
    """Remove the user's modules that were imported inside, since the process may serve another rank later."""
    before = dict(sys.modules)
    try:
        yield
    finally:
        for name, module in list(sys.modules.items()):
            spec = getattr(module, "__spec__", None)
            own = name in ("__main__", PROGRAM_MODULE) or (spec is not None and _is_users(spec))
            if own and before.get(name) is not module:
                del sys.modules[name]
        sys.modules.update({name: before[name] for name in ("__main__",) if name in before})


def _is_users(spec: importlib.machinery.ModuleSpec) -> bool:
    """Return whether a module is outside of the installed packages, the standard library and this library."""
    if spec.name.partition(".")[0] in FRAMEWORKS:
        return False
    places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
    return any(
        not is_installed(place) and not str(Path(place).resolve()).startswith(_LIBRARY) for place in places if place
    )
