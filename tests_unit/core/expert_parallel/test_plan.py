"""Plans of a dispatch: each kept assignment reaches its expert once and returns, in the order of global tokens."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.dtensor.layout import chunk_bounds
from hyper_parallel.core.expert_parallel.plan import expert_capacity, local_routing, plan_dispatch


def carried(plans, held):
    """Return what each rank receives when the plans' rows of ``held`` are exchanged."""
    parts = [
        np.split(rows[plan.sent], np.cumsum(plan.input_splits)[:-1]) for plan, rows in zip(plans, held, strict=True)
    ]
    arrived = [np.concatenate([part[rank] for part in parts]) for rank in range(len(plans))]
    for rank, plan in enumerate(plans):
        assert plan.output_splits == tuple(len(part[rank]) for part in parts)
    return arrived


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens, count, choices, capacity", [(23, 7, 3, None), (3, 2, 1, None), (29, 5, 2, 4)])
def test_rows_reach_their_expert_and_return(world, tokens, count, choices, capacity):
    """Whatever the number of ranks, an expert gets the same assignments, in the same order."""
    random = np.random.default_rng(tokens)
    chosen = random.integers(0, count, (tokens, choices))
    cuts = [chunk_bounds(tokens, world, rank) for rank in range(world)]
    numbers = np.arange(tokens * choices).reshape(tokens, choices)
    routings = [local_routing(chosen[low:high], count) for low, high in cuts]
    held = [numbers[low:high].reshape(-1) for low, high in cuts]
    bounds = [chunk_bounds(count, world, rank) for rank in range(world)]
    counts, members = [routing.counts for routing in routings], range(world)
    plans = [plan_dispatch(routings[rank], counts, rank, members, bounds, capacity) for rank in range(world)]
    for plan, rows, (low, high), own in zip(plans, carried(plans, held), bounds, held, strict=True):
        sorted_rows = rows[plan.by_expert]
        np.testing.assert_array_equal(sorted_rows[plan.by_source], rows)
        for expert, part in zip(range(low, high), np.split(sorted_rows, np.cumsum(plan.counts))[:-1], strict=True):
            np.testing.assert_array_equal(part, np.flatnonzero(chosen.reshape(-1) == expert)[:capacity])
        returned = np.append(own[plan.sent], -1)[plan.slots]
        assert plan.drops == (-1 in returned)
        np.testing.assert_array_equal(returned[returned >= 0], own[returned >= 0])


def test_the_capacity_is_rounded_up():
    """It is the even share of all assignments times the factor."""
    assert [expert_capacity(34, 4, factor) for factor in (0.6, 1.0, 1.25)] == [6, 9, 11]
