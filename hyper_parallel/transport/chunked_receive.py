"""Messages that travel in pieces, so that nobody is sent more than there is room for.

Gloo ends the process that is sent more than it asked for. A message therefore travels in pieces, and whoever receives
has room for whole ones, as many as it expects. The first one tells how many there are: those for which there was no
room yet are asked for then, and thrown away; room that was not filled is there for the next message.

The sender is told, per message, how much room there has been so far. What does not fit is taken only once the receiver
waits, which the sender must not wait for: the receiver may be in a collective by then, which waits for the sender.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ChunkedReceiver"]

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


class ChunkedReceiver:
    """What one rank sends to this one under one tag.

    Args:
        receive: begins to receive a piece; gives what waits for it and returns it.
        count: how many pieces the message has that begins with this one; 0 for one piece of somebody who is not told.
        tell: begins to tell the sender for how many pieces there has been room; gives what waits until it is told.
    """

    def __init__(self, receive: Callable[[], Wait], count: Callable[[Any], int], tell: Callable[[int], Wait]) -> None:
        self._receive = receive
        self._count = count
        self._tell = tell
        self._lock = threading.Lock()
        self._room: deque[Wait] = deque()
        self._made = 0
        self._needed = 0
        self._telling: deque[Wait] = deque()
        self._last: _Expected | None = None

    def expect(self, count: int) -> Wait:
        """Begin to receive a message of ``count`` pieces; gives what waits for it and returns the pieces that came."""
        with self._lock:
            self._needed += count
            # Told before there is room: it is there by the time at which the message is.
            self._telling.append(self._tell(self._made + max(0, self._needed - len(self._room))))
            self._make_room()
            earlier = None if self._last is None or self._last.pieces is not None else self._last
            message = self._last = _Expected(count, earlier)

        def taken() -> list[Any]:
            self._serve(message)
            pieces, message.pieces = message.pieces, []
            return pieces or []

        return taken

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
        if count:
            with self._lock:
                told = self._telling.popleft()
            with suppress(RuntimeError):  # nobody is left who could be told
                told()
        if count == expected:
            pieces += [self._next() for _ in range(count - 1)]
        else:
            with suppress(RuntimeError):  # nor is the rest of what is refused needed
                for _ in range(count - 1):
                    self._next()
        with self._lock:
            self._needed -= expected
            self._make_room()
        return pieces

    def _next(self) -> Any:
        with self._lock:
            wait = self._room.popleft() if self._room else self._asked()
        return wait()

    def _asked(self) -> Wait:
        self._made += 1
        return self._receive()

    def _make_room(self) -> None:
        """For as many pieces as are expected."""
        while len(self._room) < self._needed:
            self._room.append(self._asked())
