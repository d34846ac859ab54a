"""A world of one rank: every collective is a copy, and no framework's communication is touched."""

from __future__ import annotations

from typing import Any

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.calls import Call, Message
from hyper_parallel.transport.simulated import HostOps, SimulatedTransport

__all__ = ["SingleTransport"]


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
