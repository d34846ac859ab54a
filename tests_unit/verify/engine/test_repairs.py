"""Repairs of a case: which runs made them, and why some cannot be made."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from hyper_parallel.verify.engine.blind_spots import BlindSpot
from hyper_parallel.verify.engine.repairs import (
    SPREAD,
    Repairs,
    not_made,
    random_cotangent,
    repairs_of,
    spread_constant,
)
from hyper_parallel.verify.frameworks.contract.case_changes import CaseChanges
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Record, Run

RNG = np.random.default_rng(3)


@pytest.mark.parametrize(
    "case, expected",
    [
        (
            CaseChanges(weights={"scale": RNG.standard_normal(3)}),
            "rank 1 of 2 does not call the model that has scale before its first step",
        ),
        (CaseChanges(share=0.5), "rank 1 of 2 calls no backward"),
        (
            CaseChanges(outputs={("head", 0, 0): RNG.standard_normal(3)}),
            "rank 1 of 2 does not make the same outputs again",
        ),
        (CaseChanges(strided=True), ""),
    ],
)
def test_changes_that_a_run_did_not_meet(case, expected):
    """A change that a rank's program went around is named, with the rank."""
    repairs = Repairs(CaseChanges(), [CaseChanges(), case])
    parallel = Run([RankRecords(0), RankRecords(1)])
    assert not_made(repairs, Run([RankRecords(0)]), parallel) == expected


def test_the_single_device_must_make_its_changes_too():
    """A reference that never called the model shows nothing either."""
    repairs = Repairs(CaseChanges(weights={"b": 1.0, "a": 2.0}), [])
    expected = "the single device does not call the model that has a before its first step"
    assert not_made(repairs, Run([RankRecords(0)]), Run([])) == expected


def runs(*, placement=None, inputs=(), memory=None, rank_memory=(), records=(), reference=None):
    """Return what changes look at of a comparison of two ranks."""
    ranks = [RankRecords(number, notes={"sizes of input memory": size}) for number, size in enumerate(rank_memory)]
    return SimpleNamespace(
        ranks=[{key: Record("loss", key[1], "", key[2], 0, np.ones(1)) for key in records} for _ in range(2)],
        reference_notes={"inputs": inputs, "sizes of input memory": memory},
        bounds=SimpleNamespace(reference=reference or {}),
        holders=lambda _: [0, 1],
        parameters=SimpleNamespace(of=lambda *_: placement),
        placement=lambda *_: placement,
        parallel=Run(ranks),
        axes=SimpleNamespace(groups={"dp": [(0, 1)]}),
    )


def left(kind, spots=("x",), **facts):
    """Return why nothing was changed for blind spots of this kind."""
    case = [BlindSpot(kind, subject, "facts", "repair") for subject in spots]
    repairs = repairs_of(runs(**facts), case, 0)
    assert kind not in repairs.words
    return repairs.left[kind]


def test_losses_that_cannot_be_weighted():
    """A rank without a loss, and ranks whose work is not known to be equal, keep their losses."""
    assert left("equal-data", ("dp",)) == "the losses enter no backward that the recorder can weight"
    loss = {("loss", "loss", 0, 0)}
    assert left("equal-data", ("dp",), records=loss) == "whether the ranks of dp do the same work cannot be determined"


def test_parameters_and_outputs_of_unknown_placement():
    """Where a rank's part is not known, neither a parameter nor an output is changed."""
    weight = {("weight", "scale", -1, 0): Record("weight", "scale", "", -1, 0, np.ones(4))}
    assert left("constant-parameters", reference=weight) == "which part of scale a rank has cannot be determined"
    output = {("output", "x", 0, 0): Record("output", "x", "x", 0, 0, RNG.standard_normal(4))}
    assert left("constant-cotangents", reference=output) == "which part of x's output a rank has is unknown"


def test_inputs_that_are_no_numbers_or_no_views():
    """Noise is added to numbers only, and on ranks whose inputs lie in the single device's memory."""
    words = [("input", "x", np.zeros(4, dtype="U1"))]
    for kind in ("symmetric-inputs", "equal-masks"):
        assert left(kind, inputs=words) == "x holds no numbers to which noise can be added"
    numbers = [("input", "x", np.ones(4, dtype=np.float64))]
    expected = "the inputs of rank 1 are no views of the single device's batch"
    assert left("symmetric-inputs", inputs=numbers, memory=(4,), rank_memory=((4,), (2,))) == expected
    masks = [("input", "x", np.ones(4, dtype=bool))]
    assert left("equal-masks", inputs=masks, memory=(4,), rank_memory=((4,), (2,))) == expected


def test_masks_of_dropout_alone_are_not_thinned_out():
    """The masks that dropout draws are no inputs."""
    repairs = repairs_of(runs(), [BlindSpot("equal-masks", "dropout", "facts", "repair")], 0)
    assert (repairs.words, repairs.left) == ({}, {})


def test_random_numbers_depend_on_seed_and_name_only():
    """Cotangents have both signs; constants are spread around their value, and other parameters stay."""
    weights = random_cotangent((4, 5), 0, "out")
    assert (weights > 0).any()
    assert (weights < 0).any()
    assert np.array_equal(weights, random_cotangent((4, 5), 0, "out"))
    assert not np.array_equal(weights, random_cotangent((4, 5), 1, "out"))
    for value, scale in ((0.0, SPREAD), (1.0, SPREAD), (-4.0, 4 * SPREAD)):
        spread = spread_constant(np.full(1000, value, np.float32), 0, "norm")
        assert spread.dtype == np.float32
        assert spread.std() == pytest.approx(scale, rel=0.1)
        assert spread.mean() == pytest.approx(value, abs=scale / 5)
    for array in (np.arange(3.0), np.ones(3, int), np.ones(1)):
        assert spread_constant(array, 0, "norm") is array
