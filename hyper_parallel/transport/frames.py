"""Tracebacks of failed ranks as users see them, and the frames that tracebacks and call sites leave out.

Packages that build on the transport run programs through functions of their own. Users look for their own lines, so
these packages register the files of such functions when they are imported.
"""

from __future__ import annotations

import os
import re
import threading
import traceback
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.transport.installed import FRAMEWORKS, installed_package, package_place

__all__ = [
    "PROGRAMS",
    "RUNNERS",
    "WRAPPERS",
    "fold_frames",
    "hide_file",
    "hide_folder",
    "stack",
    "take_for_programs",
    "trace",
]


RUNNERS: list[str] = []
"""Files that run ranks: their frames are in no traceback."""

WRAPPERS: list[str] = []
"""Folders, with a separator at the end, of functions that replace those of a framework: hidden like its frames."""

PROGRAMS: list[str] = []
"""Folders of this library, with a separator at the end, whose files are programs as a user writes them."""


def hide_file(path: str) -> None:
    """Hide the frames of the file at ``path``, which runs ranks, in tracebacks."""
    if path not in RUNNERS:
        RUNNERS.append(path)


def hide_folder(path: Path) -> None:
    """In tracebacks, count the frames of a folder instead of showing them; skip them in call sites."""
    if f"{path}{os.sep}" not in WRAPPERS:
        WRAPPERS.append(f"{path}{os.sep}")


def take_for_programs(path: Path) -> None:
    """Let call sites treat the files of a folder of this library as a user's."""
    if f"{path}{os.sep}" not in PROGRAMS:
        PROGRAMS.append(f"{path}{os.sep}")


# Modules of this package that run ranks and check their collectives: their frames are irrelevant to the program.
_OWN = (
    "transport/simulated/threads.py",
    "transport/simulated/transport.py",
    "transport/simulated/coordinator.py",
    "transport/frontends/c10d/simulated_world.py",
    "transport/frontends/c10d/simulated_work.py",
    "transport/frontends/c10d/simulated_group.py",
    "transport/simulated/processes.py",
    "transport/simulated/rank_process.py",
    "transport/real/launched_rank.py",
    "transport/real/guarded.py",
    "transport/checks/torch_distributed.py",
    "transport/frontends/c10d/checked_messages.py",
)

# Frames that start the thread or process of a rank, in stacks of running ranks.
_STARTERS = (
    threading.__file__,
    "multiprocessing/forkserver.py",
    "multiprocessing/spawn.py",
    "multiprocessing/process.py",
    "coverage/multiproc.py",
    '"<string>"',
    "Extension modules:",
)

_ENTRY = re.compile(r'  File "(?P<path>[^"]+)", line \d+')
# Frames of these folders and of the frameworks are counted instead of shown, if they are between frames of the program.
_LIBRARY = re.compile(r".*/hyper_parallel/(?:core|platform|transport)/")


def trace(error: BaseException) -> str:
    """Return the traceback without the frames of the modules that run ranks, and with frames of packages folded.

    Every frame of a package is shown if ``HP_FULL_TRACEBACK`` is set to anything but an empty text.
    """
    shown = traceback.TracebackException.from_exception(error)
    kept = [frame for frame in shown.stack if not _runs_ranks(frame.filename)]
    if kept:
        shown.stack = traceback.StackSummary.from_list(kept)
    text = "".join(shown.format()).rstrip()
    if os.environ.get("HP_FULL_TRACEBACK"):
        return text
    return fold_frames(text, shows_last=not isinstance(error, HyperParallelError))


def fold_frames(text: str, *, shows_last: bool = True) -> str:
    """Return a traceback in which runs of frames of PyTorch, MindSpore and this library are replaced by a count.

    The last frame of a traceback, which raised the error, is always shown, and a single frame is not replaced.

    Args:
        text: the traceback as Python formats it, with those of its causes.
        shows_last: False for an error of this library, whose message is sufficient: all frames after the program's last
            one are then omitted.
    """
    lines: list[str] = []
    entries = list(_entries(text))
    runs = [list(run) for _, run in groupby(entries, key=lambda entry: _package(entry) is not None)]
    final = max((number for number, run in enumerate(runs) if _package(run[0])), default=0)
    for number, run in enumerate(runs):
        packaged = _package(run[0]) is not None
        last = number + 1 == len(runs) or not _ENTRY.match(runs[number + 1][0])
        after_program = last and number == final > 0 and _ENTRY.match(runs[number - 1][-1]) is not None
        drops_last = after_program and not shows_last
        hidden = run[: -1 if last and not drops_last else None] if packaged else []
        if len(hidden) > 1 or drops_last:
            folders = ", ".join(dict.fromkeys(str(_package(entry)) for entry in hidden))
            count = f"{len(hidden)} frame{'s' * (len(hidden) > 1)}"
            lines += [f"  ({count} of {folders} not shown)", *run[len(hidden) :]]
        else:
            lines += run
    return "\n".join(lines)


def stack(text: str) -> str:
    """Return the stack of a running rank without the frames that started it and that run its collectives.

    Every frame is shown if ``HP_FULL_TRACEBACK`` is set to anything but an empty text.

    Args:
        text: the stack as ``traceback`` or ``faulthandler`` formats it.
    """
    if os.environ.get("HP_FULL_TRACEBACK"):
        return text.rstrip()
    hidden = (*_OWN, *_STARTERS, *RUNNERS)
    kept = "\n".join(entry for entry in _entries(text) if not any(name in entry.split("\n", 1)[0] for name in hidden))
    return (kept if "most recent call first" in text else fold_frames(kept)).rstrip()


def _runs_ranks(path: str) -> bool:
    return path in RUNNERS or path.replace("\\", "/").endswith(_OWN)


def _entries(text: str) -> Iterator[str]:
    """Yield frames with their source lines, and all other lines one by one."""
    entry: list[str] = []
    for line in text.split("\n"):
        if entry and line.startswith("    "):
            entry.append(line)
            continue
        if entry:
            yield "\n".join(entry)
        entry = [line] if _ENTRY.match(line) else []
        if not entry:
            yield line
    if entry:
        yield "\n".join(entry)


def _package(entry: str) -> str | None:
    """Return the folder of the package that a frame is in, or None for other frames and lines."""
    frame = _ENTRY.match(entry)
    if frame is None:
        return None
    path = frame["path"].replace("\\", "/")
    own = _LIBRARY.match(path)
    if own:
        return own[0]
    if installed_package(path) in FRAMEWORKS:
        return f"{package_place(path)}/"
    return next((wrappers for wrappers in WRAPPERS if frame["path"].startswith(wrappers)), None)
