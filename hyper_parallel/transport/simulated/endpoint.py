"""Interface between a rank and the coordinator of its world: contributions, results, and waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hyper_parallel.transport.checks.fingerprint import CollectiveFingerprint, MessageFingerprint

__all__ = ["Contribution", "Endpoint", "PostingEndpoint", "RankAbortedError", "Resumption", "Wait", "unwinding"]


class RankAbortedError(BaseException):
    """Unwinds a rank whose world has failed elsewhere; a BaseException, so that rank code does not catch it."""


def unwinding(error: BaseException | None) -> bool:
    """Return True if ``error`` is a consequence of unwinding the rank."""
    while error is not None and not isinstance(error, RankAbortedError):
        error = error.__context__
    return error is not None


@dataclass(slots=True)
class Contribution:
    """A rank's contribution to a collective: fingerprint and payloads.

    Attributes:
        fingerprint: fingerprint of the call, which is compared with the other members' fingerprints.
        payloads: one payload per member, in the order of the fingerprint's ranks; opaque to the coordinator.
        ticket: positive number of an asynchronous collective, which identifies its result; None for a blocking one.
        awaited: whether the rank requests the result.
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
        """Join a collective; return each member's payload for this rank, in rank order."""

    def start(self, contribution: Contribution) -> None:
        """Contribute to a collective with a ticket, and continue."""

    def wait(self, ticket: int) -> list[Any]:
        """Return each member's payload for this rank in the collective of ``ticket``; once per ticket."""

    def send(self, message: MessageFingerprint, payload: Any) -> None:
        """Send a message without waiting."""

    def receive(self, posted: MessageFingerprint) -> Any:
        """Wait for a message; return its payload."""


class PostingEndpoint(Endpoint, Protocol):
    """An endpoint on which both the sender and the receiver post a message, and then wait for each other."""

    def post(
        self, ticket: int, message: MessageFingerprint, payload: Any, *, sending: bool, raises: bool = True
    ) -> None:
        """Post one side of a message under a number of this rank's choice, and continue.

        Args:
            ticket: the number.
            message: fingerprint of the message.
            payload: payload of the sender.
            sending: whether this is the sender's side.
            raises: whether a mismatch raises on this side; if false, only the other side raises.
        """

    def settle(self, ticket: int) -> tuple[int, Any]:
        """Wait for the other side of a message; return its source and the sender's payload. Once per ticket."""

    def is_settled(self, ticket: int) -> bool:
        """Whether :meth:`settle` would return or raise at once."""


class Wait(Protocol):
    """A wait other than for collectives and mailboxes: for a message on a board, or a key of a store."""

    def text(self) -> str:
        """The call, with its site: ``recv(f32[2], src=0, tag=0) at train.py:7``."""

    def hopeless(self, ended: Mapping[int, str]) -> str | None:
        """The text of the error if no remaining rank can end the wait; otherwise None."""

    def answering(self, world_size: int) -> Sequence[int]:
        """The ranks that may end this wait."""

    def causes(self) -> list[str]:
        """Possible causes of a wait that never ends: ``ranks 0 and 1 disagree about the tag of a message``."""

    def unanswered(self) -> list[str]:
        """Lines of the error for operations that others have started and no rank has answered."""

    def dismiss(self) -> None:
        """End the wait, since its rank got an error."""
