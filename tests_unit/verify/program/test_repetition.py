"""A reference whose repeat differs only by rounding is accepted, with a note; one that draws at random is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hyper_parallel.verify import verify_program
from hyper_parallel.verify.engine.bounds import Bounds
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Record, Run
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.program import find_program
from hyper_parallel.verify.program.repetition import check_deterministic, check_rounding

UNIT = 2.0**-23
VALUES = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
SEED = (
    "; seed every generator that it uses (torch.manual_seed, mindspore.set_seed, random.seed, numpy.random.seed), and "
    "keep time and object ids out of the training"
)


def trained():
    """Stand for the program."""


PROGRAM = find_program(trained, [], "FILE")
REFUSED = f"{PROGRAM.name} is not deterministic on one rank: run twice, "


def run_of(*values, kind="output", step=0):
    """Return a run on one rank that recorded ``values`` of module ``fc``."""
    records = [Record(kind, "fc", "fc", step, call, np.asarray(value)) for call, value in enumerate(values)]
    return Run([RankRecords(0, records)])


def test_equal_runs_differ_in_nothing():
    """Two runs that are equal bit for bit, NaN included, leave nothing to say."""
    values = np.where(VALUES > 1, np.nan, VALUES)
    assert check_deterministic(PROGRAM, run_of(values, 3), run_of(values.copy(), 3)) == ""


@pytest.mark.parametrize("units", [1, 3, 15])
def test_a_few_units_in_the_last_place_are_rounding(units):
    """The first value that differs is named, with its distance in units of the array's largest number."""
    largest = np.float32(np.abs(VALUES).max())
    again = VALUES.copy()
    again[2, 3] += units * UNIT * largest
    words = check_deterministic(PROGRAM, run_of(VALUES), run_of(again))
    assert (
        words
        == f"output 'fc' of step 0 by {np.abs(again - VALUES).max() / (UNIT * largest):.2g} units in the last place"
    )


NO_ROUNDING = {
    "more units": (run_of(VALUES), run_of(VALUES * (1 + 20 * UNIT))),
    "an initial weight": (run_of(VALUES, kind="weight", step=-1), run_of(VALUES * (1 + UNIT), kind="weight", step=-1)),
    "an integer": (run_of([3, 4]), run_of([3, 5])),
    "a mask": (run_of([True, False], kind="mask"), run_of([True, True], kind="mask")),
    "another shape": (run_of(VALUES), run_of(VALUES[:4])),
    "another dtype": (run_of(VALUES), run_of(VALUES.astype(np.float64) * (1 + UNIT))),
    "an infinity": (run_of([1.0, 2.0]), run_of([1.0, np.inf])),
    "another infinity": (run_of([1.0, -np.inf]), run_of([1.0, np.inf])),
    "where all is zero": (run_of([0.0, 0.0]), run_of([0.0, 1e-30])),
}


@pytest.mark.parametrize("case", NO_ROUNDING)
def test_other_differences_are_refused(case):
    """What no order of sums explains is refused, with the value."""
    first, second = NO_ROUNDING[case]
    record = first.ranks[0].records[0]
    with pytest.raises(InputError) as caught:
        check_deterministic(PROGRAM, first, second)
    assert str(caught.value) == f"{REFUSED}{record.kind} 'fc' of step {record.step} differs{SEED}"


def test_values_that_one_run_lacks_are_refused():
    """Other values, or fewer, are refused, by name or by number."""
    with pytest.raises(InputError) as caught:
        check_deterministic(PROGRAM, run_of(VALUES, VALUES), run_of(VALUES))
    assert str(caught.value) == f"{REFUSED}the number of recorded values (2 and 1) differs{SEED}"
    with pytest.raises(InputError) as caught:
        check_deterministic(PROGRAM, run_of(VALUES), run_of(VALUES, kind="loss"))
    assert str(caught.value) == f"{REFUSED}output 'fc' of step 0 differs{SEED}"


def _perturbed(by, **options):
    return [run_of(VALUES, VALUES * np.float32(1 + sign * by), **options) for sign in (1, -1)]


