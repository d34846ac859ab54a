"""The coordinator of a simulated world: a state machine that owns every collective and selects the next rank to run.

It has no threads or pipes, and computes nothing. A driver (``threads.py``, ``processes.py``, ``launched_processes.py``)
forwards the calls of ranks and runs the rank that :meth:`Coordinator.next_rank` returns. In a simulated world exactly
one rank runs at any time, so no locks are needed. The order is round robin (the next ready rank above the one that just
ran, or else the lowest), so that runs of a deterministic program are identical.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from hyper_parallel._text import ranked
from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.base import Channel, Ranks
from hyper_parallel.transport.checks.compare import listed, message_mismatch
from hyper_parallel.transport.checks.fingerprint import MessageFingerprint
from hyper_parallel.transport.simulated.endpoint import Contribution, RankAbortedError, Resumption, Wait
from hyper_parallel.transport.simulated.pending_collective import PendingCollective, Waiting, deadlock_text, stuck_ranks

__all__ = ["NOT_STARTED", "NOT_WAITING", "Coordinator"]

NOT_STARTED = "had not started"
NOT_WAITING = "was not in a communication call"


class Coordinator:
    """Matches collectives and messages of ``world_size`` ranks and schedules the ranks.

    Attributes:
        aborted: whether the world has failed; from then on ranks only unwind.
        aborted_in: by rank, a description of what the rank did when it ended or the world failed.
        unreported: by rank, the error of a collective that the rank started and never waits for; drivers report it.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.aborted = False
        self.aborted_in: dict[int, str] = {}
        self.unreported: dict[int, CollectiveMismatchError] = {}
        self._holds_back = True
        self._ready = set(range(world_size))
        self._ended: dict[int, str] = {}
        self._waiting: dict[int, Waiting] = {}
        self._resumptions: dict[int, Resumption] = {}
        self._counts: dict[tuple[int, Ranks, str], int] = {}
        self._collectives: dict[tuple[Ranks, str, int], PendingCollective] = {}
        self._mail: dict[tuple[int, int, int, Channel], deque[tuple[MessageFingerprint, Any]]] = {}
        # Asynchronous collectives by rank and ticket: in flight, and complete but not yet waited for.
        self._in_flight: dict[tuple[int, int], tuple[PendingCollective, Contribution]] = {}
        self._results: dict[tuple[int, int], Resumption] = {}

    # -- called by ranks -------------------------------------------------------------------------------------------

    def join(self, rank: int, contribution: Contribution) -> None:
        """Let ``rank`` join a collective; it becomes ready again when the last member has joined or an error occurs."""
        self._ready.discard(rank)
        if self.aborted:
            self._release(rank, Resumption(error=RankAbortedError()))
            return
        self._contribute(rank, contribution)

    def start(self, rank: int, contribution: Contribution) -> None:
        """Start an asynchronous collective; ``rank`` continues. See :meth:`await_ticket`."""
        if not self.aborted:
            self._contribute(rank, contribution)

    def await_ticket(self, rank: int, ticket: int) -> None:
        """Let ``rank`` wait for a collective that it started; it becomes ready when that is complete or has failed."""
        self._ready.discard(rank)
        complete = self._results.pop((rank, ticket), None)
        if self.aborted:
            self._release(rank, Resumption(error=RankAbortedError()))
        elif complete is not None:
            self._release(rank, complete)
        else:
            collective, _ = self._waiting[rank] = self._in_flight[rank, ticket]
            problem = self._absence(collective)
            if problem is not None:
                self._fail_collective(collective, problem)

    def is_complete(self, rank: int, ticket: int) -> bool:
        """Whether a collective that ``rank`` started, and has not waited for, is complete or has failed."""
        return self.aborted or (rank, ticket) in self._results

    def give_way(self, rank: int) -> None:
        """Keep ``rank`` ready, and run the others before it."""
        if self.aborted:
            raise RankAbortedError
        self._release(rank, Resumption())

    def _contribute(self, rank: int, contribution: Contribution) -> None:
        fingerprint = contribution.fingerprint
        ranks, group = fingerprint.ranks, fingerprint.group
        number = self._counts.get((rank, ranks, group), 0)
        self._counts[rank, ranks, group] = number + 1
        collective = self._collectives.get((ranks, group, number))
        if collective is None:
            collective = self._collectives[ranks, group, number] = PendingCollective(ranks, number, group)
        problem = collective.add(rank, contribution)
        if not collective.differs:
            problem = self._absence(collective) or problem
        if contribution.ticket is not None:
            self._in_flight[rank, contribution.ticket] = (collective, contribution)
        if problem is not None:
            self._fail_collective(collective, problem)
        elif len(collective.joined) == len(ranks):
            self._complete(collective)
        elif contribution.ticket is None:
            self._waiting[rank] = (collective, contribution)

    def send(self, message: MessageFingerprint, payload: Any) -> None:
        """Put a message into its mailbox; the sender continues at once."""
        if self.aborted:
            raise RankAbortedError
        posted = self._waiting.get(message.destination)
        self._mail.setdefault(message.key, deque()).append((message, payload))
        if isinstance(posted, MessageFingerprint) and posted.key == message.key:
            del self._waiting[message.destination]
            self._deliver(posted)

    def receive(self, posted: MessageFingerprint) -> None:
        """Let the destination of ``posted`` wait for a message; it becomes ready when one has arrived."""
        rank = posted.destination
        self._ready.discard(rank)
        if self.aborted:
            self._release(rank, Resumption(error=RankAbortedError()))
        elif self._mail.get(posted.key):
            self._deliver(posted)
        elif posted.source in self._ended:
            self._release(rank, self._error(self._never_sent(posted)))
        else:
            self._waiting[rank] = posted

    def block(self, rank: int, wait: Wait) -> None:
        """Let ``rank`` wait until :meth:`unblock`, or until no rank is left that could unblock it."""
        self._ready.discard(rank)
        problem = None if self.aborted else wait.hopeless(self._ended)
        if self.aborted:
            self._release(rank, Resumption(error=RankAbortedError()))
        elif problem is not None:
            wait.dismiss()
            self._release(rank, self._error(problem))
        else:
            self._waiting[rank] = wait

    def answer(self, rank: int, resumption: Resumption) -> None:
        """Answer a request of ``rank`` whose result is known already."""
        self._release(rank, Resumption(error=RankAbortedError()) if self.aborted else resumption)

    def unblock(self, rank: int, resumption: Resumption) -> None:
        """End the wait of ``rank`` in :meth:`block`."""
        del self._waiting[rank]
        self._release(rank, resumption)

    def waits_for(self, rank: int) -> object:
        """Return the object that ``rank`` waits for, or None."""
        return self._waiting.get(rank)

    def finish(self, rank: int) -> None:
        """Record that ``rank`` returned. Ranks that wait for it get an error."""
        self._end(rank, "returned")
        if not self.aborted:
            self._wake_orphans(rank)

    def fail(self, rank: int, reason: str) -> None:
        """Record that ``rank`` raised or died: every other rank unwinds."""
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
            self.aborted_in[rank] = self.describe(rank)
            self._waiting.pop(rank, None)
            known = self._resumptions.get(rank)
            if known is None or known.error is None:  # a rank still gets its own undelivered error
                self._release(rank, Resumption(error=RankAbortedError()))

    # -- called by drivers -----------------------------------------------------------------------------------------

    def next_rank(self, after: int) -> int | None:
        """Return the rank to run now, or None when all have ended. If no rank is ready, all waiting ranks fail."""
        if not self._ready:
            if not self._waiting:
                return None
            self._deadlock(sorted(self._waiting))
        later = [rank for rank in self._ready if rank > after]
        return min(later or self._ready)

    def resumptions(self, waiting: set[int]) -> dict[int, Resumption]:
        """Return the ``waiting`` ranks that continue now, for drivers whose ranks run concurrently.

        Ranks that wait for each other get a deadlock error even if others run. A mismatch error is delayed while a
        running member may still join, because its call helps to identify the wrong ranks.
        """
        stuck = stuck_ranks(self._waiting, self._ready, self.world_size) if self._waiting else []
        if stuck:
            self._deadlock(stuck)
        here = [rank for rank in sorted(waiting) if rank in self._resumptions and not self._is_held(rank)]
        return {rank: self._resumptions.pop(rank) for rank in here}

    def release_held(self) -> bool:
        """Release delayed errors; return whether there are any."""
        held = any(self._is_held(rank) for rank in self._resumptions)
        self._holds_back = False
        return held

    def _is_held(self, rank: int) -> bool:
        error = self._resumptions[rank].error
        if not self._holds_back or self.aborted or error is None:
            return False
        return any(
            any(error is other for other in collective.errors) and self._may_be_joined(collective)
            for collective in self._collectives.values()
            if collective.differs
        )

    def _may_be_joined(self, collective: PendingCollective) -> bool:
        """Whether a member that has not joined is still running."""
        missing = [rank for rank in collective.ranks if rank not in collective.joined]
        return any(rank in self._ready and rank not in self._resumptions for rank in missing)

    def take(self, rank: int) -> Any:
        """Return the result of the call that ``rank`` waited in.

        Raises:
            CollectiveMismatchError: the call failed.
            RankAbortedError: the world failed.
        """
        resumption = self.resumption(rank)
        if resumption.error is not None:
            raise resumption.error
        return resumption.value

    def resumption(self, rank: int) -> Resumption:
        """Return the result or error of :meth:`take` as an object."""
        return self._resumptions.pop(rank, None) or Resumption()

    def describe(self, rank: int) -> str:
        """Return a description of the activity of ``rank``."""
        if rank in self._ended:
            return self._ended[rank]
        wait = self._waiting.get(rank)
        if wait is None:
            return NOT_WAITING
        if isinstance(wait, MessageFingerprint):
            return f"waited in {wait.text(sending=False)} at {wait.site}"
        if not isinstance(wait, tuple):
            return f"waited in {wait.text()}"
        collective, contribution = wait
        missing = [other for other in collective.ranks if other not in collective.joined]
        fingerprint = contribution.fingerprint
        return f"waited in {fingerprint} ({collective.name}) for ranks {missing} at {fingerprint.site}"

    def forgotten(self) -> dict[int, CollectiveMismatchError]:
        """Return, by rank, errors of collectives that the rank never waited for and that failed or never completed."""
        errors: dict[int, CollectiveMismatchError] = {}
        for (rank, _), resumption in self._results.items():
            if isinstance(resumption.error, CollectiveMismatchError):
                errors.setdefault(rank, resumption.error)
        for (rank, _), (collective, _) in self._in_flight.items():
            if collective.failed is None:
                collective.fail(self._absent(collective, self._gone(collective)), self._gone(collective))
            errors.setdefault(rank, collective.error())
        return errors

    def undelivered(self, more: Sequence[MessageFingerprint] = ()) -> str | None:
        """Return the error text for messages that were sent but never received, including ``more``, or None."""
        lost = [*(message for mailbox in self._mail.values() for message, _ in mailbox), *more]
        if not lost:
            return None
        lines = [
            f"  rank {message.source}: {message.text(sending=True)} was never received; sent at {message.site}"
            for message in lost
        ]
        return "messages were lost:\n" + "\n".join(lines)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _release(self, rank: int, resumption: Resumption) -> None:
        self._resumptions[rank] = resumption
        self._ready.add(rank)

    def _deliver_result(self, rank: int, contribution: Contribution, resumption: Resumption) -> None:
        """Deliver the result of a contribution: now if ``rank`` waits for it, otherwise when it waits."""
        waits = self._waiting.get(rank)
        waiting = isinstance(waits, tuple) and waits[1] is contribution
        if contribution.ticket is not None:
            del self._in_flight[rank, contribution.ticket]
            if not waiting:
                if contribution.awaited:
                    self._results[rank, contribution.ticket] = resumption
                return
        if waiting:
            del self._waiting[rank]
        self._release(rank, resumption)

    @staticmethod
    def _error(text: str) -> Resumption:
        return Resumption(error=CollectiveMismatchError(text))

    def _end(self, rank: int, how: str) -> None:
        self._ready.discard(rank)
        self._waiting.pop(rank, None)
        self._ended[rank] = how
        if not self.aborted:
            self.aborted_in[rank] = how

    def _complete(self, collective: PendingCollective) -> None:
        del self._collectives[collective.ranks, collective.group, collective.number]
        contributions = [collective.joined[rank] for rank in collective.ranks]
        for position, rank in enumerate(collective.ranks):
            received = [contribution.payloads[position] for contribution in contributions]
            self._deliver_result(rank, contributions[position], Resumption(received))

    def _fail_collective(self, collective: PendingCollective, problem: str) -> None:
        """Fail a collective: members that have joined get the error now, the others when they join."""
        collective.fail(problem, self._gone(collective))
        for rank, contribution in collective.joined.items():
            if not contribution.awaited and rank not in self.unreported:
                self.unreported[rank] = collective.error()
            if rank in self._ended:
                continue
            if contribution.ticket is not None:
                if (rank, contribution.ticket) in self._in_flight:
                    self._deliver_result(rank, contribution, Resumption(error=collective.error()))
            elif rank not in self._resumptions and self._belongs(rank, collective):
                self._deliver_result(rank, contribution, Resumption(error=collective.error()))
        if len(collective.joined) == len(collective.ranks):
            del self._collectives[collective.ranks, collective.group, collective.number]

    def _belongs(self, rank: int, collective: PendingCollective) -> bool:
        """Whether ``rank`` is in this collective now; it may have left it with an error."""
        wait = self._waiting.get(rank)
        if wait is None:
            return rank not in self._ready
        return isinstance(wait, tuple) and wait[0] is collective

    def _absence(self, collective: PendingCollective) -> str | None:
        gone = self._gone(collective)
        return self._absent(collective, gone) if gone else None

    def _gone(self, collective: PendingCollective) -> list[int]:
        return [other for other in collective.ranks if other in self._ended and other not in collective.joined]

    def _absent(self, collective: PendingCollective, gone: list[int]) -> str:
        alike: dict[str, list[int]] = {}
        for other in gone:
            alike.setdefault(self._ended[other], []).append(other)
        ends = ", ".join(f"{ranked(others)} {how}" for how, others in alike.items())
        waiting = listed(collective.fingerprints)
        return f"{ends} without joining {collective.name}, in which others wait:\n{waiting}"

    def _wake_orphans(self, gone: int) -> None:
        for rank, wait in list(self._waiting.items()):
            if self._waiting.get(rank) is not wait:
                continue
            if isinstance(wait, MessageFingerprint):
                if wait.source == gone:
                    del self._waiting[rank]
                    self._release(rank, self._error(self._never_sent(wait)))
            elif not isinstance(wait, tuple):
                problem = wait.hopeless(self._ended)
                if problem is not None:
                    wait.dismiss()
                    self.unblock(rank, self._error(problem))
            elif gone in wait[0].ranks and gone not in wait[0].joined:
                self._fail_collective(wait[0], self._absent(wait[0], [gone]))
        for collective, contribution in list(self._in_flight.values()):
            missed = gone in collective.ranks and gone not in collective.joined
            if missed and not contribution.awaited and collective.failed is None:
                self._fail_collective(collective, self._absent(collective, [gone]))

    def _never_sent(self, posted: MessageFingerprint) -> str:
        end = f"rank {posted.source} {self._ended[posted.source]}"
        return (
            f"{end} without sending what rank {posted.destination} waits for:\n"
            f"  rank {posted.destination}: {posted.text(sending=False)} at {posted.site}"
        )

    def _deliver(self, posted: MessageFingerprint) -> None:
        mailbox = self._mail[posted.key]
        message, payload = mailbox.popleft()
        if not mailbox:
            del self._mail[posted.key]
        problem = message_mismatch(message, posted)
        self._release(posted.destination, Resumption(payload) if problem is None else self._error(problem))

    def _deadlock(self, stuck: list[int]) -> None:
        activities = {rank: self.describe(rank) for rank in range(self.world_size)}
        problem = deadlock_text(stuck, self._waiting, activities)
        for rank in stuck:
            wait = self._waiting.pop(rank)
            if isinstance(wait, tuple):
                wait[0].failed = problem
                self._in_flight.pop((rank, wait[1].ticket or 0), None)
            elif not isinstance(wait, MessageFingerprint):
                wait.dismiss()
            self._release(rank, self._error(problem))
