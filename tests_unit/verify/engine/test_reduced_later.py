"""Gradients that an optimizer reduces in its step: which ones are taken for such, on two small runs in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.reduced_later import reduced_later
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Record, Run

KEY = ("gradient", "w", 0, 0)


def _runs(own, world, rows=None, holders=None):
    """Return both runs: the ranks' weights are right, and their gradients are ``own(rank, gradient)``."""
    rng = np.random.default_rng(5)
    before, gradient = rng.standard_normal((6, 4)), rng.standard_normal((6, 4))

    def records(part, value):
        return [
            Record("weight", "w", "", -1, 0, before[part]),
            Record(*KEY[:2], "", *KEY[2:], value),
            Record("weight", "w", "", 0, 0, (before - 0.1 * gradient)[part]),
        ]

    reference = Run([RankRecords(0, records(slice(None), gradient))])
    ranks = []
    for rank in range(world):
        part = slice(None) if rows is None else rows[rank]
        other = [Record("weight", "v", "", -1, 0, before[:1])]
        held = holders is None or rank in holders
        ranks.append(RankRecords(rank, records(part, own(rank, gradient)[part]) if held else other))
    return PairedRuns(reference, [reference, reference], Run(ranks), None, None)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("words", ["sum", "mean"])
def test_shares_that_add_up_are_reduced_later(world, words):
    """Shares of one gradient that differ from rank to rank are its sum or mean over the ranks."""
    shares = np.random.default_rng(world).standard_normal((world, 6, 4))
    shares -= shares.mean(axis=0)
    found = reduced_later(_runs(lambda rank, g: shares[rank] + (g / world if words == "sum" else g), world), KEY)
    assert found is not None
    assert found[0] == f"the {words} over world"
    assert found[1] <= 1


def test_equal_gradients_are_no_shares():
    """A gradient that is off by a factor on all ranks alike is wrong, though its sum is right."""
    assert reduced_later(_runs(lambda _, g: g / 3, 3), KEY) is None


def test_different_parts_are_no_shares():
    """Ranks that hold other rows of a weight have nothing to add."""
    rows = [slice(0, 3), slice(3, 6)]
    assert reduced_later(_runs(lambda rank, g: g * (rank + 2), 2, rows), KEY) is None


def test_ranks_without_the_weight_are_no_group_of_its():
    """Shares on some ranks of a group, of which the others have another weight, are not added."""
    assert reduced_later(_runs(lambda rank, g: g * rank * 2, 3, holders=(0, 1)), KEY) is None
