"""Measurements of calls in turns."""

import math

import pytest

from workshop.bench import turns as benchmark
from workshop.bench.turns import BenchmarkCase, BenchmarkRow, measured


@pytest.mark.parametrize("one_by_one, length", [(False, 2), (True, 1)])
def test_calls_take_turns(one_by_one, length):
    """Every implementation is called equally often, in either order: by a twenty-fifth of a round, or call by call."""
    called = []
    calls = [lambda: called.append("plain"), lambda: called.append("ours")]
    row = measured(BenchmarkCase("some", 1.5, calls, 50), 2, one_by_one=one_by_one)
    turn = ["plain"] * length + ["ours"] * 2 * length + ["plain"] * length
    assert called == ["plain"] * 20 + ["ours"] * 20 + turn * (50 // length)  # each is called a few times first
    assert (row.name, row.budget, row.peer, row.by_hand) == ("some", 1.5, None, False)
    assert row.plain > 0
    assert row.ours > 0


def test_a_machine_that_changes_its_speed_changes_no_ratio(monkeypatch):
    """The ratio is the median of those of turns that stand beside each other, not that of two medians."""
    clock, speeds = [0], iter([1, 1, 1, 1, 4, 4, 4, 4, 9, 27, 27, 9])

    def work(units):
        return lambda: clock.__setitem__(0, clock[0] + units * 1000 * next(speeds, 1))

    monkeypatch.setattr(benchmark, "thread_time_ns", lambda: clock[0])
    monkeypatch.setattr(benchmark, "_WARM_UP", 0)
    row = measured(BenchmarkCase("some", 1.5, [work(2), work(3)], 6), 1)
    assert (row.plain, row.ours, row.ratio) == (8.0, 12.0, 1.5)


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
    """It is that of the overheads where there is a peer and plain is not a program by hand; else that of the times."""
    assert math.isclose(BenchmarkRow("some", 1.0, peer, 6.0, 1.0, by_hand).ratio, ratio)
