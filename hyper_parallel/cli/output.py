"""Checks of output paths before a command starts its work."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["can_be_written"]


def can_be_written(option: str, path_text: str | None, *, folder: bool = False) -> None:
    """Check that a report can be written before minutes of work; missing folders are created.

    Args:
        option: option that names the file, for the message.
        path_text: path of the file, or None if none is written.
        folder: the path is a folder for several files.

    Raises:
        ValueError: the file or its folder cannot be written.
    """
    if path_text is None:
        return
    path = Path(path_text)
    problem = "is a folder" if path.is_dir() and not folder else ""
    try:
        (path if folder else path.parent).mkdir(parents=True, exist_ok=True)
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            problem = "Permission denied"
    except OSError as error:
        problem = error.strerror or type(error).__name__
    if problem:
        msg = f"{option} {path_text} cannot be written: {problem}"
        raise ValueError(msg)
