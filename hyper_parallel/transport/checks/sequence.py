"""Collectives in an order that all ranks have agreed upon beforehand: one agreement per forward or backward.

A window is a forward or a backward pass. Its first run agrees on one collective at a time and records the order. The
next run agrees once, on the recorded order, and every rank must then run these collectives. A rank that leaves the
order runs the next two collectives with zeros and its own flag set, so that no rank waits for it. No more than two
collectives are in flight, so every rank sees the flags before it continues. If all ranks have left the order at the
same place, the window continues with an agreement on each collective; else all ranks raise an error.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hyper_parallel.errors import CollectiveMismatchError

if TYPE_CHECKING:
    from hyper_parallel.transport.base import Ranks, Transport
    from hyper_parallel.transport.work import Work

__all__ = ["AgreedSequence", "Carrier", "Finish", "Step"]

_IN_FLIGHT = 2
_AHEAD = 2  # at most this many more all-gathers than reductions have been started, when the order is changed


class Step(NamedTuple):
    """A collective of a window.

    Attributes:
        operation: ``all_gather``, ``reduce_scatter`` or ``all_reduce``.
        owner: name of the module group or bucket that calls it, equal on all ranks.
        width: number of elements of a rank's row, including one flag per rank at the row's end.
        dtype: dtype of the row.
    """

    operation: str
    owner: str
    width: int
    dtype: Any


Finish = Callable[[Any], None]
"""Receives the result: the list of all ranks' rows, or this rank's reduced row."""


class Carrier(Protocol):
    """Runs the collectives; rows are tensors of one framework."""

    def transport(self) -> Transport:
        """The transport of the current rank."""

    def agree(self, ranks: Ranks, **facts: Any) -> None:
        """Compare ``facts`` between the ranks."""

    def agreed(self, step: Step, rows: Any, ranks: Ranks) -> Any:
        """Run ``step`` after an agreement of the ranks, and return its result."""

    def start(self, step: Step, rows: Any, ranks: Ranks) -> Work:
        """Begin ``step`` without agreement."""

    def flagged(self, step: Step, ranks: Ranks) -> Any:
        """Return rows of zeros for ``step``, with this rank's flag set."""

    def flags(self, step: Step, result: Any, ranks: Ranks) -> list[bool]:
        """Return which of ``ranks`` have set their flags."""


def _drop(result: Any) -> None:
    del result


class _Launched(NamedTuple):
    step: Step
    work: Work
    finish: Finish


