"""The transport of simulated ranks.

:class:`SimulatedTransport` builds every collective from mailboxes and one primitive, *exchange*: each member
contributes one payload per member and gets the payloads that the others contributed for it. The receiving rank does the
arithmetic, in the order of ``ranks``, so that all members compute bitwise equal results. Payloads are private copies:
later writes into a rank's tensor do not change those of other ranks.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.errors import CollectiveMismatchError, MeshError
from hyper_parallel.transport.base import (
    WORLD,
    Channel,
    HostOps,
    Parts,
    Ranks,
    Shape,
    Transport,
    after_dropped,
    unknown_group,
)
from hyper_parallel.transport.checks.fingerprint import (
    MessageFingerprint,
    TransportFingerprints,
)
from hyper_parallel.transport.simulated.endpoint import Contribution, Endpoint, RankAbortedError
from hyper_parallel.transport.work import Work

__all__ = ["SimulatedGroup", "SimulatedTransport", "Started"]


@dataclass(frozen=True)
class SimulatedGroup:
    """Group handle of a simulated world: its ranks."""

    ranks: Ranks

    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def __getattr__(self, name: str) -> Any:
        """Raise an error for attributes that a process group of the framework has, such as its collectives."""
        msg = (
            f"simulated ranks have no process group, so torch.distributed cannot call {name}; the sum of the ranks' x "
            "over a mesh is hyper_parallel.DTensor.from_local(x, mesh, [hyper_parallel.Partial()]).full_tensor()"
        )
        raise AttributeError(msg)


@dataclass(frozen=True)
class _Collective:
    """One rank's side of a collective: its contribution, and the function that combines the received payloads."""

    contribution: Contribution
    finish: Callable[[list[Any]], Any]

    @property
    def alone(self) -> bool:
        """Whether there is no other member."""
        return len(self.contribution.payloads) == 1


@dataclass(frozen=True, slots=True)
class Started:
    """A collective that was started."""

    endpoint: Endpoint
    ticket: int

    def wait(self) -> list[Any]:
        """Wait for each member's payload for this rank, in rank order; may be called once."""
        return self.endpoint.wait(self.ticket)


