"""A transport whose ranks live on one machine under one coordinator, deterministically.

:class:`SimulatedTransport` builds every collective from one primitive, *exchange* (each member deposits a payload
per member and gets what the others deposited for it), and from mailboxes. Arithmetic is done by the receiving
rank, in the order of ``ranks``, so that all members compute bitwise the same. Payloads are private copies: a rank
that later writes into its tensor changes nobody else's.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hyper_parallel.errors import CollectiveMismatchError, MeshError
from hyper_parallel.transport.base import (
    WORLD,
    Channel,
    Ranks,
    Shape,
    Transport,
    after_dropped,
    check_ranks,
    check_reduction,
)
from hyper_parallel.transport.checks.fingerprint import Call, Message, call_site
from hyper_parallel.transport.work import Pending

__all__ = ["Endpoint", "HostOps", "SimulatedGroup", "SimulatedTransport"]


class HostOps(Protocol):
    """The little that a simulated rank needs from a framework (or from numpy)."""

    def shape(self, x: Any) -> Shape:
        """Sizes of ``x``."""

    def dtype(self, x: Any) -> str:
        """Name of the dtype of ``x``."""

    def inexact(self, x: Any) -> bool:
        """Whether ``x`` is floating or complex, so that it has an average."""

    def copy(self, x: Any) -> Any:
        """A contiguous copy outside any gradient, sharing nothing with ``x``."""

    def reduce(self, parts: Sequence[Any], op: str) -> Any:
        """Reduce equal-shaped ``parts`` in their order with ``op``; a new tensor of the same dtype."""

    def save_state(self) -> Any:
        """What the framework keeps per process but a rank owns: the default generator, the default dtype."""

    def restore_state(self, state: Any) -> None:
        """Put back what :meth:`save_state` returned."""


class Endpoint(Protocol):
    """A rank's line to the coordinator; every method may block the rank and raise what the coordinator decides."""

    def exchange(self, call: Call) -> list[Any]:
        """Join a collective; what each member deposited for this rank, in the order of ``call.ranks``."""

    def start(self, call: Call) -> None:
        """Deposit the part in a collective that has a ticket, and go on."""

    def wait(self, ticket: int) -> list[Any]:
        """What each member of the collective of ``ticket`` deposited for this rank; once per ticket."""

    def send(self, message: Message) -> None:
        """Deposit a message."""

    def receive(self, wish: Message) -> Any:
        """Wait for a message; its payload."""


@dataclass(frozen=True)
class SimulatedGroup:
    """Group handle of a simulated world: nothing but its ranks."""

    ranks: Ranks

    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)


@dataclass(frozen=True)
class _Part:
    """One rank's part in a collective, and what it makes of the others' parts."""

    call: Call
    finish: Callable[[list[Any]], Any]


