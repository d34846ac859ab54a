"""Checks collectives over gloo without a coordinator: ranks exchange fingerprints before each collective.

Gloo aborts a process that receives more than its buffer holds, and leaves garbage in the buffer if it receives less. So
members first gather labels of one size: each member's fingerprint, and whether it has already started the collective.

A blocking member waits for the labels, and continues if all match. A member that starts a collective must not wait for
the others: it claims its collective in the world's store, and the first claim decides which collective runs. A later
member with a mismatch joins the first member's collective with zeros, and all members raise when they wait. If the
labels show that a member has started the collective, blocking members claim after that member and join in the same way.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.base import Parts, Ranks, Shape, Transport
from hyper_parallel.transport.checks.compare import mismatch
from hyper_parallel.transport.checks.fingerprint import CollectiveFingerprint, Site
from hyper_parallel.transport.work import Work

if TYPE_CHECKING:
    import numpy as np

__all__ = ["BARRIER", "LABEL", "GlooAgreement", "Proposal", "Tensors", "engine_arguments", "must_agree"]

LABEL = 1024
"""Size of a label in bytes, without the numbers of rows that follow it: those sent to and expected from each member."""
BARRIER = "barrier"
"""Operation without data: the barrier is complete once all labels have arrived."""
_STARTED, _BLOCKING = b"+", b" "
_LONGEST_NAME = 100


class Tensors(Protocol):
    """Tensor operations that agreement needs."""

    def from_numpy(self, array: Any) -> Any:
        """A tensor of these values."""

    def tensor_to_numpy(self, tensor: Any) -> Any:
        """The values of ``tensor``."""

    def zeros(self, shape: Any, *, dtype: Any) -> Any:
        """A tensor of zeros."""

    def str_to_dtype(self, name: str) -> Any:
        """The dtype of this name, such as ``float32``."""


class Proposal(NamedTuple):
    """The collective that a member is about to call.

    Attributes:
        position: position of the member among the sorted ranks.
        operation: name of the transport's method, :data:`BARRIER`, or "" if facts are only compared. The fingerprint of
            an all-to-all of rows has the chunks to send and to expect, and its facts have the dtype but no shape.
        fingerprint: fingerprint, whose facts are dtype, shape, and reduction or source.
    """

    position: int
    operation: str
    fingerprint: CollectiveFingerprint

    def same(self, other: Proposal) -> bool:
        """Whether the other member is about to call the same collective; chunks are not compared."""
        ours, theirs = self.fingerprint, other.fingerprint
        return (self.operation, ours.operation, ours.facts) == (other.operation, theirs.operation, theirs.facts)

    @property
    def row(self) -> Shape | None:
        """Shape of a row of the collective's chunks; None for a collective without chunks."""
        return None if self.fingerprint.sends is None else self.fingerprint.sends[0][1:]

    def rows(self) -> tuple[list[int], list[int]]:
        """Numbers of rows sent to and expected from each member; zeros for a collective without chunks."""
        none = ((0,),) * len(self.fingerprint.ranks)
        sends, expects = self.fingerprint.sends or none, self.fingerprint.expects or none
        return [shape[0] for shape in sends], [shape[0] for shape in expects]

    def fitted(self, earlier: Sequence[Proposal]) -> tuple[list[int], list[int]]:
        """Return the numbers of rows to send and expect, adjusted to earlier members so that the exchange completes."""
        sends, expects = self.rows()
        expects[self.position] = sends[self.position]
        for other in earlier:
            their_sends, their_expects = other.rows()
            sends[other.position] = their_expects[self.position]
            expects[other.position] = their_sends[self.position]
        return sends, expects

    def to_json(self) -> str:
        """The text that :meth:`from_json` reads."""
        return json.dumps([self.position, self.operation, _fields(self.fingerprint), *self.rows()])

    @classmethod
    def from_json(cls, text: str, ranks: Ranks) -> Proposal:
        """The proposal that another member of ``ranks`` wrote with :meth:`to_json`."""
        position, operation, fields, sends, expects = json.loads(text)
        return cls(position, operation, _from_fields(fields, ranks, sends, expects))


