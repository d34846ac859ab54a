"""Outputs under ``no_grad``: those of training steps are listed if training is right, those of evaluations differ."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from hyper_parallel.verify.engine.activations import are_padded_rows
from hyper_parallel.verify.engine.comparison import compare_runs
from hyper_parallel.verify.engine.matching import positions_of
from hyper_parallel.verify.engine.placement import Placement
from hyper_parallel.verify.engine.step_outputs import StepOutputs
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Record, Run

RNG = np.random.default_rng(3)
LOGITS, TEACHER, RATIO = RNG.standard_normal((6, 4)), RNG.standard_normal((6, 4)), RNG.standard_normal(4)
WEIGHT, FROZEN = RNG.standard_normal((4, 4)), RNG.standard_normal((4, 4))
ROWS = (np.s_[:4], np.s_[4:])
NUMBER = "teacher (no_grad)['loss']"


def step(number, rows=np.s_[:], order=("", "teacher"), *, teacher=TEACHER, metric=1.0, gradient=RATIO, frozen=FROZEN):
    """Return the records of one step of a model and its teacher; ``order`` is that of their calls."""
    calls = {
        "": [Record("output", "(model)", "", number, 0, LOGITS[rows])],
        "teacher": [
            Record("output", "teacher (no_grad)['logits']", "teacher", number, 0, teacher[rows]),
            Record("output", NUMBER, "teacher", number, 0, np.array(metric)),
        ],
    }
    return [
        *(record for model in order for record in calls[model]),
        Record("loss", "loss", "", number, 0, np.array(2.0)),
        Record("gradient", "weight", "", number, 0, gradient),
        Record("weight", "weight", "", number, 0, WEIGHT - number),
        Record("weight", "teacher.weight", "teacher", number, 0, frozen),
    ]


def start():
    """Return the records before training."""
    return [
        Record("weight", "weight", "", -1, 0, WEIGHT + 1),
        Record("weight", "teacher.weight", "teacher", -1, 0, FROZEN),
    ]


def compared(whole, *ranks):
    """Return the verdict on ranks that have these records."""
    runs = [Run([RankRecords(rank, records) for rank, records in enumerate(each)]) for each in ([whole], ranks)]
    return compare_runs(runs[0], [runs[0], runs[0]], runs[1], mesh={"dp": len(ranks)})


def steps(*arguments, **changed):
    """Return the records of two steps."""
    return [*start(), *step(0, *arguments, **changed), *step(1, *arguments, **changed)]


@pytest.mark.parametrize("order", [("", "teacher"), ("teacher", "")], ids=["inside", "before"])
def test_a_frozen_models_own_number_is_listed(order):
    """A frozen model computes a number that nothing uses, of each rank's rows: training is right without it."""
    whole = steps(np.s_[:], order)
    verdict = compared(
        whole, *(steps(rows, order, metric=metric) for rows, metric in zip(ROWS, (3.0, 7.0), strict=True))
    )
    assert verdict.equal, verdict.text()
    assert verdict.skipped == [
        f"the output of {NUMBER}: they differ, but all gradients, norms, optimizer states and weights are equal"
    ]


@pytest.mark.parametrize("order", [("", "teacher"), ("teacher", "")], ids=["inside", "before"])
def test_a_wrong_output_that_the_loss_uses_is_the_first_difference(order):
    """If a gradient is wrong, the frozen model's wrong output is reported, and not the gradient alone."""
    ranks = [steps(rows, order, teacher=TEACHER + (rank == 1), gradient=RATIO + 1) for rank, rows in enumerate(ROWS)]
    first = compared(steps(np.s_[:], order), *ranks).first
    assert (first.name, first.ranks, first.step) == ("teacher (no_grad)['logits']", (1,), 0)


def test_an_evaluation_before_the_forward_differs():
    """The output of a trained model, of one whose weights change, or of one not called in every step, is compared."""
    order = ("teacher", "")
    numbers = {"metric": 9.0}
    moved = {"frozen": FROZEN + 1}
    once = [*start(), *step(0, np.s_[:], ("",))]
    for own, other in (
        (steps(np.s_[:], order, **moved), steps(np.s_[:], order, **moved, **numbers)),
        ([*once, *step(1, np.s_[:], order)], [*once, *step(1, np.s_[:], order, **numbers)]),
    ):
        verdict = compared(own, other, other)
        assert not verdict.equal
        assert verdict.first.name == NUMBER
    trained = [Record("gradient", "teacher.weight", "teacher", 1, 0, RATIO)]
    verdict = compared([*steps(np.s_[:], order), *trained], *[[*steps(np.s_[:], order, **numbers), *trained]] * 2)
    assert verdict.first.name == NUMBER


