"""What a rank and the coordinator of its world exchange: contributions, results, and what a rank waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hyper_parallel.transport.checks.fingerprint import CollectiveFingerprint, MessageFingerprint

__all__ = ["Contribution", "Endpoint", "PostingEndpoint", "RankAbortedError", "Resumption", "Wait", "unwinding"]


class RankAbortedError(BaseException):
    """Unwinds a rank whose world has failed elsewhere; a BaseException so that rank code does not swallow it."""


def unwinding(error: BaseException | None) -> bool:
    """Return True if ``error`` is a consequence of unwinding the rank."""
    while error is not None and not isinstance(error, RankAbortedError):
        error = error.__context__
    return error is not None


@dataclass(slots=True)
class Contribution:
    """A rank's part in a collective: fingerprint and payloads.

    Attributes:
        fingerprint: compared with those of the other members.
        payloads: one per member, in the order of the fingerprint's ranks; opaque to the coordinator.
        ticket: number of an asynchronous collective, positive, by which its result is asked for; None for a blocking
            one.
        awaited: False if the rank goes on and never asks for the result.
    """

    fingerprint: CollectiveFingerprint
    payloads: Sequence[Any]
    ticket: int | None = None
    awaited: bool = True


@dataclass(slots=True)
class Resumption:
    """The result of the call in which a rank waited, or the error to raise."""

    value: Any = None
    error: BaseException | None = None


class Endpoint(Protocol):
    """A rank's connection to the coordinator; methods may block.

    Attributes:
        own_process: whether the rank is a process of its own, which shares no state with others.
    """

    own_process: bool

    def exchange(self, contribution: Contribution) -> list[Any]:
        """Join a collective; each member's payload for this rank, in the order of the ranks."""

    def start(self, contribution: Contribution) -> None:
        """Contribute to a collective that has a ticket, and go on."""

    def wait(self, ticket: int) -> list[Any]:
        """Each member's payload for this rank, in the collective of ``ticket``; once per ticket."""

    def send(self, message: MessageFingerprint, payload: Any) -> None:
        """Deposit a message."""

    def receive(self, posted: MessageFingerprint) -> Any:
        """Wait for a message; its payload."""


class PostingEndpoint(Endpoint, Protocol):
    """An endpoint on which messages are posted by both sides, which then wait for each other."""

    def post(
        self, ticket: int, message: MessageFingerprint, payload: Any, *, sending: bool, raises: bool = True
    ) -> None:
        """Post one side of a message under a number of this rank's choice, and go on.

        Args:
            ticket: the number.
            message: its fingerprint.
            payload: of the sender.
            sending: whether it is the sender's side.
            raises: whether this side raises if the two do not fit; if not, only the other one is.
        """

    def settle(self, ticket: int) -> tuple[int, Any]:
        """Wait for the other side of a message; its source, and the payload of the sender. Once per ticket."""

    def is_settled(self, ticket: int) -> bool:
        """Whether :meth:`settle` would return, or raise, at once."""


class Wait(Protocol):
    """What a rank waits for apart from collectives and mailboxes: a message on a board, a key of a store."""

    def text(self) -> str:
        """The call, with its site: ``recv(f32[2], src=0, tag=0) at train.py:7``."""

    def hopeless(self, ended: Mapping[int, str]) -> str | None:
        """The text of the error if the ranks that have ended leave nobody to wait for; else None."""

    def answering(self, world_size: int) -> Sequence[int]:
        """The ranks of which any may end this wait."""

    def causes(self) -> list[str]:
        """What is known about why it waits in vain: ``ranks 0 and 1 disagree about the tag of a message``."""

    def unanswered(self) -> list[str]:
        """A line of the error for everything that others have started and nobody has answered."""

    def dismiss(self) -> None:
        """Its rank got an error and waits no longer."""
