"""Which rank of a ring holds which positions, and what a balanced order does."""

import pytest

from hyper_parallel import balanced_order
from hyper_parallel.core.context_parallel.plan import Run, ring_plan
from hyper_parallel.errors import PlanError


def test_shards_are_runs_of_positions():
    """A sequence in order has one run in each shard, none in an empty one; another order has one for each break."""
    plan = ring_plan((4, 6, 9), 6, 4, True, None)
    assert plan.index == 1
    assert plan.runs == ((Run(0, 2, 0),), (Run(0, 2, 2),), ())
    assert plan.sizes == (2, 2, 0)
    assert [plan.member_at(step) for step in range(4)] == [1, 0, 2, 1]
    assert [plan.start(member) for member in range(3)] == [0, 2, 4]
    assert ring_plan((0, 1), 0, 5, True, (0, 4, 1, 2, 3)).runs == (
        (Run(0, 1, 0), Run(1, 1, 4), Run(2, 1, 1)),
        (Run(0, 2, 2),),
    )


def test_runs_are_cut_into_tiles():
    """No run is longer than a tile, and tiles end where a run ends."""
    plan = ring_plan((0, 1), 1, 9, False, (0, 1, 2, 5, 6, 3, 4, 7, 8), 2)
    assert plan.runs[0] == (Run(0, 2, 0), Run(2, 1, 2), Run(3, 2, 5))
    assert plan.own == (Run(0, 2, 3), Run(2, 2, 7))


def test_a_query_sees_up_to_its_own_position():
    """Runs of keys are seen in part from the last query's position on, and whole up to the first query's."""
    queries = Run(0, 3, 4)
    assert [queries.sees(Run(0, 2, position)) for position in (5, 6, 7)] == [True, True, False]
    assert [queries.sees_all(Run(0, 2, position)) for position in (2, 3, 4)] == [True, True, False]


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_a_balanced_order_gives_each_shard_as_many_visible_pairs(parts):
    """The order is a permutation, and queries of each shard see as many keys together."""
    length = 4 * parts
    order = balanced_order(length, parts)
    assert sorted(order) == list(range(length))
    seen = {sum(position + 1 for position in order[4 * part : 4 * part + 4]) for part in range(parts)}
    assert len(seen) == 1


@pytest.mark.parametrize("length, parts, padded", [(7, 2, 8), (0, 3, 6), (5, 0, 6), (13, 3, 18)])
def test_a_length_that_cannot_be_balanced_is_refused(length, parts, padded):
    """The message has the length to pad to."""
    with pytest.raises(PlanError) as caught:
        balanced_order(length, parts)
    assert str(caught.value) == (
        f"balanced_order: a sequence of {length} in {parts} parts; the length must be a multiple of twice the number "
        f"of parts; pad the sequence to {padded}"
    )