def test_modules_without_parameters_are_frozen_with_the_module_around_them():
    """An activation in a frozen model has no parameters of its own; the model itself may have none at all."""
    records = [
        *steps(),
        Record("output", "teacher.act (no_grad)", "teacher.act", 0, 0, RATIO),
        Record("output", "(model) (no_grad)", "", 0, 0, RATIO),
    ]
    reference = {each.key: each for each in records}

    def belongs(key, names):
        runs = SimpleNamespace(
            bounds=SimpleNamespace(reference=reference), parameters=SimpleNamespace(names=lambda: names)
        )
        return key in StepOutputs(runs, [0])

    act, model = ("output", "teacher.act (no_grad)", 0, 0), ("output", "(model) (no_grad)", 0, 0)
    assert belongs(act, ["weight", "teacher.weight"])
    assert not belongs(act, ["weight"])
    assert not belongs(model, ["weight", "teacher.weight"])
    assert not belongs(model, [])
    assert not belongs(("gradient", "weight", 0, 0), [])
    assert not belongs(("output", "(model)", 1, 0), [])


def masked(name, numbers, masks):
    """Return the records of one step whose model returns a mean and the mask of the elements that it is over."""
    return [
        Record("weight", "weight", "", -1, 0, WEIGHT),
        Record("output", f"{name}['mask']", "", 0, 0, masks),
        Record("output", f"{name}['loss']", "", 0, 0, np.array(numbers)),
        Record("gradient", "weight", "", 0, 0, RATIO),
    ]


@pytest.mark.parametrize("name", ["(model)", "(model) (no_grad)"])
def test_means_over_masks_are_weighted(name):
    """Ranks whose masks have unequal numbers of true elements return means that only these numbers combine."""
    mask = RNG.random((8, 5)) < 0.6
    mask[0] = True
    parts = (np.s_[:2], np.s_[2:])
    counts = [int(mask[part].sum()) for part in parts]
    numbers = (1.25, 3.75)
    whole = masked(name, float(np.average(numbers, weights=counts)), mask)
    verdict = compared(whole, *(masked(name, number, mask[part]) for number, part in zip(numbers, parts, strict=True)))
    assert verdict.equal, verdict.text()
    assert any(
        note.endswith(
            f"is compared as the mean over dp, weighted with the true elements of {name}['mask'] on each rank, of the "
            "ranks' values"
        )
        for note in verdict.notes
    ), verdict.notes
    whole = masked(name, 1.01 * float(np.average(numbers, weights=counts)), mask)
    ranks = [masked(name, number, mask[part]) for number, part in zip(numbers, parts, strict=True)]
    for records in ranks:  # a gradient that is wrong keeps the difference from being listed
        records[-1] = Record("gradient", "weight", "", 0, 0, RATIO + 1)
    assert compared(whole, *ranks).first.name == f"{name}['loss']"
    ranks[0][1] = Record("output", f"{name}['mask']", "", 0, 0, np.ones((2, 5), bool))
    assert (
        compared(masked(name, float(np.average(numbers, weights=counts)), mask), *ranks).first.name == f"{name}['loss']"
    )


def test_another_batch_under_no_grad_does_not_place_the_models_outputs():
    """If the frozen model gets another rank's batch, its rows differ first; they place no value of the trained one."""
    mask, inner = RNG.random((6, 4)) < 0.5, RNG.standard_normal((6, 4))

    def records(own, other, gradient):
        return [
            *start(),
            Record("output", "mask", "mask", 0, 0, mask[own]),
            Record("output", "(model)", "", 0, 0, LOGITS[own]),
            Record("output", "teacher.up (no_grad)", "teacher.up", 0, 0, inner[other]),
            Record("output", "teacher (no_grad)", "teacher", 0, 0, TEACHER[other]),
            Record("loss", "loss", "", 0, 0, np.array(2.0)),
            Record("gradient", "weight", "", 0, 0, gradient),
        ]

    halves = (np.s_[:3], np.s_[3:])
    ranks = [records(halves[rank], halves[1 - rank], RATIO + 1) for rank in range(2)]
    verdict = compared(records(np.s_[:], np.s_[:], RATIO), *ranks)
    first = verdict.first
    assert (first.name, first.ranks) == ("teacher.up (no_grad)", (0, 1)), verdict.text()
    assert first.why == "rank 0 has rows 3:6 of 6 in dim 0, other rows than of the values before"


@pytest.mark.parametrize(
    "rows, columns, padded",
    [
        (([0, 2], [1, 3]), (range(3), range(4)), True),
        (([0, 2], [1, 3]), (range(1, 4), range(4)), True),
        (([0, 2], [1, 2]), (range(3), range(4)), False),
        (([0, 2], [1, 3]), (range(3), range(3)), False),
        (([0, 1], [2, 3]), (range(2), range(2, 4)), False),
    ],
    ids=["right", "left", "a row on no rank", "a column on no rank", "blocks"],
)
def test_batches_padded_to_other_widths_have_all_rows(rows, columns, padded):
    """Each rank pads its rows to its longest: elements that only pad the others are on no rank."""
    placements = [
        Placement((4, 4), positions_of((np.array(own), np.array(list(line))), (4, 4)))
        for own, line in zip(rows, columns, strict=True)
    ]
    assert are_padded_rows(placements) is padded
