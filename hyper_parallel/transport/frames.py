"""Frames that tracebacks and call sites leave out, and files of this library that are programs.

Packages that build on the transport run programs through functions of their own. Users look for their own lines, so
these packages register the files of such functions when they are imported.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["PROGRAMS", "RUNNERS", "WRAPPERS", "hide_file", "hide_folder", "take_for_programs"]

RUNNERS: list[str] = []
"""Files that run ranks: their frames are in no traceback."""

WRAPPERS: list[str] = []
"""Folders, with a separator at the end, of functions that stand for a framework's: hidden as the framework's are."""

PROGRAMS: list[str] = []
"""Folders of this library, with a separator at the end, whose files are programs as a user writes them."""


def hide_file(path: str) -> None:
    """Leave the frames of the file at ``path``, which runs ranks, out of tracebacks."""
    if path not in RUNNERS:
        RUNNERS.append(path)


def hide_folder(path: Path) -> None:
    """Count the frames of a folder in tracebacks instead of showing them, and skip them in call sites."""
    if f"{path}{os.sep}" not in WRAPPERS:
        WRAPPERS.append(f"{path}{os.sep}")


def take_for_programs(path: Path) -> None:
    """Let call sites treat the files of a folder of this library as a user's."""
    if f"{path}{os.sep}" not in PROGRAMS:
        PROGRAMS.append(f"{path}{os.sep}")
