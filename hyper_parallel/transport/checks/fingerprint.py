"""What a rank says when it joins a collective: the payload, and everything by which others can tell it strayed.

Nothing here knows a framework. Payloads are opaque; shapes are tuples, dtypes are strings.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.errors import short_dtype
from hyper_parallel.transport.base import WORLD, Channel, Ranks, Shape

__all__ = [
    "Call",
    "Message",
    "Site",
    "call_site",
    "describe",
]

Facts = tuple[tuple[str, Any], ...]

_TRANSPORT_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # noqa: PTH100, PTH120 - compared with co_filename
_PACKAGE_DIR = os.path.dirname(os.path.dirname(_TRANSPORT_DIR)) + os.sep  # noqa: PTH120


@dataclass(frozen=True)
class Site:
    """Where a collective was called: the first frame outside the transport, and the first outside the library."""

    near: tuple[str, int]
    user: tuple[str, int] | None = None

    def __str__(self) -> str:
        near = f"{self.near[0]}:{self.near[1]}"
        return near if self.user is None else f"{self.user[0]}:{self.user[1]} (through {near})"


@dataclass
class Call:
    """One member's part in one collective.

    Attributes:
        operation: name of the transport method.
        ranks: ordered members.
        facts: named values on which all members must agree.
        outgoing: one payload per member, in the order of ``ranks``.
        sends: shape of each outgoing chunk, where they may differ between members; else None.
        expects: shape that this member expects from each member; else None.
        site: where it was called.
        ticket: what the member will wait for, a positive number; None if it waits at once.
        awaited: False if the member goes on and never asks how it ended.
    """

    operation: str
    ranks: Ranks
    facts: Facts
    outgoing: Sequence[Any]
    site: Site
    sends: tuple[Shape, ...] | None = None
    expects: tuple[Shape, ...] | None = None
    ticket: int | None = None
    awaited: bool = True

    def __str__(self) -> str:
        return describe(self.operation, self.facts, self.sends, self.expects)


@dataclass
class Message:
    """A point-to-point message (``payload`` set) or the wish to receive one (``payload`` None)."""

    source: int
    destination: int
    tag: int
    facts: Facts
    site: Site
    payload: Any = field(default=None, repr=False)
    channel: Channel = WORLD

    @property
    def key(self) -> tuple[int, int, int, Channel]:
        """Mailbox that the message travels through."""
        return (self.source, self.destination, self.tag, self.channel)

    def text(self, *, sending: bool) -> str:
        """``send(f32[2], dst=1, tag=0)`` or ``recv(f32[2], src=0, tag=0)``."""
        peer = f"dst={self.destination}" if sending else f"src={self.source}"
        where = f", {self.channel}" if self.channel != WORLD else ""
        return describe("send" if sending else "recv", self.facts)[:-1] + f", {peer}, tag={self.tag}{where})"


def describe(
    operation: str, facts: Facts, sends: Sequence[Shape] | None = None, expects: Sequence[Shape] | None = None
) -> str:
    """``all_reduce(f32[2, 3], sum)``: the operation with the facts that tell it from another.

    Of chunks, what goes to each member and what is to come from each: ``all_to_all(f32[1] f32[2], expects f32[1]
    f32[3])``.
    """
    known = dict(facts)
    parts: list[str] = []
    dtype = short_dtype(known.pop("dtype")) if "dtype" in known else ""
    if "shape" in known:
        parts.append(f"{dtype}{list(known.pop('shape'))}")
    elif sends is not None:
        parts.append(_chunks(dtype, sends))
        if expects is not None:
            parts.append(f"expects {_chunks(dtype, expects)}")
    elif dtype:
        parts.append(dtype)
    if "reduction" in known:
        parts.append(str(known.pop("reduction")))
    parts.extend(f"{name}={_plain(value)}" for name, value in known.items())
    return f"{operation}({', '.join(parts)})"


def _chunks(dtype: str, shapes: Sequence[Shape]) -> str:
    return " ".join(f"{dtype}{list(shape)}" for shape in shapes)


def _plain(value: Any) -> str:
    """Shapes as lists, everything else as it prints."""
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return "[" + ", ".join(str(list(item)) for item in value) + "]"
    return str(value)


def call_site(beneath: str = "") -> Site:
    """The call site of the collective that is running now.

    Args:
        beneath: a folder that is passed over as the transport's own is.
    """
    frame: Any = sys._getframe(1)  # noqa: SLF001 - the only cheap way to a caller's line
    passed = (_TRANSPORT_DIR, beneath or _TRANSPORT_DIR)
    while frame is not None and frame.f_code.co_filename.startswith(passed):
        frame = frame.f_back
    if frame is None:
        return Site(("<unknown>", 0))
    near = (frame.f_code.co_filename, frame.f_lineno)
    if not near[0].startswith(_PACKAGE_DIR):
        return Site(near)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE_DIR):
        frame = frame.f_back
    return Site(near, None if frame is None else (frame.f_code.co_filename, frame.f_lineno))
