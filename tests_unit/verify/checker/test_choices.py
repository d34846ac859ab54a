"""The placements that are tried."""

import numpy as np

from hyper_parallel.core.dtensor.placements import PARTIAL_OPS, Partial, Replicate, Shard
from hyper_parallel.verify.checker.choices import placement_tuples, possible_placements, random_placements


def test_possible_placements_depend_on_the_values():
    """An array is replicated, sharded in each dim, or split by the reductions that its dtype and values allow."""
    numbers = possible_placements(np.array([[1.0, -2.0]]), PARTIAL_OPS)
    assert numbers[:3] == [Replicate(), Shard(0), Shard(1)]
    assert {placement.reduce_op for placement in numbers[3:]} == {"sum", "avg", "max", "min", "prod"}
    assert possible_placements(np.array(True), PARTIAL_OPS) == [Replicate(), Partial("all"), Partial("any")]
    assert Partial("max") not in possible_placements(np.array([np.nan]), PARTIAL_OPS)


def test_tuples_have_one_reduction_at_most():
    """Reductions of different kinds on different axes do not commute: no tuple has two."""
    tuples = placement_tuples([Replicate(), Partial("sum"), Partial("max")], 2)
    assert (Partial("sum"), Partial("sum")) in tuples
    assert (Partial("sum"), Partial("max")) not in tuples
    assert len(tuples) == 7


def test_random_placements_fit_the_values():
    """Parts of an infinity add up to no number, and a boolean is never a sum."""
    rng = np.random.default_rng(0)
    for array, allowed in (
        (np.array([np.inf, 1.0]), {"max", "min"}),
        (np.array([True, False]), {"any", "all"}),
        (np.array([1.0, 2.0]), {"sum", "avg", "max", "min"}),
    ):
        drawn = [placement for _ in range(200) for placement in random_placements(array, (2, 3), rng)]
        assert {placement.reduce_op for placement in drawn if isinstance(placement, Partial)} <= allowed
        assert {Replicate(), Shard(0)} <= set(drawn)
        assert not any(isinstance(p, Partial) for p in random_placements(array, (2, 3), rng, partial=False))
