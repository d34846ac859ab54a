"""Atomic writes: a temporary file is written first and then replaces the file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["atomic_write_all", "atomic_write_text"]


def atomic_write_text(path: Path, text: str) -> None:
    """Write a text file as UTF-8, atomically: no reader finds half of it, even after a full disk or a killed process.

    A path that is not a plain file, such as ``/dev/stdout`` or a link, is written to directly.

    Args:
        path: path of the file, in a folder that exists.
        text: the complete text.

    Raises:
        OSError: the file cannot be written; the error names it. An earlier file, if any, is unchanged, and no partial
            file is left.
    """
    atomic_write_all({path: text})


def atomic_write_all(texts: Mapping[Path, str]) -> None:
    """Write several files as :func:`atomic_write_text` does; none is replaced before all new ones are on the disk.

    Args:
        texts: the text for each path.

    Raises:
        OSError: a file cannot be written; the error names it. All earlier files are unchanged, and no partial file is
            left.
    """
    partials = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in texts if _is_plain(path)}
    try:
        for path, partial in partials.items():
            _write(path, partial, texts[path])
        for path in texts:
            if path not in partials:
                _write(path, path, texts[path])
        for path, partial in partials.items():
            partial.replace(path)
    except BaseException:
        for partial in partials.values():
            with contextlib.suppress(OSError):
                partial.unlink()
        raise


def _is_plain(path: Path) -> bool:
    return not path.is_symlink() and (path.is_file() or not path.exists())


def _write(path: Path, to: Path, text: str) -> None:
    """Write the text of ``path`` to a file. An error names ``path``; the system's error for a full disk does not."""
    try:
        with to.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if to != path:
                os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(path)
        raise