def test_later_values_must_agree_in_half_of_their_digits():
    """However wide the bounds are: the repeats of a program that draws at random differ as much as its repetition."""
    reference = run_of(VALUES, VALUES)
    wide = Bounds(reference, _perturbed(0.5))
    check_rounding(PROGRAM, reference, run_of(VALUES, VALUES * np.float32(1 + 3e-4)), wide)
    with pytest.raises(InputError) as caught:
        check_rounding(PROGRAM, reference, run_of(VALUES, VALUES * np.float32(1.01)), wide)
    assert str(caught.value) == f"{REFUSED}output 'fc' of step 0, by more than rounding does, differs{SEED}"


@pytest.mark.parametrize("kind", ["output", "weight"])
def test_later_values_must_be_within_the_measured_bounds(kind):
    """What rounding was not measured to do is refused; weights may differ by more, where their repeats do."""
    reference = run_of(VALUES, VALUES, kind=kind)
    again = run_of(VALUES, VALUES * np.float32(1 + 1e-4), kind=kind)
    check_rounding(PROGRAM, reference, again, Bounds(reference, _perturbed(1e-5, kind=kind)))
    with pytest.raises(InputError, match="by more than rounding does"):
        check_rounding(PROGRAM, reference, again, Bounds(reference, _perturbed(UNIT, kind=kind)))


# -- whole programs ----------------------------------------------------------------------------------------------------


def _noisy(fault=1.0, draw=0.0):
    """A data-parallel program that rounds differently in each run; the gradients of its ranks are off by a factor."""
    import torch
    import torch.distributed as dist
    from torch import nn

    runs = itertools.count(1)

    def program():
        number, rank, world = next(runs), dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(3):
            x = torch.randn(6, 5).tensor_split(world)[rank]
            scale = 1.0 + (number % 7) * 2.0**-23 + (draw * number if step == 2 else 0.0)
            (model(x).square().sum() * scale).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad *= fault if world > 1 and step == 1 else 1.0
            optimizer.step()
            optimizer.zero_grad()

    return program


@pytest.mark.platforms("torch")
def test_a_program_that_rounds_otherwise_in_each_run_is_verified():
    """It is equal; where the reference ran twice unchanged, the report says that its runs differ."""
    report = verify_program(_noisy(), 2, platform="torch")
    assert report.ok, report.text()
    report = verify_program(_noisy(fault=1.001), 2, platform="torch")
    assert report.rounding.startswith("loss 'loss' of step 0 by ")
    assert report.text().splitlines()[1] == (
        f"the single device rounds differently in each run, first in {report.rounding}; all differences are within the "
        "measured rounding error"
    )
    assert report.json()["rounding"] == report.rounding


@pytest.mark.platforms("torch")
def test_a_fault_is_found_beside_such_rounding():
    """A gradient that is off by a thousandth is found all the same."""
    report = verify_program(_noisy(fault=1.001), 2, platform="torch")
    first = report.verdict.first
    assert not report.ok
    assert (first.kind, first.step) == ("gradient", 1)


@pytest.mark.platforms("torch")
def test_a_draw_behind_such_rounding_is_refused():
    """A program whose runs start to differ by rounding, and later by a draw, is not deterministic."""
    with pytest.raises(InputError) as caught:
        verify_program(_noisy(draw=0.1), 2, platform="torch")
    assert ": run twice, loss 'loss' of step 2, by more than rounding does, differs; " in str(caught.value)


@pytest.mark.parametrize("steps, fewer", [((9, 14), 2), ((3, 1), 1)])
def test_a_training_that_time_ends_is_refused_with_a_number_of_steps(steps, fewer):
    """Runs that compute the same, and differ in their number of steps alone, need a number of steps that all make."""
    runs = [run_of(*[VALUES] * count) for count in steps]
    for run, count in zip(runs, steps, strict=True):
        run.ranks[0].notes["optimizer steps"] = count
    with pytest.raises(InputError) as caught:
        check_deterministic(PROGRAM, *runs)
    assert str(caught.value) == (
        f"{PROGRAM.name} takes {steps[0]} optimizer steps in one run and {steps[1]} in another, and the steps that "
        "both take are equal: something other than the training ends it, such as a time limit; give it a number of "
        f"steps that every run takes, such as --steps {fewer}"
    )
