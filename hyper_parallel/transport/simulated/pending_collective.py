"""A collective that some of its members have joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.base import Ranks
from hyper_parallel.transport.checks.compare import joined_mismatch, joining_mismatch, odd_ranks, title
from hyper_parallel.transport.checks.fingerprint import CollectiveFingerprint
from hyper_parallel.transport.simulated.endpoint import Contribution

__all__ = ["PendingCollective"]


@dataclass(slots=True)
class PendingCollective:
    """A collective in progress: the ranks that have joined, and its error if it failed.

    ``differs`` means that members call it differently. Each member that joins after that makes clearer which ones are
    odd, and the errors that were delivered before it say so, too.
    """

    ranks: Ranks
    number: int
    group: str = ""
    joined: dict[int, Contribution] = field(default_factory=dict)
    fingerprints: dict[int, CollectiveFingerprint] = field(default_factory=dict)
    failed: str | None = None
    differs: bool = False
    odd: tuple[int, ...] = ()
    errors: list[CollectiveMismatchError] = field(default_factory=list)

    @property
    def name(self) -> str:
        """For error messages."""
        return title(self.ranks, self.number, self.group)

    def add(self, rank: int, contribution: Contribution) -> str | None:
        """Let ``rank`` join; the text of the error if members call different things or the collective has failed."""
        problem = self.failed or joining_mismatch(self.fingerprints, rank, contribution.fingerprint, self.number)
        self.differs = self.differs or (self.failed is None and problem is not None)
        self.joined[rank] = contribution
        self.fingerprints[rank] = contribution.fingerprint
        return (joined_mismatch(self.fingerprints, self.number) or problem) if self.differs else problem

    def fail(self, problem: str, gone: Sequence[int]) -> None:
        """Note why it failed, in all of its errors; ``gone`` are members that will not join."""
        self.failed = problem
        self.odd = odd_ranks(self.fingerprints) if self.differs else tuple(gone)
        for error in self.errors:
            error.args, error.odd_ranks = (problem,), self.odd

    def error(self) -> CollectiveMismatchError:
        """A new error that says why it failed."""
        error = CollectiveMismatchError(self.failed)
        error.odd_ranks = self.odd
        self.errors.append(error)
        return error
