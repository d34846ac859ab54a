"""One of the two compared runs: its program, ranks, interpreter and revision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.launch_line import read_launch_line
from hyper_parallel.verify.recording.debug_mode import is_log

__all__ = ["DiffSide", "side_of"]


@dataclass(frozen=True)
class DiffSide:
    """A run of a program, or a recording of a run.

    Attributes:
        target: ``train.py``, ``-m package.train``, ``train.py:function`` or a function; for a recording, its folder or
            a log of DebugMode.
        args: arguments of the script.
        world_size: number of ranks.
        launch: kind of ranks, as in ``verify program``.
        single_args: for A only: arguments with which the script runs on one rank; by default ``args``. This run
            determines the positions of shards and the tolerances.
        platform: ``torch`` or ``mindspore``; with None, the framework that the file imports.
        mesh: for a recording that is compared with a recording: sizes of the axes in declared placements.
        python: interpreter that runs the program, such as ``/envs/new/bin/python``; empty for the current interpreter.
        revision: commit whose files are run, such as ``HEAD~1``; empty for the files of the working folder.
    """

    target: str | Callable[..., Any]
    args: Sequence[str] = ()
    world_size: int = 1
    launch: str = "simulated"
    single_args: Sequence[str] | None = None
    platform: str | None = None
    revision: str = ""
    python: str = ""
    mesh: Mapping[str, int] | None = None

    @property
    def is_recording(self) -> bool:
        """Whether the target is a recording, which is a folder or a log of DebugMode."""
        return isinstance(self.target, str) and not self.target.startswith("-m ") and _is_recorded(Path(self.target))


def side_of(words: Sequence[str], label: str) -> tuple[str, tuple[str, ...], int | None]:
    """Return the target, its arguments and its number of ranks from words such as ``train.py --tp 2``.

    Args:
        words: a script or function and its arguments, or a command that starts training.
        label: ``A`` or ``B``, for messages.

    Raises:
        InputError: (a ValueError) there are no words, or the words neither start a script nor name a recording.
    """
    if not words:
        msg = f"{label} is empty; it must be a script with its arguments, such as 'train.py --tp 2'"
        raise InputError(msg)
    if len(words) == 1 and _is_recorded(Path(words[0])):
        return words[0], (), None
    if words[0].rpartition(":")[2].isidentifier() and ".py:" in words[0]:
        return words[0], tuple(words[1:]), None
    if len(words) == 1 and not words[0].endswith(".py"):
        msg = (
            f"{label}: {words[0]!r} is neither a script nor a folder: give FILE, a command such as torchrun train.py, "
            "or the folder of a recording"
        )
        raise InputError(msg)
    line = read_launch_line(words)
    return line.target, line.arguments, line.ranks


def _is_recorded(path: Path) -> bool:
    return path.is_dir() or is_log(path)
