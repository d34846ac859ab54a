"""Finds and calls the user's SPEC and PLAN functions, and reports their errors as input errors."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hyper_parallel
from hyper_parallel._text import an_object, near_hint, shortened
from hyper_parallel.errors import PlanError
from hyper_parallel.transport.installed import is_installed
from hyper_parallel.verify.input_error import InputError

__all__ = [
    "blame_user",
    "call_user_function",
    "error_summary",
    "find_function",
    "from_user_frames",
    "type_name",
    "user_file",
    "user_function",
    "user_line",
]

_LIBRARY = Path(hyper_parallel.__file__).resolve().parent

_FILE_MODULE = "_hyper_parallel_"
"""Prefix of the names of modules that are loaded from users' files."""

_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(.+)", line \d+')

# -- finding -----------------------------------------------------------------------------------------------------------


def find_function(spec: str, source: str) -> Callable[..., Any]:
    """Return the function that ``spec`` names.

    Args:
        spec: ``package.module:function`` (modules in the current folder included) or ``path/file.py:function``.
        source: ``SPEC`` or ``PLAN``, for messages.

    Raises:
        InputError: (a ValueError) ``spec`` is malformed, or its module or file cannot be imported or has no such
            function.
    """
    module_name, _, name = spec.rpartition(":")
    if not (_is_module(module_name) and name.isidentifier()):
        msg = f"{source} {spec!r} must look like package.module:function or path/file.py:function"
        raise InputError(msg)
    if module_name.endswith(".ipynb"):
        msg = (
            f"{source} {spec!r}: {module_name} is a notebook; save its cells as a script "
            "(jupyter nbconvert --to script), or call hyper_parallel.verify.verify_model in a cell"
        )
        raise InputError(msg)
    if not module_name.endswith(".py") and "." in module_name and Path(module_name).is_file():
        msg = f"{source} {spec!r}: {module_name} is not a Python file: its name does not end in .py"
        raise InputError(msg)
    load = _load_file if module_name.endswith(".py") else _import_module
    module = load(module_name, source)
    function = getattr(module, name, None)
    if function is None:
        known = _public_functions(module)
        functions = near_hint(name, known) or (f"; it has {shortened(known)}" if known else ", nor any other")
        msg = f"{source} {spec!r}: {module_name} has no function {name!r}{functions}"
        raise InputError(msg)
    if not callable(function):
        wanted = "takes the mesh and returns the plan" if source == "PLAN" else "returns model, batches and loss"
        msg = (
            f"{source} {spec!r}: {name} is {an_object(function)}, not a function; {source} must name a function that "
            f"{wanted}"
        )
        raise InputError(msg)
    return function  # type: ignore[no-any-return] # callable, checked above


def _public_functions(module: Any) -> list[str]:
    """Return the names of a module's own functions and classes; if it has none, of those that it imported."""
    names = {key: value for key, value in vars(module).items() if callable(value) and not key.startswith("_")}
    own = [key for key, value in names.items() if getattr(value, "__module__", None) == module.__name__]
    return sorted(own or names)


def _is_module(name: str) -> bool:
    return name.endswith(".py") or all(part.isidentifier() for part in name.split("."))


def user_function(function: str | Callable[..., Any], source: str) -> Callable[..., Any]:
    """Return a function that finds and calls ``function`` on its rank.

    Args:
        function: a function, or its name as for :func:`find_function`; names are sent to other processes as text.
        source: ``SPEC`` or ``PLAN``, for messages. Exceptions become an :class:`InputError`.
    """
    return functools.partial(_find_and_call, function, source)


def _find_and_call(function: str | Callable[..., Any], source: str, *args: Any) -> Any:
    return call_user_function(source, find_function(function, source) if isinstance(function, str) else function, *args)


def _import_module(name: str, source: str) -> Any:
    current_folder = str(Path.cwd())
    if current_folder not in sys.path:
        sys.path.insert(0, current_folder)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise _import_error(source, name, error) from error


def _load_file(name: str, source: str) -> Any:
    path, is_file = user_file(name)
    if not is_file:
        msg = f"{source}: there is no file {path}"
        raise InputError(msg)
    # one module per file, independent of the notation of its path; the digest distinguishes files with equal names
    module_name = f"{_FILE_MODULE}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    module_spec: Any = importlib.util.spec_from_file_location(module_name, path)  # never None for a .py file
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise _import_error(source, str(path), error) from error
    return module


