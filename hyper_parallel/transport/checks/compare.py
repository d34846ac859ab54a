"""Compares fingerprints and formulates the errors."""

from __future__ import annotations

from collections.abc import Mapping

from hyper_parallel._text import ranked
from hyper_parallel.transport.base import Ranks
from hyper_parallel.transport.checks.fingerprint import CollectiveFingerprint, Facts, MessageFingerprint

__all__ = [
    "joined_mismatch",
    "joining_mismatch",
    "listed",
    "message_mismatch",
    "mismatch",
    "odd_ranks",
    "title",
]

_Fingerprints = Mapping[int, CollectiveFingerprint]


def title(ranks: Ranks, number: int | None = None, group: str = "") -> str:
    """Which collective an error is about: ``collective 3 of ranks (0, 1)``, if its number is known."""
    named = f" in group {group}" if group else ""
    return f"{'a collective' if number is None else f'collective {number}'} of ranks {ranks}{named}"


def joining_mismatch(joined: _Fingerprints, rank: int, fingerprint: CollectiveFingerprint, number: int) -> str | None:
    """Return why the fingerprint of ``rank`` does not match those of earlier members, which match each other.

    Args:
        joined: fingerprints of earlier members by rank.
        rank: rank of the member that joins.
        fingerprint: fingerprint of this member.
        number: number of the collective among those of its ranks.

    Returns:
        the text of the error, or None.
    """
    problem = _first_problem(joined, rank, fingerprint)
    if problem is None:
        return None
    everyone = {**joined, rank: fingerprint}
    who, chunk = problem
    return _worded((who if chunk else _difference(everyone) or who, chunk), _title_of(fingerprint, number), everyone)


def joined_mismatch(fingerprints: _Fingerprints, number: int) -> str | None:
    """Return the error text if the members' operations or facts differ; else None.

    Args:
        fingerprints: fingerprints of all members that have joined, by rank.
        number: number of the collective among those of its ranks.
    """
    who = _difference(fingerprints)
    name = _title_of(next(iter(fingerprints.values())), number)
    return None if who is None else _worded((who, ""), name, fingerprints)


def _title_of(fingerprint: CollectiveFingerprint, number: int) -> str:
    return title(fingerprint.ranks, number, fingerprint.group)


def _difference(fingerprints: _Fingerprints) -> str | None:
    """Name the ranks that disagree, and the fact: odd ranks and the majority, or two ranks; None if all agree."""
    ranks = sorted(fingerprints)  # without a majority, the lowest rank is compared with the others
    odd = odd_ranks(fingerprints)
    usual = [rank for rank in ranks if rank not in odd]
    for other in odd or ranks[1:]:
        what = _first_difference(fingerprints[usual[0]], fingerprints[other])
        if what is not None:
            if not odd:
                return f"ranks {usual[0]} and {other} disagree about the {what}"
            return f"{ranked(odd)} disagree{'s' * (len(odd) == 1)} with {ranked(usual)} about the {what}"
    return None


def odd_ranks(fingerprints: _Fingerprints) -> tuple[int, ...]:
    """The ranks whose operation or facts differ from those of the majority; none without a majority."""
    same: dict[tuple[str, Facts], list[int]] = {}
    for rank, fingerprint in fingerprints.items():
        same.setdefault((fingerprint.operation, fingerprint.facts), []).append(rank)
    usual = max(same.values(), key=len)
    return tuple(rank for rank in fingerprints if rank not in usual) if 2 * len(usual) > len(fingerprints) else ()


def mismatch(fingerprints: _Fingerprints, ranks: Ranks) -> str | None:
    """The text of the error if the fingerprints of all members, by rank, do not match; else None."""
    joined: dict[int, CollectiveFingerprint] = {}
    for rank, fingerprint in fingerprints.items():
        problem = _first_problem(joined, rank, fingerprint) or _chunk_problem({rank: fingerprint}, rank, fingerprint)
        if problem is not None:
            who, chunk = problem
            return _worded((who if chunk else _difference(fingerprints) or who, chunk), title(ranks), fingerprints)
        joined[rank] = fingerprint
    return None


def message_mismatch(sent: MessageFingerprint, posted: MessageFingerprint) -> str | None:
    """The text of the error if a message does not match the receive that was posted for it; else None."""
    if sent.agreed == posted.agreed:
        return None
    return (
        f"ranks {sent.source} and {sent.destination} disagree about the "
        f"{_first_fact(sent.agreed, posted.agreed)} of a message:\n"
        f"  rank {sent.source}: {sent.text(sending=True)} at {sent.site}\n"
        f"  rank {sent.destination}: {posted.text(sending=False)} at {posted.site}"
    )


def listed(fingerprints: _Fingerprints) -> str:
    """A line for each fingerprint with its call site; ranks that have the same one share a line."""
    ranks_of: dict[str, list[int]] = {}
    for rank, fingerprint in sorted(fingerprints.items()):
        ranks_of.setdefault(f"{fingerprint} at {fingerprint.site}", []).append(rank)
    return "\n".join(f"  {ranked(ranks)}: {text}" for text, ranks in ranks_of.items())


def _first_problem(joined: _Fingerprints, rank: int, fingerprint: CollectiveFingerprint) -> tuple[str, str] | None:
    """The ranks that disagree, the differing fact, and the chunk that it concerns, if any; None if all match.

    All members that joined have equal operations and facts, so only the first one is compared.
    """
    if joined:
        other = next(iter(joined))
        what = _first_difference(joined[other], fingerprint)
        if what is not None:
            return f"ranks {other} and {rank} disagree about the {what}", ""
    return _chunk_problem(joined, rank, fingerprint)


def _chunk_problem(joined: _Fingerprints, rank: int, fingerprint: CollectiveFingerprint) -> tuple[str, str] | None:
    if fingerprint.sends is None or fingerprint.expects is None:
        return None
    ranks, sends, expects = fingerprint.ranks, fingerprint.sends, fingerprint.expects
    here = ranks.index(rank)
    for other, earlier in joined.items():
        there = ranks.index(other)
        their_sends, their_expects = earlier.sends or (), earlier.expects or ()
        if their_sends[here] != expects[there]:
            sender, sent, receiver, expected = other, their_sends[here], rank, expects[there]
        elif sends[there] != their_expects[here]:
            sender, sent, receiver, expected = rank, sends[there], other, their_expects[here]
        else:
            continue
        if other == rank:
            who, receiving = f"rank {rank} disagrees with itself", "itself, and"
        else:
            who, receiving = f"ranks {other} and {rank} disagree", f"rank {receiver}, which"
        return (
            f"{who} about the chunk shapes",
            f" rank {sender} sends {list(sent)} to {receiving} expects {list(expected)}",
        )
    return None


def _worded(problem: tuple[str, str], name: str, fingerprints: _Fingerprints) -> str:
    who, chunk = problem
    return f"{who} of {name}:{chunk}\n{listed(fingerprints)}"


def _first_difference(earlier: CollectiveFingerprint, later: CollectiveFingerprint) -> str | None:
    if earlier.operation != later.operation:
        return "operation"
    return None if earlier.facts == later.facts else _first_fact(earlier.facts, later.facts)


def _first_fact(earlier: Facts, later: Facts) -> str:
    """Return the name of the first fact that differs between two members."""
    left, right = dict(earlier), dict(later)
    for name in {**left, **right}:
        if left.get(name) != right.get(name):
            return name
    return "order of facts"
