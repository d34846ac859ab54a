"""How explanations are reported: units, and the order of candidate plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.verify.explained_step import Memory
from hyper_parallel.verify.explanation import Explanation, duration, ranking
from hyper_parallel.verify.links import Link
from hyper_parallel.verify.model_report import Traffic
from hyper_parallel.verify.prove.table import ProvenCalls


def explained(plan, axes, size, wrong=()):
    """Return an explanation with one collective."""
    rows = [Traffic("", "forward", "all_reduce", axes, 1, size, 0)]
    return Explanation(
        "m", "torch", {"tp": 2}, [], {}, {}, rows, Memory(1, 1, 1, None), {"tp": Link(1.0, 1.0)}, [], list(wrong), [],
        plan=plan,
    )  # fmt: skip


@pytest.mark.parametrize(
    "seconds, text", [(None, "not priced"), (0.0, "0 us"), (2.5e-5, "25 us"), (0.0125, "12.5 ms"), (3.0, "3 s")]
)
def test_durations(seconds, text):
    """A duration has a unit that reads well."""
    assert duration(seconds) == text


def test_a_large_sum_has_a_unit():
    """A large number of bytes is reported a second time in its unit."""
    small = explained("p", ("tp",), 1)
    assert "(" not in small._memory_lines()[-1]
    large = replace(small, memory=Memory(3 * 2**29, 0, 0, None))
    assert large._memory_lines()[-1].endswith("1610612736 (1.50 GiB)")


def test_plans_are_ranked_by_time():
    """The fastest communication is first; plans without a price come later, wrong ones last."""
    plans = [explained("wrong", ("tp",), 1, ["it is"]), explained("unpriced", (), 1), explained("slow", ("tp",), 9),
             explained("fast", ("tp",), 3)]  # fmt: skip
    assert [each.plan for each in ranking(plans)] == ["fast", "slow", "unpriced", "wrong"]


def test_memory_that_the_framework_does_not_tell():
    """What is kept for backward is told to be unknown, and left out of the sum."""
    text = explained("p", ("tp",), 1).text()
    assert "    kept for backward  unavailable\n    sum                3\n" in text


def test_rows_that_are_not_proven_are_listed():
    """The line with the numbers is followed by each row that is not proven, with its operator and level."""
    rows = (("tested", "relu", "Shard(0) -> Shard(0)"),)
    told = replace(explained("p", ("tp",), 1), proofs=ProvenCalls("2026-11-30", {"proven": 2, "tested": 1}, rows, ()))
    assert (
        "  rows of 3 operator calls: 2 proven for every size, 1 tested on small sizes\n"
        "    tested: relu: Shard(0) -> Shard(0)\n"
    ) in told.text() + "\n"
    assert told.json()["proofs"]["rows"] == [{"level": "tested", "op": "relu", "row": "Shard(0) -> Shard(0)"}]
    assert explained("p", ("tp",), 1).json()["proofs"] is None
