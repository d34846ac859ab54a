"""Matches sends with receives between simulated ranks; as in gloo, a send completes when its receive is posted.

The board is part of a simulated world and needs no framework. A receive gets the first message that was posted for it,
by source, tag and channel; a receive from any source gets the first message of any rank. Mismatches are errors on both
sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.checks.compare import message_mismatch
from hyper_parallel.transport.checks.fingerprint import ANY_SOURCE, MessageFingerprint
from hyper_parallel.transport.simulated.coordinator import Coordinator
from hyper_parallel.transport.simulated.endpoint import RankAbortedError, Resumption

__all__ = ["MessageBoard", "Posted"]


@dataclass(eq=False, slots=True)
class Posted:
    """One side of a message.

    Attributes:
        message: fingerprint of the message; the source of a receive may be :data:`ANY_SOURCE`.
        sending: whether this is the sender's side.
        board: board on which the message was posted.
        payload: the sent tensor; on the receiver's side None until the message is matched.
        error: the text of the mismatch, if any.
        matched: whether the other side was posted.
        seen: whether the rank of this side has received the result.
        raises: whether a mismatch raises on the rank of this side; if false, it raises only on the other side's rank.
    """

    message: MessageFingerprint
    sending: bool
    board: MessageBoard
    payload: Any = None
    error: str | None = None
    matched: bool = False
    seen: bool = False
    raises: bool = True

    @property
    def rank(self) -> int:
        """The rank that posted this side."""
        return self.message.source if self.sending else self.message.destination

    def text(self) -> str:
        """See :class:`Wait`."""
        return f"{self.message.text(sending=self.sending)} at {self.message.site}"

    def hopeless(self, ended: Mapping[int, str]) -> str | None:
        """See :class:`Wait`."""
        return self.board.absent(self, ended)

    @property
    def peer(self) -> int:
        """The rank of the other side; :data:`ANY_SOURCE` for a receive from any rank."""
        return self.message.destination if self.sending else self.message.source

    def answering(self, world_size: int) -> Sequence[int]:
        """See :class:`Wait`."""
        members = self.message.channel.ranks or range(world_size)
        return [rank for rank in members if rank != self.rank] if self.peer == ANY_SOURCE else [self.peer]

    def causes(self) -> list[str]:
        """See :class:`Wait`."""
        return self.board.disagreements(self)

    def unanswered(self) -> list[str]:
        """See :class:`Wait`."""
        return self.board.unanswered()

    def dismiss(self) -> None:
        """See :class:`Wait`; a dismissed side must not match a later message."""
        self.board.withdraw(self)

    def resumption(self) -> Resumption:
        """The source and the sender's payload of a matched message, or the error of a mismatch."""
        self.seen = True
        error = None if self.error is None else CollectiveMismatchError(self.error)
        return Resumption((self.message.source, self.payload), error)

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
        self._mismatches: list[tuple[Posted, Posted]] = []

    def post(self, message: MessageFingerprint, payload: Any = None, *, sending: bool, raises: bool = True) -> Posted:
        """Post one side of a message; the rank continues. See :class:`Posted` for the arguments."""
        if self._coordinator.aborted:
            raise RankAbortedError
        posted = Posted(message, sending, self, payload, raises=raises)
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
        """Block the posting rank until the other side is posted; :meth:`take` then returns the payload."""
        if posted.matched:
            return
        self._coordinator.block(posted.rank, posted)

    def settle(self, posted: Posted) -> None:
        """Like :meth:`wait`, for a rank that expects the source and the payload, or an error."""
        if posted.matched:
            self._coordinator.answer(posted.rank, posted.resumption())
        else:
            self._coordinator.block(posted.rank, posted)

    @staticmethod
    def take(posted: Posted) -> Any:
        """Return the payload of a matched message.

        Raises:
            CollectiveMismatchError: the two sides do not match.
        """
        posted.seen = True
        if posted.error is not None:
            raise CollectiveMismatchError(posted.error)
        return posted.payload

    def withdraw(self, posted: Posted) -> None:
        """Remove one side of an unmatched message."""
        side = self._sends if posted.sending else self._receives
        side[:] = [other for other in side if other is not posted]

    def forgotten(self) -> str | None:
        """Return the error of a mismatched message that no side waited for, or None."""
        unseen = (pair for pair in self._mismatches if not any(posted.seen and posted.raises for posted in pair))
        return next((receive.error for _, receive in unseen), None)

    def disagreements(self, posted: Posted) -> list[str]:
        """Return one line for each message that would match ``posted`` if tag or group were equal."""
        lines = []
        for other in self._receives if posted.sending else self._sends:
            send, receive = (posted, other) if posted.sending else (other, posted)
            same_peers = send.peer == receive.rank and receive.peer in (send.rank, ANY_SOURCE)
            if same_peers and not send.fits(receive):
                what = "tag" if send.message.channel == receive.message.channel else "group"
                lines.append(f"ranks {send.rank} and {receive.rank} disagree about the {what} of a message")
        return lines

    def unanswered(self) -> list[str]:
        """Return one line for each message that is posted by one side only, whose rank does not wait for it now."""
        posted = [*self._sends, *self._receives]
        loose = [other for other in posted if self._coordinator.waits_for(other.rank) is not other]
        return [f"  rank {other.rank}, unanswered: {other.text()}" for other in loose]

    def undelivered(self) -> list[MessageFingerprint]:
        """Return the messages that were sent but never received."""
        return [posted.message for posted in self._sends]

    def absent(self, posted: Posted, ended: Mapping[int, str]) -> str | None:
        """Return the reason why no rank can answer ``posted`` any more; None if a rank can."""
        peers = posted.answering(self._coordinator.world_size)
        if any(peer not in ended for peer in peers):
            return None
        ends = ", ".join(f"rank {peer} {ended[peer]}" for peer in peers)
        verb = "receiving what rank {} sends" if posted.sending else "sending what rank {} waits for"
        lines = [f"{ends} without {verb.format(posted.rank)}:", f"  rank {posted.rank}: {posted.text()}"]
        others = [other for other in self._sends + self._receives if self._is_near(other, posted, peers)]
        return "\n".join([*lines, *(f"  rank {other.rank}, unanswered: {other.text()}" for other in others)])

    @staticmethod
    def _is_near(other: Posted, posted: Posted, peers: Sequence[int]) -> bool:
        """Whether ``other`` is an opposite side that involves the rank of ``posted`` or one of its peers."""
        return other.sending != posted.sending and (other.rank in peers or other.peer in (posted.rank, ANY_SOURCE))

    def _match(self, send: Posted, receive: Posted) -> None:
        receive.message = replace(receive.message, source=send.message.source)
        problem = message_mismatch(send.message, receive.message)
        receive.payload = send.payload
        if problem is not None:
            self._mismatches.append((send, receive))
        for posted in (send, receive):
            posted.matched, posted.error = True, problem if posted.raises else None
            if self._coordinator.waits_for(posted.rank) is posted:
                self._coordinator.unblock(posted.rank, posted.resumption())
