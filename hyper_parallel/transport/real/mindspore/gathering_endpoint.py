"""An endpoint without a coordinator: members gather all contributions over a real transport and compare them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.base import Transport
from hyper_parallel.transport.checks.compare import mismatch
from hyper_parallel.transport.checks.fingerprint import MessageFingerprint
from hyper_parallel.transport.host.numpy_ops import BFLOAT16
from hyper_parallel.transport.simulated.endpoint import Contribution
from hyper_parallel.transport.work import Work

__all__ = ["GatheringEndpoint"]


class GatheringEndpoint:
    """The endpoint of a real rank in a world that has no coordinator.

    A started collective is complete when ``start`` returns, so it waits for the other members. Unlike with
    a coordinator, a program deadlocks if its members start collectives and wait for messages in different orders.

    Args:
        transport: the real transport.
        from_host: converts a host array to a tensor of ``transport``.
        to_host: converts a result of ``transport`` to a host array.
    """

    own_process = True

    def __init__(self, transport: Transport, from_host: Callable[[Any], Any], to_host: Callable[[Any], Any]) -> None:
        self._transport = transport
        self._from_host = from_host
        self._to_host = to_host
        self._results: dict[int, list[Any]] = {}
        self._on_their_way: list[Work] = []  # kept alive, since they own the memory that is sent

    def exchange(self, contribution: Contribution) -> list[Any]:
        """See :class:`Endpoint`.

        Raises:
            CollectiveMismatchError: the members call different collectives.
        """
        fingerprint = contribution.fingerprint
        ranks = fingerprint.ranks
        gathered = self._transport.all_gather_object((fingerprint, contribution.payloads), ranks)
        problem = mismatch({rank: entry[0] for rank, entry in zip(ranks, gathered, strict=True)}, ranks)
        if problem is not None:
            raise CollectiveMismatchError(problem)
        position = ranks.index(self._transport.rank)
        return [payloads[position] for _, payloads in gathered]

    def start(self, contribution: Contribution) -> None:
        """See :class:`Endpoint`; complete at once."""
        self._results[contribution.ticket or 0] = self.exchange(contribution)

    def wait(self, ticket: int) -> list[Any]:
        """See :class:`Endpoint`."""
        return self._results.pop(ticket)

    def send(self, message: MessageFingerprint, payload: Any) -> None:
        """See :class:`Endpoint`; the message is on its way when this returns."""
        sent = self._from_host(payload), message.destination, message.tag, message.channel
        self._on_their_way.append(self._transport.start("send", *sent))

    def receive(self, posted: MessageFingerprint) -> Any:
        """See :class:`Endpoint`."""
        facts = dict(posted.facts)
        dtype = BFLOAT16 if facts["dtype"] == "bfloat16" else np.dtype(facts["dtype"])
        like = self._from_host(np.zeros(facts["shape"], dtype))
        return self._to_host(self._transport.recv(like, posted.source, posted.tag, posted.channel))