class GlooAgreement:
    """Agreement of ``ranks`` on one collective.

    Args:
        transport: transfers labels, and runs the collectives.
        tensors: tensor operations of the framework.
        ranks: the members.
    """

    def __init__(self, transport: Transport, tensors: Tensors, ranks: Ranks) -> None:
        self._transport = transport
        self._tensors = tensors
        self._ranks = tuple(sorted(ranks))

    def compare(self, mine: Proposal) -> bool:
        """Wait for every member's fingerprint; return whether a member has started the collective.

        Raises:
            CollectiveMismatchError: the fingerprints do not match; every member raises it.
        """
        fingerprints, started = self._gather(mine, started=False).wait()
        if started:
            earlier = self._claim(mine)
            if self._problem(fingerprints) is not None:
                self._join(mine, earlier).wait()
        self._check(fingerprints)
        return bool(started)

    def start(self, mine: Proposal, begin: Callable[[], Work]) -> Work:
        """Begin a collective; a mismatch is raised by ``wait()``.

        It costs one store access and one small extra collective.

        Args:
            mine: the collective to start.
            begin: function that starts it.
        """
        earlier, labels = self._claim(mine), self._gather(mine, started=True)
        work = begin() if not earlier or mine.same(earlier[0]) else self._join(mine, earlier)

        def finish() -> Any:
            (fingerprints, _), result = labels.wait(), work.wait()
            self._check(fingerprints)
            return result

        return Work(mine.operation, finish, work.output)

    def compare_rows(self, mine: Proposal, begin: Callable[[], tuple[Any, Work]]) -> Any:
        """Like :meth:`compare`, for an all-to-all of rows.

        Returns:
            the output, if a member has started the collective, which then runs here; else None.
        """
        fingerprints, started = self._gather(mine, started=False).wait()
        if not started:
            self._check(fingerprints)
            return None
        labels = Work("labels", lambda: (fingerprints, started))
        output, work = self._begin_rows(mine, begin, self._claim(mine), labels)
        work.wait()
        return output

    def start_rows(self, mine: Proposal, begin: Callable[[], tuple[Any, Work]]) -> tuple[Any, Work]:
        """Like :meth:`start`, for an all-to-all of rows; return the output and the work to wait for."""
        earlier, labels = self._claim(mine), self._gather(mine, started=True)
        return self._begin_rows(mine, begin, earlier, labels)

    def _begin_rows(
        self, mine: Proposal, begin: Callable[[], tuple[Any, Work]], earlier: list[Proposal], labels: Work
    ) -> tuple[Any, Work]:
        first = earlier[0] if earlier else mine
        if _kind(first) == _kind(mine) and mine.fitted(earlier) == mine.rows():
            output, work = begin()
        else:
            work, dtype = self._join(mine, earlier), dict(mine.fingerprint.facts)["dtype"]
            output = self._zeros((sum(mine.rows()[1]), *(mine.row or ())), dtype)

        def finish() -> Any:
            (fingerprints, _), result = labels.wait(), work.wait()
            self._check(fingerprints)
            return result

        return output, Work(mine.fingerprint.operation, finish, work.output)

    def _claim(self, mine: Proposal) -> list[Proposal]:
        """Claim the collective; return the claims of earlier members."""
        texts = self._transport.claim(mine.to_json(), self._ranks)
        return [Proposal.from_json(text, self._ranks) for text in texts]

    def _gather(self, mine: Proposal, *, started: bool) -> Work:
        """Every member's fingerprint, and whether one of them has started the collective."""
        label = self._tensors.from_numpy(_label(mine, started=started))
        labels = self._transport.start("all_gather", label, self._ranks, [tuple(label.shape)] * len(self._ranks))

        def read(parts: list[Any]) -> tuple[list[CollectiveFingerprint], bool]:
            arrays = [self._tensors.tensor_to_numpy(part) for part in parts]
            return [_read_label(array, self._ranks) for array in arrays], any(map(_is_started, arrays))

        return labels.then(read)

    def _join(self, mine: Proposal, earlier: list[Proposal]) -> Work:
        """Join the first member's collective with zeros, although this rank called a different one."""
        first = earlier[0] if earlier else mine
        if first.operation == BARRIER:
            return Work(BARRIER, lambda: None)
        facts = dict(first.fingerprint.facts)
        if first.row is not None:
            sends, expects = mine.fitted(earlier)
            zeros = self._zeros((sum(sends), *first.row), facts["dtype"])
            parts = [Parts.of([(count, *first.row) for count in rows]) for rows in (sends, expects)]
            return self._transport.start("all_to_all", zeros, self._ranks, *parts)
        zeros = self._zeros(facts["shape"], facts["dtype"])
        arguments = engine_arguments(first.operation, zeros, self._ranks, facts.get("reduction", facts.get("src")))
        return self._transport.start(first.operation, *arguments)

    def _zeros(self, shape: Shape, dtype: str) -> Any:
        return self._tensors.zeros(shape, dtype=self._tensors.str_to_dtype(dtype))

    def _problem(self, fingerprints: list[CollectiveFingerprint]) -> str | None:
        return mismatch(dict(zip(self._ranks, fingerprints, strict=True)), self._ranks)

    def _check(self, fingerprints: list[CollectiveFingerprint]) -> None:
        problem = self._problem(fingerprints)
        if problem is not None:
            raise CollectiveMismatchError(problem)


