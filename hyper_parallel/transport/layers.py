"""What transports that stand on something else share: on another transport, or on an engine that starts collectives."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.transport.base import WORLD, Channel, Ranks, Shape, Transport

if TYPE_CHECKING:
    from hyper_parallel.transport.pending import Pending

__all__ = ["EngineTransport", "TransportOver"]


class TransportOver(Transport):
    """On ``inner``: the same world, and the same groups."""

    def __init__(self, inner: Transport) -> None:
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.backend = inner.backend
        self._inner = inner

    def group(self, ranks: Ranks) -> Any:
        """See :meth:`Transport.group`."""
        return self._inner.group(ranks)

    def ranks_of(self, group: Any) -> Ranks:
        """See :meth:`Transport.ranks_of`."""
        return self._inner.ranks_of(group)

    def build_group(self, ranks: Ranks, **options: Any) -> Any:
        """See :meth:`Transport.build_group`."""
        return self._inner.build_group(ranks, **options)

    def claimed(self, statement: str, ranks: Ranks) -> list[str]:
        """See :meth:`Transport.claimed`."""
        return self._inner.claimed(statement, ranks)

    def build_of(self, ranks: Ranks, group: Any = None) -> str:
        """See :meth:`Transport.build_of`."""
        return self._inner.build_of(ranks, group)

    def known_group(self, ranks: Ranks) -> Any:
        """See :meth:`Transport.known_group`."""
        return self._inner.known_group(ranks)

    def adopt(self, group: Any) -> None:
        """See :meth:`Transport.adopt`."""
        self._inner.adopt(group)

    def drop(self, group: Any) -> None:
        """See :meth:`Transport.drop`."""
        self._inner.drop(group)

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        self._inner.close()


class EngineTransport(Transport):
    """On an engine that carries collectives while the caller goes on: each is started, and waited for at once."""

    def all_reduce(self, x: Any, op: str, ranks: Ranks) -> Any:
        """See :meth:`Transport.all_reduce`."""
        return self._all_reduce(x, op, ranks).wait()

    def all_gather(self, x: Any, ranks: Ranks, shapes: Sequence[Shape]) -> list[Any]:
        """See :meth:`Transport.all_gather`; uneven shapes travel padded to the largest."""
        found: list[Any] = self._all_gather(x, ranks, shapes).wait()
        return found

    def reduce_scatter(self, chunks: Sequence[Any], op: str, ranks: Ranks) -> Any:
        """See :meth:`Transport.reduce_scatter`; uneven chunks travel padded to the largest."""
        return self._reduce_scatter(chunks, op, ranks).wait()

    def all_to_all(self, chunks: Sequence[Any], ranks: Ranks, shapes: Sequence[Shape]) -> list[Any]:
        """See :meth:`Transport.all_to_all`; one collective, whatever the shapes."""
        found: list[Any] = self._all_to_all(chunks, ranks, shapes).wait()
        return found

    def broadcast(self, x: Any, src: int, ranks: Ranks) -> Any:
        """See :meth:`Transport.broadcast`."""
        return self._broadcast(x, src, ranks).wait()

    def start(self, operation: str, *args: Any) -> Pending:
        """See :meth:`Transport.start`; the engine carries it while the caller goes on."""
        starts: dict[str, Callable[..., Pending]] = {
            "all_reduce": self._all_reduce,
            "all_gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
            "all_to_all": self._all_to_all,
            "broadcast": self._broadcast,
            "send": self._send,
            "recv": self._recv,
        }
        return starts[operation](*args)

    @abc.abstractmethod
    def _all_reduce(self, x: Any, op: str, ranks: Ranks) -> Pending: ...

    @abc.abstractmethod
    def _all_gather(self, x: Any, ranks: Ranks, shapes: Sequence[Shape]) -> Pending: ...

    @abc.abstractmethod
    def _reduce_scatter(self, chunks: Sequence[Any], op: str, ranks: Ranks) -> Pending: ...

    @abc.abstractmethod
    def _all_to_all(self, chunks: Sequence[Any], ranks: Ranks, shapes: Sequence[Shape]) -> Pending: ...

    @abc.abstractmethod
    def _broadcast(self, x: Any, src: int, ranks: Ranks) -> Pending: ...

    @abc.abstractmethod
    def _send(self, x: Any, dst: int, tag: int = 0, channel: Channel = WORLD) -> Pending: ...

    @abc.abstractmethod
    def _recv(self, like: Any, src: int, tag: int = 0, channel: Channel = WORLD) -> Pending: ...
