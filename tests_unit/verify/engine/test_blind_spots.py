"""Cases that are blind in one way each: the check of the case says so, and only so."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.verify.engine.blind_spots import BLIND, blind_spots
from hyper_parallel.verify.engine.comparison import compare_runs
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Record, Run

ROWS, WIDTH, OUT = 5, 7, 3


class Case:
    """A training of one sharded weight on a sharded batch, as records; attributes are what a case may do badly."""

    def __init__(self):
        self.mesh, self.steps, self.rows, self.width = {"dp": 2, "tp": 3}, 2, ROWS, WIDTH
        self.own_data, self.dropout = True, 0.4
        self.rng = np.random.default_rng(3)
        self.inputs = self.rng.standard_normal((ROWS, 4))
        self.valid = np.arange(ROWS) != 4
        self.weights = [self.rng.standard_normal((WIDTH, OUT)) for _ in range(3)]
        self.gradient = self.rng.standard_normal((WIDTH, OUT))
        self.inner = self.rng.standard_normal((WIDTH, 4))
        self.cotangent = None
        self.contiguous = False
        self.updated, self.optimizer = True, ""

    def runs(self):
        """Return the reference and the parallel run."""
        outputs = [self.rng.standard_normal((self.rows, OUT)) for _ in range(self.steps)]
        masks = [self.rng.random((self.rows, OUT)) >= self.dropout for _ in range(self.steps)]
        world = int(np.prod(list(self.mesh.values())))
        dp, tp = self.mesh["dp"], self.mesh["tp"]
        ranks = [
            self.rank(
                rank, outputs, masks,
                np.array_split(np.arange(self.rows), dp)[rank // tp] if self.own_data else np.arange(self.rows),
                np.array_split(np.arange(self.width), tp)[rank % tp],
            )
            for rank in range(world)
        ]  # fmt: skip
        whole = self.rank(0, outputs, masks, np.arange(self.rows), np.arange(self.width))
        return Run([whole]), Run(ranks)

    def rank(self, rank, outputs, masks, rows, part):
        """Return the records of one rank."""
        records = [Record("weight", "body.weight", "body", -1, 0, self.weights[0][: self.width][part])]
        for step in range(self.steps):
            records.append(Record("mask", "drop", "drop", step, 0, masks[step][rows]))
            records.append(Record("output", "inner", "inner", step, 0, self.inner[: self.width][part][:, : step + 2]))
            records.append(Record("output", "body", "body", step, 0, outputs[step][rows]))
            factor = self.rng.standard_normal(outputs[step].shape) if self.cotangent is None else self.cotangent
            loss = np.asarray((outputs[step] * factor).sum()) if self.cotangent is not None else np.asarray(2.5 + step)
            records.append(Record("loss", "loss", "", step, 0, loss))
            records.append(Record("gradient", "body.weight", "body", step, 0, self.gradient[: self.width][part]))
            weight = self.weights[step + 1 if self.updated else 0]
            records.append(Record("weight", "body.weight", "body", step, 0, weight[: self.width][part]))
        notes = {"inputs": [(0, "x", self.inputs[rows]), (0, "valid", self.valid[rows])]}
        notes["contiguous inputs"] = self.contiguous
        notes["optimizer steps"] = self.steps
        if self.optimizer:
            notes["parameters that no model has"] = [[self.width, OUT]]
            notes["parameters that no optimizer has"] = ["body.weight"]
        return RankRecords(rank, records, [], notes)

    def spots(self):
        """Return the blind spots."""
        reference, parallel = self.runs()
        verdict = compare_runs(reference, [reference], parallel, mesh=self.mesh)
        assert verdict.equal, verdict.text()
        spots = blind_spots(PairedRuns(reference, [reference], parallel, self.mesh, None))
        assert verdict.blind == [str(spot) for spot in spots]
        return spots


def test_a_good_case_has_no_blind_spot():
    """Own data, unequal sizes, uneven dims, random values and two steps leave nothing to say."""
    assert Case().spots() == []


SABOTAGE = {
    "equal-data": {"own_data": False},
    "equal-sizes": {"mesh": {"dp": 3, "tp": 3}},
    "even-dims": {"width": 6},
    "constant-cotangents": {"cotangent": 1.0},
    "constant-parameters": {
        "weights": [np.zeros((WIDTH, OUT))] * 2 + [np.ones((WIDTH, OUT))],
        "mesh": {"dp": 3, "tp": 1},
    },
    "symmetric-inputs": {"inputs": np.ones((ROWS, 4)) * np.arange(4)},
    "one-step": {"steps": 1},
    "equal-masks": {"valid": np.array([True, False, True, True, True])},
    "contiguous-inputs": {"contiguous": True},
    "zero-gradients": {"gradient": np.zeros((WIDTH, OUT))},
    "untrained-parameters": {"updated": False, "optimizer": "made too early"},
}


@pytest.mark.parametrize(
    "kind, facts",
    [
        ("equal-data", "all ranks along dp compute the same outputs (6 compared)"),
        ("equal-sizes", "axes dp and tp both have size 3"),
        ("even-dims", "what is sharded over tp divides evenly: body.weight, inner"),
        ("constant-cotangents", "the loss is the sum or mean of the output of body"),
        ("symmetric-inputs", "x does not change when dim 0 is reversed"),
        ("one-step", "only one optimizer step was compared"),
        ("equal-masks", "valid selects 2 elements on every rank"),
        ("contiguous-inputs", "every input of the model is contiguous on every rank"),
        ("zero-gradients", "the gradient of body.weight is zero in every step"),
        ("constant-parameters", "every element of body.weight is 0 in every step"),
        (
            "untrained-parameters",
            "no step changes body.weight, and an optimizer has a parameter [7, 3] that is in no model",
        ),
    ],
)
def test_a_blind_case_is_seen(kind, facts):
    """Each way of being blind is found, with the facts and a repair; nothing else is claimed."""
    case = Case()
    vars(case).update(SABOTAGE[kind])
    spots = {spot.kind: spot for spot in case.spots()}
    assert spots[kind].facts == facts
    assert spots[kind].repair
    assert str(spots[kind]) == f"{BLIND[kind]}: {facts}; {spots[kind].repair}"
    assert set(spots) == {kind} | ({"equal-masks"} if kind == "equal-data" else set())


def test_a_program_that_changes_nothing_is_told():
    """Where no step changes any weight, the case says so; it is refused only where an optimizer has other tensors."""
    case = Case()
    case.updated = False
    (spot,) = case.spots()
    assert (
        str(spot)
        == "errors in weights that no step changes: no step changes any parameter; use a learning rate above 0"
    )
    assert not spot.refused
    case.optimizer = "made too early"
    (spot,) = case.spots()
    assert spot.refused


def test_every_blind_spot_has_a_sabotaged_case():
    """The ways of being blind are those that are tried."""
    assert set(SABOTAGE) == set(BLIND)


def test_other_symmetries_dropout_and_missing_gradients():
    """A transposed input, dropout that keeps everything and a parameter without a gradient are found."""
    case = Case()
    square = case.rng.standard_normal((ROWS, ROWS))
    case.inputs, case.dropout = square + square.T, 0.0
    reference, parallel = case.runs()
    extra = [Record("weight", "unused", "", step, 0, square) for step in (-1, 0, 1)]
    for rank in (*reference.ranks, *parallel.ranks):
        rank.records += extra
    spots = blind_spots(PairedRuns(reference, [reference], parallel, case.mesh, None))
    assert [spot.facts for spot in spots] == [
        "x equals its transpose",
        "dropout keeps every element",
        "the gradient of unused is missing in every step",
    ]
    reference.ranks[0].notes["parameters that no optimizer has"] = ["unused"]
    spots = blind_spots(PairedRuns(reference, [reference], parallel, case.mesh, None))
    assert spots[-1].facts == "unused has no gradient and is not trained"
    for rank in (*reference.ranks, *parallel.ranks):
        rank.records += [Record("weight", "Copy.unused", "", step, 0, square) for step in (-1, 0, 1)]
    reference.ranks[0].notes["parameters that no optimizer has"] = ["unused", "Copy.unused"]
    spots = blind_spots(PairedRuns(reference, [reference], parallel, case.mesh, None))
    assert [spot.facts for spot in spots[2:]] == ["unused and 1 more have no gradient and are not trained"]
    reference.ranks[0].notes["frozen parameters"] = ["unused", "Copy.unused"]
    spots = blind_spots(PairedRuns(reference, [reference], parallel, case.mesh, None))
    assert len(spots) == 2
