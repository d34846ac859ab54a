"""Sides of thresholds: only numbers that rounding may take across are taken from the reference, wherever they lie."""

import numpy as np
import pytest

from hyper_parallel.verify.engine.bounds import Bounds
from hyper_parallel.verify.engine.thresholds import sides_of
from hyper_parallel.verify.frameworks.contract.records import THRESHOLDS, RankRecords, Record, Run

MOVED = 1e-6


def calls(values, step=0, name="act relu"):
    """Return the records of calls of a ReLU."""
    return [
        record
        for call, value in enumerate(values)
        for record in (
            Record(THRESHOLDS[0], name, "act", step, call, np.abs(value)),
            Record(THRESHOLDS[1], name, "act", step, call, value > 0),
        )
    ]


def run_of(ranks):
    """Return a run of ranks with these records."""
    return Run([RankRecords(rank, records) for rank, records in enumerate(ranks)])


def bounds_of(records):
    """Return the bounds of a reference whose repeats move every distance by ``MOVED``."""
    repeats = [
        Run([RankRecords(0, [
            Record(r.kind, r.name, r.module, r.step, r.call, r.value + sign * MOVED if r.kind == "margin" else r.value)
            for r in records
        ])])
        for sign in (1, -1)
    ]  # fmt: skip
    return Bounds(run_of([records]), repeats)


def numbers(*shape):
    """Return numbers of which that at [3, 2] is next to zero, and no other one."""
    values = np.random.default_rng(3).standard_normal(shape)
    values = np.sign(values) * (np.abs(values) + 0.1)
    values[3, 2] = 2 * MOVED
    return values


@pytest.mark.parametrize("dim", [0, 1])
def test_a_number_next_to_a_threshold_is_found_on_its_rank(dim):
    """Ranks hold blocks of rows or columns; the one that has the number on the other side gets the reference's side."""
    values = numbers(7, 5)
    own = values.copy()
    own[3, 2] *= -1
    parts = np.array_split(own, [4 if dim == 0 else 3], axis=dim)
    found = sides_of(bounds_of(calls([values])), run_of([calls([part]) for part in parts]), [{}, {}])
    (decision,) = found
    assert (decision.rank, decision.own, len(decision.flips)) == (0, ("side", "act relu", 0, 0), 1)
    (place,) = zip(*np.nonzero(decision.expected), strict=True)
    assert place == (3, 2)
    assert 2 * MOVED < decision.expected[place] < 1e-3  # above, and how far it is mirrored at most
    assert not decision.outside


def test_a_number_that_rounding_does_not_take_across_keeps_its_side():
    """A rank whose number lies far on the other side is wrong, and nothing of it is replaced."""
    values = numbers(7, 5)
    own = values.copy()
    own[3, 2] = -0.3
    assert sides_of(bounds_of(calls([values])), run_of([calls([own])]), [{}]) == []
    own[3, 2] = -2 * MOVED
    own[1, 1] *= -1  # far from zero, and as far as the reference's
    (decision,) = sides_of(bounds_of(calls([values])), run_of([calls([own])]), [{}])
    assert decision.flips == (3 * 5 + 2,)
    assert np.count_nonzero(decision.expected) == 1


def test_numbers_that_an_earlier_flip_has_changed_lie_where_the_others_do():
    """Where a call's numbers are not found, they lie where those of calls of the same shapes were found."""
    first, second = numbers(8, 5), numbers(8, 5) + 0.05
    second[6, 1], second[3, 2] = MOVED, 0.4
    own = second[4:].copy()
    own[0] += 0.2  # a row behind the flip of the first call
    own[2, 1] *= -1
    bounds = bounds_of([*calls([first]), *calls([second], name="next relu")])
    ranks = [[], [*calls([first[4:]]), *calls([own], name="next relu")]]
    (decision,) = sides_of(bounds, run_of(ranks), [{}, {}])
    assert (decision.rank, decision.own[1], decision.flips) == (1, "next relu", (2 * 5 + 1,))


def test_micro_batches_are_parts_of_all_calls_of_a_step():
    """A rank that calls a module more often than the reference has rows of its calls, joined."""
    values = numbers(8, 5)
    own = values.copy()
    own[3, 2] *= -1
    whole = calls([values[:5], values[5:]])
    (decision,) = sides_of(bounds_of(whole), run_of([calls([own[:2], own[2:6], own[6:]])]), [{}])
    assert decision.own == ("side", "act relu", 0, 1)
    assert decision.flips == (1 * 5 + 2,)


def test_a_rank_whose_numbers_are_all_others_is_left_alone():
    """Nothing is assumed of a rank none of whose first calls is found, nor of calls of another width."""
    values = [numbers(6, 4) + place for place in range(12)]
    other = [value + 9.0 for value in values]
    assert sides_of(bounds_of(calls(values)), run_of([calls(other)]), [{}]) == []
    narrow = [value[:, :3] for value in values[:1]]
    wide = calls(values[:1]) + calls([np.ones((2, 3))], step=1)
    assert sides_of(bounds_of(wide), run_of([calls(narrow) + calls([np.ones((2, 5))], step=1)]), [{}]) == []
