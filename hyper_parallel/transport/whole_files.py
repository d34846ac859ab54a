"""Writes files that are whole or not there: under another name first, then in the place of the earlier one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, text: str) -> None:
    """Write a text file as UTF-8, so that no reader, and no full disk or killed process, meets half of it.

    A path that is no plain file, such as ``/dev/stdout`` or a link, is written to directly.

    Args:
        path: of the file, in a folder that exists.
        text: all of it.

    Raises:
        OSError: it cannot be written; the earlier file, if any, is as it was, and no part is left.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_text(text, encoding="utf-8")
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
