"""Receives messages in fixed-size chunks, so that a receive buffer can never overflow.

Gloo ends a process that is sent more than it asked for. A message therefore travels in chunks, and the receiver has
room for whole ones, as many as it expects. The first chunk has the number of chunks in its head: those for which there
was no room yet are then received and discarded; room that was not filled is used by the next message.

For each message the receiver sends back how many chunks it has had room for so far. The rest is received only when the
receiver waits, and the sender must not wait for that: the receiver may be in a collective that waits for the sender.
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
    """A posted receive.

    Attributes:
        count: how many chunks are expected.
        earlier: the receive that was posted before it, unless that is complete.
        chunks: those received, None before that; only the first if their number is not the expected one.
        lock: held while they are waited for.
    """

    count: int
    earlier: _Expected | None
    chunks: list[Any] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class ChunkedReceiver:
    """Receives the messages of one sender under one tag.

    Args:
        receive: begins to receive a chunk; returns a function that waits for it and returns it.
        count: number of chunks of the message that begins with this one; 0 for a message without head, whose sender
            waits for no answer.
        send_room: begins to send how many chunks there has been room for; returns a function that waits for that.
    """

    def __init__(
        self, receive: Callable[[], Wait], count: Callable[[Any], int], send_room: Callable[[int], Wait]
    ) -> None:
        self._receive = receive
        self._count = count
        self._send_room = send_room
        self._lock = threading.Lock()
        self._room: deque[Wait] = deque()
        self._begun = 0
        self._needed = 0
        self._answers: deque[Wait] = deque()
        self._last: _Expected | None = None

    def expect(self, count: int) -> Wait:
        """Start receiving ``count`` chunks; return a function that waits for them."""
        with self._lock:
            self._needed += count
            # Sent before there is room: there will be by the time the message arrives.
            self._answers.append(self._send_room(self._begun + max(0, self._needed - len(self._room))))
            self._make_room()
            earlier = None if self._last is None or self._last.chunks is not None else self._last
            message = self._last = _Expected(count, earlier)

        def take() -> list[Any]:
            self._serve(message)
            chunks, message.chunks = message.chunks, []
            return chunks or []

        return take

    def _serve(self, message: _Expected) -> None:
        """Wait for every message up to this one, in the order in which the receives were posted."""
        posted, earlier = [message], message.earlier
        while earlier is not None:
            posted.append(earlier)
            earlier = earlier.earlier
        for expected in reversed(posted):
            with expected.lock:
                if expected.chunks is None:
                    expected.chunks = self._receive_message(expected.count)
                    expected.earlier = None

    def _receive_message(self, expected: int) -> list[Any]:
        chunks = [self._next()]
        count = self._count(chunks[0])
        if count:
            with self._lock:
                wait_for_answer = self._answers.popleft()
            with suppress(RuntimeError):  # the sender may be gone
                wait_for_answer()
        if count == expected:
            chunks += [self._next() for _ in range(count - 1)]
        else:
            with suppress(RuntimeError):  # the message is refused, so a lost rest does not matter
                for _ in range(count - 1):
                    self._next()
        with self._lock:
            self._needed -= expected
            self._make_room()
        return chunks

    def _next(self) -> Any:
        with self._lock:
            wait = self._room.popleft() if self._room else self._begin()
        return wait()

    def _begin(self) -> Wait:
        self._begun += 1
        return self._receive()

    def _make_room(self) -> None:
        """Begin to receive as many chunks as are expected."""
        while len(self._room) < self._needed:
            self._room.append(self._begin())
