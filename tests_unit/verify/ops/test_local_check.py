"""Claimed placements on plain tensors, and correct placements that no rule claims."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.shard import rules
from hyper_parallel.verify.ops.local_check import _output_candidates
from hyper_parallel.verify.ops.selection import Effort
from hyper_parallel.verify.ops.sweep import sweep_operator

rules.load()

EFFORT = Effort(meshes=((2,),), choices=1, splits=1, public=False, reproducers=False, redistributed=0, missing=1)


@pytest.mark.platforms("torch")
@pytest.mark.parametrize(
    "op, missing",
    [
        ("prod", ["Partial(prod) -> Partial(prod)", "Shard(0) -> Partial(prod)", "Shard(1) -> Partial(prod)"]),
        ("slogdet", []),
        ("hardshrink", ["Partial(max) -> Partial(max)", "Partial(min) -> Partial(min)"]),
    ],
)
def test_true_rows_that_are_not_claimed_are_listed(op, missing):
    """Correct rows that the rule does not claim are listed; rows that hold forward only are not.

    A function that never falls commutes with extrema.
    """
    listed = sweep_operator("torch", op, EFFORT).missing
    assert sorted(listed) == [f"sample 0: {row}" for row in missing]


@pytest.mark.platforms("torch")
@pytest.mark.filterwarnings("ignore:torch.cholesky is deprecated")
def test_rows_without_a_gradient_are_not_listed():
    """Rows whose gradient cannot be computed are not listed, and the sweep goes on."""
    report = sweep_operator("torch", "cholesky", EFFORT)
    assert (report.outcome, report.crash) == ("ok", [])
    assert not [row for row in report.missing if "Shard" in row]


def test_one_placement_for_all_outputs():
    """A placement for all outputs never shards a dim that one of them lacks."""
    outputs = [np.ones((2, 3)), np.ones(2)]
    bench = SimpleNamespace(reference=SimpleNamespace(outputs=outputs))
    places = {placement for placement, _ in _output_candidates(bench)}
    assert {Replicate(), Shard(0), Partial("sum")} <= places
    assert Shard(1) not in places
