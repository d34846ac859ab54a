"""Choices are compared as decisions: near ties may flip, and rows are found where the ranks have them."""

import numpy as np
import pytest

from hyper_parallel.verify.engine.bounds import DISPLACED, Bounds
from hyper_parallel.verify.engine.decisions import decisions_of
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.replay import Replay, plan_replay
from hyper_parallel.verify.frameworks.contract.records import Group, RankRecords, Record, Run

ROWS, WIDTH = 12, 5


def calls(parts, choose, name="gate topk", step=0):
    """Return the records of calls that choose from scores."""
    records = []
    for call, part in enumerate(parts):
        chosen = choose(part).astype(np.int64)
        records.append(Record("scores", name, "gate", step, call, part))
        records.append(Record("choice", name, "gate", step, call, chosen))
    return records


def top2(scores):
    """Return the indices of the two largest scores of each row."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :2]


def run_of(ranks):
    """Return a run of ranks with these records."""
    world = tuple(range(len(ranks)))
    return Run([RankRecords(rank, records, [Group("dp", world)]) for rank, records in enumerate(ranks)])


def bounds_of(records, moved):
    """Return the bounds of a reference whose repeats move the scores by ``moved``."""
    repeats = []
    for sign in (1, -1, 0):
        values = [
            Record(
                *each.key[:2], each.module, *each.key[2:], each.value + (sign * moved if each.kind == "scores" else 0)
            )
            for each in records
        ]
        repeats.append(Run([RankRecords(0, values)], {} if sign else {"perturbation": DISPLACED}))
    return Bounds(run_of([records]), repeats)


def scores_of(rows=ROWS):
    """Return scores in which the best two of every third row are a near tie."""
    scores = np.random.default_rng(0).standard_normal((rows, WIDTH))
    for row in range(0, rows, 3):
        scores[row, :2] = 3.0 + row, 3.0 + row + 1e-9
    return scores


def flipped(scores):
    """Return scores whose near ties are decided otherwise, each moved by 2e-9."""
    other = scores.copy()
    other[::3, 0] += 2e-9
    return other


@pytest.mark.parametrize("cut", [np.s_[:4], np.s_[5:], np.s_[1::3]], ids=str)
def test_near_ties_flip_and_rows_are_found(cut):
    """Flips within the bounds are counted, and the reference's choice of the rank's own rows replaces them."""
    scores = scores_of()
    bounds = bounds_of(calls([scores], top2), 1e-9)
    own = flipped(scores)[cut]
    (decision,) = decisions_of(bounds, run_of([calls([own], top2)]), [{}])
    ties = [row for row, number in enumerate(range(ROWS)[cut]) if number % 3 == 0]
    assert (decision.rank, decision.flips, decision.outside) == (0, tuple(ties), ())
    np.testing.assert_array_equal(decision.expected, top2(scores)[cut])


def test_a_flip_outside_of_the_bounds_is_an_error():
    """Right scores with another index differ, with both scores in words; wrong scores are no decisions."""
    scores = scores_of()
    bounds = bounds_of(calls([scores], top2), 1e-12)
    third = calls([scores], lambda part: np.argsort(-part, axis=1, kind="stable")[:, 1:3])
    (decision,) = decisions_of(bounds, run_of([third]), [{}])
    assert decision.outside == tuple(range(ROWS))
    own, other = third[1].value[0, 0], top2(scores)[0, 0]
    assert decision.why.startswith(
        f"rank 0 chooses index {own} where the single device chooses {other}: their scores are {scores[0, own]:.6g} "
        f"and {scores[0, other]:.6g}, and rounding moves them by "
    )
    changed = scores.copy()
    changed[2] += np.arange(WIDTH)
    (decision,) = decisions_of(bounds, run_of([calls([changed], top2)]), [{}])
    assert (decision.flips, decision.outside) == ((), ())


def test_calls_that_ranks_cut_otherwise_are_found_in_a_step_s_union():
    """A rank may decide row by row of its own part, where the reference does so for all rows."""
    scores = scores_of()
    bounds = bounds_of(calls(np.split(scores, 6), top2), 1e-9)
    found = decisions_of(bounds, run_of([calls(np.split(flipped(scores)[3:9], 3), top2)]), [{}])
    assert [decision.own[3] for decision in found] == [0, 1, 2]
    np.testing.assert_array_equal(np.concatenate([each.expected for each in found]), top2(scores)[3:9])


def test_rows_behind_a_flip_are_where_those_before_are():
    """Scores that an earlier flip has changed altogether match nothing; their rows are those of other decisions."""
    scores = scores_of()
    later = np.random.default_rng(1).standard_normal((ROWS, WIDTH))
    reference = [*calls([scores], top2), *calls([later], top2, name="second topk")]
    own = [*calls([flipped(scores)[4:8]], top2), *calls([later[4:8] + 1.5], top2, name="second topk")]
    found = {each.own[1]: each for each in decisions_of(bounds_of(reference, 1e-9), run_of([own]), [{}])}
    np.testing.assert_array_equal(found["second topk"].expected, top2(later)[4:8])
    assert found["second topk"].flips == ()


def test_other_widths_are_no_decisions_of_the_reference():
    """Scores of another width, more rows than the reference's, and names that it lacks are passed over."""
    scores = scores_of()
    bounds = bounds_of(calls([scores], top2), 1e-9)
    for own in (
        calls([scores[:, :4]], top2),
        calls([np.concatenate([scores, scores])], top2),
        calls([scores + 100.0], top2),
        calls([scores], top2, name="other topk"),
    ):
        assert decisions_of(bounds, run_of([own]), [{}]) == []


def test_a_plan_has_all_choices_if_one_flips():
    """The ranks take every known choice of the reference, under their own names, and only what is new counts."""
    scores, weight = scores_of(), Record("weight", "w", "", -1, 0, np.arange(3.0))
    reference = [weight, *calls([scores], top2)]
    bounds = bounds_of(reference, 1e-9)
    halves = [[weight, *calls([flipped(scores)[:6]], top2)], [weight, *calls([scores[6:]], top2)]]
    plan = plan_replay(PairedRuns(run_of([reference]), bounds, run_of(halves), None, None))
    assert (plan.flips, plan.decisions, plan.masks) == (2, 12, 0)
    key = ("choice", "gate topk", 0, 0)
    assert {rank: list(own) for rank, own in plan.table.items()} == {0: [key], 1: [key]}
    np.testing.assert_array_equal(plan.table[1][key], top2(scores)[6:])
    assert plan.adds_to(None)
    assert not plan.adds_to(plan)
    (line,) = plan.words()
    assert line == (
        "decisions: 2 of 12 are near ties that ranks decide otherwise, with margins within the bounds; the reference's "
        "were replayed"
    )
    same = [[weight, *calls([scores[:6]], top2)], [weight, *calls([scores[6:]], top2)]]
    assert plan_replay(PairedRuns(run_of([reference]), bounds, run_of(same), None, None)) is None
    masked = Replay({0: {("mask", "drop", 0, 0): np.ones(3, bool)}}, masks=1)
    both = plan.with_draws_of(masked)
    assert (both.masks, both.flips, set(both.table[0])) == (1, 2, {key, ("mask", "drop", 0, 0)})
    assert masked.with_draws_of(None) is masked
