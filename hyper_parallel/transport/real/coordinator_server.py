"""A coordinator for real ranks that connect to it over a socket, however they were started."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path

from hyper_parallel.transport.failures import WorldFailedError
from hyper_parallel.transport.real.requests import Requests
from hyper_parallel.transport.simulated.coordinator import Coordinator

__all__ = ["CoordinatorServer", "connect", "peer_user"]

_CREDENTIALS = "3i"  # number of the process, user and group


class CoordinatorServer:
    """Serves the ranks of one world, one round at a time.

    Args:
        path: of the socket, which is created. Only processes of this user are listened to: messages are pickled.
        world_size: number of ranks.
        how_ended: called with a rank whose connection has closed: ``returned``, or what else happened to it.

    Attributes:
        coordinator: compares what the ranks call.
    """

    def __init__(self, path: Path, world_size: int, how_ended: Callable[[int], str]) -> None:
        self.coordinator = Coordinator(world_size)
        self._requests = Requests(self.coordinator)
        self._how_ended = how_ended
        self._ranks: dict[Connection, int] = {}
        self._waiting: set[int] = set()
        self._ended: set[int] = set()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        path.chmod(0o600)
        self._socket.listen(world_size)

    def serve(self, seconds: float) -> bool:
        """Take one message of each rank that has one, and let ranks go on; False if none had in so many seconds."""
        sources = wait([self._socket, *self._ranks], seconds)
        for source in sources:
            if isinstance(source, Connection):
                self._take(source, self._ranks[source])
            else:
                self._accept()
        lines = {rank: line for line, rank in self._ranks.items()}
        for rank, resumption in self._requests.answers(self._waiting).items():
            with contextlib.suppress(OSError):  # it has gone: the next round sees that
                lines[rank].send(resumption)
        return bool(sources)

    def running(self) -> list[int]:
        """The ranks that neither wait for others nor have ended."""
        return [
            rank for rank in range(self.coordinator.world_size) if rank not in self._waiting and rank not in self._ended
        ]

    def lost(self) -> str | None:
        """See :meth:`Requests.lost`."""
        return self._requests.lost()

    def write_record(self, failed: WorldFailedError) -> None:
        """Write the flight record, if there is a recorder."""
        if self._requests.recorder is not None:
            self._requests.recorder.write(failed)

    def close(self) -> None:
        """Take what the ranks, which have ended, had sent before; then close all connections."""
        while self.serve(0):
            pass
        for line in self._ranks:
            line.close()
        self._ranks.clear()
        self._socket.close()

    def _accept(self) -> None:
        accepted, _ = self._socket.accept()
        if peer_user(accepted) != os.getuid():
            accepted.close()
            return
        line = Connection(accepted.detach())
        try:
            self._ranks[line] = line.recv()
        except (EOFError, OSError):  # it died as it connected; whoever started it sees that
            line.close()

    def _take(self, line: Connection, rank: int) -> None:
        try:
            kind, content = line.recv()
        except (EOFError, OSError):
            self._close(line, rank)
        else:
            if self._requests.carry_out(rank, kind, content):
                self._waiting.add(rank)

    def _close(self, line: Connection, rank: int) -> None:
        del self._ranks[line]
        line.close()
        self._waiting.discard(rank)
        self._ended.add(rank)
        how = self._how_ended(rank)
        if how == "returned":
            self.coordinator.finish(rank)
        else:
            self.coordinator.fail(rank, how)


def peer_user(connected: socket.socket) -> int | None:
    """The user of the process at the other end of a local socket, or None where the system does not tell."""
    if sys.platform != "linux":
        return None
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(_CREDENTIALS))
    user: int = struct.unpack(_CREDENTIALS, credentials)[1]
    return user


def connect(path: Path, rank: int) -> Connection:
    """A rank's connection to the coordinator whose socket is at ``path``."""
    connecting = socket.socket(socket.AF_UNIX)
    connecting.connect(str(path))
    line = Connection(connecting.detach())
    line.send(rank)
    return line