class SimulatedTransport(Transport):
    """One simulated rank's transport: ``ops`` computes, ``endpoint`` talks to the coordinator.

    Every method raises :class:`CollectiveMismatchError` at once when members do not do the same thing.
    """

    backend = "simulated"

    def __init__(self, rank: int, world_size: int, ops: HostOps, endpoint: Endpoint) -> None:
        self.rank = rank
        self.world_size = world_size
        self._ops = ops
        self._endpoint = endpoint
        self._tickets = 0
        self._groups: dict[Ranks, SimulatedGroup] = {}
        self._dropped: dict[Ranks, int] = {}
        self._wishes: dict[tuple[int, int, int, Channel], deque[Message]] = {}
        self._arrived: dict[int, tuple[Any, CollectiveMismatchError | None]] = {}

    def all_reduce(self, x: Any, op: str, ranks: Ranks) -> Any:
        """Reduce in rank order; see :meth:`Transport.all_reduce`."""
        return self._run(self._all_reduce(x, op, ranks))

    def all_gather(self, x: Any, ranks: Ranks, shapes: Sequence[Shape]) -> list[Any]:
        """See :meth:`Transport.all_gather`."""
        found: list[Any] = self._run(self._all_gather(x, ranks, shapes))
        return found

    def reduce_scatter(self, chunks: Sequence[Any], op: str, ranks: Ranks) -> Any:
        """Reduce in rank order; see :meth:`Transport.reduce_scatter`."""
        return self._run(self._reduce_scatter(chunks, op, ranks))

    def all_to_all(self, chunks: Sequence[Any], ranks: Ranks, shapes: Sequence[Shape]) -> list[Any]:
        """See :meth:`Transport.all_to_all`."""
        found: list[Any] = self._run(self._all_to_all(chunks, ranks, shapes))
        return found

    def broadcast(self, x: Any, src: int, ranks: Ranks) -> Any:
        """See :meth:`Transport.broadcast`."""
        return self._run(self._broadcast(x, src, ranks))

    def start(self, operation: str, *args: Any) -> Pending:
        """See :meth:`Transport.start`."""
        if operation == "send":
            self.send(*args)
            return Pending("send", lambda: None)
        if operation == "recv":
            return self._post(*args)
        parts: dict[str, Callable[..., _Part]] = {
            "all_reduce": self._all_reduce,
            "all_gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
            "all_to_all": self._all_to_all,
            "broadcast": self._broadcast,
        }
        part = parts[operation](*args)
        if len(part.call.ranks) == 1:
            return Pending(operation, lambda: part.finish(list(part.call.outgoing)))
        self._tickets += 1
        ticket = part.call.ticket = self._tickets
        self._endpoint.start(part.call)
        return Pending(operation, lambda: part.finish(self._endpoint.wait(ticket)))

    def _all_reduce(self, x: Any, op: str, ranks: Ranks) -> _Part:
        check_reduction(op, inexact=self._ops.inexact(x))
        facts = (*self._facts(x), ("reduction", op))
        payloads = [self._ops.copy(x)] * len(ranks)
        return self._part("all_reduce", ranks, facts, payloads, lambda parts: self._ops.reduce(parts, op))

    def _all_gather(self, x: Any, ranks: Ranks, shapes: Sequence[Shape]) -> _Part:
        told = _tuples(shapes)
        self._check_told("all_gather", self._ops.shape(x), told, ranks)
        facts = (("dtype", self._ops.dtype(x)), ("shapes", told))
        payloads = [self._ops.copy(x)] * len(ranks)
        return self._part("all_gather", ranks, facts, payloads, lambda parts: [self._ops.copy(part) for part in parts])

    def _reduce_scatter(self, chunks: Sequence[Any], op: str, ranks: Ranks) -> _Part:
        _check_count("reduce_scatter", len(chunks), ranks)
        check_reduction(op, inexact=self._ops.inexact(chunks[0]))
        shapes = tuple(self._ops.shape(chunk) for chunk in chunks)
        facts = (("dtype", self._ops.dtype(chunks[0])), ("shapes", shapes), ("reduction", op))
        payloads = [self._ops.copy(chunk) for chunk in chunks]
        return self._part("reduce_scatter", ranks, facts, payloads, lambda parts: self._ops.reduce(parts, op))

    def _all_to_all(self, chunks: Sequence[Any], ranks: Ranks, shapes: Sequence[Shape]) -> _Part:
        _check_count("all_to_all", len(chunks), ranks)
        expects = _tuples(shapes)
        sends = tuple(self._ops.shape(chunk) for chunk in chunks)
        position = check_ranks(ranks, self.rank, self.world_size)
        self._check_told("all_to_all", sends[position], expects, ranks)
        payloads = [self._ops.copy(chunk) for chunk in chunks]
        facts = (("dtype", self._ops.dtype(chunks[0])),)
        return self._part("all_to_all", ranks, facts, payloads, list, sends, expects)

    def _broadcast(self, x: Any, src: int, ranks: Ranks) -> _Part:
        _check_source(src, ranks)
        payload = self._ops.copy(x) if src == self.rank else None
        facts = (*self._facts(x), ("src", src))
        place = ranks.index(src)
        return self._part("broadcast", ranks, facts, [payload] * len(ranks), lambda parts: self._ops.copy(parts[place]))

    def send(self, x: Any, dst: int, tag: int = 0, channel: Channel = WORLD) -> None:
        """Deposit a copy in the mailbox of ``dst`` and return at once."""
        self._check_peer("send", dst)
        self._endpoint.send(Message(self.rank, dst, tag, self._facts(x), call_site(), self._ops.copy(x), channel))

    def recv(self, like: Any, src: int, tag: int = 0, channel: Channel = WORLD) -> Any:
        """See :meth:`Transport.recv`."""
        return self._post(like, src, tag, channel).wait()

    def _post(self, like: Any, src: int, tag: int = 0, channel: Channel = WORLD) -> Pending:
        """Wish for a message; wishes for one mailbox are served in the order in which they were made."""
        self._check_peer("recv", src)
        wish = Message(src, self.rank, tag, self._facts(like), call_site(), None, channel)
        self._wishes.setdefault(wish.key, deque()).append(wish)
        return Pending("recv", lambda: self._receive(wish))

    def _receive(self, wish: Message) -> Any:
        queue = self._wishes[wish.key]
        while id(wish) not in self._arrived:
            first = queue.popleft()
            try:
                self._arrived[id(first)] = (self._endpoint.receive(first), None)
            except CollectiveMismatchError as error:
                self._arrived[id(first)] = (None, error)
        value, refused = self._arrived.pop(id(wish))
        if refused is not None:
            raise refused
        return value

    def all_gather_object(self, obj: Any, ranks: Ranks) -> list[Any]:
        """Objects travel pickled, so no two ranks share one."""
        payload = pickle.dumps(obj)
        parts = self._run(self._part("all_gather_object", ranks, (), [payload] * len(ranks), list))
        return [pickle.loads(part) for part in parts]  # noqa: S301 - written by the ranks of this very program

    def barrier(self, ranks: Ranks) -> None:
        """See :meth:`Transport.barrier`."""
        self._run(self._part("barrier", ranks, (), [None] * len(ranks), list))

    def group(self, ranks: Ranks) -> SimulatedGroup:
        """A handle; equal ranks give equal handles, and no communication happens."""
        return self._groups.setdefault(tuple(ranks), SimulatedGroup(tuple(ranks)))

    def build_of(self, ranks: Ranks, group: Any = None) -> str:
        """See :meth:`Transport.build_of`; one that follows a destroyed one is another."""
        del group
        return after_dropped(self._dropped.get(ranks, 0))

    def known_group(self, ranks: Ranks) -> SimulatedGroup | None:
        """See :meth:`Transport.known_group`."""
        return self._groups.get(tuple(ranks))

    def adopt(self, group: Any) -> None:
        """See :meth:`Transport.adopt`.

        Raises:
            MeshError: ``group`` is no group of a simulated world.
        """
        if not isinstance(group, SimulatedGroup):
            msg = f"{group!r} is no group of this world; create_group builds one"
            raise MeshError(msg)
        self._groups[group.ranks] = group

    def drop(self, group: SimulatedGroup) -> None:
        """See :meth:`Transport.drop`."""
        self.ranks_of(group)
        del self._groups[group.ranks]
        ranks = tuple(sorted(group.ranks))
        if len(ranks) < self.world_size:
            self._dropped[ranks] = self._dropped.get(ranks, 0) + 1

    def close(self) -> None:
        """Forget every group; the world itself ends with the simulation."""
        self._groups.clear()

    def ranks_of(self, group: Any) -> Ranks:
        """See :meth:`Transport.ranks_of`.

        Raises:
            MeshError: ``group`` is no group of this world, or was destroyed.
        """
        if group is None:
            return tuple(range(self.world_size))
        if not isinstance(group, SimulatedGroup) or group.ranks not in self._groups:
            msg = (
                f"{group!r} is no group of this world, or was destroyed; "
                f"known are the groups of ranks {[list(ranks) for ranks in self._groups]}; create_group builds one"
            )
            raise MeshError(msg)
        return group.ranks

    def _facts(self, x: Any) -> tuple[tuple[str, Any], ...]:
        return (("shape", self._ops.shape(x)), ("dtype", self._ops.dtype(x)))

    def _part(
        self,
        operation: str,
        ranks: Ranks,
        facts: tuple[tuple[str, Any], ...],
        outgoing: list[Any],
        finish: Callable[[list[Any]], Any],
        sends: tuple[Shape, ...] | None = None,
        expects: tuple[Shape, ...] | None = None,
    ) -> _Part:
        check_ranks(ranks, self.rank, self.world_size)
        return _Part(Call(operation, ranks, facts, outgoing, call_site(), sends, expects), finish)

    def _run(self, part: _Part) -> Any:
        alone = len(part.call.ranks) == 1
        return part.finish(list(part.call.outgoing) if alone else self._endpoint.exchange(part.call))

    def _check_told(self, operation: str, own: Shape, told: tuple[Shape, ...], ranks: Ranks) -> None:
        _check_count(operation, len(told), ranks)
        position = check_ranks(ranks, self.rank, self.world_size)
        if told[position] != own:
            msg = f"rank {self.rank} sends {list(own)} to itself in {operation} but says {list(told[position])}"
            raise CollectiveMismatchError(msg)

    def _check_peer(self, operation: str, peer: int) -> None:
        if peer == self.rank or not 0 <= peer < self.world_size:
            msg = f"{operation} on rank {self.rank} names rank {peer}; it must be another rank below {self.world_size}"
            raise CollectiveMismatchError(msg)


def _tuples(shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    return tuple(tuple(shape) for shape in shapes)


def _check_count(operation: str, count: int, ranks: Ranks) -> None:
    if count != len(ranks):
        msg = f"{operation} over {len(ranks)} ranks got {count} chunks or shapes; it takes one per rank"
        raise CollectiveMismatchError(msg)


def _check_source(src: int, ranks: Ranks) -> None:
    if src not in ranks:
        msg = f"broadcast from rank {src}, which is not among ranks {ranks}; src is a global rank"
        raise CollectiveMismatchError(msg)
