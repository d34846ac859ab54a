"""Files that a run leaves: one way to write them, and one error when that is impossible."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

__all__ = ["other_version", "read_json", "write_text"]


def write_text(path: Path | str, text: str, option: str = "") -> Path:
    """Write a text file as UTF-8, and the folders that it goes into.

    Args:
        path: the file.
        text: all of it.
        option: of the command line, that named the file; it starts the message.

    Raises:
        ValueError: it cannot be written.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        msg = f"{option} {path} cannot be written: {error.strerror}".lstrip()
        raise ValueError(msg) from error
    return path


def read_json(path: Path, needed: Collection[str], command: str) -> dict[str, Any]:
    """A JSON object that has at least the keys ``needed``.

    Args:
        path: of the file.
        needed: keys.
        command: what writes such a file.

    Raises:
        ValueError: it cannot be read, or another version wrote it.
    """
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        msg = f"{path} is no report of `{command}`: {error}"
        raise ValueError(msg) from error
    missing = [name for name in needed if not isinstance(found, dict) or name not in found]
    if missing:
        raise ValueError(other_version(path, missing, command))
    read: dict[str, Any] = found
    return read


def other_version(path: Path, missing: Collection[str], command: str) -> str:
    """What to say of a file that lacks something."""
    return f"{path} has no {', '.join(missing)}: another version wrote it; run `{command}` again"
