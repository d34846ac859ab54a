"""Transports for one process: a world of one rank, and one rank of a larger world that does not exist.

They do not use any framework's communication. The second transport runs one rank of a fake world of any size.
Collectives are checked, and their results have the right shapes, with zeros in place of data of other ranks. Calls
whose result depends on other ranks' objects or messages are rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.errors import CollectiveMismatchError, UnsupportedOnBackend
from hyper_parallel.transport.base import HostOps, Parts, Ranks, Shape
from hyper_parallel.transport.checks.fingerprint import MessageFingerprint
from hyper_parallel.transport.simulated.endpoint import Contribution
from hyper_parallel.transport.simulated.transport import SimulatedTransport
from hyper_parallel.transport.work import Work

__all__ = ["FakeTransport"]


class FakeTransport(SimulatedTransport):
    """One rank of a world whose other ranks do not exist.

    Args:
        world_size: number of ranks.
        ops: host operations of the framework; see :class:`HostOps`.
        zeros: function ``zeros(like, shape)`` that returns a tensor of the dtype of ``like``.
        rank: number of the rank, by default the first.
        instead: what to run instead; the error of a rejected call ends with this text.
    """

    backend = "fake"

    def __init__(
        self, world_size: int, ops: HostOps, zeros: Callable[[Any, Shape], Any], rank: int = 0, instead: str = ""
    ) -> None:
        super().__init__(rank, world_size, ops, _NoPeers(instead))
        self._zeros = zeros

    def start(self, operation: str, *args: Any) -> Work:
        """Run like the blocking collective, since there is no other rank to wait for."""
        result = getattr(self, operation)(*args)
        return Work(operation, lambda: result)

    def all_reduce(self, x: Any, op: str, ranks: Ranks) -> Any:
        """This rank's own operand."""
        return self._all_reduce(x, op, ranks).contribution.payloads[0]

    def all_gather(self, x: Any, ranks: Ranks, shapes: Sequence[Shape]) -> list[Any]:
        """Return this rank's tensor, and zeros in place of the other ranks' tensors; equal zeros are one tensor."""
        own = self._all_gather(x, ranks, shapes).contribution.payloads[0]
        zeros = {shape: self._zeros(x, shape) for shape in dict.fromkeys(map(tuple, shapes))}
        return [own if rank == self.rank else zeros[tuple(shape)] for rank, shape in zip(ranks, shapes, strict=True)]

    def reduce_scatter(self, chunks: Sequence[Any], op: str, ranks: Ranks) -> Any:
        """Return a copy of the chunk at this rank's position, without the other ranks' terms."""
        self._fingerprints.reduce_scatter(chunks, op, ranks)
        return self._ops.copy(chunks[ranks.index(self.rank)])

    def all_to_all(self, x: Any, ranks: Ranks, sends: Parts, expects: Parts) -> Any:
        """Return the part that this rank sends to itself, and zeros in place of the other ranks' parts."""
        position = ranks.index(self.rank)
        own = self._all_to_all(x, ranks, sends, expects).contribution.payloads[position]
        before, after = expects.starts[position], expects.total - expects.starts[position] - expects.sizes[position]
        return self._ops.join([self._zeros(x, (before,)), own, self._zeros(x, (after,))])

    def all_gather_rows(self, x: Any, ranks: Ranks, shapes: tuple[Shape, ...]) -> Any:
        """Return this rank's row, and rows of zeros in place of the other ranks'."""
        self._fingerprints.all_gather_rows(x, ranks, shapes)
        return self._own_row(x, ranks)

    def reduce_scatter_rows(self, rows: Any, op: str, ranks: Ranks, shapes: tuple[Shape, ...]) -> Any:
        """Return a copy of the row at this rank's position, without the other ranks' terms."""
        self._fingerprints.reduce_scatter_rows(rows, op, ranks, shapes)
        return self._ops.copy(rows[ranks.index(self.rank)])

    def all_to_all_rows(self, rows: Any, ranks: Ranks, sends: tuple[Shape, ...], expects: tuple[Shape, ...]) -> Any:
        """Return the row that this rank sends to itself, and rows of zeros in place of the other ranks'."""
        self._fingerprints.all_to_all_rows(rows, ranks, sends, expects)
        return self._own_row(rows[ranks.index(self.rank)], ranks)

    def _own_row(self, row: Any, ranks: Ranks) -> Any:
        """Return rows with ``row`` at this rank's position, and zeros at all other positions."""
        zeros = self._zeros(row, self._ops.shape(row))
        return self._ops.stack([row if rank == self.rank else zeros for rank in ranks])

    def broadcast(self, x: Any, src: int, ranks: Ranks) -> Any:
        """This rank's own operand."""
        self._broadcast(x, src, ranks)
        return self._ops.copy(x)


class _NoPeers:
    """The endpoint of a rank whose peers do not exist."""

    own_process = False

    def __init__(self, instead: str) -> None:
        self._instead = f": {instead}" if instead else ""

    def exchange(self, contribution: Contribution) -> list[Any]:
        """Raise an error: the result depends on data of other ranks."""
        raise self._unknown(contribution.fingerprint)

    def start(self, contribution: Contribution) -> None:
        """Raise an error: the frameworks' own asynchronous collectives are not supported."""
        raise self._unknown(contribution.fingerprint)

    def wait(self, ticket: int) -> list[Any]:
        """Raise an error: nothing was started."""
        raise self._unknown(ticket)

    def send(self, message: MessageFingerprint, payload: Any) -> None:
        """Drop the message: there is no receiver."""
        del message, payload

    def receive(self, posted: MessageFingerprint) -> Any:
        """Raise an error: there is no sender."""
        raise self._unknown(posted.text(sending=False))

    def _unknown(self, what: object) -> UnsupportedOnBackend:
        return UnsupportedOnBackend(
            f"{what}: only the other ranks know its result, but this fake world has none; run the program in a "
            f"simulated world{self._instead}"
        )


class _Alone:
    """The endpoint of the only rank of its world."""

    own_process = False

    def exchange(self, contribution: Contribution) -> list[Any]:
        """Raise an error: there is no other rank."""
        msg = f"{contribution.fingerprint} needs ranks {contribution.fingerprint.ranks}; this world has one rank"
        raise CollectiveMismatchError(msg)

    def start(self, contribution: Contribution) -> None:
        """Raise an error: there is no other rank."""
        self.exchange(contribution)

    def wait(self, ticket: int) -> list[Any]:
        """Raise an error: nothing was started."""
        raise CollectiveMismatchError(f"ticket {ticket} does not exist")

    def send(self, message: MessageFingerprint, payload: Any) -> None:
        """Raise an error: there is no other rank."""
        del payload
        msg = f"rank {message.destination} does not exist; this world has one rank"
        raise CollectiveMismatchError(msg)

    def receive(self, posted: MessageFingerprint) -> Any:
        """Raise an error: there is no other rank."""
        msg = f"rank {posted.source} does not exist; this world has one rank"
        raise CollectiveMismatchError(msg)


class SingleTransport(SimulatedTransport):
    """Transport of a world of one rank; ``ops`` copies and normalises tensors, for example ``TorchOps()``."""

    backend = "single"

    def __init__(self, ops: HostOps) -> None:
        super().__init__(0, 1, ops, _Alone())
