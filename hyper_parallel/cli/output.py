"""Files that a command writes at its end."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["can_be_written"]


def can_be_written(option: str, given: str | None, *, folder: bool = False) -> None:
    """Look before minutes of work whether their report will have a place; folders are made.

    Args:
        option: that named the file.
        given: its path, or None where it was not asked for.
        folder: it is a folder, for several files.

    Raises:
        ValueError: the file, or the folder that it goes into, cannot be written.
    """
    if given is None:
        return
    path = Path(given)
    problem = "is a folder" if path.is_dir() and not folder else ""
    try:
        (path if folder else path.parent).mkdir(parents=True, exist_ok=True)
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            problem = "Permission denied"
    except OSError as error:
        problem = error.strerror or type(error).__name__
    if problem:
        msg = f"{option} {given} cannot be written: {problem}"
        raise ValueError(msg)
