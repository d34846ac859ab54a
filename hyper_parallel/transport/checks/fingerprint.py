"""Fingerprints of collectives and messages, which ranks compare to detect mismatches.

No framework is needed here: shapes are tuples, dtypes are strings.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.errors import CollectiveMismatchError, short_dtype
from hyper_parallel.transport.base import WORLD, Channel, HostOps, Parts, Ranks, Shape, check_ranks, check_reduction
from hyper_parallel.transport.frames import PROGRAMS, WRAPPERS

__all__ = [
    "ANY_SOURCE",
    "CollectiveFingerprint",
    "Facts",
    "MessageFingerprint",
    "Site",
    "TransportFingerprints",
    "call_site",
]

ANY_SOURCE = -1
"""The source of a receive that takes a message from any rank."""

Facts = tuple[tuple[str, Any], ...]
"""Named values on which all members of a collective must agree, in a fixed order."""

_TRANSPORT_DIR, _PACKAGE_DIR = (f"{folder}{os.sep}" for folder in Path(__file__).absolute().parents[1:3])
_INSTALLED = f"-packages{os.sep}"
_FRAMEWORKS = tuple(f"{_INSTALLED}{name}{os.sep}" for name in ("torch", "mindspore"))


@dataclass(frozen=True)
class Site:
    """The call site of a collective: the first frame outside the transport, and the first frame of the program.

    The frame of the program is the first that belongs neither to this library nor to the framework.
    """

    near: tuple[str, int]
    user: tuple[str, int] | None = None

    def __str__(self) -> str:
        near = f"{self.near[0]}:{self.near[1]}"
        return near if self.user is None else f"{self.user[0]}:{self.user[1]} (through {near})"


@dataclass(slots=True)
class CollectiveFingerprint:
    """One member's view of one collective.

    Attributes:
        operation: name of the collective.
        ranks: ordered members.
        facts: named values on which all members must agree.
        site: place of the call.
        sends: shape of the chunk for each member, where chunks may differ between members; else None.
        expects: shape that this member expects from each member; else None.
        group: name of the group, where several groups of the same ranks have collectives of their own; else empty.
    """

    operation: str
    ranks: Ranks
    facts: Facts
    site: Site
    sends: tuple[Shape, ...] | None = None
    expects: tuple[Shape, ...] | None = None
    group: str = ""

    def __str__(self) -> str:
        return f"{self.operation}({', '.join(_parts(self.facts, self.sends, self.expects))})"


@dataclass(slots=True)
class MessageFingerprint:
    """A point-to-point message, as its sender or its receiver describes it.

    Attributes:
        source: rank that sends it.
        destination: rank that receives it.
        tag: tag of the message.
        facts: facts on which both sides must agree.
        site: place of the call.
        channel: stream to which the message belongs.
        counted: whether the number of elements must agree instead of the shape, because engines do not see shapes.
    """

    source: int
    destination: int
    tag: int
    facts: Facts
    site: Site
    channel: Channel = WORLD
    counted: bool = False

    @property
    def key(self) -> tuple[int, int, int, Channel]:
        """Key of the mailbox of the message."""
        return (self.source, self.destination, self.tag, self.channel)

    @property
    def agreed(self) -> Facts:
        """The facts that must be equal on both sides."""
        if not self.counted:
            return self.facts
        return tuple((name, math.prod(value) if name == "shape" else value) for name, value in self.facts)

    def text(self, *, sending: bool) -> str:
        """``send(f32[2], dst=1, tag=0)`` or ``recv(f32[2], src=0, tag=0)``."""
        source = "any" if self.source == ANY_SOURCE else self.source
        peer = f"dst={self.destination}" if sending else f"src={source}"
        channel = [str(self.channel)] if self.channel != WORLD else []
        return f"{'send' if sending else 'recv'}({', '.join([*_parts(self.facts), peer, f'tag={self.tag}', *channel])})"


class TransportFingerprints:
    """Makes the fingerprints of the methods of :class:`Transport`, and rejects invalid arguments.

    Args:
        rank: rank of the caller.
        world_size: number of ranks of the world.
        ops: describes tensors.
    """

    def __init__(self, rank: int, world_size: int, ops: HostOps) -> None:
        self._rank = rank
        self._world_size = world_size
        self._ops = ops

    def all_reduce(self, x: Any, op: str, ranks: Ranks) -> CollectiveFingerprint:
        """Return the fingerprint of :meth:`Transport.all_reduce`."""
        check_reduction(op, inexact=self._ops.inexact(x))
        return self.of("all_reduce", ranks, (*self._tensor(x), ("reduction", op)))

    def all_gather(self, x: Any, ranks: Ranks, shapes: Sequence[Shape]) -> CollectiveFingerprint:
        """Return the fingerprint of :meth:`Transport.all_gather`."""
        expected = _tuples(shapes)
        _check_count("all_gather", len(expected), ranks)
        self._check_own("all_gather", self._ops.shape(x), expected, check_ranks(ranks, self._rank, self._world_size))
        return self.of("all_gather", ranks, (*self._kind(x), ("shapes", expected)))

    def reduce_scatter(self, chunks: Sequence[Any], op: str, ranks: Ranks) -> CollectiveFingerprint:
        """Return the fingerprint of :meth:`Transport.reduce_scatter`."""
        _check_count("reduce_scatter", len(chunks), ranks)
        check_reduction(op, inexact=self._ops.inexact(chunks[0]))
        facts = (*self._kind(chunks[0]), ("shapes", self._shapes(chunks)), ("reduction", op))
        return self.of("reduce_scatter", ranks, facts)

    def all_to_all(self, x: Any, ranks: Ranks, sends: Parts, expects: Parts) -> CollectiveFingerprint:
        """Return the fingerprint of :meth:`Transport.all_to_all`."""
        _check_count("all_to_all", len(sends.shapes), ranks)
        _check_count("all_to_all", len(expects.shapes), ranks)
        position = check_ranks(ranks, self._rank, self._world_size)
        self._check_own("all_to_all", sends.shapes[position], expects.shapes, position)
        elements = math.prod(self._ops.shape(x))
        if elements != sends.total:
            msg = f"all_to_all over {len(ranks)} ranks sends {sends.total} elements of a tensor of {elements}"
            raise CollectiveMismatchError(msg)
        return self.of("all_to_all", ranks, self._kind(x), sends.shapes, expects.shapes)

    def all_gather_rows(self, x: Any, ranks: Ranks, shapes: tuple[Shape, ...]) -> CollectiveFingerprint:
        """Return the fingerprint of :meth:`Transport.all_gather_rows`, equal to that of :meth:`all_gather`."""
        _check_count("all_gather", len(shapes), ranks)
        return self.of("all_gather", ranks, (*self._kind(x), ("shapes", shapes)))

    def reduce_scatter_rows(self, rows: Any, op: str, ranks: Ranks, shapes: tuple[Shape, ...]) -> CollectiveFingerprint:
        """Return the fingerprint of :meth:`Transport.reduce_scatter_rows`, equal to that of :meth:`reduce_scatter`."""
        _check_count("reduce_scatter", self._ops.shape(rows)[0], ranks)
        check_reduction(op, inexact=self._ops.inexact(rows))
        facts = (*self._kind(rows), ("shapes", shapes), ("reduction", op))
        return self.of("reduce_scatter", ranks, facts)

    def all_to_all_rows(
        self, rows: Any, ranks: Ranks, sends: tuple[Shape, ...], expects: tuple[Shape, ...]
    ) -> CollectiveFingerprint:
        """Return the fingerprint of :meth:`Transport.all_to_all_rows`, equal to that of :meth:`all_to_all`."""
        _check_count("all_to_all", self._ops.shape(rows)[0], ranks)
        return self.of("all_to_all", ranks, self._kind(rows), sends, expects)

    def broadcast(self, x: Any, src: int, ranks: Ranks) -> CollectiveFingerprint:
        """Return the fingerprint of :meth:`Transport.broadcast`."""
        if src not in ranks:
            msg = f"broadcast from rank {src}, which is not among ranks {ranks}; src is a global rank"
            raise CollectiveMismatchError(msg)
        return self.of("broadcast", ranks, (*self._tensor(x), ("src", src)))

    def of(
        self,
        operation: str,
        ranks: Ranks,
        facts: Facts = (),
        sends: tuple[Shape, ...] | None = None,
        expects: tuple[Shape, ...] | None = None,
    ) -> CollectiveFingerprint:
        """Return the fingerprint of a collective that this rank, a member of ``ranks``, calls now."""
        check_ranks(ranks, self._rank, self._world_size)
        return CollectiveFingerprint(operation, ranks, facts, call_site(), sends, expects)

    def send(self, x: Any, dst: int, tag: int, channel: Channel) -> MessageFingerprint:
        """Return the fingerprint of :meth:`Transport.send`."""
        self._check_peer("send", dst)
        return MessageFingerprint(self._rank, dst, tag, self._tensor(x), call_site(), channel)

    def recv(self, like: Any, src: int, tag: int, channel: Channel) -> MessageFingerprint:
        """Return the fingerprint of :meth:`Transport.recv`."""
        self._check_peer("recv", src)
        return MessageFingerprint(src, self._rank, tag, self._tensor(like), call_site(), channel)

    def _tensor(self, x: Any) -> Facts:
        return (("shape", self._ops.shape(x)), *self._kind(x))

    def _kind(self, x: Any) -> Facts:
        """Return the dtype, and the device unless it is the CPU: all members compute on the same type of device."""
        device = self._ops.device(x)
        return (("dtype", self._ops.dtype(x)), ("device", device)) if device else (("dtype", self._ops.dtype(x)),)

    def _shapes(self, chunks: Sequence[Any]) -> tuple[Shape, ...]:
        return tuple(self._ops.shape(chunk) for chunk in chunks)

    def _check_own(self, operation: str, own: Shape, shapes: tuple[Shape, ...], position: int) -> None:
        if shapes[position] != own:
            named = list(shapes[position])
            msg = f"rank {self._rank} sends {list(own)} to itself in {operation}, but its shapes name {named}"
            raise CollectiveMismatchError(msg)

    def _check_peer(self, operation: str, peer: int) -> None:
        if peer == self._rank or not 0 <= peer < self._world_size:
            msg = (
                f"{operation} on rank {self._rank} names rank {peer}; it must be another rank below {self._world_size}"
            )
            raise CollectiveMismatchError(msg)


def call_site(*beneath: str) -> Site:
    """The call site of the collective that is running now.

    Args:
        beneath: prefixes of file names whose frames are skipped, in addition to those of the transport's files.
    """
    frame: Any = inspect.currentframe()
    skipped = (_TRANSPORT_DIR, *beneath, *WRAPPERS)
    while frame is not None and frame.f_code.co_filename.startswith(skipped):
        frame = frame.f_back
    if frame is None:
        return Site(("<unknown>", 0))
    near = (frame.f_code.co_filename, frame.f_lineno)
    if not near[0].startswith(_PACKAGE_DIR) or near[0].startswith(tuple(PROGRAMS)):
        return Site(near)
    while frame is not None and _of_libraries(frame.f_code.co_filename):
        frame = frame.f_back
    return Site(near, None if frame is None else (frame.f_code.co_filename, frame.f_lineno))


def _of_libraries(path: str) -> bool:
    """Return whether a file belongs to this library or to the framework, whose modules call each other."""
    return path.startswith(_PACKAGE_DIR) or (_INSTALLED in path and any(package in path for package in _FRAMEWORKS))


def _parts(facts: Facts, sends: Sequence[Shape] | None = None, expects: Sequence[Shape] | None = None) -> list[str]:
    """``f32[2, 3]`` and ``sum``, or for chunks ``f32[1] f32[2]`` and ``expects f32[1] f32[3]``."""
    values = dict(facts)
    parts: list[str] = []
    dtype = short_dtype(values.pop("dtype")) if "dtype" in values else ""
    if "shape" in values:
        parts.append(f"{dtype}{list(values.pop('shape'))}")
    elif sends is not None:
        parts.append(_chunks(dtype, sends))
        if expects is not None:
            parts.append(f"expects {_chunks(dtype, expects)}")
    elif dtype:
        parts.append(dtype)
    if "reduction" in values:
        parts.append(str(values.pop("reduction")))
    return [*parts, *(f"{name}={_value(value)}" for name, value in values.items())]


def _chunks(dtype: str, shapes: Sequence[Shape]) -> str:
    return " ".join(f"{dtype}{list(shape)}" for shape in shapes)


def _value(value: Any) -> str:
    """Shapes as lists, everything else by ``str``."""
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return "[" + ", ".join(str(list(item)) for item in value) + "]"
    return str(value)


def _tuples(shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    return tuple(tuple(shape) for shape in shapes)


def _check_count(operation: str, count: int, ranks: Ranks) -> None:
    if count != len(ranks):
        msg = f"{operation} over {len(ranks)} ranks got {count} chunks or shapes; it takes one per rank"
        raise CollectiveMismatchError(msg)
