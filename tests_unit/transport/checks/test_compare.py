"""The comparison of fingerprints, and its messages."""

from hyper_parallel.transport.checks.compare import joining_mismatch, listed, mismatch
from hyper_parallel.transport.checks.fingerprint import CollectiveFingerprint, Site

RANKS = (0, 1, 2)


def fingerprint(line, operation="all_reduce", sends=None, expects=None, **facts):
    """Return the fingerprint of a call in this line of train.py."""
    chunks = (None if sizes is None else tuple((size,) for size in sizes) for sizes in (sends, expects))
    return CollectiveFingerprint(operation, RANKS, tuple(facts.items()), Site(("train.py", line)), *chunks)


def test_ranks_with_one_fingerprint_share_a_line():
    """Ranks with equal fingerprints share a line, except for different call sites; a rank that differs has its own."""
    fingerprints = {0: fingerprint(3), 1: fingerprint(5), 2: fingerprint(3)}
    assert listed(fingerprints) == "  ranks 0, 2: all_reduce() at train.py:3\n  rank 1: all_reduce() at train.py:5"
    assert mismatch(fingerprints, RANKS) is None


def test_all_members_are_listed_where_all_are_known():
    """The header names the odd ranks, or two that differ; the operation is compared before other facts."""
    fingerprints = {0: fingerprint(3, src=0), 1: fingerprint(3, src=0), 2: fingerprint(3, src=1)}
    assert mismatch(fingerprints, RANKS) == (
        "rank 2 disagrees with ranks 0, 1 about the src of a collective of ranks (0, 1, 2):\n"
        "  ranks 0, 1: all_reduce(src=0) at train.py:3\n"
        "  rank 2: all_reduce(src=1) at train.py:3"
    )
    fingerprints[1] = fingerprint(4, "barrier")
    assert "ranks 0 and 1 disagree about the operation" in mismatch(fingerprints, RANKS)


def test_a_chunk_is_compared_with_every_member():
    """Every pair of members is compared, in either direction, and the chunk that does not fit is named."""
    fits = {
        0: fingerprint(1, sends=(1, 1, 1), expects=(1, 1, 1)),
        1: fingerprint(1, sends=(1, 1, 2), expects=(1, 1, 3)),
    }
    assert joining_mismatch({0: fits[0]}, 1, fits[1], 7) is None
    third = fingerprint(1, sends=(1, 3, 1), expects=(1, 9, 1))
    header = "ranks 1 and 2 disagree about the chunk shapes of collective 7 of ranks (0, 1, 2):"
    assert f"{header} rank 1 sends [2] to rank 2, which expects [9]\n" in joining_mismatch(fits, 2, third, 7)
    third = fingerprint(1, sends=(1, 8, 1), expects=(1, 2, 1))
    assert f"{header} rank 2 sends [8] to rank 1, which expects [3]\n" in joining_mismatch(fits, 2, third, 7)
    alone = {0: fingerprint(1, sends=(2, 0, 0), expects=(3, 0, 0))}
    assert "rank 0 disagrees with itself about the chunk shapes of a collective of ranks (0, 1, 2): " in mismatch(
        alone, RANKS
    )
