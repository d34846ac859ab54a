"""The flight recorder: the last calls of every rank, kept while a world runs and written as JSON when it fails.

The parent is the process that starts the ranks and compares their calls. It keeps the record, which therefore has the
calls of ranks that are killed, are stopped or crash in C++ as well. Each rank also keeps its own calls, and writes them
if the parent is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hyper_parallel.transport.atomic_files import atomic_write_all, atomic_write_text
from hyper_parallel.transport.checks.fingerprint import CollectiveFingerprint, MessageFingerprint
from hyper_parallel.transport.failures import WorldFailedError, lost_peer
from hyper_parallel.transport.processes import process_state

__all__ = ["CALLS", "FOLDER_VARIABLE", "FlightRecorder", "RankFlight", "RecordedLine", "recorder_from_environment"]


FOLDER_VARIABLE = "HP_FLIGHT_FOLDER"
"""Names the folder that receives the record of a failed world; without it nothing is recorded."""
CALLS = 256
"""Calls that are kept per rank."""


@dataclass(slots=True)
class _Call:
    """One call of a rank.

    ``state`` is ``started``, ``matched`` (all members have called the same collective) or ``completed`` (the rank has
    continued).
    """

    number: int
    sequence: int
    called: CollectiveFingerprint | MessageFingerprint
    sending: bool
    blocking: bool
    started: float
    state: str = "started"
    ended: float | None = None


class FlightRecorder:
    """The last :data:`CALLS` calls of each rank of one world.

    Args:
        world_size: number of ranks.
        folder: folder that receives one file per rank when the world has failed.
    """

    def __init__(self, world_size: int, folder: Path) -> None:
        self._folder = folder
        self._begun = time.time()
        self._calls: list[deque[_Call]] = [deque(maxlen=CALLS) for _ in range(world_size)]
        self._numbers = [0] * world_size
        self._sequences: dict[tuple[int, Any, str], int] = {}
        self._tickets: dict[tuple[int, int], _Call] = {}
        self._current: dict[int, _Call] = {}

    def asked(self, rank: int, kind: str, content: Any) -> None:
        """Record a request of a rank: see :meth:`Requests.carry_out`."""
        self._went_on(rank)
        if kind in ("join", "start"):
            call = self._add(rank, content.fingerprint, sending=False, blocking=kind == "join")
            if content.awaited:
                self._follow(rank, call, content.ticket)
        elif kind in ("send", "receive"):
            self._follow(rank, self._add(rank, content if kind == "receive" else content[0], sending=kind == "send"))
        elif kind == "post":
            ticket, message, _, sending, _ = content
            self._follow(rank, self._add(rank, message, sending=sending), ticket)
        elif kind in ("await", "settle") and (rank, content) in self._tickets:
            self._current[rank] = self._tickets.pop((rank, content))

    def answered(self, rank: int, error: BaseException | None) -> None:
        """Record that a rank continues with the answer that it waited for."""
        call = self._current.get(rank)
        if call is not None and error is None:
            call.state = "matched"

    def _went_on(self, rank: int) -> None:
        call = self._current.get(rank)
        if call is not None and call.state == "matched":
            call.state, call.ended = "completed", time.time()
            del self._current[rank]

    def _add(
        self, rank: int, called: CollectiveFingerprint | MessageFingerprint, *, sending: bool, blocking: bool = False
    ) -> _Call:
        key = (
            (rank, called.ranks, called.group) if isinstance(called, CollectiveFingerprint) else (rank, called.key, "")
        )
        sequence = self._sequences[key] = self._sequences.get(key, -1) + 1
        call = _Call(self._numbers[rank], sequence, called, sending, blocking, time.time())
        self._numbers[rank] += 1
        self._calls[rank].append(call)
        return call

    def _follow(self, rank: int, call: _Call, ticket: int | None = None) -> None:
        if ticket is None:
            self._current[rank] = call
        else:
            self._tickets[rank, ticket] = call

    def write(self, failed: WorldFailedError) -> None:
        """Write the record of a failed world, one file per rank, and replace an earlier record.

        If the folder cannot be written, the world's error message reports it, and the earlier record is unchanged.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            texts = {
                self._folder / f"rank-{rank}.json": json.dumps(self._record(rank, failed), indent=1)
                for rank in range(len(self._calls))
            }
            atomic_write_all(texts)
            for earlier in set(self._folder.glob("rank-*.json")) - set(texts):
                earlier.unlink()
        except OSError as error:
            failed.args = (f"{failed}\nthe flight record could not be written to {self._folder}: {error}",)
        else:
            failed.args = (f"{failed}\nflight record: hyper-parallel trace {self._folder}",)

    def write_orphaned(self, rank: int) -> None:
        """Write the record of ``rank`` alone, after the process that started this rank has ended.

        Records of earlier worlds are removed; those of other ranks of this world are kept.

        Raises:
            OSError: the folder cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        orphaned = WorldFailedError("", {}, {rank: "was running when the process that had started it ended"})
        atomic_write_text(self._folder / f"rank-{rank}.json", json.dumps(self._record(rank, orphaned), indent=1))
        for path in self._folder.glob("rank-*.json"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < self._begun:
                    path.unlink()

    def _record(self, rank: int, failed: WorldFailedError) -> dict[str, Any]:
        error = failed.failures.get(rank)
        cause = error is not None and not lost_peer(error) and not isinstance(error, TimeoutError)
        return {
            "version": 1,
            "rank": rank,
            "world_size": len(self._calls),
            "written": time.time(),
            "error": f"{type(error).__name__}: {error}" if cause else None,
            "doing": failed.activities.get(rank, ""),
            "calls": [_json(call) for call in self._calls[rank]],
        }


def recorder_from_environment(world_size: int) -> FlightRecorder | None:
    """A recorder for a world if :data:`FOLDER_VARIABLE` names a folder; else None."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return FlightRecorder(world_size, Path(folder)) if folder else None


