"""What members of a collective say about it, so that gloo is never asked to carry what does not fit together.

Gloo ends the process that is sent more than it has room for, and takes garbage for the rest where it is sent less. A
started collective may not wait for the others to say what they do. So whoever begins it first says what it is, in the
world's store; who comes later and has something else in mind joins that one instead, with zeros, and everybody learns
of it while waiting: what each member said travels beside the collective, in labels of one size.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyper_parallel.errors import CollectiveMismatchError, short_dtype
from hyper_parallel.transport.base import Ranks

if TYPE_CHECKING:
    import numpy as np

__all__ = ["LABEL", "Statement", "Transfer", "compare", "label", "text_of"]

LABEL = 256
"""Bytes of a label."""
_DIGEST = 8


@dataclass(frozen=True)
class Statement:
    """One collective, as what a member begins.

    Attributes:
        member: name of the platform's member.
        operation: what the transport does.
        dtype: name of the tensor's dtype.
        shape: of the tensor.
        fact: the reduction or the source, where there is one.
    """

    member: str
    operation: str
    dtype: str
    shape: tuple[int, ...]
    fact: Any = None

    @classmethod
    def parsed(cls, text: str) -> Statement:
        """What :attr:`json` was made of."""
        member, operation, dtype, shape, fact = json.loads(text)
        return cls(member, operation, dtype, tuple(shape), fact)

    @property
    def json(self) -> str:
        """For another member of the same program."""
        return json.dumps([self.member, self.operation, self.dtype, self.shape, self.fact])

    def __str__(self) -> str:
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

    @classmethod
    def parsed(cls, text: str) -> Transfer:
        """What :attr:`json` was made of."""
        place, sent, received, dtype, rest = json.loads(text)
        return cls(place, tuple(sent), tuple(received), dtype, tuple(rest))

    @property
    def json(self) -> str:
        """For another member of the same program."""
        return json.dumps([self.place, self.sent, self.received, self.dtype, self.rest])

    def after(self, earlier: Sequence[Transfer]) -> Transfer:
        """This one, with as many rows to and from earlier members as those expect and send, of the first one's kind."""
        sent, received = list(self.sent), list(self.received)
        for one in earlier:
            sent[one.place], received[one.place] = one.received[self.place], one.sent[self.place]
        kind = earlier[0] if earlier else self
        return Transfer(self.place, tuple(sent), tuple(received), kind.dtype, kind.rest)


def compare(ranks: Ranks, found: Sequence[str]) -> None:
    """Raise on every member when they said different things.

    Raises:
        CollectiveMismatchError: as said, with what each is about to do.
    """
    if any(one != found[0] for one in found):
        told = "\n".join(f"  rank {rank}: {one}" for rank, one in zip(ranks, found, strict=True))
        msg = f"members of the group {list(ranks)} do different things:\n{told}"
        raise CollectiveMismatchError(msg)


def label(text: str) -> np.ndarray[Any, Any]:
    """``text`` in :data:`LABEL` bytes; of a longer one the beginning and a checksum."""
    import numpy as np

    told = text.encode()
    if len(told) > LABEL:
        told = told[: LABEL - _DIGEST] + f"{zlib.crc32(told):08x}".encode()
    return np.frombuffer(told.ljust(LABEL), np.uint8)


def text_of(told: np.ndarray[Any, Any]) -> str:
    """What :func:`label` was made of."""
    return told.tobytes().decode(errors="replace").rstrip()