def type_name(kind: type) -> str:
    """Return the name of a type with its module, or with its file, as in ``model.py:Net``, if the user named a file."""
    module = kind.__module__
    if module.startswith(_FILE_MODULE):
        return f"{Path(str(sys.modules[module].__file__)).name}:{kind.__qualname__}"
    return f"{module}.{kind.__qualname__}"


def user_file(name: str) -> tuple[Path, bool]:
    """Return the absolute path of a file that the user named, and whether it is a file."""
    try:
        path = Path(name).resolve()
        return path, path.is_file()
    except (OSError, RuntimeError):  # a name that is not valid for files, or a cycle of links
        return Path(name).absolute(), False


def _import_error(source: str, name: str, error: BaseException) -> InputError:
    return InputError(f"{source}: cannot import {name}: {error_summary(error)}{user_line(error)}")


# -- calling -----------------------------------------------------------------------------------------------------------


def call_user_function(source: str, function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(*args)``.

    Raises:
        InputError: the function raises, or cannot be called with ``args``; the message starts with ``source``.
    """
    try:
        inspect.signature(function).bind(*args)
    except TypeError as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        given = f"{len(args)} argument{'s' * (len(args) != 1)}" if args else "no argument"
        types = f" ({', '.join(type(arg).__name__ for arg in args)})" if args else ""
        msg = f"{source}: {name}{inspect.signature(function)} is called with {given}{types}: {error}"
        raise InputError(msg) from None
    except ValueError:
        pass  # a function in C without a signature: calling it raises the error
    with blame_user(source):
        returned = function(*args)
    if inspect.iscoroutine(returned):
        returned.close()  # prevents Python's warning that it was never awaited; callers reject it by its type
    return returned


@contextlib.contextmanager
def blame_user(source: str, *unchanged: type[Exception]) -> Iterator[None]:
    """Inside this context, replace exceptions by an :class:`InputError` that names ``source`` and the user's line.

    :class:`InputError`, :class:`~hyper_parallel.errors.PlanError` and MemoryError pass unchanged.

    Args:
        source: name of the user's code that runs inside the context, such as ``SPEC``.
        unchanged: further exception types that pass unchanged.
    """
    passing: tuple[type[Exception], ...] = (InputError, PlanError, MemoryError, *unchanged)
    try:
        yield
    except passing:
        raise
    except (Exception, SystemExit) as error:
        msg = f"{source} raised {error_summary(error)}{user_line(error) or _outermost_line(error)}"
        raise InputError(msg) from error


def error_summary(error: BaseException) -> str:
    """Return an exception in one line: its type, and the first line of its message without separators and titles."""
    lines = str(error).splitlines()
    framed = [line for line in lines if line.strip("- ") and not (line.startswith("- ") and line.endswith(":"))]
    first = (framed or lines or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def from_user_frames(text: str) -> str:
    """Return a text with tracebacks starting at the first call in the user's files, with the number of omitted calls.

    A traceback without such a call is not shortened.
    """
    lines = text.splitlines()
    kept: list[str] = []
    start = 0
    while start < len(lines):
        kept.append(lines[start])
        start += 1
        if not lines[start - 1].startswith(_TRACEBACK):
            continue
        end = next((place for place in range(start, len(lines)) if not lines[place].startswith(" ")), len(lines))
        frames = [place for place in range(start, end) if _FRAME.match(lines[place])]
        own = [place for place in frames if _is_users(_FRAME.match(lines[place]))]
        if own and own[0] > start:
            kept.append(f"  ({frames.index(own[0])} calls before it are not in your files)")
            start = own[0]
    return "\n".join(kept)


def _is_users(frame: re.Match[str] | None) -> bool:
    return frame is not None and not is_installed(frame[1]) and not _in(frame[1], _LIBRARY)


def user_line(error: BaseException) -> str:
    """Return the innermost line of the user's code in the traceback, on a line of its own; empty without one."""
    own = [frame for frame in _outside_library(error) if not is_installed(frame.filename)]
    return _frame_line(own[-1]) if own else ""


def _outermost_line(error: BaseException) -> str:
    """Return the outermost line of the traceback that is not in this library, on a line of its own."""
    frames = _outside_library(error)
    return _frame_line(frames[0]) if frames else ""


def _outside_library(error: BaseException) -> list[traceback.FrameSummary]:
    return [frame for frame in traceback.extract_tb(error.__traceback__) if not _in(frame.filename, _LIBRARY)]


def _frame_line(frame: traceback.FrameSummary) -> str:
    return f"\n  {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}"


def _in(filename: str, folder: Path) -> bool:
    return filename.startswith("<") or Path(filename).resolve().is_relative_to(folder)
