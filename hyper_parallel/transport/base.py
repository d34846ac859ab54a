"""The interface of transports, which move local tensors between ranks.

A transport knows no mesh, layout or autograd. Every method is a collective over ``ranks``, an ordered tuple of
global ranks that contains the caller; all members call the same methods in the same order. Results are new
tensors: no method writes into its input, and no result shares memory with a tensor that another rank may still change.
Reductions are computed in the order of ``ranks``, so every member gets bitwise the same answer.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from hyper_parallel.errors import ArgumentTypeError, CollectiveMismatchError, HyperParallelError, MeshError
from hyper_parallel.transport.row_collectives import Parts, RowCollectives

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hyper_parallel.transport.work import Work

__all__ = [
    "ORDERED_REDUCTIONS",
    "REDUCTIONS",
    "WORLD",
    "Channel",
    "EngineTransport",
    "ForwardingTransport",
    "HostOps",
    "Parts",
    "Ranks",
    "ReductionError",
    "Shape",
    "Transport",
    "active_transport",
    "active_transport_of",
    "after_dropped",
    "by_rank",
    "check_ranks",
    "check_reduction",
    "unknown_group",
    "use_transport",
]

Ranks = tuple[int, ...]
Shape = tuple[int, ...]

REDUCTIONS = ("sum", "avg", "max", "min", "prod", "all", "any")
ORDERED_REDUCTIONS = frozenset({"sum", "avg", "prod"})
"""Reductions of floating point numbers whose bits depend on the order of the ranks."""


class Channel(NamedTuple):
    """The stream of a message between two ranks, in addition to its tag: messages of one stream arrive in order.

    Attributes:
        kind: kind of the sending member, if receives by other functions must not match its messages; else empty.
        ranks: ranks of the group that the message is sent in, sorted; empty for the world.
        build: distinguishes groups of the same ranks; see :meth:`Transport.build_of`.
    """

    kind: str = ""
    ranks: Ranks = ()
    build: str = ""

    def __str__(self) -> str:
        group = f"group {list(self.ranks)}" if self.ranks else ""
        return ", ".join(filter(None, (self.kind, group, self.build)))


WORLD = Channel()
"""The default channel: plain messages outside of a group."""


class ReductionError(HyperParallelError, TypeError):
    """A reduction that does not exist, or not for this dtype, such as the average of integers."""


class HostOps(Protocol):
    """The operations on local tensors that a transport needs from a framework, or from NumPy.

    Attributes:
        framework: name of the framework; empty for NumPy.
    """

    framework: str

    def shape(self, x: Any) -> Shape:
        """Sizes of ``x``."""

    def dtype(self, x: Any) -> str:
        """Name of the dtype of ``x``."""

    def inexact(self, x: Any) -> bool:
        """Whether ``x`` is floating or complex, so that it has an average."""

    def device(self, x: Any) -> str:
        """Type of the device that has ``x``, such as ``npu``; empty for the CPU."""

    def copy(self, x: Any) -> Any:
        """Return a contiguous copy, detached from autograd, that shares no memory with ``x``."""

    def stack(self, parts: Sequence[Any]) -> Any:
        """Return a new tensor, detached from autograd, with the equal-shaped ``parts`` as rows."""

    def split(self, x: Any, sizes: Sequence[int]) -> list[Any]:
        """Return flat copies of consecutive parts of ``x``, with ``sizes`` elements, detached from autograd."""

    def join(self, parts: Sequence[Any]) -> Any:
        """Concatenate flat ``parts``, which the caller does not use any more; may return the only non-empty part."""

    def reduce(self, parts: Sequence[Any], op: str) -> Any:
        """Reduce equal-shaped ``parts`` in their order with ``op``; return a new tensor of the same dtype."""

    def save_state(self) -> Any:
        """Return process-wide state that each rank has separately: the default generator, the default dtype."""

    def restore_state(self, state: Any, now: Any = None) -> None:
        """Restore the state that :meth:`save_state` returned.

        Args:
            state: state of the rank that continues.
            now: result of :meth:`save_state` for another rank, if no rank has run since; an item that is the same
                object in ``state`` and in ``now`` is not restored.
        """


class Transport(RowCollectives):
    """Carries tensors of one framework between the ranks of one world.

    Attributes:
        rank: this rank's number in the world.
        world_size: number of ranks.
        backend: short name for messages and ``get_backend``: ``gloo``, ``nccl``, ``hccl``, ``simulated``, ``single``.
        framework: framework of the tensors: ``torch``, ``mindspore``, or empty for host arrays.
        survives_mismatch: whether the world can still be used after ranks disagreed about a message or an asynchronous
            collective. False for NCCL and HCCL, which start a call before the ranks' calls are compared: afterwards
            the ranks have called in different orders.
    """

    rank: int
    world_size: int
    backend: str
    framework: str = ""
    survives_mismatch: bool = True

    @functools.cached_property
    def receiving(self) -> dict[Channel, WeakKeyDictionary[Work, str]]:
        """Live handles of posted receives by channel, each with a description of the awaited message."""
        return {}

    @functools.cached_property
    def sequences(self) -> dict[Ranks, Any]:
        """The :class:`AgreedSequence` of each group (collectives agreed upon beforehand), by the sorted ranks."""
        return {}

    @abc.abstractmethod
    def all_reduce(self, x: Any, op: str, ranks: Ranks) -> Any:
        """Reduce ``x`` (equal shape and dtype on every member) with ``op`` of :data:`REDUCTIONS`; the dtype is kept."""

    @abc.abstractmethod
    def all_gather(self, x: Any, ranks: Ranks, shapes: Sequence[Shape]) -> list[Any]:
        """Return every member's ``x``, in the order of ``ranks``; member ``i`` sends ``shapes[i]``."""

    @abc.abstractmethod
    def reduce_scatter(self, chunks: Sequence[Any], op: str, ranks: Ranks) -> Any:
        """Member ``i`` receives the reduction of all members' ``chunks[i]``; chunks may differ in shape or be empty."""

    @abc.abstractmethod
    def all_to_all(self, x: Any, ranks: Ranks, sends: Parts, expects: Parts) -> Any:
        """Send each member its part of ``x``; return the received parts, concatenated, as a flat tensor.

        Args:
            x: a tensor of any shape, whose elements are the parts.
            ranks: the members.
            sends: part ``i`` goes to member ``i``.
            expects: part ``i`` of the result comes from member ``i``.
        """

    @abc.abstractmethod
    def broadcast(self, x: Any, src: int, ranks: Ranks) -> Any:
        """The tensor of global rank ``src``; on other members only the shape and dtype of ``x`` matter."""

    @abc.abstractmethod
    def send(self, x: Any, dst: int, tag: int = 0, channel: Channel = WORLD) -> None:
        """Send ``x`` to global rank ``dst``; returns when ``x`` may be reused.

        A message only matches a receive of its tag and channel, except on NCCL and HCCL, which match by order alone.
        """

    @abc.abstractmethod
    def recv(self, like: Any, src: int, tag: int = 0, channel: Channel = WORLD) -> Any:
        """Receive a tensor of the shape and dtype of ``like`` from global rank ``src``."""

    @abc.abstractmethod
    def all_gather_object(self, obj: Any, ranks: Ranks) -> list[Any]:
        """Every member's picklable ``obj``, in the order of ``ranks``."""

    @abc.abstractmethod
    def barrier(self, ranks: Ranks) -> None:
        """Return once every member has called this method."""

    @abc.abstractmethod
    def group(self, ranks: Ranks) -> Any:
        """Return this transport's handle of the group ``ranks``, built once and cached; only members need it."""

    @abc.abstractmethod
    def start(self, operation: str, *args: Any) -> Work:
        """Begin a collective and return before it is complete; ``wait()`` of the handle returns its result.

        Args:
            operation: name of a method above: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``,
                ``broadcast``, ``send`` or ``recv``.
            args: arguments of this method; tensors among them must not be written before the collective is complete.
        """

    def claim(self, proposal: str, ranks: Ranks) -> list[str]:
        """Propose the next asynchronous collective of ``ranks``; return the proposals of members that proposed earlier.

        It does not wait for later members. Returns an empty list by default, for engines that handle disagreement
        themselves.
        """
        del proposal, ranks
        return []

    def build_group(self, ranks: Ranks, **options: Any) -> Any:
        """Like :meth:`group`, with options of the engine: timeout, pg_options, group_desc."""
        del options
        return self.group(ranks)

    def build_of(self, ranks: Ranks, group: Any = None) -> str:
        """A name, equal on all members, that distinguishes groups of the same ``ranks``; empty for the default one.

        Args:
            ranks: ranks of the group, sorted.
            group: handle of the group; None for the cached group of these ranks or, without one, the next to be built.
        """
        del ranks, group
        return ""

    @abc.abstractmethod
    def known_group(self, ranks: Ranks) -> Any:
        """The cached handle of these ranks, or None."""

    @abc.abstractmethod
    def adopt(self, group: Any) -> None:
        """Keep a handle that was built elsewhere as the cached one of its ranks."""

    @abc.abstractmethod
    def drop(self, group: Any) -> None:
        """Destroy a group and what was cached for it."""

    def at_end(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` when the world ends, whether or not this rank has ended by then.

        No effect for ranks that are processes.
        """
        del undo

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the world."""

    @abc.abstractmethod
    def ranks_of(self, group: Any) -> Ranks:
        """Global ranks of a handle that :meth:`group` returned; ``None`` is the world."""


class ForwardingTransport(Transport):
    """Forwards everything about groups to ``inner``; collectives are up to the subclass."""

    def __init__(self, inner: Transport) -> None:
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.backend = inner.backend
        self.framework = inner.framework
        self.survives_mismatch = inner.survives_mismatch
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

    def claim(self, proposal: str, ranks: Ranks) -> list[str]:
        """See :meth:`Transport.claim`."""
        return self._inner.claim(proposal, ranks)

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

    def at_end(self, undo: Callable[[], None]) -> None:
        """See :meth:`Transport.at_end`."""
        self._inner.at_end(undo)

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        self._inner.close()


class EngineTransport(Transport):
    """Base for engines with asynchronous collectives; a blocking one is started and then waited for."""

    def all_reduce(self, x: Any, op: str, ranks: Ranks) -> Any:
        """See :meth:`Transport.all_reduce`."""
        return self._all_reduce(x, op, ranks).wait()

    def all_gather(self, x: Any, ranks: Ranks, shapes: Sequence[Shape]) -> list[Any]:
        """See :meth:`Transport.all_gather`; uneven shapes are padded to the largest."""
        parts: list[Any] = self._all_gather(x, ranks, shapes).wait()
        return parts

    def reduce_scatter(self, chunks: Sequence[Any], op: str, ranks: Ranks) -> Any:
        """See :meth:`Transport.reduce_scatter`; uneven chunks are padded to the largest."""
        return self._reduce_scatter(chunks, op, ranks).wait()

    def all_to_all(self, x: Any, ranks: Ranks, sends: Parts, expects: Parts) -> Any:
        """See :meth:`Transport.all_to_all`; one collective, whatever the sizes."""
        return self._all_to_all(x, ranks, sends, expects).wait()

    def broadcast(self, x: Any, src: int, ranks: Ranks) -> Any:
        """See :meth:`Transport.broadcast`."""
        return self._broadcast(x, src, ranks).wait()

    def start(self, operation: str, *args: Any) -> Work:
        """See :meth:`Transport.start`; the engine runs it while the caller continues."""
        starts: dict[str, Callable[..., Work]] = {
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
    def _all_reduce(self, x: Any, op: str, ranks: Ranks) -> Work: ...

    @abc.abstractmethod
    def _all_gather(self, x: Any, ranks: Ranks, shapes: Sequence[Shape]) -> Work: ...

    @abc.abstractmethod
    def _reduce_scatter(self, chunks: Sequence[Any], op: str, ranks: Ranks) -> Work: ...

    @abc.abstractmethod
    def _all_to_all(self, x: Any, ranks: Ranks, sends: Parts, expects: Parts) -> Work: ...

    @abc.abstractmethod
    def _broadcast(self, x: Any, src: int, ranks: Ranks) -> Work: ...

    @abc.abstractmethod
    def _send(self, x: Any, dst: int, tag: int = 0, channel: Channel = WORLD) -> Work: ...

    @abc.abstractmethod
    def _recv(self, like: Any, src: int, tag: int = 0, channel: Channel = WORLD) -> Work: ...


def after_dropped(count: int) -> str:
    """A name for a group of ranks that have destroyed ``count`` earlier groups: see :meth:`Transport.build_of`."""
    return f"after {count} destroyed" if count else ""


def unknown_group(group: Any, known: Iterable[Ranks]) -> MeshError:
    """The error for a handle that is not a group of this world; ``known`` are the ranks of its groups."""
    return MeshError(
        f"{group!r} is not a group of this world, or was destroyed; "
        f"known are the groups of ranks {[list(ranks) for ranks in known]}; create_group builds one"
    )


def by_rank(ranks: Ranks) -> list[int]:
    """Return the positions in ``ranks`` of its ranks in ascending order, which is the order of a group's members."""
    return sorted(range(len(ranks)), key=ranks.__getitem__)


def check_ranks(ranks: Ranks, rank: int, world_size: int) -> int:
    """Position of ``rank`` in ``ranks``.

    Raises:
        CollectiveMismatchError: ``rank`` is not a member, a member is named twice or lies outside the world.
    """
    if rank not in ranks:
        msg = f"rank {rank} calls a collective over ranks {ranks}, of which it is not a member"
        raise CollectiveMismatchError(msg)
    if len(set(ranks)) != len(ranks) or min(ranks) < 0 or max(ranks) >= world_size:
        msg = f"ranks {ranks} must be distinct and lie in 0..{world_size - 1}"
        raise CollectiveMismatchError(msg)
    return ranks.index(rank)


def check_reduction(op: str, *, inexact: bool) -> None:
    """Reject unknown reductions, and ``avg`` of a dtype that is neither floating nor complex.

    Raises:
        ReductionError: ``op`` is unknown, or ``avg`` of integers or booleans.
    """
    if op not in REDUCTIONS:
        msg = f"unknown reduction {op!r}; known: {', '.join(REDUCTIONS)}"
        raise ReductionError(msg)
    if op == "avg" and not inexact:
        msg = "the average of integers or booleans is not an integer: use 'sum', or convert to a float first"
        raise ReductionError(msg)


_ACTIVE: ContextVar[Transport | None] = ContextVar("hyper_parallel_transport", default=None)


def active_transport() -> Transport | None:
    """Return the current transport (usually that of a simulated rank), or None."""
    return _ACTIVE.get()


def active_transport_of(framework: str) -> Transport | None:
    """Return :func:`active_transport` for tensors of ``framework``.

    Raises:
        ArgumentTypeError: the current transport transfers tensors of a different framework.
    """
    active = _ACTIVE.get()
    if active is not None and active.framework not in ("", framework):
        msg = (
            f"a rank of {active.framework} got a tensor of {framework}, which it cannot send to other ranks; "
            f'write platform="{framework}" in simulate or launch, or @pytest.mark.platforms("{framework}") for a test'
        )
        raise ArgumentTypeError(msg)
    return active


@contextmanager
def use_transport(transport: Transport) -> Iterator[None]:
    """Make ``transport`` the current one inside this context; it is a context variable, per thread and asyncio task."""
    token = _ACTIVE.set(transport)
    try:
        yield
    finally:
        _ACTIVE.reset(token)
