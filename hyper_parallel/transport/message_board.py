"""Messages that sender and receiver agree on: a send is complete when its receive is posted, as gloo has it.

The board is part of a simulated world and needs no framework. A receive takes the first message that was posted for it,
by source, tag and channel; one from any source takes the first from anybody. Mismatches are errors on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.checks.compare import message_mismatch
from hyper_parallel.transport.checks.fingerprint import ANY_SOURCE, MessageFingerprint
from hyper_parallel.transport.coordinator import Coordinator
from hyper_parallel.transport.endpoint import RankAbortedError, Resumption

__all__ = ["MessageBoard", "Posted"]


@dataclass(eq=False, slots=True)
class Posted:
    """One side of a message.

    Attributes:
        message: its fingerprint; the source of a receive may be :data:`ANY_SOURCE`.
        sending: whether it is the sender's side.
        board: on which it was posted.
        payload: of the sender; of the receiver once it is matched.
        error: the text of the mismatch, if any.
        matched: whether the other side was found.
    """

    message: MessageFingerprint
    sending: bool
    board: MessageBoard
    payload: Any = None
    error: str | None = None
    matched: bool = False

    @property
    def rank(self) -> int:
        """Who posted it."""
        return self.message.source if self.sending else self.message.destination

    def text(self) -> str:
        """See :class:`Wait`."""
        return f"{self.message.text(sending=self.sending)} at {self.message.site}"

    def hopeless(self, ended: Mapping[int, str]) -> str | None:
        """See :class:`Wait`."""
        return self.board.absent(self, ended)

    def fits(self, other: Posted) -> bool:
        """Whether this send and the receive ``other`` are sides of one message."""
        sent, taken = self.message, other.message
        same = (sent.destination, sent.tag, sent.channel) == (taken.destination, taken.tag, taken.channel)
        return same and taken.source in (ANY_SOURCE, sent.source)


class MessageBoard:
    """Matches the sends and receives of the ranks of one world.

    Args:
        coordinator: schedules the ranks.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._sends: list[Posted] = []
        self._receives: list[Posted] = []

    def post(self, message: MessageFingerprint, payload: Any = None, *, sending: bool) -> Posted:
        """Post one side of a message; the rank goes on."""
        if self._coordinator.aborted:
            raise RankAbortedError
        posted = Posted(message, sending, self, payload)
        others = self._receives if sending else self._sends
        for other in others:
            send, receive = (posted, other) if sending else (other, posted)
            if send.fits(receive):
                others.remove(other)
                self._match(send, receive)
                return posted
        (self._sends if sending else self._receives).append(posted)
        return posted

    def wait(self, posted: Posted) -> None:
        """The rank that posted it waits for the other side; its result is :meth:`take` of it."""
        if posted.matched:
            return
        self._coordinator.block(posted.rank, posted)

    @staticmethod
    def take(posted: Posted) -> Any:
        """The payload of a matched message.

        Raises:
            CollectiveMismatchError: the two sides do not fit.
        """
        if posted.error is not None:
            raise CollectiveMismatchError(posted.error)
        return posted.payload

    def undelivered(self) -> list[MessageFingerprint]:
        """Messages that were sent and never received."""
        return [posted.message for posted in self._sends]

    def absent(self, posted: Posted, ended: Mapping[int, str]) -> str | None:
        """Why nobody can answer ``posted`` any more; None if somebody can."""
        message = posted.message
        if posted.sending:
            peers = [message.destination]
        elif message.source == ANY_SOURCE:
            peers = list(message.channel.ranks or range(self._coordinator.world_size))
            peers.remove(message.destination)
        else:
            peers = [message.source]
        if any(peer not in ended for peer in peers):
            return None
        ends = ", ".join(f"rank {peer} {ended[peer]}" for peer in peers)
        verb = "receiving what rank {} sends" if posted.sending else "sending what rank {} waits for"
        lines = [f"{ends} without {verb.format(posted.rank)}:", f"  rank {posted.rank}: {posted.text()}"]
        others = [other for other in self._sends + self._receives if self._is_near(other, posted, peers)]
        return "\n".join([*lines, *(f"  rank {other.rank}, unanswered: {other.text()}" for other in others)])

    @staticmethod
    def _is_near(other: Posted, posted: Posted, peers: list[int]) -> bool:
        """Whether ``other`` is the opposite side of a message between the same ranks, of another tag or group."""
        to = other.message.destination if other.sending else other.message.source
        return other.sending != posted.sending and other.rank in peers and to in (posted.rank, ANY_SOURCE)

    def _match(self, send: Posted, receive: Posted) -> None:
        receive.message = replace(receive.message, source=send.message.source)
        problem = message_mismatch(send.message, receive.message)
        receive.payload = send.payload
        for posted in (send, receive):
            posted.matched, posted.error = True, problem
            if self._coordinator.waits_for(posted.rank) is posted:
                self._coordinator.unblock(posted.rank, Resumption())
