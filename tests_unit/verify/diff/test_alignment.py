"""Calls of a module that one run makes more often are aligned, by what they returned or by their order."""

import numpy as np
import pytest

from hyper_parallel.verify.diff.alignment import align_calls
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Record, Run

RNG = np.random.default_rng(3)
VALUES = [RNG.standard_normal((4, 3)).astype(np.float32) for _ in range(5)]


def run(*outputs, name="up"):
    """Return a run on one rank of these outputs; a pair names the module."""
    counts, records = {}, []
    for output in outputs:
        own, value = output if isinstance(output, tuple) else (name, output)
        records.append(Record("output", own, own, 0, counts.setdefault(own, 0), value))
        counts[own] += 1
    return Run([RankRecords(0, records)])


def calls(aligned, name="up"):
    """Return the numbers of the calls of a module, in their order."""
    return [record.call for record in aligned.ranks[0].records if record.name == name]


@pytest.mark.parametrize(
    "known, own, expected",
    [
        ([0, 1, 2], [0, 1, 2], [0, 1, 2]),
        ([0, 1, 2], [3, 0, 1, 2], [3, 0, 1, 2]),
        ([0, 1, 2], [0, 3, 1, 4, 2], [0, 3, 1, 4, 2]),
        ([0, 1, 2], [1], [1]),
        ([0, 1, 2], [0, 2], [0, 2]),
    ],
)
def test_calls_are_aligned_by_what_they_returned(known, own, expected):
    """Another call gets a number that the reference does not have; those that it has keep its numbers."""
    noise = np.float32(1 + 2e-6)
    aligned, words = align_calls(run(*(VALUES[each] for each in known)), run(*(VALUES[each] * noise for each in own)))
    assert calls(aligned) == expected
    assert bool(words) == (len(known) != len(own))


def test_parts_of_ranks_are_found_in_the_whole():
    """A rank's rows of a call are aligned with the call that has them."""
    aligned, words = align_calls(run(VALUES[0], VALUES[1]), run(VALUES[1][2:]))
    assert calls(aligned) == [1]
    assert words == ["the output of up: 2 calls in step 1 of A, 1 in that of B; calls were aligned"]


def test_other_values_are_aligned_by_order():
    """Where no call returned the same, its place among the calls of other modules says which it is."""
    first = run(("down", VALUES[0]), ("up", VALUES[1]), ("mid", VALUES[0]), ("up", VALUES[2]))
    second = run(("down", VALUES[0]), ("mid", VALUES[0]), ("up", VALUES[4]))
    assert calls(align_calls(first, second)[0]) == [1]


def test_the_nearest_call_is_taken():
    """A call of nearly the same value, such as a norm of other numbers, does not take the place of the same."""
    nearly = VALUES[0] * np.float32(1 + 1e-5)
    assert calls(align_calls(run(VALUES[0]), run(nearly, VALUES[0]))[0]) == [1, 0]
    parts = run(nearly[:2], VALUES[0][:2])
    assert calls(align_calls(run(VALUES[0]), parts)[0]) == [1, 0]
