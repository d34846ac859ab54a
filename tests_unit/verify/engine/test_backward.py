"""Gradients that are wrong from one module on back, after a forward that is right, are told by the module."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.verify.engine.comparison import compare_runs
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Record, Run

MODULES = ("embed", "mid", "late", "head")


def records(seed, wrong=(), outputs=(), zero=()):
    """One step of four modules, with other numbers in the gradients of ``wrong`` and the outputs of ``outputs``."""
    found = []
    for kind, others in (("output", outputs), ("gradient", wrong)):
        for place, module in enumerate(MODULES):
            value = np.random.default_rng(place).standard_normal((6, 5))
            if module in others:
                value += np.random.default_rng(10 + seed).standard_normal((6, 5))
            name = module if kind == "output" else f"{module}.weight"
            found.append(Record(kind, name, module, 0, 0, value * (kind == "output" or module not in zero)))
    return found


def cause(**changes):
    """The cause of the first difference of two ranks, each of which is wrong in its own way."""
    zero = changes.get("zero", ())
    reference = Run([RankRecords(0, records(0, zero=zero))])
    parallel = Run([RankRecords(rank, records(rank, **changes)) for rank in range(2)])
    first = compare_runs(reference, [reference], parallel, mesh={"dp": 2}).first
    return first.name, first.cause


@pytest.mark.parametrize("ranks_agree", [True, False])
def test_gradients_that_are_wrong_from_a_module_on_back(ranks_agree, monkeypatch):
    """The two modules between which the gradient goes wrong are named, with how many before have a wrong one."""
    if ranks_agree:
        plain = records
        monkeypatch.setitem(globals(), "records", lambda seed, **changes: plain(0 * seed, **changes))
    name, found = cause(wrong=("embed", "mid"))
    assert name == "mid.weight"
    if not ranks_agree:  # then they were not reduced, which is tested before
        assert found.kind == "missing-reduction"
        return
    assert found.kind == "backward"
    assert found.evidence == (
        "every output that was compared is right, and so are the gradients of late; those of mid, which runs before "
        "it, are wrong, and of 1 of the 1 modules before: look at the backward of what uses the output of mid up to "
        "late, or at what weights it in the loss"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"wrong": ("late",)},  # those before are right: only its own is wrong
        {"wrong": ("embed",)},  # nothing is before it
        {"wrong": MODULES},  # nothing is right
        {"wrong": ("embed", "mid", "late"), "zero": ("head",)},  # what is right says nothing
        {"wrong": ("embed", "mid"), "outputs": ("head",)},  # the forward is wrong
    ],
    ids=str,
)
def test_what_may_be_no_wrong_way_back(changes, monkeypatch):
    """Nothing is claimed unless gradients after are right, most of those before are wrong, and the forward is right."""
    plain = records
    monkeypatch.setitem(globals(), "records", lambda seed, **changes: plain(0 * seed, **changes))
    assert cause(**changes)[1].kind != "backward"


@pytest.mark.parametrize("agree", [True, False])
def test_gradients_that_are_all_wrong_after_a_right_loss(agree):
    """A right loss with no right gradient leaves the backward of the loss, if ranks agree, and what reduces them."""

    def step(seed, wrong):
        return [*(each for each in records(seed, wrong)), Record("loss", "loss", "", 0, 0, np.asarray(1.5))]

    reference = Run([RankRecords(0, step(0, ()))])
    parallel = Run([RankRecords(rank, step(0 if agree else rank, MODULES)) for rank in range(2)])
    first = compare_runs(reference, [reference], parallel, mesh={"dp": 2}).first
    assert (first.kind, first.cause.kind) == ("gradient", "backward" if agree else "missing-reduction")
    if agree:
        assert first.cause.evidence == (
            "the outputs and the loss are right, and the gradients of every module, from head back, are wrong: look at "
            "the backward from the loss to head, or at what reduces all gradients"
        )


def test_gradients_after_clipping_say_nothing_about_the_way_back():
    """Where some gradients are wrong, all clipped ones are: those before clipping show the modules that are right."""

    def clipped(wrong):
        found = records(0, wrong)
        again = [
            Record(each.kind, each.name, each.module, 0, 1, each.value * (0.5 if wrong else 0.7))
            for each in found
            if each.kind == "gradient"
        ]
        return [*found, *again]

    reference = Run([RankRecords(0, clipped(()))])
    parallel = Run([RankRecords(rank, clipped(("embed", "mid"))) for rank in range(2)])
    first = compare_runs(reference, [reference], parallel, mesh={"dp": 2}).first
    assert (first.name, first.cause.kind) == ("mid.weight", "backward")
    assert "and so are the gradients of late; those of mid" in first.cause.evidence