class SimulatedTransport(Transport):
    """One simulated rank's transport.

    Every method raises :class:`CollectiveMismatchError` at once when members call it differently.

    Attributes:
        refused: error of a call that was rejected in a second thread of the rank. It is raised at the rank's end, since
            in the second thread it would end only that thread.
        count: called with the name of each collective, for the framework's tools that count them; or None.

    Args:
        rank: number of the simulated rank.
        world_size: number of ranks.
        ops: host operations on local tensors.
        endpoint: connection to the coordinator.
    """

    backend = "simulated"

    def __init__(self, rank: int, world_size: int, ops: HostOps, endpoint: Endpoint) -> None:
        self.rank = rank
        self.world_size = world_size
        self.framework = ops.framework
        self._ops = ops
        self._endpoint = endpoint
        self._fingerprints = TransportFingerprints(rank, world_size, ops)
        self._tickets = 0
        self._groups: dict[Ranks, SimulatedGroup] = {}
        self._dropped: dict[Ranks, int] = {}
        self._posted: dict[tuple[int, int, int, Channel], deque[MessageFingerprint]] = {}
        self._arrived: dict[int, tuple[Any, CollectiveMismatchError | None]] = {}
        self._undone_at_end: list[Callable[[], None]] = []
        self._ended = False
        self.refused: Exception | None = None
        self.count: Callable[[str], None] | None = None

    def at_end(self, undo: Callable[[], None]) -> None:
        """See :meth:`Transport.at_end`.

        Raises:
            RankAbortedError: the world has ended, but this rank's thread is still running.
        """
        if self._ended:
            raise RankAbortedError
        self._undone_at_end.append(undo)

    def end(self) -> None:
        """Undo this rank's changes to the process, since its world has ended."""
        self._ended = True
        while self._undone_at_end:
            self._undone_at_end.pop()()

    @property
    def endpoint(self) -> Endpoint:
        """The connection to the coordinator, for collectives of a framework's own functions."""
        return self._endpoint

    @property
    def own_process(self) -> bool:
        """Whether the rank is a process of its own."""
        return self._endpoint.own_process

    def all_reduce(self, x: Any, op: str, ranks: Ranks) -> Any:
        """Reduce in rank order; see :meth:`Transport.all_reduce`."""
        return self._run(self._all_reduce(x, op, ranks))

    def all_gather(self, x: Any, ranks: Ranks, shapes: Sequence[Shape]) -> list[Any]:
        """See :meth:`Transport.all_gather`."""
        parts: list[Any] = self._run(self._all_gather(x, ranks, shapes))
        return parts

    def reduce_scatter(self, chunks: Sequence[Any], op: str, ranks: Ranks) -> Any:
        """Reduce in rank order; see :meth:`Transport.reduce_scatter`."""
        return self._run(self._reduce_scatter(chunks, op, ranks))

    def all_to_all(self, x: Any, ranks: Ranks, sends: Parts, expects: Parts) -> Any:
        """See :meth:`Transport.all_to_all`."""
        return self._run(self._all_to_all(x, ranks, sends, expects))

    def all_gather_rows(self, x: Any, ranks: Ranks, shapes: tuple[Shape, ...]) -> Any:
        """See :meth:`RowCollectives.all_gather_rows`."""
        fingerprint = self._fingerprints.all_gather_rows(x, ranks, shapes)
        payloads = [self._ops.copy(x)] * len(ranks)
        return self._run(_Collective(Contribution(fingerprint, payloads), self._ops.stack))

    def reduce_scatter_rows(self, rows: Any, op: str, ranks: Ranks, shapes: tuple[Shape, ...]) -> Any:
        """Reduce in rank order; see :meth:`RowCollectives.reduce_scatter_rows`."""
        fingerprint = self._fingerprints.reduce_scatter_rows(rows, op, ranks, shapes)
        contribution = Contribution(fingerprint, self._copies(rows))
        return self._run(_Collective(contribution, lambda parts: self._ops.reduce(parts, op)))

    def all_to_all_rows(self, rows: Any, ranks: Ranks, sends: tuple[Shape, ...], expects: tuple[Shape, ...]) -> Any:
        """See :meth:`RowCollectives.all_to_all_rows`."""
        fingerprint = self._fingerprints.all_to_all_rows(rows, ranks, sends, expects)
        return self._run(_Collective(Contribution(fingerprint, self._copies(rows)), self._ops.stack))

    def broadcast(self, x: Any, src: int, ranks: Ranks) -> Any:
        """See :meth:`Transport.broadcast`."""
        return self._run(self._broadcast(x, src, ranks))

    def start(self, operation: str, *args: Any) -> Work:
        """See :meth:`Transport.start`."""
        if operation == "send":
            self.send(*args)
            return Work("send", lambda: None)
        if operation == "recv":
            return self._post(*args)
        collectives: dict[str, Callable[..., _Collective]] = {
            "all_reduce": self._all_reduce,
            "all_gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
            "all_to_all": self._all_to_all,
            "broadcast": self._broadcast,
        }
        collective = collectives[operation](*args)
        if collective.alone:
            return Work(operation, lambda: self._run(collective))
        if self.count is not None:
            self.count(operation)
        started = self.begin(collective.contribution)
        return Work(operation, lambda: collective.finish(started.wait()))

    def begin(self, contribution: Contribution) -> Started:
        """Start a collective of a framework's own functions on this world's coordinator."""
        self._tickets += 1
        contribution.ticket = self._tickets
        self._endpoint.start(contribution)
        return Started(self._endpoint, self._tickets)

    def _all_reduce(self, x: Any, op: str, ranks: Ranks) -> _Collective:
        fingerprint = self._fingerprints.all_reduce(x, op, ranks)
        payloads = [self._ops.copy(x)] * len(ranks)
        return _Collective(Contribution(fingerprint, payloads), lambda parts: self._ops.reduce(parts, op))

    def _all_gather(self, x: Any, ranks: Ranks, shapes: Sequence[Shape]) -> _Collective:
        fingerprint = self._fingerprints.all_gather(x, ranks, shapes)
        payloads = [self._ops.copy(x)] * len(ranks)
        return _Collective(Contribution(fingerprint, payloads), lambda parts: [self._ops.copy(part) for part in parts])

    def _reduce_scatter(self, chunks: Sequence[Any], op: str, ranks: Ranks) -> _Collective:
        fingerprint = self._fingerprints.reduce_scatter(chunks, op, ranks)
        return _Collective(Contribution(fingerprint, self._copies(chunks)), lambda parts: self._ops.reduce(parts, op))

    def _all_to_all(self, x: Any, ranks: Ranks, sends: Parts, expects: Parts) -> _Collective:
        fingerprint = self._fingerprints.all_to_all(x, ranks, sends, expects)
        return _Collective(Contribution(fingerprint, self._ops.split(x, sends.sizes)), self._ops.join)

    def _broadcast(self, x: Any, src: int, ranks: Ranks) -> _Collective:
        fingerprint = self._fingerprints.broadcast(x, src, ranks)
        payload = self._ops.copy(x) if src == self.rank else None
        root = ranks.index(src)
        return _Collective(Contribution(fingerprint, [payload] * len(ranks)), lambda parts: self._ops.copy(parts[root]))

    def _copies(self, chunks: Sequence[Any]) -> list[Any]:
        return [self._ops.copy(chunk) for chunk in chunks]

    def send(self, x: Any, dst: int, tag: int = 0, channel: Channel = WORLD) -> None:
        """Put a copy into the mailbox of ``dst`` and return at once."""
        message = self._fingerprints.send(x, dst, tag, channel)
        self._endpoint.send(message, self._ops.copy(x))

    def recv(self, like: Any, src: int, tag: int = 0, channel: Channel = WORLD) -> Any:
        """See :meth:`Transport.recv`."""
        return self._post(like, src, tag, channel).wait()

    def _post(self, like: Any, src: int, tag: int = 0, channel: Channel = WORLD) -> Work:
        """Post a receive; receives of one mailbox are served in the order of posting."""
        posted = self._fingerprints.recv(like, src, tag, channel)
        self._posted.setdefault(posted.key, deque()).append(posted)
        return Work("recv", lambda: self._receive(posted))

    def _receive(self, posted: MessageFingerprint) -> Any:
        queue = self._posted[posted.key]
        while id(posted) not in self._arrived:
            first = queue.popleft()
            try:
                self._arrived[id(first)] = (self._endpoint.receive(first), None)
            except CollectiveMismatchError as error:
                self._arrived[id(first)] = (None, error)
        value, mismatch = self._arrived.pop(id(posted))
        if mismatch is not None:
            raise mismatch
        return value

    def all_gather_object(self, obj: Any, ranks: Ranks) -> list[Any]:
        """Gather pickled objects, so that no two ranks share one."""
        payload = pickle.dumps(obj)
        parts = self._run(self._plain("all_gather_object", ranks, payload))
        return [pickle.loads(part) for part in parts]  # noqa: S301 - written by ranks of this program

    def barrier(self, ranks: Ranks) -> None:
        """See :meth:`Transport.barrier`."""
        self._run(self._plain("barrier", ranks, None))

    def group(self, ranks: Ranks) -> SimulatedGroup:
        """Return a handle without communication; equal ranks give equal handles."""
        return self._groups.setdefault(tuple(ranks), SimulatedGroup(tuple(ranks)))

    def build_of(self, ranks: Ranks, group: Any = None) -> str:
        """See :meth:`Transport.build_of`; a group built after a destroyed one has a different number."""
        del group
        return after_dropped(self._dropped.get(ranks, 0))

    def known_group(self, ranks: Ranks) -> SimulatedGroup | None:
        """See :meth:`Transport.known_group`."""
        return self._groups.get(tuple(ranks))

    def adopt(self, group: Any) -> None:
        """See :meth:`Transport.adopt`.

        Raises:
            MeshError: ``group`` is not a group of a simulated world.
        """
        if self._is_frameworks(group):
            self.group(self.ranks_of(group))
            return
        if not isinstance(group, SimulatedGroup):
            msg = f"{group!r} is not a group of this world; create_group builds one"
            raise MeshError(msg)
        self._groups[group.ranks] = group

    def drop(self, group: Any) -> None:
        """See :meth:`Transport.drop`."""
        ranks = self.ranks_of(group)
        self._groups.pop(ranks, None)
        ranks = tuple(sorted(ranks))
        if len(ranks) < self.world_size:
            self._dropped[ranks] = self._dropped.get(ranks, 0) + 1

    def close(self) -> None:
        """Discard all groups; the world itself ends with the simulation."""
        self._groups.clear()

    def ranks_of(self, group: Any) -> Ranks:
        """See :meth:`Transport.ranks_of`.

        Raises:
            MeshError: ``group`` is not a group of this world, or was destroyed.
        """
        if group is None:
            return tuple(range(self.world_size))
        if self._is_frameworks(group):
            return tuple(group.ranks)
        if not isinstance(group, SimulatedGroup) or group.ranks not in self._groups:
            raise unknown_group(group, self._groups)
        return group.ranks

    def _is_frameworks(self, group: Any) -> bool:
        """Whether this rank's framework has built ``group`` on this transport."""
        return getattr(group, "transport", None) is self

    def _plain(self, operation: str, ranks: Ranks, payload: Any) -> _Collective:
        """A collective without tensors."""
        fingerprint = self._fingerprints.of(operation, ranks)
        return _Collective(Contribution(fingerprint, [payload] * len(ranks)), list)

    def _run(self, collective: _Collective) -> Any:
        contribution = collective.contribution
        if self.count is not None:
            self.count(contribution.fingerprint.operation)
        received = list(contribution.payloads) if collective.alone else self._endpoint.exchange(contribution)
        return collective.finish(received)