def _json(call: _Call) -> dict[str, Any]:
    called = call.called
    row = {"number": call.number, "sequence": call.sequence, "state": call.state, "started": call.started}
    row |= {"ended": call.ended, "site": str(called.site), "facts": _plain(called.facts)}
    if isinstance(called, CollectiveFingerprint):
        kind = {"kind": "collective", "operation": called.operation, "ranks": list(called.ranks), "group": called.group}
        return row | kind | {"text": str(called)}
    verb = "send" if call.sending else "recv"
    text, peers = called.text(sending=call.sending), [called.source, called.destination]
    return row | {"kind": "message", "operation": verb, "ranks": peers, "group": str(called.channel), "text": text}


def _plain(facts: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value if isinstance(value, (int, str)) else str(value) for name, value in facts}


_FOLLOW_SECONDS = 1.0
_ENDING_SECONDS = 2.0
_STEP_SECONDS = 0.02
_ENDED = ("Z", "X")  # states of a process that has ended and was not waited for


class RankFlight:
    """The last calls of this rank, if the user asked for a flight record.

    Args:
        rank, world_size: number of this rank, and number of ranks.
        parent: process id of the parent, which keeps the record of all ranks while it lives.
    """

    def __init__(self, rank: int, world_size: int, parent: int) -> None:
        self.rank = rank
        self.recorder: FlightRecorder | None = None
        self._world_size, self._parent = world_size, parent
        self._writing = threading.Lock()

    def begin(self) -> None:
        """Start over with the folder that the environment names now."""
        self.recorder = recorder_from_environment(self._world_size)

    def leave_with_parent(self, leave: Callable[[int], Any]) -> None:
        """Write the calls as soon as the parent has ended, and call ``leave(1)``; never returns."""
        while not _has_ended(self._parent):
            time.sleep(_FOLLOW_SECONDS)
        self._write()
        leave(1)

    def lost_line(self) -> None:
        """Write the calls if the connection to the parent broke because the parent has ended."""
        deadline = time.monotonic() + _ENDING_SECONDS
        while self.recorder is not None and time.monotonic() < deadline:
            if _has_ended(self._parent):
                self._write()
                return
            time.sleep(_STEP_SECONDS)

    def _write(self) -> None:
        with self._writing, contextlib.suppress(OSError):  # no process is left that could read an error
            if self.recorder is not None:
                self.recorder.write_orphaned(self.rank)
                self.recorder = None


class RecordedLine:
    """The connection to the parent, whose requests and answers are recorded."""

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
    """Whether a process has ended, even if its own parent has not waited for it."""
    try:
        with contextlib.suppress(PermissionError):
            os.kill(process, 0)
    except ProcessLookupError:
        return True
    return process_state(process) in _ENDED
