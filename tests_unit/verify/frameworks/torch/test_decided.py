"""Masks, draws, choices and sides are recorded once; what cannot be read stays, and recomputation finds them again."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hyper_parallel.verify.frameworks.contract.record_log import RecordLimits, RecordLog
from hyper_parallel.verify.frameworks.torch.decided import Decided

pytestmark = pytest.mark.platforms("torch")

CALLS = {
    "mask": lambda decided, x: decided.mask(x),
    "draw": lambda decided, x: decided.draw("rand", x),
    "choice": lambda decided, x: decided.choice("argmax", x, x, -1),
    "side": lambda decided, x: decided.side("relu", x, torch.ones(2, dtype=torch.bool)),
}


def deciding(infers=False, **limits):
    """Return the recorder of a module ``gate`` and its log."""
    log = RecordLog(0, RecordLimits(**limits))
    return Decided(log, SimpleNamespace(inside="gate", infers=infers)), log


@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_tensor_is_not_recorded(call):
    """Values that cannot be read stay as they are."""
    decided, log = deciding()
    assert CALLS[call](decided, "no tensor") is None
    assert log.records == []


@pytest.mark.parametrize("call", ["mask", "choice", "side"])
def test_nothing_is_recorded_while_a_stage_learns_its_shapes(call):
    """The values of such a pass are not those of the program."""
    decided, log = deciding(infers=True)
    assert CALLS[call](decided, torch.ones(2)) is None
    assert log.records == []


def test_masks_of_other_modules_and_draws_of_a_placed_run_are_not_recorded():
    """The limits name the modules; where outputs are placed by whoever runs the program, draws are not replaced."""
    decided, log = deciding(only=("head",))
    assert decided.mask(torch.ones(2)) is None
    log.place = lambda *_: None
    assert decided.draw("rand", torch.ones(2)) is None
    assert log.records == []


def replaced(function, kind, name, instead):
    """Run a function with the recorder under checkpointing; return what it got each time, and the records."""
    decided, log = deciding(replay={0: {(kind, name, 0, 0): instead}})
    got = []

    def body(x):
        got.append(function(decided, x.detach()))
        return x * x

    x = torch.tensor([[0.5, -2.0, 1.5], [3.0, 0.25, -1.0]], requires_grad=True)
    checkpoint(body, x, use_reentrant=False).sum().backward()
    return got, log.records


@pytest.mark.parametrize(
    "function, kind, name, instead, expected",
    [
        (
            lambda decided, x: decided.mask(x.clamp(min=0)),
            "mask",
            "gate",
            np.array([[True, True, False], [False, True, True]]),
            [[True, True, False], [False, True, True]],
        ),
        (
            lambda decided, x: decided.draw("rand", x),
            "draw",
            "gate rand",
            np.arange(6, dtype=np.float32).reshape(2, 3),
            [[0, 1, 2], [3, 4, 5]],
        ),
        (
            lambda decided, x: decided.choice("topk", x, x.topk(2, 0).indices, 0),
            "choice",
            "gate topk",
            np.array([[0, 1], [1, 0], [1, 0]]),
            [[0, 1, 1], [1, 0, 0]],
        ),
        (
            lambda decided, x: decided.side("relu", x.abs(), x > 0),
            "side",
            "gate relu",
            np.array([[-0.6, 1.0, 0.0], [-1.0, -0.3, 2.0]], dtype=np.float32),
            [[False, False, True], [True, False, True]],
        ),
    ],
    ids=["mask", "draw", "choice", "side"],
)
def test_recomputation_gets_what_forward_got(function, kind, name, instead, expected):
    """The reference's decision replaces the rank's in forward and again in recomputation, which is not recorded."""
    got, records = replaced(function, kind, name, instead)
    assert len(got) == 2
    for each in got:
        assert np.array_equal(np.asarray(each), expected)
    assert [(record.kind, record.name) for record in records].count((kind, name)) == 1


@pytest.mark.parametrize(
    "function, kinds",
    [
        (lambda decided, x: decided.mask(x), ["mask"]),
        (lambda decided, x: decided.draw("rand", x), ["draw"]),
        (lambda decided, x: decided.choice("topk", x, x.topk(2, 0).indices, 0), ["scores", "choice"]),
        (lambda decided, x: decided.side("relu", x.abs(), x > 0), ["margin", "side"]),
    ],
    ids=["mask", "draw", "choice", "side"],
)
def test_a_decision_that_the_reference_does_not_have_stays(function, kinds):
    """Nothing is replaced, in forward and in recomputation, and forward's own decision is recorded."""
    got, records = replaced(function, "draw", "another", np.ones(1))
    assert got == [None, None]
    assert [record.kind for record in records] == kinds


def test_an_attention_mask_that_cannot_be_told_is_noted_once():
    """The module is noted once, and not where nothing is recorded; a mask that is known is recorded as any other."""
    decided, log = deciding()
    assert [decided.attention_mask(None) for _ in range(2)] == [None, None]
    assert log.notes == {"masks that were not recorded": ["gate"]}
    assert decided.attention_mask(torch.tensor([1.0, 0.0])) is None
    assert [(record.kind, record.value.tolist()) for record in log.records] == [("mask", [True, False])]
    decided, log = deciding(infers=True)
    assert decided.attention_mask(None) is None
    assert log.notes == {}
