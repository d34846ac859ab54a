"""Cases of a model verification are looked at first, and hardened."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.core.tensor_parallel import ColwiseParallel, RowwiseParallel
from hyper_parallel.verify.model.hardening import attempts, fewer_rows
from hyper_parallel.verify.model.run import verify_model
from hyper_parallel.verify.model_case import ModelCase, ParallelPlan

pytestmark = pytest.mark.platforms("torch")

SIZES = (
    "a reduction over the wrong axis, a rank taken from the wrong group: axes dp and tp both have size 2; use a mesh "
    "with different sizes, such as 2x3"
)
STEP = (
    "stale values, weights that are not updated, replicas that drift: only one optimizer step was compared; run "
    "at least two"
)
ROWS = (
    "wrong boundaries of uneven shards, averages weighted wrongly: what is sharded over dp divides evenly: norm, up, "
    "down, (model); choose a batch, sequence or width that 2 does not divide"
)
CONSTANT = (
    "errors in gradients that flow through constant parameters: every element of norm.weight is 1 in every step; "
    "initialise it at random, or run more steps"
)


def build():
    """Return a norm, whose weights are constant, and two linear layers."""
    import torch

    model = torch.nn.Module()
    model.norm = torch.nn.RMSNorm(4, dtype=torch.float64)
    model.up = torch.nn.Linear(4, 7, dtype=torch.float64)
    model.down = torch.nn.Linear(7, 3, dtype=torch.float64)
    model.forward = lambda x: model.down(torch.tanh(model.up(model.norm(x))))
    return model


def parallel_plan():
    """Return a plan of both axes."""
    styles = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False)}
    return ParallelPlan(styles, {"dp": Shard(0)})


def only_six_rows():
    """Return a model that takes six rows."""
    model = build()
    forward = model.forward
    model.forward = lambda x: forward(x.reshape(6, 4))
    return model


def report(mesh=(2, 2), build=build, plan=None, **options):
    """Return the report of a case that is blind in four ways."""
    rng = np.random.default_rng(0)
    case = ModelCase(
        build,
        [(rng.standard_normal((6, 4)), rng.standard_normal((6, 3)))],
        lambda output, batch: ((output - batch[1]) ** 2).mean(),
    )
    plan = plan or (lambda _: parallel_plan())
    return verify_model(lambda: case, plan, mesh, ("dp", "tp"), platform="torch", steps=1, name="blind", **options)


def test_a_blind_case_is_listed():
    """Without --harden nothing is changed, and everything that hides errors is said."""
    result = report()
    assert result.ok, result.text()
    assert (result.mesh, result.steps, result.hardened) == ("dp=2 x tp=2", 1, [])
    assert result.blind == [SIZES, ROWS, CONSTANT, STEP]
    assert f"  blind spot: {CONSTANT}\n" in result.text()
    assert result.json()["cannot_show"] == result.blind


def test_a_blind_case_is_hardened():
    """With --harden sizes, steps, rows and constants are changed in both runs, each said, and nothing is left."""
    result = report(harden=True)
    assert result.ok, result.text()
    assert (result.mesh, result.axes, result.steps) == ("dp=2 x tp=3", {"dp": 2, "tp": 3}, 3)
    assert result.hardened == [
        "the mesh is dp=2 x tp=3 instead of dp=2 x tp=2",
        "3 steps are made instead of 1",
        "the batch has 5 rows instead of 6",
        "norm.weight is spread around its constant value 1",
    ]
    assert result.blind == []
    assert len(result.losses) == 3
    assert "  hardened: the batch has 5 rows instead of 6\n" in result.text()
    assert result.json()["hardened"] == result.hardened


def test_rows_that_one_device_needs_stay():
    """A model that needs its rows keeps them, and the report says why."""
    result = report(build=only_six_rows, harden=True, mesh=(2, 1))
    assert not any("rows" in line for line in result.hardened)
    assert any("what is sharded over dp divides evenly" in line for line in result.blind)
    assert result.blind[-1].startswith(
        "wrong boundaries of uneven shards, averages weighted wrongly: the batch has 6 rows, which dp=2 divides; with "
        "5 rows the single-device model fails: SPEC: the model or its loss on a single device"
    )


def test_a_change_that_ranks_cannot_run_is_taken_back():
    """A plan for one mesh only runs on that one, and the report says what was tried."""

    def plan(mesh):
        if mesh.shape != (2, 2):
            msg = "heads do not divide"
            raise RuntimeError(msg)
        return parallel_plan()

    result = report(plan=plan, harden=True)
    assert result.ok, result.text()
    assert (result.mesh, result.steps) == ("dp=2 x tp=2", 3)
    assert result.hardened == [
        "3 steps are made instead of 1",
        "the batch has 5 rows instead of 6",
        "norm.weight is spread around its constant value 1",
    ]
    assert result.blind[0] == SIZES
    assert result.blind[-1].startswith(
        "a reduction over the wrong axis, a rank taken from the wrong group: with the mesh dp=2 x tp=3 the run ended: "
    )
    assert "heads do not divide" in result.blind[-1]


def test_what_is_tried():
    """The most changed run comes first; unequal axes stay, equal ones become unequal, one step three."""
    tries, steps = attempts({"dp": 2, "tp": 3}, 2)
    assert [(attempt.shape, attempt.rows, attempt.changes) for attempt in tries] == [
        ((2, 3), True, ()),
        ((2, 3), False, ()),
    ]
    assert steps == 2
    tries, steps = attempts({"pp": 2, "ep": 1, "tp": 2}, 1)
    mesh = "the mesh is pp=2 x ep=1 x tp=3 instead of pp=2 x ep=1 x tp=2"
    longer = "3 steps are made instead of 1"
    assert [(attempt.shape, attempt.changes) for attempt in tries] == [
        ((2, 1, 3), (mesh, longer)),
        ((2, 1, 2), (longer,)),
        ((2, 1, 2), (longer,)),
    ]
    assert steps == 3


@pytest.mark.parametrize("rows, sizes, expected", [(6, [2], 5), (5, [2], 5), (6, [2, 3], 5), (2, [2], 2), (4, [], 4)])
def test_rows_become_fewer(rows, sizes, expected):
    """Rows are dropped, none added, and every rank keeps at least one."""
    assert fewer_rows(rows, sizes) == expected
