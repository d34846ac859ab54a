"""What members of a collective say about it, so that gloo is never asked to carry what does not fit together.

Gloo ends the process that is sent more than it has room for, and takes garbage for the rest where it is sent less. So
every member first says what it is about to do, in labels of one size.

Whoever blocks waits for the labels and goes on if all are alike. A started collective may not wait for the others, so
whoever begins it first also claims, in the world's store, what is carried out; who comes later and has something else
in mind joins that one instead, with zeros, and everybody learns of it while waiting. Labels tell whether their member
waits: if another has started the collective, members that block claim after it, and join it in the same way.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

from hyper_parallel.errors import CollectiveMismatchError, short_dtype
from hyper_parallel.transport.base import Ranks

if TYPE_CHECKING:
    import numpy as np

__all__ = ["BARRIER", "LABEL", "Statement", "Transfer", "claim", "claimed", "compare", "label", "started", "text_of"]

LABEL = 256
"""Bytes of a label: whether the collective was started, and what it is."""
BARRIER = "barrier"
"""The operation that carries nothing: members are together once all have said so."""
_DIGEST = 8
_STARTED, _BLOCKING = b"+", b" "


@dataclass(frozen=True)
class Statement:
    """One collective, as what a member begins.

    Attributes:
        place: of the member among the ranks, in their order.
        member: name of the platform's member.
        operation: what the transport does.
        dtype: name of the tensor's dtype.
        shape: of the tensor.
        fact: the reduction or the source, where there is one.
    """

    place: int
    member: str
    operation: str
    dtype: str
    shape: tuple[int, ...]
    fact: Any = None

    def same(self, other: Statement | Transfer) -> bool:
        """Whether the other member begins the same collective."""
        return isinstance(other, Statement) and replace(other, place=self.place) == self

    def transfer(self, count: int) -> Transfer:
        """Its part in an all-to-all of rows that others of the ``count`` members mean: none."""
        return Transfer(self.place, (0,) * count, (0,) * count, self.dtype, ())

    def __str__(self) -> str:
        if self.operation == BARRIER:
            return f"{self.member}()"
        fact = f", src={self.fact}" if self.operation == "broadcast" else f", {self.fact}" if self.fact else ""
        return f"{self.member}({short_dtype(self.dtype)}{list(self.shape)}{fact})"


@dataclass(frozen=True)
class Transfer:
    """An all-to-all of rows of different numbers, as what a member begins.

    Attributes:
        place: of the member among the ranks.
        sent: how many rows go to each.
        received: how many come from each.
        dtype: name of the tensor's dtype.
        rest: shape of a row.
    """

    place: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    dtype: str
    rest: tuple[int, ...]

    def transfer(self, count: int) -> Transfer:
        """Itself, since ``count`` members mean it."""
        del count
        return self

    def after(self, earlier: Sequence[Transfer]) -> Transfer:
        """This one, with as many rows to and from earlier members as those expect and send, of the first one's kind.

        To itself it sends as many as it says that it sends.
        """
        sent, received = list(self.sent), list(self.received)
        received[self.place] = sent[self.place]
        for one in earlier:
            sent[one.place], received[one.place] = one.received[self.place], one.sent[self.place]
        kind = earlier[0] if earlier else self
        return Transfer(self.place, tuple(sent), tuple(received), kind.dtype, kind.rest)


def claim(what: Statement | Transfer) -> str:
    """What another member of the same program reads with :func:`claimed`."""
    return json.dumps([isinstance(what, Transfer), *astuple(what)])


def claimed(text: str) -> Statement | Transfer:
    """What :func:`claim` was made of."""
    routed, *given = json.loads(text)
    if routed:
        place, sent, received, dtype, rest = given
        return Transfer(place, tuple(sent), tuple(received), dtype, tuple(rest))
    place, member, operation, dtype, shape, fact = given
    return Statement(place, member, operation, dtype, tuple(shape), fact)


def compare(ranks: Ranks, found: Sequence[str]) -> None:
    """Raise on every member when they said different things.

    Raises:
        CollectiveMismatchError: as said, with what each is about to do.
    """
    if any(one != found[0] for one in found):
        told = "\n".join(f"  rank {rank}: {one}" for rank, one in zip(ranks, found, strict=True))
        msg = f"members of the group {list(ranks)} do different things:\n{told}"
        raise CollectiveMismatchError(msg)


def label(text: str, *, started: bool = False) -> np.ndarray[Any, Any]:
    """Whether the collective is ``started``, and ``text``, in :data:`LABEL` bytes; a long one ends in a checksum."""
    import numpy as np

    told, room = text.encode(), LABEL - 1
    if len(told) > room:
        told = told[: room - _DIGEST] + f"{zlib.crc32(told):08x}".encode()
    return np.frombuffer((_STARTED if started else _BLOCKING) + told.ljust(room), np.uint8)


def text_of(told: np.ndarray[Any, Any]) -> str:
    """The text of a :func:`label`."""
    return told[1:].tobytes().decode(errors="replace").rstrip()


def started(told: np.ndarray[Any, Any]) -> bool:
    """Whether a :func:`label` is of a started collective."""
    return told[:1].tobytes() == _STARTED