class AgreedSequence:
    """The windows of one group of ranks on one rank.

    Args:
        carrier: runs the collectives.
        ranks: the members.
        caller: the function that calls the collectives, for error messages.
    """

    def __init__(self, carrier: Carrier, ranks: Ranks, caller: str = "fully_shard") -> None:
        self.ranks, self._caller = ranks, caller
        self.window: Any = None
        """The key of the open window; None outside of windows."""
        self.running: Step | None = None
        """The collective that was begun last."""
        self._carrier = carrier
        self._orders: dict[Any, tuple[Step, ...]] = {}
        self._order: tuple[Step, ...] = ()
        self._recorded: list[Step] = []
        self._launched: list[_Launched] = []
        self._completed = 0
        self._follows = self._records = self._agreeing = False

    @property
    def next_owed(self) -> Step | None:
        """The next collective of the agreed order that this rank has not begun; None if there is none."""
        count = len(self._launched)
        return self._order[count] if self._follows and count < len(self._order) else None

    def open(self, key: Any) -> None:
        """Begin a window if no window is open; ``key``, equal on all ranks, distinguishes windows of different orders.

        Raises:
            CollectiveMismatchError: ranks have recorded different orders.
        """
        self._order = self._orders.get(key, ())
        digest = f"{zlib.crc32(repr(self._order).encode()):08x}"
        self._carrier.agree(self.ranks, window=str(key), order=digest)
        self.window, self._recorded, self._launched, self._completed = key, [], [], 0
        self._follows, self._records = bool(self._order), True
        self._carrier.transport().sequences[tuple(sorted(self.ranks))] = self

    def close(self) -> None:
        """End the window: wait for everything, and keep its order for the next one of the same key."""
        try:
            self.leave()
            self._orders[self.window] = self._order_for_next()
        finally:
            self.window, self._follows, self._launched = None, False, []
            self._carrier.transport().sequences.pop(tuple(sorted(self.ranks)), None)

    def record(self, step: Step) -> None:
        """Record that this rank needs the result of ``step`` now; the recorded order is used for the next window."""
        if self._records:
            self._recorded.append(step)

    def run(self, step: Step, rows: Any, finish: Finish) -> int:
        """Begin ``step``; ``finish`` is called with its result when it is complete.

        Returns:
            a number for :meth:`complete`.

        Raises:
            CollectiveMismatchError: other ranks have called a different collective.
        """
        owed = self.next_owed
        if owed is not None and owed != step:
            self.leave()
        self.running = step
        if owed == step:
            return self._launch(step, rows, finish)
        self._follow_no_more()
        self._agreeing = True
        try:
            result = self._carrier.agreed(step, rows, self.ranks)
        finally:
            self._agreeing = False
        finish(result)
        return 0

    def complete(self, number: int) -> None:
        """Wait for the collectives up to ``number``.

        Raises:
            CollectiveMismatchError: a rank has left the order there.
        """
        while self._completed < number:
            index = self._completed
            launched, self._completed = self._launched[index], index + 1
            result = self._awaited(launched.work)
            flags = self._carrier.flags(launched.step, result, self.ranks)
            if any(flags):
                following = self._leave_order(index)
                if following is not None:
                    following.wait()
                raise CollectiveMismatchError(self._message(launched.step, flags))
            launched.finish(result)

    def complete_all(self) -> None:
        """Wait for everything that was begun; see :meth:`complete`."""
        self.complete(len(self._launched))

    def interrupt(self) -> None:
        """End the agreed order, because a collective of the same ranks follows that is not in it."""
        if not self._agreeing:
            self.leave()
            self._records = False

    def leave(self) -> None:
        """Complete everything; if agreed collectives remain, agree with the other ranks to skip them.

        Raises:
            CollectiveMismatchError: other ranks have not left the order at this place.
        """
        self.complete_all()
        index, owed = len(self._launched), self.next_owed
        if owed is None:
            self._follow_no_more()
            return
        work = self._carrier.start(owed, self._carrier.flagged(owed, self.ranks), self.ranks)
        self._launched.append(_Launched(owed, work, lambda _: None))
        following = self._leave_order(index)
        flags = self._carrier.flags(owed, self._awaited(work), self.ranks)
        self._completed = len(self._launched)
        if following is not None:
            following.wait()
        if not all(flags):
            raise CollectiveMismatchError(self._message(owed, flags))

    def _order_for_next(self) -> tuple[Step, ...]:
        """Return the recorded order, with each all-gather moved before the preceding reduction.

        An all-gather can then begin while the preceding module computes. Few are in flight at a time, to limit memory.
        """
        order, ahead = list(self._recorded), 0
        for index, step in enumerate(order):
            following = order[index + 1] if index + 1 < len(order) else step
            operation = step.operation
            if operation == "reduce_scatter" and following.operation == "all_gather" and ahead < _AHEAD:
                order[index], order[index + 1], operation = following, step, following.operation
            ahead += 1 if operation == "all_gather" else -1
        return tuple(order)

    def forget_reductions(self) -> None:
        """Drop the results of reductions in flight."""
        self._launched = [
            each if each.step.operation == "all_gather" else each._replace(finish=_drop) for each in self._launched
        ]

    def _launch(self, step: Step, rows: Any, finish: Finish) -> int:
        self.complete(len(self._launched) + 1 - _IN_FLIGHT)
        self._launched.append(_Launched(step, self._carrier.start(step, rows, self.ranks), finish))
        return len(self._launched)

    def _leave_order(self, index: int) -> Work | None:
        """Leave the agreed order after collective ``index + 1``, which every rank has begun or will begin."""
        owed = self.next_owed
        self._follows = False
        if len(self._launched) > index + 1:
            for launched in self._launched[index + 1 :]:
                launched.work.wait()
            self._completed = len(self._launched)
        elif owed is not None:
            return self._carrier.start(owed, self._carrier.flagged(owed, self.ranks), self.ranks)
        return None

    def _awaited(self, work: Work) -> Any:
        """Return the result of ``work``; if the transport raises, the agreed order ends."""
        try:
            return work.wait()
        except BaseException:
            self._follows, self._launched, self._completed = False, [], 0
            raise

    def _follow_no_more(self) -> None:
        self.complete_all()
        self._follows = False

    def _message(self, step: Step, flags: list[bool]) -> str:
        left = [rank for rank, flag in zip(self.ranks, flags, strict=True) if flag]
        return (
            f"{self._caller}: ranks {left} of {list(self.ranks)} did not call the {step.operation} of module group "
            f"{step.owner} ({step.width} elements of {step.dtype}), which all ranks called in the pass before; let all "
            "ranks call the same modules in the same order"
        )
