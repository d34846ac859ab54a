"""Records the lines that rank 0 prints or writes to text files while its program runs, with the step."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hyper_parallel.verify.frameworks.contract.record_log import RecordLog, active_log

__all__ = ["PRINTED", "WRITTEN", "noting_output", "written_lines"]

PRINTED = "printed lines"
"""Key of a rank's note with the lines that it printed, each with the number of completed optimizer steps."""

WRITTEN = "written lines"
"""Key of the note with the lines that all ranks wrote to text files, by path; the steps are not known."""

_MOST = 1 << 20
"""Largest number of characters of printed lines that are kept, and largest size of a text file that is read."""

_TEXT = (".jsonl", ".csv", ".tsv", ".log", ".txt")


@contextmanager
def noting_output(log: RecordLog) -> Iterator[None]:
    """Record the lines that the program prints inside this context, if this is rank 0. The lines are still printed.

    Args:
        log: active log of the rank.
    """
    if log.rank:
        yield
        return
    log.notes[PRINTED] = []
    with _LOCK:
        plain = {name: getattr(sys, name) for name in ("stdout", "stderr")}
        for name, stream in plain.items():
            setattr(sys, name, _Noting(stream))
    try:
        yield
    finally:
        with _LOCK:
            for name, stream in plain.items():
                setattr(sys, name, stream)


_LOCK = threading.Lock()


class _Noting:
    """A text stream whose lines are recorded in the log of the rank that writes them."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._open, self._size = stream, "", 0

    def write(self, text: str) -> int:
        """Write ``text``, and record the lines that it completes."""
        log = active_log()
        lines = None if log is None else log.notes.get(PRINTED)
        if lines is not None and log is not None and self._size < _MOST:
            self._size += len(text)
            *ended, self._open = (self._open + text).replace("\r", "\n").split("\n")
            lines += [(log.step, line) for line in ended if line.strip()]
        return int(self._stream.write(text) or 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def written_lines(folder: Path) -> dict[str, list[tuple[int, str]]]:
    """Return the lines of the text files in a folder, by path relative to the folder."""
    found: dict[str, list[tuple[int, str]]] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in _TEXT and path.is_file() and path.stat().st_size <= _MOST:
            text = path.read_text(encoding="utf-8", errors="replace")
            found[str(path.relative_to(folder))] = [(-1, line) for line in text.splitlines() if line.strip()]
    return found
