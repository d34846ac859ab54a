"""Measurements of calls in turns."""

import math

import pytest

from hyper_parallel.platform.contract.benchmark import BenchmarkCase, BenchmarkRow, measured


@pytest.mark.parametrize("one_by_one", [False, True])
def test_calls_take_turns(one_by_one):
    """Every implementation is called equally often: round by round in loops, or call by call."""
    called = []
    calls = [lambda: called.append("plain"), lambda: called.append("ours")]
    row = measured(BenchmarkCase("some", 1.5, calls, 3), 2, one_by_one=one_by_one)
    turn = ["plain", "ours"] * 3 if one_by_one else ["plain"] * 3 + ["ours"] * 3
    assert called == ["plain"] * 3 + ["ours"] * 3 + turn * 2  # each is called a few times first
    assert (row.name, row.budget, row.peer, row.by_hand) == ("some", 1.5, None, False)
    assert row.plain > 0
    assert row.ours > 0


def test_a_peer_is_measured_between():
    """Of three implementations the one in the middle is the peer."""
    row = measured(BenchmarkCase("some", 0.5, [lambda: None, lambda: sum(range(20_000)), lambda: None], 2, True), 1)
    assert row.by_hand
    assert row.peer is not None
    assert row.peer > row.plain


@pytest.mark.parametrize(
    "peer, by_hand, ratio", [(11.0, False, 0.5), (11.0, True, 6.0), (None, False, 6.0), (None, True, 6.0)]
)
def test_the_ratio(peer, by_hand, ratio):
    """It is that of the overheads where there is a peer and plain is no program by hand; else that of the times."""
    assert math.isclose(BenchmarkRow("some", 1.0, peer, 6.0, 1.0, by_hand).ratio, ratio)
