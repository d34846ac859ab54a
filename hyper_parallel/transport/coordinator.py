"""The coordinator of a simulated world: a state machine that owns every collective and says who runs next.

It holds no thread, pipe or tensor arithmetic: carriers (``threads.py``, ``workers.py``) tell it what ranks do and
run the rank that :meth:`Coordinator.next_rank` names. At any time exactly one rank runs, so nothing here locks.
The order is round robin (the lowest ready rank above the one that just ran, else the lowest), hence every run of
a deterministic program is the same run.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.base import Channel, Ranks
from hyper_parallel.transport.checks.fingerprint import Call, Message

__all__ = ["Coordinator", "Outcome", "RankAbortedError", "unwinding"]


class RankAbortedError(BaseException):
    """Unwinds a rank whose world has failed elsewhere; a BaseException so that rank code does not swallow it."""


def unwinding(error: BaseException | None) -> bool:
    """Whether ``error`` only arose while the rank was being unwound."""
    while error is not None and not isinstance(error, RankAbortedError):
        error = error.__context__
    return error is not None


@dataclass
class Outcome:
    """What a resumed rank finds: a value, or an error to raise."""

    value: Any = None
    error: BaseException | None = None


@dataclass
class _Meeting:
    """One collective: who has come, and what went wrong if something did."""

    ranks: Ranks
    number: int
    joined: dict[int, Call] = field(default_factory=dict)
    failed: str | None = None
    left: int = 0


class Coordinator:
    """Matches collectives and messages of ``world_size`` ranks and schedules the ranks.

    Attributes:
        aborted: True once the world has failed; from then on ranks only unwind.
        folded: per rank, the words for what it was in when the world ended under it.
        unheard: per rank, the error of a collective that it started and never asks about; its carrier tells it.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.aborted = False
        self.folded: dict[int, str] = {}
        self.unheard: dict[int, CollectiveMismatchError] = {}
        self._ready = set(range(world_size))
        self._ended: dict[int, str] = {}
        self._waiting: dict[int, tuple[_Meeting, Call] | Message] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._counts: dict[tuple[int, Ranks], int] = {}
        self._meetings: dict[tuple[Ranks, int], _Meeting] = {}
        self._mail: dict[tuple[int, int, int, Channel], deque[Message]] = {}
        # Collectives that were started: in flight, and settled but not yet waited for; by rank and ticket.
        self._open: dict[tuple[int, int], tuple[_Meeting, Call]] = {}
        self._settled: dict[tuple[int, int], Outcome] = {}

    # -- what ranks do --------------------------------------------------------------------------------------------

    def join(self, rank: int, call: Call) -> None:
        """``rank`` joins a collective; it becomes ready again when the last member has come or something is wrong."""
        self._ready.discard(rank)
        if self.aborted:
            self._release(rank, Outcome(error=RankAbortedError()))
            return
        self._meet(rank, call)

    def start(self, rank: int, call: Call) -> None:
        """``rank`` deposits its part in a collective with a ticket and goes on; :meth:`await_ticket` is the rest."""
        if not self.aborted:
            self._meet(rank, call)

    def await_ticket(self, rank: int, ticket: int) -> None:
        """``rank`` waits for what it started; it becomes ready when the last member has come or something is wrong."""
        self._ready.discard(rank)
        settled = self._settled.pop((rank, ticket), None)
        if self.aborted:
            self._release(rank, Outcome(error=RankAbortedError()))
        elif settled is not None:
            self._release(rank, settled)
        else:
            meeting, call = self._waiting[rank] = self._open[rank, ticket]
            problem = self._absence(meeting, rank, call)
            if problem is not None:
                self._fail_meeting(meeting, problem)

    def _meet(self, rank: int, call: Call) -> None:
        number = self._counts.get((rank, call.ranks), 0)
        self._counts[rank, call.ranks] = number + 1
        key = (call.ranks, number)
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = self._meetings[key] = _Meeting(call.ranks, number)
        problem = meeting.failed or self._disagreement(meeting, rank, call) or self._absence(meeting, rank, call)
        meeting.joined[rank] = call
        if call.ticket is not None:
            self._open[rank, call.ticket] = (meeting, call)
        if problem is not None:
            self._fail_meeting(meeting, problem)
        elif len(meeting.joined) == len(call.ranks):
            self._complete(meeting)
        elif call.ticket is None:
            self._waiting[rank] = (meeting, call)

    def send(self, message: Message) -> None:
        """Put a message into its mailbox; the sender goes on at once."""
        if self.aborted:
            raise RankAbortedError
        wish = self._waiting.get(message.destination)
        self._mail.setdefault(message.key, deque()).append(message)
        if isinstance(wish, Message) and wish.key == message.key:
            del self._waiting[message.destination]
            self._deliver(wish)

    def receive(self, wish: Message) -> None:
        """The destination of ``wish`` waits for a message; it becomes ready when one is there."""
        rank = wish.destination
        self._ready.discard(rank)
        if self.aborted:
            self._release(rank, Outcome(error=RankAbortedError()))
        elif self._mail.get(wish.key):
            self._deliver(wish)
        elif wish.source in self._ended:
            self._release(rank, self._error(self._never_sent(wish)))
        else:
            self._waiting[rank] = wish

    def finish(self, rank: int) -> None:
        """``rank`` returned. Whoever waits for it in vain is told so."""
        self._end(rank, "returned")
        if not self.aborted:
            self._wake_orphans(rank)

    def fail(self, rank: int, reason: str) -> None:
        """``rank`` raised or died: every other rank unwinds."""
        self._end(rank, reason)
        self.abort()

    def abort(self) -> None:
        """Unwind every rank that has not ended."""
        if self.aborted:
            return
        self.aborted = True
        for rank in range(self.world_size):
            if rank in self._ended:
                continue
            self.folded[rank] = self.describe(rank)
            self._waiting.pop(rank, None)
            known = self._outcomes.get(rank)
            if known is None or known.error is None:  # a rank that is to learn its own error still learns it
                self._release(rank, Outcome(error=RankAbortedError()))

    # -- what carriers ask ----------------------------------------------------------------------------------------

    def next_rank(self, after: int) -> int | None:
        """The rank to run now, or None when all have ended. No ready rank is a deadlock: all waiting ranks fail."""
        if not self._ready:
            if not self._waiting:
                return None
            self._deadlock()
        later = [rank for rank in self._ready if rank > after]
        return min(later or self._ready)

    def answers(self, asking: set[int]) -> dict[int, Outcome]:
        """For carriers whose ranks run side by side: what each of the ``asking`` ranks is to be told now.

        If every rank waits, all of them learn that this is a deadlock.
        """
        if not self._ready and self._waiting:
            self._deadlock()
        return {rank: self._outcomes.pop(rank) for rank in sorted(asking) if rank in self._outcomes}

    def take(self, rank: int) -> Any:
        """The result of the call that ``rank`` waited in.

        Raises:
            CollectiveMismatchError: the call failed.
            RankAbortedError: the world failed.
        """
        outcome = self.outcome(rank)
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def outcome(self, rank: int) -> Outcome:
        """Like :meth:`take`, as a value."""
        return self._outcomes.pop(rank, None) or Outcome()

    def describe(self, rank: int) -> str:
        """What ``rank`` is doing, in words."""
        if rank in self._ended:
            return self._ended[rank]
        wait = self._waiting.get(rank)
        if wait is None:
            return "was running, or ready to run"
        if isinstance(wait, Message):
            return f"waited in {wait.text(sending=False)} at {wait.site}"
        meeting, call = wait
        missing = [other for other in meeting.ranks if other not in meeting.joined]
        where = f"collective {meeting.number} of ranks {meeting.ranks}"
        return f"waited in {call} ({where}) for ranks {missing} at {call.site}"

    def undelivered(self) -> str | None:
        """Words for messages that were sent and never received, or None."""
        lost = [message for box in self._mail.values() for message in box]
        if not lost:
            return None
        lines = [
            f"  rank {item.source}: {item.text(sending=True)} was never received; sent at {item.site}" for item in lost
        ]
        return "messages were lost:\n" + "\n".join(lines)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _release(self, rank: int, outcome: Outcome) -> None:
        self._outcomes[rank] = outcome
        self._ready.add(rank)

    def _settle(self, rank: int, call: Call, outcome: Outcome) -> None:
        """Hand ``rank`` the outcome of ``call``: now if it waits for it, else when it does."""
        waits = self._waiting.get(rank)
        waiting = waits is not None and not isinstance(waits, Message) and waits[1] is call
        if call.ticket is not None:
            del self._open[rank, call.ticket]
            if not waiting:
                if call.awaited:
                    self._settled[rank, call.ticket] = outcome
                return
        if waiting:
            del self._waiting[rank]
        self._release(rank, outcome)

    @staticmethod
    def _error(text: str) -> Outcome:
        return Outcome(error=CollectiveMismatchError(text))

    def _end(self, rank: int, how: str) -> None:
        self._ready.discard(rank)
        self._waiting.pop(rank, None)
        self._ended[rank] = how
        if not self.aborted:
            self.folded[rank] = how

    def _complete(self, meeting: _Meeting) -> None:
        del self._meetings[meeting.ranks, meeting.number]
        calls = [meeting.joined[rank] for rank in meeting.ranks]
        for position, rank in enumerate(meeting.ranks):
            self._settle(rank, meeting.joined[rank], Outcome([call.outgoing[position] for call in calls]))

    def _fail_meeting(self, meeting: _Meeting, problem: str) -> None:
        """Everyone who has come gets the error now, everyone else when they come."""
        meeting.failed = problem
        for rank, call in meeting.joined.items():
            if not call.awaited:
                self.unheard.setdefault(rank, CollectiveMismatchError(problem))
            if rank in self._ended:
                continue
            if call.ticket is not None:
                if (rank, call.ticket) in self._open:
                    self._settle(rank, call, self._error(problem))
            elif rank not in self._outcomes and self._belongs(rank, meeting):
                self._settle(rank, call, self._error(problem))
        meeting.left = len(meeting.ranks) - len(meeting.joined)
        if not meeting.left:
            del self._meetings[meeting.ranks, meeting.number]

    def _belongs(self, rank: int, meeting: _Meeting) -> bool:
        """Whether ``rank`` is in ``meeting`` right now, rather than having been thrown out of it before."""
        wait = self._waiting.get(rank)
        if wait is None:
            return rank not in self._ready
        return not isinstance(wait, Message) and wait[0] is meeting

    def _disagreement(self, meeting: _Meeting, rank: int, call: Call) -> str | None:
        for other, earlier in meeting.joined.items():
            what = _difference(other, earlier, rank, call)
            if what is not None:
                return (
                    f"ranks {other} and {rank} disagree about the {what} of collective {meeting.number} "
                    f"of ranks {meeting.ranks}:\n"
                    f"  rank {other}: {earlier} at {earlier.site}\n"
                    f"  rank {rank}: {call} at {call.site}"
                )
        return None

    def _absence(self, meeting: _Meeting, rank: int, call: Call) -> str | None:
        gone = [other for other in meeting.ranks if other in self._ended and other not in meeting.joined]
        if not gone:
            return None
        return self._absent(meeting, gone, {**meeting.joined, rank: call})

    def _absent(self, meeting: _Meeting, gone: list[int], joined: dict[int, Call]) -> str:
        ends = ", ".join(f"rank {other} {self._ended[other]}" for other in gone)
        lines = [f"  rank {other}: {call} at {call.site}" for other, call in joined.items()]
        return (
            f"{ends} without joining collective {meeting.number} of ranks {meeting.ranks}, in which others wait:\n"
            + "\n".join(lines)
        )

    def _wake_orphans(self, gone: int) -> None:
        for rank, wait in list(self._waiting.items()):
            if self._waiting.get(rank) is not wait:
                continue
            if isinstance(wait, Message):
                if wait.source == gone:
                    del self._waiting[rank]
                    self._release(rank, self._error(self._never_sent(wait)))
            elif gone in wait[0].ranks and gone not in wait[0].joined:
                self._fail_meeting(wait[0], self._absent(wait[0], [gone], wait[0].joined))
        for meeting, call in list(self._open.values()):
            missed = gone in meeting.ranks and gone not in meeting.joined
            if missed and not call.awaited and meeting.failed is None:
                self._fail_meeting(meeting, self._absent(meeting, [gone], meeting.joined))

    def _never_sent(self, wish: Message) -> str:
        return (
            f"rank {wish.source} {self._ended[wish.source]} without sending what rank {wish.destination} waits for:\n"
            f"  rank {wish.destination}: {wish.text(sending=False)} at {wish.site}"
        )

    def _deliver(self, wish: Message) -> None:
        box = self._mail[wish.key]
        message = box.popleft()
        if not box:
            del self._mail[wish.key]
        if message.facts == wish.facts:
            self._release(wish.destination, Outcome(message.payload))
            return
        problem = (
            f"ranks {wish.source} and {wish.destination} disagree about the "
            f"{_first_difference(message.facts, wish.facts)} of a message:\n"
            f"  rank {wish.source}: {message.text(sending=True)} at {message.site}\n"
            f"  rank {wish.destination}: {wish.text(sending=False)} at {wish.site}"
        )
        self._release(wish.destination, self._error(problem))

    def _deadlock(self) -> None:
        lines = [f"  rank {rank} {self.describe(rank)}" for rank in range(self.world_size)]
        problem = "deadlock, no rank can go on:\n" + "\n".join(lines)
        for rank in list(self._waiting):
            wait = self._waiting.pop(rank)
            if not isinstance(wait, Message):
                wait[0].failed = problem
                self._open.pop((rank, wait[1].ticket or 0), None)
            self._release(rank, self._error(problem))


def _first_difference(ours: tuple[tuple[str, Any], ...], theirs: tuple[tuple[str, Any], ...]) -> str:
    left, right = dict(ours), dict(theirs)
    for name in {**left, **right}:
        if left.get(name) != right.get(name):
            return name
    return "order of facts"


def _difference(other: int, earlier: Call, rank: int, call: Call) -> str | None:
    """Name of the first thing in which two members' calls do not fit, or None when they fit."""
    if earlier.operation != call.operation:
        return "operation"
    if earlier.facts != call.facts:
        return _first_difference(earlier.facts, call.facts)
    here, there = call.ranks.index(rank), call.ranks.index(other)
    if _unfit(earlier, here, call, there) or _unfit(call, there, earlier, here):
        return "chunk shapes"
    return None


def _unfit(sender: Call, to: int, receiver: Call, origin: int) -> bool:
    """Whether what ``sender`` sends to position ``to`` is not what ``receiver`` expects from ``origin``."""
    if sender.sends is None or receiver.expects is None:
        return False
    return sender.sends[to] != receiver.expects[origin]
