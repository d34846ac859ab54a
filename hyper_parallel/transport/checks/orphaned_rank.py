"""What a real rank does whose parent was killed: it writes its last calls, which the parent can no more, and leaves."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from hyper_parallel.transport.checks.flight_recorder import FlightRecorder, recorder_from_environment
from hyper_parallel.transport.processes import process_state

__all__ = ["RankFlight", "RecordedLine"]

_FOLLOW_SECONDS = 1.0
_ENDING_SECONDS = 2.0
_STEP_SECONDS = 0.02
_ENDED = ("Z", "X")  # states of a process that has ended and that nobody has asked for yet


class RankFlight:
    """The last calls of this rank, if the user asked for a flight record.

    Args:
        rank, world_size: which rank it is, of how many.
        parent: process number of the parent, which keeps the record of all ranks while it lives.
    """

    def __init__(self, rank: int, world_size: int, parent: int) -> None:
        self.rank = rank
        self.recorder: FlightRecorder | None = None
        self._world_size, self._parent = world_size, parent
        self._writing = threading.Lock()

    def begin(self) -> None:
        """Begin anew with the folder that the environment names now."""
        self.recorder = recorder_from_environment(self._world_size)

    def leave_with_parent(self, leave: Callable[[int], Any]) -> None:
        """Return never: write the calls as soon as the parent has ended, however it ended, and call ``leave(1)``."""
        while not _has_ended(self._parent):
            time.sleep(_FOLLOW_SECONDS)
        self._write()
        leave(1)

    def lost_line(self) -> None:
        """Write the calls if the line to the parent has broken because that has ended."""
        deadline = time.monotonic() + _ENDING_SECONDS
        while self.recorder is not None and time.monotonic() < deadline:
            if _has_ended(self._parent):
                self._write()
                return
            time.sleep(_STEP_SECONDS)

    def _write(self) -> None:
        with self._writing, contextlib.suppress(OSError):  # nobody is left who could be told
            if self.recorder is not None:
                self.recorder.write_orphaned(self.rank)
                self.recorder = None


class RecordedLine:
    """The line to the parent, whose requests and answers are recorded."""

    def __init__(self, line: Connection, flight: RankFlight) -> None:
        self._line, self._flight = line, flight

    def send(self, request: tuple[str, Any]) -> None:
        """Send a request: its kind and content."""
        recorder = self._flight.recorder
        if recorder is not None:
            recorder.asked(self._flight.rank, *request)
        try:
            self._line.send(request)
        except OSError:
            self._flight.lost_line()
            raise

    def recv(self) -> Any:
        """Receive the answer."""
        try:
            resumption = self._line.recv()
        except (EOFError, OSError):
            self._flight.lost_line()
            raise
        recorder = self._flight.recorder
        if recorder is not None:
            recorder.answered(self._flight.rank, resumption.error)
        return resumption


def _has_ended(process: int) -> bool:
    """Whether a process has ended, although its own parent may not have asked how."""
    try:
        with contextlib.suppress(PermissionError):
            os.kill(process, 0)
    except ProcessLookupError:
        return True
    return process_state(process) in _ENDED
