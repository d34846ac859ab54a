"""A transport that checks every collective with a coordinator first, so that mismatches raise instead of hanging.

Gloo hangs when ranks call different collectives, and computes wrong results when they use different operations. A
guarded rank therefore sends its fingerprint to a coordinator, like a simulated rank, and starts the real collective
only when all members have sent matching fingerprints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.transport.base import WORLD, Channel, ForwardingTransport, HostOps, Parts, Ranks, Shape, Transport
from hyper_parallel.transport.checks.fingerprint import (
    CollectiveFingerprint,
    MessageFingerprint,
    TransportFingerprints,
)
from hyper_parallel.transport.simulated.endpoint import Contribution, Endpoint, PostingEndpoint
from hyper_parallel.transport.work import Work

__all__ = ["GuardedTransport"]


class GuardedTransport(ForwardingTransport):
    """A transport that checks each collective before ``inner`` executes it.

    Every method raises :class:`CollectiveMismatchError` when members call it differently.

    Args:
        inner: the real transport.
        ops: host operations, used to describe tensors.
        endpoint: connection to the coordinator.
    """

    def __init__(self, inner: Transport, ops: HostOps, endpoint: PostingEndpoint) -> None:
        super().__init__(inner)
        self._fingerprints = TransportFingerprints(inner.rank, inner.world_size, ops)
        self._endpoint = endpoint
        self._tickets = 0

    @property
    def endpoint(self) -> Endpoint:
        """The connection to the coordinator, for collectives of a framework's own functions."""
        return self._endpoint

    def all_reduce(self, x: Any, op: str, ranks: Ranks) -> Any:
        """See :meth:`Transport.all_reduce`."""
        self.agree(self._fingerprints.all_reduce(x, op, ranks))
        return self._inner.all_reduce(x, op, ranks)

    def all_gather(self, x: Any, ranks: Ranks, shapes: Sequence[Shape]) -> list[Any]:
        """See :meth:`Transport.all_gather`."""
        self.agree(self._fingerprints.all_gather(x, ranks, shapes))
        return self._inner.all_gather(x, ranks, shapes)

    def reduce_scatter(self, chunks: Sequence[Any], op: str, ranks: Ranks) -> Any:
        """See :meth:`Transport.reduce_scatter`."""
        self.agree(self._fingerprints.reduce_scatter(chunks, op, ranks))
        return self._inner.reduce_scatter(chunks, op, ranks)

    def all_to_all(self, x: Any, ranks: Ranks, sends: Parts, expects: Parts) -> Any:
        """See :meth:`Transport.all_to_all`."""
        self.agree(self._fingerprints.all_to_all(x, ranks, sends, expects))
        return self._inner.all_to_all(x, ranks, sends, expects)

    def all_gather_rows(self, x: Any, ranks: Ranks, shapes: tuple[Shape, ...]) -> Any:
        """See :meth:`RowCollectives.all_gather_rows`."""
        self.agree(self._fingerprints.all_gather_rows(x, ranks, shapes))
        return self._inner.all_gather_rows(x, ranks, shapes)

    def reduce_scatter_rows(self, rows: Any, op: str, ranks: Ranks, shapes: tuple[Shape, ...]) -> Any:
        """See :meth:`RowCollectives.reduce_scatter_rows`."""
        self.agree(self._fingerprints.reduce_scatter_rows(rows, op, ranks, shapes))
        return self._inner.reduce_scatter_rows(rows, op, ranks, shapes)

    def all_to_all_rows(self, rows: Any, ranks: Ranks, sends: tuple[Shape, ...], expects: tuple[Shape, ...]) -> Any:
        """See :meth:`RowCollectives.all_to_all_rows`."""
        self.agree(self._fingerprints.all_to_all_rows(rows, ranks, sends, expects))
        return self._inner.all_to_all_rows(rows, ranks, sends, expects)

    def broadcast(self, x: Any, src: int, ranks: Ranks) -> Any:
        """See :meth:`Transport.broadcast`."""
        self.agree(self._fingerprints.broadcast(x, src, ranks))
        return self._inner.broadcast(x, src, ranks)

    def start(self, operation: str, *args: Any) -> Work:
        """See :meth:`Transport.start`; a mismatch is raised by ``wait()``."""
        if operation in ("send", "recv"):
            return self._send(*args) if operation == "send" else self._recv(*args)
        fingerprints: dict[str, Callable[..., CollectiveFingerprint]] = {
            "all_reduce": self._fingerprints.all_reduce,
            "all_gather": self._fingerprints.all_gather,
            "reduce_scatter": self._fingerprints.reduce_scatter,
            "all_to_all": self._fingerprints.all_to_all,
            "broadcast": self._fingerprints.broadcast,
        }
        fingerprint = fingerprints[operation](*args)
        if len(fingerprint.ranks) == 1:
            return self._inner.start(operation, *args)
        ticket = self._start(fingerprint)
        work = self._inner.start(operation, *args)

        def finish() -> Any:
            self._endpoint.wait(ticket)
            return work.wait()

        return Work(operation, finish, work.output)

    def send(self, x: Any, dst: int, tag: int = 0, channel: Channel = WORLD) -> None:
        """See :meth:`Transport.send`."""
        self._send(x, dst, tag, channel).wait()

    def recv(self, like: Any, src: int, tag: int = 0, channel: Channel = WORLD) -> Any:
        """See :meth:`Transport.recv`."""
        return self._recv(like, src, tag, channel).wait()

    def all_gather_object(self, obj: Any, ranks: Ranks) -> list[Any]:
        """See :meth:`Transport.all_gather_object`."""
        self.agree(self._fingerprints.of("all_gather_object", ranks))
        return self._inner.all_gather_object(obj, ranks)

    def barrier(self, ranks: Ranks) -> None:
        """See :meth:`Transport.barrier`."""
        self.agree(self._fingerprints.of("barrier", ranks))
        self._inner.barrier(ranks)

    def agree(self, fingerprint: CollectiveFingerprint, *, wait: bool = True) -> None:
        """Send the fingerprint of a collective that this rank is about to call.

        Args:
            fingerprint: fingerprint of a collective of this transport, or of another transport in the same world.
            wait: whether to wait until every member has sent a matching fingerprint. Otherwise return at once; the
                world then fails as soon as members disagree.
        """
        if len(fingerprint.ranks) == 1:
            return
        if wait:
            self._endpoint.exchange(_contribution(fingerprint))
        else:
            self._start(fingerprint, awaited=False)

    def _start(self, fingerprint: CollectiveFingerprint, *, awaited: bool = True) -> int:
        self._tickets += 1
        contribution = _contribution(fingerprint)
        contribution.ticket, contribution.awaited = self._tickets, awaited
        self._endpoint.start(contribution)
        return self._tickets

    # -- messages --------------------------------------------------------------------------------------------------

    def post(self, message: MessageFingerprint, payload: Any = None, *, sending: bool, raises: bool = True) -> int:
        """Post one side of a message of this or another transport in the same world; return its number for `settle`.

        Args:
            message: fingerprint of the message.
            payload: payload that the receiver gets from :meth:`settle`, if no engine transfers it.
            sending: whether this is the sender's side.
            raises: whether a mismatch raises on this side; if false, only the other side raises.
        """
        self._tickets += 1
        self._endpoint.post(self._tickets, message, payload, sending=sending, raises=raises)
        return self._tickets

    def settle(self, ticket: int) -> tuple[int, Any]:
        """Wait until both sides of a message are posted, and compare them; return source and payload of the message.

        Raises:
            CollectiveMismatchError: the sides do not match, or no rank is left that could post the other side.
        """
        return self._endpoint.settle(ticket)

    def is_settled(self, ticket: int) -> bool:
        """Whether :meth:`settle` would return, or raise, at once."""
        return self._endpoint.is_settled(ticket)

    def _send(self, x: Any, dst: int, tag: int = 0, channel: Channel = WORLD) -> Work:
        posted = self.post(self._fingerprints.send(x, dst, tag, channel), sending=True, raises=False)
        return self._settled(posted, self._inner.start("send", x, dst, tag, channel))

    def _recv(self, like: Any, src: int, tag: int = 0, channel: Channel = WORLD) -> Work:
        posted = self.post(self._fingerprints.recv(like, src, tag, channel), sending=False)
        return self._settled(posted, self._inner.start("recv", like, src, tag, channel))

    def _settled(self, posted: int, work: Work) -> Work:
        """Return a handle that waits for the comparison and then for the engine's work.

        If the sides do not match, the engine's receive stays pending. A later receive of the same mailbox waits for its
        message first, and discards it.
        """

        def finish() -> Any:
            self.settle(posted)
            return work.wait()

        return Work(work.what, finish, work.output)


def _contribution(fingerprint: CollectiveFingerprint) -> Contribution:
    """Return a contribution without payload, since the real transport transfers the tensors."""
    return Contribution(fingerprint, [None] * len(fingerprint.ranks))
