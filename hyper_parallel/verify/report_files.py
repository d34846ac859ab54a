"""Files that a run leaves: one way to write them, and one error when that is impossible."""

from __future__ import annotations

from pathlib import Path

__all__ = ["write_text"]


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