def must_agree(transport: Transport, ranks: Ranks) -> bool:
    """Whether a collective of ``ranks`` needs agreement: over gloo, with more than one rank.

    The simulation compares calls itself. On an accelerator, agreement would cost as much as a small collective.
    """
    return transport.backend == "gloo" and len(ranks) > 1


def engine_arguments(operation: str, data: Any, ranks: Ranks, argument: Any) -> tuple[Any, ...]:
    """The arguments of the transport's method ``operation``.

    Args:
        operation: name of the method.
        data: the tensor; to scatter or exchange it, it is cut into one block per member, each with equally many rows.
        ranks: the members.
        argument: the reduction or the source.
    """
    if operation in ("all_reduce", "broadcast"):
        return data, argument, ranks
    if operation == "all_gather":
        return data, ranks, [tuple(data.shape)] * len(ranks)
    rows = data.shape[0] // len(ranks)
    if operation == "reduce_scatter":
        return [data[rows * index : rows * (index + 1)] for index in range(len(ranks))], argument, ranks
    parts = Parts.of([(rows, *data.shape[1:])] * len(ranks))
    return data, ranks, parts, parts


def _kind(proposal: Proposal) -> tuple[Any, ...]:
    """Return everything that members must agree on: all but the numbers of rows."""
    fingerprint = proposal.fingerprint
    return proposal.operation, fingerprint.operation, fingerprint.facts, proposal.row


# -- serialization -----------------------------------------------------------------------------------------------------


def _fields(fingerprint: CollectiveFingerprint) -> list[Any]:
    """Return the fingerprint without numbers of rows, in a form for JSON."""
    row = None if fingerprint.sends is None else fingerprint.sends[0][1:]
    return [fingerprint.operation, fingerprint.facts, row, fingerprint.site.near, fingerprint.site.user]


def _from_fields(
    fields: list[Any], ranks: Ranks, sends: Sequence[int], expects: Sequence[int]
) -> CollectiveFingerprint:
    operation, facts, row, near, user = map(_tuples, fields)
    sent, expected = (
        None if row is None else tuple((int(count), *row) for count in counts) for counts in (sends, expects)
    )
    return CollectiveFingerprint(operation, ranks, facts, Site(near, user), sent, expected)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _label(proposal: Proposal, *, started: bool) -> np.ndarray[Any, Any]:
    """A flag and the fingerprint, padded to :data:`LABEL` bytes together, then the numbers of rows.

    If the fingerprint is too long, a digest replaces its facts: it can be compared, but not read.
    """
    import numpy as np

    fields = _fields(proposal.fingerprint)
    text = json.dumps(fields).encode()
    if len(text) >= LABEL:
        operation, facts, row, (file, line), _ = fields
        digest = f"{zlib.crc32(json.dumps([operation, facts, row]).encode()):08x}"
        short = [operation[:_LONGEST_NAME], [["digest", digest]], row and [], [file[-_LONGEST_NAME:], line], None]
        text = json.dumps(short).encode()
    flag = _STARTED if started else _BLOCKING
    rows = np.array(proposal.rows(), np.int64)
    return np.concatenate([np.frombuffer(flag + text.ljust(LABEL - 1), np.uint8), rows.reshape(-1).view(np.uint8)])


def _read_label(label: np.ndarray[Any, Any], ranks: Ranks) -> CollectiveFingerprint:
    import numpy as np

    sends, expects = label[LABEL:].copy().view(np.int64).reshape(2, len(ranks))
    return _from_fields(json.loads(label[1:LABEL].tobytes()), ranks, sends, expects)


def _is_started(label: np.ndarray[Any, Any]) -> bool:
    return label[:1].tobytes() == _STARTED
