"""SPEC and PLAN: finding a function by ``package.module:function`` or ``path/file.py:function``."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hyper_parallel.verify.blame import called, own_line, said
from hyper_parallel.verify.model_case import InputError

__all__ = ["maker", "resolve"]


def resolve(spec: str, what: str) -> Callable[..., Any]:
    """The function that ``spec`` names.

    Args:
        spec: ``package.module:function`` (the current folder counts) or ``path/file.py:function``.
        what: ``SPEC`` or ``PLAN``, for messages.

    Raises:
        InputError: (a ValueError) it is malformed, the module or file does not import, or holds no such function.
    """
    where, _, name = spec.rpartition(":")
    if not where or not name.isidentifier():
        msg = f"{what} {spec!r} must look like package.module:function or path/file.py:function"
        raise InputError(msg)
    module = _file(where, what) if where.endswith(".py") else _module(where, what)
    found = getattr(module, name, None)
    if not callable(found):
        functions = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        msg = f"{what} {spec!r}: {where} has no function {name!r}; it has {', '.join(functions) or 'none'}"
        raise InputError(msg)
    return found  # type: ignore[no-any-return] # callable, checked above


def maker(given: str | Callable[..., Any], what: str) -> Callable[..., Any]:
    """A function that finds the named one where it runs, on a rank, and tells what it raises as an InputError."""
    return functools.partial(_call, given, what)


def _call(given: str | Callable[..., Any], what: str, *args: Any) -> Any:
    return called(what, resolve(given, what) if isinstance(given, str) else given, *args)


def _module(name: str, what: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise _failed(what, name, error) from error


def _file(name: str, what: str) -> Any:
    path = Path(name).resolve()
    if not path.is_file():
        msg = f"{what}: there is no file {path}"
        raise InputError(msg)
    # One module per file, however often it is named; the digest keeps equal file names apart.
    alias = f"_hyper_parallel_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if alias in sys.modules:
        return sys.modules[alias]
    spec: Any = importlib.util.spec_from_file_location(alias, path)  # a file that ends in .py has one
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = module
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[alias]
        raise _failed(what, str(path), error) from error
    return module


def _failed(what: str, name: str, error: BaseException) -> InputError:
    return InputError(f"{what}: cannot import {name}: {said(error)}{own_line(error)}")
