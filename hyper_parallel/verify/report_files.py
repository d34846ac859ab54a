"""Reading and writing of report files, with one error for files that cannot be read or written."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import jinja2

from hyper_parallel.transport.atomic_files import atomic_write_text

__all__ = ["other_version", "parse_toml", "read_json", "read_json_rows", "reading", "write_text"]


def write_text(path: Path | str, text: str, option: str = "") -> Path:
    """Write a text file as UTF-8, and create its folders.

    Args:
        path: path of the file.
        text: the complete content.
        option: the command-line option that named the file; the error message starts with it.

    Returns:
        the path.

    Raises:
        ValueError: the file cannot be written.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, text)
    except OSError as error:
        msg = f"{option} {path} cannot be written: {error.strerror}".lstrip()
        raise ValueError(msg) from error
    return path


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text.

    Raises:
        ValueError: the text is not TOML.
    """
    # Python 3.10 has no tomllib; tomli is the same parser.
    parser = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    tables: dict[str, Any] = parser.loads(text)
    return tables


def read_json(path: Path, needed: Collection[str], command: str) -> dict[str, Any]:
    """Return the JSON object in a file, which must have the keys ``needed``.

    Args:
        path: path of the file.
        needed: required keys.
        command: command that writes such files, for messages.

    Raises:
        ValueError: the file cannot be read, or was written by a different version.
    """
    content = _load(path, command)
    _require(path, [content], needed, command)
    report: dict[str, Any] = content
    return report


def read_json_rows(path: Path, needed: Collection[str], command: str) -> list[dict[str, Any]]:
    """Return the rows of a report or of a bare list, each of which must have the keys ``needed``.

    Arguments and errors are those of :func:`read_json`.
    """
    content = _load(path, command)
    if isinstance(content, dict) and "rows" in content:
        content = content["rows"]
    if not isinstance(content, list):
        msg = f"{path} is not a report of `{command}`: it is not a list"
        raise ValueError(msg)  # noqa: TRY004 - one type for every file that cannot be read
    _require(path, content, needed, command)
    return content


def other_version(path: Path, missing: Collection[str], command: str) -> str:
    """Return the message for a file that lacks keys."""
    return f"{path} has no {', '.join(missing)}: it is not a report of `{command}`, or another version wrote it"


@contextlib.contextmanager
def reading(*paths: Path) -> Iterator[None]:
    """Inside this context, replace errors about values of the wrong kind by one error that names the files.

    Raises:
        ValueError: a report has the required keys, but with other kinds of values.
    """
    try:
        yield
    except (AttributeError, TypeError, ValueError, LookupError, ArithmeticError, jinja2.TemplateError) as error:
        if isinstance(error, ValueError) and str(error).startswith(tuple(map(str, paths))):
            raise  # the error names its file already
        names = ", ".join(map(str, paths))
        which = "a file" if len(paths) > 1 else "it"
        reason = f"{type(error).__name__}: {error}"
        msg = f"{names} cannot be shown: {which} is damaged, or another version wrote it ({reason})"
        raise ValueError(msg) from error


def _load(path: Path, command: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except IsADirectoryError as error:
        msg = f"{path} is a folder; name a file, which `{command}` writes"
        raise ValueError(msg) from error
    except OSError as error:
        msg = f"{path} cannot be read: {error.strerror or type(error).__name__}; `{command}` writes such a file"
        raise ValueError(msg) from error
    except (ValueError, RecursionError) as error:
        msg = f"{path} is not a report of `{command}`: {error}"
        raise ValueError(msg) from error


def _require(path: Path, objects: Collection[Any], needed: Collection[str], command: str) -> None:
    missing = [key for key in needed if any(not isinstance(entry, dict) or key not in entry for entry in objects)]
    if missing:
        raise ValueError(other_version(path, missing, command))
