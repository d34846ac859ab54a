"""One rank of a world that does not exist: every collective is checked, and its result has the right shape only.

For asking what a program would communicate, in a world of any size. What other ranks would have sent is zeros; what
only they can know is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.errors import CollectiveMismatchError, UnsupportedOnBackend
from hyper_parallel.transport.base import Ranks, Shape
from hyper_parallel.transport.checks.fingerprint import Call, Message
from hyper_parallel.transport.simulated import HostOps, SimulatedTransport

__all__ = ["RehearsedTransport"]


class RehearsedTransport(SimulatedTransport):
    """Rank 0 of ``world_size`` ranks of which no other exists.

    Args:
        world_size: number of ranks.
        ops: the framework's; see :class:`HostOps`.
        zeros: ``zeros(like, shape)``, a tensor of the dtype of ``like``.
    """

    backend = "rehearsed"

    def __init__(self, world_size: int, ops: HostOps, zeros: Callable[[Any, Shape], Any]) -> None:
        super().__init__(0, world_size, ops, _Nobody())
        self._zeros = zeros

    def all_reduce(self, x: Any, op: str, ranks: Ranks) -> Any:
        """What this rank gave."""
        return self._all_reduce(x, op, ranks).call.outgoing[0]

    def all_gather(self, x: Any, ranks: Ranks, shapes: Sequence[Shape]) -> list[Any]:
        """This rank's part, and zeros."""
        own = self._all_gather(x, ranks, shapes).call.outgoing[0]
        return [own if rank == self.rank else self._zeros(x, shape) for rank, shape in zip(ranks, shapes, strict=True)]

    def reduce_scatter(self, chunks: Sequence[Any], op: str, ranks: Ranks) -> Any:
        """This rank's own chunk for itself."""
        return self._reduce_scatter(chunks, op, ranks).call.outgoing[ranks.index(self.rank)]

    def all_to_all(self, chunks: Sequence[Any], ranks: Ranks, shapes: Sequence[Shape]) -> list[Any]:
        """This rank's own chunk for itself, and zeros."""
        call = self._all_to_all(chunks, ranks, shapes).call
        return [
            call.outgoing[place] if rank == self.rank else self._zeros(chunks[0], shape)
            for place, (rank, shape) in enumerate(zip(ranks, shapes, strict=True))
        ]

    def broadcast(self, x: Any, src: int, ranks: Ranks) -> Any:
        """What this rank gave."""
        self._broadcast(x, src, ranks)
        return self._ops.copy(x)


class _Nobody:
    """An endpoint with nobody at the other end."""

    def exchange(self, call: Call) -> list[Any]:
        """Refuse: what other ranks hold decides on what comes next."""
        raise _unknown(call)

    def start(self, call: Call) -> None:
        """Refuse: the frameworks' own asynchronous collectives are not rehearsed."""
        raise _unknown(call)

    def wait(self, ticket: int) -> list[Any]:
        """Refuse: nothing was started."""
        raise _unknown(ticket)

    def send(self, message: Message) -> None:
        """Nobody receives it."""

    def receive(self, wish: Message) -> Any:
        """Refuse: nobody sent anything."""
        raise _unknown(wish)


def _unknown(what: object) -> UnsupportedOnBackend:
    return UnsupportedOnBackend(
        f"{what}: only the other ranks know its result, and in a rehearsal there are none; run the program in a "
        "simulated world: hyper-parallel verify model"
    )


class _Alone:
    """An endpoint with nobody at the other end."""

    def exchange(self, call: Call) -> list[Any]:
        """Refuse: there is no other rank."""
        msg = f"{call} needs ranks {call.ranks}; this world has one rank"
        raise CollectiveMismatchError(msg)

    def start(self, call: Call) -> None:
        """Refuse: there is no other rank."""
        self.exchange(call)

    def wait(self, ticket: int) -> list[Any]:
        """Nothing was ever started."""
        raise CollectiveMismatchError(f"ticket {ticket} was never given out")

    def send(self, message: Message) -> None:
        """Refuse: there is no other rank."""
        msg = f"rank {message.destination} does not exist; this world has one rank"
        raise CollectiveMismatchError(msg)

    def receive(self, wish: Message) -> Any:
        """Refuse: there is no other rank."""
        msg = f"rank {wish.source} does not exist; this world has one rank"
        raise CollectiveMismatchError(msg)


class SingleTransport(SimulatedTransport):
    """Transport of a lone process; ``ops`` copies and normalises, e.g. ``TorchOps()``."""

    backend = "single"

    def __init__(self, ops: HostOps) -> None:
        super().__init__(0, 1, ops, _Alone())
