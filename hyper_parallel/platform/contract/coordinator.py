"""Where two threads that overlap communication and computation meet."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hyper_parallel.errors import RendezvousError

__all__ = ["POSITIONS", "HookCoordinator"]

# Around MoE: before dispatch, after dispatch, before combine, after combine.
POSITIONS = ("A", "B", "C", "D")


class HookCoordinator:
    """Lets two threads pass their positions in turn: each waits at a position until the other has come to one.

    One thread may be in its forward while the other is in its backward, so that one computes while the other's
    all-to-all travels. A thread that is done calls :meth:`leave` (or ends its :meth:`taking_part`); from then on the
    other passes without waiting. Who waits longer than ``timeout`` raises, and so does its partner.

    Args:
        timeout: seconds.
    """

    def __init__(self, timeout: float = 60.0) -> None:
        self.timeout = timeout
        self._arrival = threading.Condition()
        self._waiting: str | None = None
        self._round = 0
        self._partner = ""
        self._alone = False
        self._failure: str | None = None
        self._last: dict[str, str] = {}

    def rendezvous(self, position: str, phase: str = "forward") -> str | None:
        """Wait at ``position`` for the other thread.

        Args:
            position: ``A``, ``B``, ``C`` or ``D``.
            phase: ``forward`` or ``backward``.

        Returns:
            where the other thread is, for example ``"C (backward)"``, or None when it has left.

        Raises:
            ValueError: unknown position.
            RendezvousError: (a TimeoutError) the other thread did not come in time, or failed.
        """
        if position not in POSITIONS:
            msg = f"rendezvous: position {position!r} is none of {', '.join(POSITIONS)}"
            raise ValueError(msg)
        here, me = f"{position} ({phase})", threading.current_thread().name
        with self._arrival:
            self._last[me] = here
            if self._failure is not None:
                raise RendezvousError(self._failure)
            if self._alone:
                return None
            if self._waiting is None:
                return self._wait(here, me)
            found, self._waiting, self._partner = self._waiting, None, here
            self._round += 1
            self._arrival.notify_all()
            return found

    def _wait(self, here: str, me: str) -> str | None:
        turn, self._waiting = self._round, here
        came = self._arrival.wait_for(
            lambda: self._round != turn or self._alone or self._failure is not None, self.timeout
        )
        if self._round != turn:
            return self._partner
        self._waiting = None
        if self._failure is None and not came:
            self._failure = (
                f"HookCoordinator: thread {me!r} waited {self.timeout:g} s at {here} for its partner, "
                f"{self._whereabouts(me)}; both threads must pass the same number of positions, or call leave()"
            )
            self._arrival.notify_all()
        if self._failure is not None:
            raise RendezvousError(self._failure)
        return None

    def _whereabouts(self, me: str) -> str:
        others = [f"thread {name!r}, last at {place}" for name, place in self._last.items() if name != me]
        return ", ".join(others) if others else "which never came to any position"

    def leave(self) -> None:
        """The calling thread passes no more positions: the other one goes on without it."""
        with self._arrival:
            self._alone = True
            self._arrival.notify_all()

    def abort(self, reason: str) -> None:
        """Let whoever waits, or comes later, raise with ``reason``."""
        with self._arrival:
            self._failure = self._failure or reason
            self._arrival.notify_all()

    def reset(self) -> None:
        """Be as new, for the next pair of passes."""
        with self._arrival:
            self._waiting, self._alone, self._failure = None, False, None
            self._last.clear()

    @contextmanager
    def taking_part(self) -> Iterator[HookCoordinator]:
        """The body of one of the threads: leaves at its end; an exception makes the partner raise, too."""
        try:
            yield self
        except BaseException as error:
            who = threading.current_thread().name
            self.abort(f"HookCoordinator: the partner thread {who!r} raised {type(error).__name__}: {error}")
            raise
        self.leave()
