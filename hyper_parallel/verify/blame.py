"""What the user's own functions raise, told as the user's own mistake: what, and where in the user's code."""

from __future__ import annotations

import contextlib
import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hyper_parallel
from hyper_parallel.errors import PlanError
from hyper_parallel.verify.model_case import InputError

__all__ = ["called", "own_line", "said", "told"]

_LIBRARY = Path(hyper_parallel.__file__).resolve().parent
_INSTALLED = tuple({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")})


@contextlib.contextmanager
def told(what: str, *passing: type[Exception]) -> Iterator[None]:
    """Exceptions inside become an :class:`InputError` that says ``what`` raised them, and in which line.

    What says it all by itself passes, and so does the end of memory.

    Args:
        what: runs inside.
        passing: further exceptions that pass.
    """
    speaking: tuple[type[Exception], ...] = (InputError, PlanError, MemoryError, *passing)
    try:
        yield
    except speaking:
        raise
    except (Exception, SystemExit) as error:
        msg = f"{what} raised {said(error)}{own_line(error) or _outermost(error)}"
        raise InputError(msg) from error


def called(what: str, function: Callable[..., Any], *args: Any) -> Any:
    """What a function of the user's returns for ``args``.

    Raises:
        InputError: it raises, or does not take ``args``.
    """
    try:
        inspect.signature(function).bind(*args)
    except TypeError as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        given = ", ".join(type(one).__name__ for one in args) or "no argument"
        msg = f"{what}: {name}{inspect.signature(function)} is called with {given}: {error}"
        raise InputError(msg) from None
    except ValueError:
        pass  # written in C: it says itself what it takes
    with told(what):
        return function(*args)


def said(error: BaseException) -> str:
    """The exception in one line: its type, and the first line of what it says."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def own_line(error: BaseException) -> str:
    """The innermost line of the user's own code that the exception passed, as a line of text; nothing without one."""
    own = [one for one in _theirs(error) if not any(_in(one.filename, folder) for folder in _INSTALLED)]
    return _shown(own[-1]) if own else ""


def _outermost(error: BaseException) -> str:
    """The outermost line that is not this library's."""
    theirs = _theirs(error)
    return _shown(theirs[0]) if theirs else ""


def _theirs(error: BaseException) -> list[traceback.FrameSummary]:
    return [one for one in traceback.extract_tb(error.__traceback__) if not _in(one.filename, _LIBRARY)]


def _shown(frame: traceback.FrameSummary) -> str:
    return f"\n  {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}"


def _in(filename: str, folder: Path) -> bool:
    return filename.startswith("<") or Path(filename).resolve().is_relative_to(folder)
