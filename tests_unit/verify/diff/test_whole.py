"""The ranks of a run are put together where the place of every part is known; the rest is left out by its key."""

import numpy as np
import pytest

from hyper_parallel.verify.diff.whole import put_together
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.placement import Placement
from hyper_parallel.verify.engine.scratch import Scratch
from hyper_parallel.verify.engine.sinks import KeepSink
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Record, Region, Run

RNG = np.random.default_rng(8)
WHOLE = RNG.standard_normal((5, 3)).astype(np.float32)
KEY = ("weight", "up.weight", -1, 0)


def weight(value, region=None):
    """Return the record of a weight before training."""
    return Record("weight", "up.weight", "up", -1, 0, np.asarray(value), region)


def together(alone, *ranks, place=None):
    """Return the records of ranks that are put together, by key, and the keys of those that are left out."""
    map_run = Run([RankRecords(0, alone)])
    paired = PairedRuns(
        map_run, [map_run], Run([RankRecords(rank, each) for rank, each in enumerate(ranks)]), None, None
    )
    if place is not None:
        paired.placement = lambda _key, rank: place[rank]
    with Scratch() as scratch:
        run, left_out = put_together(paired, map_run, KeepSink(scratch, "A, put together"))
        return {record.key: np.array(record.value) for record in run.ranks[0].records}, left_out


def test_parts_are_written_to_their_places():
    """Unequal parts become one array; a decision is the map's own, which the ranks are asked for."""
    chosen = Record("choice", "gate topk", "gate", 0, 0, np.array([[1, 0]]))
    parts = [[weight(WHOLE[:3], Region((5, 3), (0, 0)))], [weight(WHOLE[3:], Region((5, 3), (3, 0)))]]
    values, left_out = together([weight(WHOLE), chosen], *parts)
    assert left_out == []
    assert list(values) == [KEY, chosen.key]
    assert np.array_equal(values[KEY], WHOLE)
    assert np.array_equal(values[chosen.key], chosen.value)


def test_what_no_rank_has_and_unknown_parts_are_left_out():
    """A value that only the map has, a part that is nowhere in the map's, and a part that is missing have no array."""
    other = Record("weight", "down.weight", "down", -1, 0, np.float32([1, 2]))
    strange = RNG.standard_normal((2, 2)).astype(np.float32)
    assert together([weight(WHOLE), other], [weight(strange)], [weight(strange)]) == ({}, [KEY, other.key])
    half = weight(WHOLE[:3], Region((5, 3), (0, 0)))
    assert together([weight(WHOLE), other], [half], [half])[1] == [KEY, other.key]


@pytest.mark.parametrize(
    "place",
    [
        Placement((5, 3), pending=((0, 1),)),
        Placement((3, 5)),
        Placement((5, 3), np.arange(6)),
        Placement((5, 3), compared=False),
    ],
    ids=["a sum whose parts do not fit", "another shape", "other positions", "the rank's own"],
)
def test_parts_that_do_not_fit_their_place_are_left_out(place):
    """A value is never put together of parts that are not what their places say."""
    ranks = [[weight(WHOLE)], [weight(WHOLE[:4])]]
    assert together([weight(WHOLE)], *ranks, place=[place, place]) == ({}, [KEY])


def test_pending_sums_are_done():
    """Parts that add up to a value become their sum."""
    place = Placement((5, 3), pending=((0, 1),))
    values, left_out = together([weight(WHOLE)], [weight(WHOLE - 2)], [weight(WHOLE * 0 + 2)], place=[place, place])
    assert left_out == []
    assert np.allclose(values[KEY], WHOLE, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "known, own, expected",
    [(2.0, (1.0, 3.0), 2.0), (4.0, (1.0, 3.0), 4.0), (1.25, (1.0, 3.0), 1.0), (7, (7, 8), 7)],
    ids=["mean", "sum", "the first rank's", "integers are not combined"],
)
def test_a_loss_is_the_combination_nearest_to_the_maps(known, own, expected):
    """The ranks' own numbers are combined as the map shows; the map's number itself is never taken."""
    losses = [Record("loss", "loss", "", 0, 0, np.asarray(each)) for each in (known, *own)]
    values, left_out = together([losses[0]], [losses[1]], [losses[2]])
    assert left_out == []
    assert values["loss", "loss", 0, 0] == expected
