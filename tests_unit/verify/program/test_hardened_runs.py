"""What becomes of a hardened run that fails, cannot be compared, or shows nothing new."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hyper_parallel.errors import RankFailedError
from hyper_parallel.verify.engine.repairs import Repairs
from hyper_parallel.verify.frameworks.contract.case_changes import CaseChanges
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Record, Run
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program import hardening
from hyper_parallel.verify.program.program import Program
from hyper_parallel.verify.program.worlds import World


@pytest.fixture
def hardened(monkeypatch):
    """A hardening whose runs end as a test says; what compares them is stated, too."""
    program = Program("train.py")
    built = hardening.Hardening(program, program, World(2, "torch", "simulated"), None, None, 0, lambda _: None)

    def outcomes(*, reference=None, ranks=None, verdict=None):
        def ended(value):
            if isinstance(value, Exception):
                raise value
            return value

        monkeypatch.setattr(hardening, "run_reference", lambda *_: ReferenceOf(ended(reference)))
        monkeypatch.setattr(hardening, "run_world", lambda *_, **_options: ended(ranks))
        monkeypatch.setattr(hardening, "check_recorded", lambda *_: None)
        monkeypatch.setattr(hardening, "compare_with", lambda *_, **__: (None, verdict))
        return built

    return outcomes


def run(*losses):
    """Return a run of one rank with these losses."""
    return Run([RankRecords(0, [Record("loss", "loss", "", 0, 0, np.array(loss)) for loss in losses])])


BEFORE = SimpleNamespace(bounds=SimpleNamespace(reference={"loss": Record("loss", "loss", "", 0, 0, np.ones(()))}))


SCRATCH = SimpleNamespace(path=Path(os.devnull), at_end=lambda _: None)


class ReferenceOf(contextlib.nullcontext):
    """A reference, with nothing to compare with."""

    bounds, scratch = None, SCRATCH

    def __init__(self, losses):
        super().__init__()
        self.run = losses


REFERENCE = SimpleNamespace(run=None, bounds=None, scratch=SCRATCH)
CHANGES = Repairs(CaseChanges(), [CaseChanges(), CaseChanges()], {"equal-masks": "masks select fewer elements"})


def test_a_reference_that_refuses_the_change(hardened):
    """The change is left out with the first line of the reference's error."""
    case, why, spots = hardened(reference=InputError("no\nmore"))._run_changed(CHANGES, BEFORE, SCRATCH)
    assert (case.words, why, spots) == (["masks select fewer elements"], "no", [])


def test_a_change_that_makes_the_loss_infinite(hardened):
    """A change under which the single device's loss overflows shows nothing."""
    _, why, _ = hardened(reference=run(np.inf))._run_changed(CHANGES, BEFORE, SCRATCH)
    assert why == "the single device's loss is not finite then"


def test_a_change_that_a_rank_went_around(hardened):
    """A run that did not make its changes is not compared."""
    repairs = Repairs(CaseChanges(share=0.5), [CaseChanges()], {"equal-data": "losses are weighted"})
    _, why, _ = hardened(reference=run(1.0), ranks=run(1.0))._run_changed(repairs, BEFORE, SCRATCH)
    assert why == "the single device calls no backward"


@pytest.mark.parametrize(
    "facts, expected",
    [
        ({"incomplete": [], "unplaced": ["x: unknown"]}, "x: unknown"),
        ({"incomplete": [], "unplaced": []}, "nothing was compared"),
    ],
)
def test_a_hardened_run_that_is_not_compared(hardened, facts, expected):
    """A case in which no difference was sought is not said to be equal."""
    verdict = SimpleNamespace(first=None, differences=[], replicas=[], ok=False, equal=False, spots=[], **facts)
    built = hardened(reference=run(1.0), ranks=Run([RankRecords(0), RankRecords(1)]), verdict=verdict)
    assert built._run_changed(CHANGES, BEFORE, SCRATCH)[1] == expected
    other = SimpleNamespace(size=3, mesh={})
    assert built._run_size(other, REFERENCE)[1] == expected


def test_other_numbers_of_ranks_that_say_nothing(hardened):
    """A rank that fails, bad input, and other initial weights are properties of that number of ranks."""
    other = SimpleNamespace(size=3, mesh={})
    failed = RankFailedError("rank 2 failed")
    failed.__cause__ = ValueError("3 rows for 2")
    _, why = hardened(ranks=failed)._run_size(other, REFERENCE)
    assert why == "a rank fails: ValueError: 3 rows for 2"
    assert hardened(ranks=InputError("no\nmore"))._run_size(other, REFERENCE)[1] == "no"

    class First(SimpleNamespace):
        def __str__(self):
            return "the parameter w"

    verdict = SimpleNamespace(first=First(step=-1), ok=False, equal=False)
    built = hardened(ranks=Run([RankRecords(0)]), verdict=verdict)
    assert built._run_size(other, REFERENCE)[1] == "the ranks hold other weights before training: the parameter w"
