"""Pickles functions, arguments and results for other processes.

Functions and classes of modules that the other process may not import identically (``__main__``, test modules,
notebooks) are pickled by value; those of installed packages and of this library by reference.
"""

from __future__ import annotations

import functools
import importlib.machinery
import io
import pickle
import sys
import threading
from collections import ChainMap
from collections.abc import Callable, Sequence
from types import CodeType, ModuleType
from typing import Any, ClassVar

import cloudpickle

from hyper_parallel._caches import register
from hyper_parallel.errors import ArgumentTypeError
from hyper_parallel.transport.installed import is_installed

__all__ = ["pack", "pack_back", "pack_error", "unpack"]

_ADVICE = "create the object on the ranks, inside the function"
_LOCK = threading.Lock()


def pack(obj: Any, owner: Callable[..., Any] | None = None) -> bytes:
    """Pickle ``obj``; the module of ``owner`` and every module that cannot be found by name are pickled by value.

    Raises:
        ArgumentTypeError: ``obj`` refers to a value that cannot be pickled.
    """
    while isinstance(owner, functools.partial):
        owner = owner.func
    with _LOCK:
        chosen = [module for module in list(sys.modules.values()) if _by_value(module, owner)]
        registered = [module for module in chosen if module.__name__ not in cloudpickle.list_registry_pickle_by_value()]
        for module in registered:
            cloudpickle.register_pickle_by_value(module)
        try:
            return _dumps(obj)
        except (TypeError, pickle.PicklingError) as error:
            msg = f"a function or argument of the ranks cannot be copied to their processes: {error}; {_ADVICE}"
            raise ArgumentTypeError(msg) from error
        finally:
            for module in registered:
                cloudpickle.unregister_pickle_by_value(module)


def pack_back(obj: Any) -> bytes:
    """Pickle a result; functions and classes that this process received by value are sent back by value."""
    return _dumps(obj)


def unpack(packed: bytes) -> Any:
    """The object that :func:`pack` wrote."""
    return pickle.loads(packed)  # noqa: S301 - written by this very program in its other process


def pack_error(error: BaseException) -> bytes:
    """Pickle an exception; if it cannot be pickled, pickle a RuntimeError with its type and text."""
    bare = error.with_traceback(None)
    bare.__cause__ = bare.__context__ = None
    try:
        packed = pack_back(bare)
        unpack(packed)
    except Exception:  # noqa: BLE001 - whatever its pickling raises, the text must get through
        return pack_back(RuntimeError(f"{type(error).__name__}: {error}"))
    return packed


def _reduce_code(code: CodeType) -> tuple[Callable[..., CodeType], tuple[Any, ...]]:
    """Return how to rebuild a code object with its file's name, which cloudpickle omits from 3.1.3 on."""
    make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _make_code, (make, arguments, code.co_filename)


def _make_code(make: Callable[..., CodeType], arguments: tuple[Any, ...], file: str) -> CodeType:
    return make(*arguments).replace(co_filename=file)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # it has no types
    """cloudpickle's pickler, but functions keep their file names, which tracebacks and call sites of ranks contain."""

    dispatch_table: ClassVar = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)


def _dumps(obj: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(obj)
    return buffer.getvalue()


def _by_value(module: ModuleType, owner: Callable[..., Any] | None) -> bool:
    path = getattr(module, "__file__", None)
    name = getattr(module, "__name__", "")
    if not isinstance(path, str) or not path.endswith(".py") or sys.modules.get(name) is not module:
        return False
    if name.split(".")[0] in ("hyper_parallel", "__main__", "__mp_main__") or is_installed(path):
        return False
    return name == getattr(owner, "__module__", None) or not _findable(name, path, tuple(sys.path))


@functools.lru_cache(maxsize=4096)
def _findable(name: str, path: str, search: tuple[str, ...]) -> bool:
    """Whether importing ``name`` in a fresh process with ``sys.path`` = ``search`` finds ``path``.

    The top-level package and each subpackage are looked up again. A package in ``sys.modules`` is not a proof, since
    test runners and notebooks put packages there that are not on any search path.
    """
    parts = name.split(".")
    where: Sequence[str] = search
    origin = None
    for depth in range(1, len(parts) + 1):
        try:
            spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:depth]), where)
        except (ImportError, ValueError):
            return False
        if spec is None:
            return False
        where, origin = list(spec.submodule_search_locations or ()), spec.origin
    return origin == path


register("modules that are found", _findable)
