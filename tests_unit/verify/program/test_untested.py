"""A script that accumulates or saves says which relation was not tested, and by which option it is."""

import numpy as np
import pytest

from hyper_parallel.verify.engine.samples import calls_of_first_step
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Record, Run
from hyper_parallel.verify.program.program import Program
from hyper_parallel.verify.program.report import ProgramReport
from hyper_parallel.verify.program.untested import untested_relations

SCRIPT = Program("train.py", "train.py")
MICRO = (
    "it calls its model 2 times before the first optimizer step: if these are micro-batches, whether they train like "
    "one batch; give the script's arguments for one batch with --accumulate"
)
RESUME = (
    "whether it goes on from what it has saved as if it had not been stopped; give the script's arguments for that "
)


def run(*records, calls=1):
    """Return a run of records that are a kind, a name and a step, whose first step called the model so often."""
    names = [record[:2] for record in records]
    made = [
        Record(kind, name, "", step, names[:place].count((kind, name)), np.zeros(1))
        for place, (kind, name, step) in enumerate(records)
    ]
    return Run([RankRecords(0, made, [], {"inputs": [(call, 0, np.zeros(1)) for call in range(calls)]})])


@pytest.mark.parametrize(
    "records, calls, said",
    [
        ((("rate", "optimizer 0", 0), ("state", "w:step", 0), ("state", "b:step", 0)), 1, []),
        ((), 2, [MICRO]),
        ((("saved", "model", 1),), 1, [f"it saves tensors: {RESUME}with --resume"]),
        (
            (("state", "w:step", 0), ("state", "w:step", 0)),
            1,
            [f"two optimizers train a parameter, the second from its own first step: {RESUME}with --resume"],
        ),
    ],
)
def test_what_was_not_tested_is_said(records, calls, said):
    """Each sign has its sentence, which is gone where the option is given; a function has no arguments."""
    found = run(*records, calls=calls)
    assert untested_relations(SCRIPT, found, accumulates=False, resumes=False) == said
    assert untested_relations(SCRIPT, found, accumulates=True, resumes=True) == []
    assert untested_relations(Program("f", "", print), found, accumulates=False, resumes=False) == []


def test_different_models_are_no_micro_batches():
    """A model, the cell of its loss and one that takes gradients are called once each."""
    inputs = [(0, "0", np.zeros((2, 3))), (1, "0", np.zeros((2, 3))), (1, "1", np.zeros(2)), (2, "0", np.zeros(3))]
    assert calls_of_first_step({"inputs": inputs}) == 1
    assert calls_of_first_step({"inputs": [*inputs, (3, "0", np.zeros((4, 5)))]}) == 2


def test_the_report_lists_it():
    """The text has a line for each, and the JSON the sentences."""
    report = ProgramReport("train.py", "torch", "simulated", 2, 0, untested=[MICRO])
    assert f"not tested: {MICRO}" in report.text()
    assert report.json()["untested"] == [MICRO]
