"""Executes requests of real ranks to their coordinator, over any kind of connection."""

from __future__ import annotations

from typing import Any

from hyper_parallel.transport.checks.fingerprint import CollectiveFingerprint, MessageFingerprint
from hyper_parallel.transport.checks.flight_recorder import recorder_from_environment
from hyper_parallel.transport.simulated.coordinator import Coordinator
from hyper_parallel.transport.simulated.endpoint import Resumption
from hyper_parallel.transport.simulated.message_board import MessageBoard, Posted

__all__ = ["Requests", "called"]


class Requests:
    """The requests of the ranks of one world.

    Args:
        coordinator: coordinator of the world.

    Attributes:
        recorder: keeps the last calls, if the user requested it.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.recorder = recorder_from_environment(coordinator.world_size)
        self._coordinator = coordinator
        self._board = MessageBoard(coordinator)
        self._posted: dict[tuple[int, int], Posted] = {}

    def carry_out(self, rank: int, kind: str, content: Any) -> bool:
        """Execute one request; return whether ``rank`` now waits for an answer.

        Args:
            rank: rank that sent the request.
            kind: ``join``, ``start`` or ``await`` a collective, ``send`` or ``receive`` by mailbox, ``post`` one side
                of a message, ``settle`` it, or ``probe`` whether it is settled.
            content: a contribution, a ticket, a message, or a tuple of such objects.
        """
        if self.recorder is not None:
            self.recorder.asked(rank, kind, content)
        if self._coordinator.aborted and kind in ("send", "post"):
            return False
        if kind == "send":
            self._coordinator.send(*content)
        elif kind == "start":
            self._coordinator.start(rank, content)
        elif kind == "post":
            ticket, message, payload, sending, raises = content
            self._posted[rank, ticket] = self._board.post(message, payload, sending=sending, raises=raises)
        else:
            self._ask(rank, kind, content)
            return True
        return False

    def _ask(self, rank: int, kind: str, content: Any) -> None:
        coordinator = self._coordinator
        if kind == "join":
            coordinator.join(rank, content)
        elif kind == "await":
            coordinator.await_ticket(rank, content)
        elif kind == "receive":
            coordinator.receive(content)
        elif kind == "probe":
            posted = self._posted.get((rank, content))
            coordinator.answer(rank, Resumption(posted is not None and posted.matched))
        elif coordinator.aborted:
            coordinator.answer(rank, Resumption())
        else:
            self._board.settle(self._posted.pop((rank, content)))

    def answers(self, waiting: set[int]) -> dict[int, Resumption]:
        """Return the answers for those of the ``waiting`` ranks that continue now."""
        answers = self._coordinator.resumptions(waiting)
        waiting.difference_update(answers)
        if self.recorder is not None:
            for rank, resumption in answers.items():
                self.recorder.answered(rank, resumption.error)
        return answers

    def lost(self) -> str | None:
        """Return the error text for mismatched or unreceived messages that no rank waited for, or None."""
        return self._board.forgotten() or self._coordinator.undelivered(self._board.undelivered())


def called(kind: str, content: Any) -> str | None:
    """Return the collective or message of a request with its call site; None for other requests."""
    if kind in ("join", "start"):
        fingerprint: CollectiveFingerprint = content.fingerprint
        return f"{fingerprint} at {fingerprint.site}"
    message: MessageFingerprint
    if kind == "send":
        message, sending = content[0], True
    elif kind == "receive":
        message, sending = content, False
    elif kind == "post":
        _, message, _, sending, _ = content
    else:
        return None
    return f"{message.text(sending=sending)} at {message.site}"
