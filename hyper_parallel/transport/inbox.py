"""Messages that travel in pieces, so that nobody is sent more than there is room for.

Gloo ends the process that is sent more than it asked for. A message therefore travels in pieces, and whoever receives
has room for whole ones, as many as it expects. The first one tells how many there are: those for which there was no
room yet are asked for then, and thrown away; room that was not filled is there for the next message.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Inbox"]

Wait = Callable[[], Any]


@dataclass
class _Expected:
    """A message that somebody receives, ``count`` pieces long if it is what was expected.

    Attributes:
        count: how many pieces were expected.
        earlier: the message before it, if that is not there yet.
        pieces: what came, and None before; of more pieces than were expected only the first.
        lock: held while they are waited for.
    """

    count: int
    earlier: _Expected | None
    pieces: list[Any] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class Inbox:
    """What one rank sends to this one under one tag.

    Args:
        receive: begins to receive a piece; gives what waits for it and returns it.
        count: how many pieces the message has that begins with this one.
    """

    def __init__(self, receive: Callable[[], Wait], count: Callable[[Any], int]) -> None:
        self._receive = receive
        self._count = count
        self._lock = threading.Lock()
        self._room: deque[Wait] = deque()
        self._needed = 0
        self._last: _Expected | None = None

    def expect(self, count: int) -> Wait:
        """Begin to receive a message of ``count`` pieces; gives what waits for it and returns the pieces that came."""
        with self._lock:
            self._needed += count
            self._make_room()
            message = self._last = _Expected(count, self._waited_for())

        def taken() -> list[Any]:
            self._serve(message)
            pieces, message.pieces = message.pieces, []
            return pieces or []

        return taken

    def serve_meanwhile(self) -> None:
        """Let a thread wait for all that is expected, while this one does something else."""
        message = self._waited_for()
        if message is not None:
            threading.Thread(target=self._serve_quietly, args=(message,), daemon=True).start()

    def _waited_for(self) -> _Expected | None:
        return None if self._last is None or self._last.pieces is not None else self._last

    def _serve_quietly(self, message: _Expected) -> None:
        try:
            self._serve(message)
        except RuntimeError:
            return  # the connection is gone, which whoever waits for the message is told

    def _serve(self, message: _Expected) -> None:
        """Wait for every message up to this one, in the order in which they were asked for."""
        line, earlier = [message], message.earlier
        while earlier is not None:
            line.append(earlier)
            earlier = earlier.earlier
        for one in reversed(line):
            with one.lock:
                if one.pieces is None:
                    one.pieces = self._arrived(one.count)
                    one.earlier = None

    def _arrived(self, expected: int) -> list[Any]:
        pieces = [self._next()]
        count = self._count(pieces[0])
        for _ in range(count - 1):
            piece = self._next()
            if count == expected:
                pieces.append(piece)
        with self._lock:
            self._needed -= expected
            self._make_room()
        return pieces

    def _next(self) -> Any:
        with self._lock:
            wait = self._room.popleft() if self._room else self._receive()
        return wait()

    def _make_room(self) -> None:
        """For as many pieces as are expected."""
        while len(self._room) < self._needed:
            self._room.append(self._receive())
