"""Repeats of a reference: few where the ranks are within their bounds, more one by one until they are, or all."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from hyper_parallel.verify.engine.scratch import Scratch
from hyper_parallel.verify.engine.sinks import KeepSink
from hyper_parallel.verify.program.program import find_program
from hyper_parallel.verify.program.reference import _within_bounds, compare_with, run_reference
from hyper_parallel.verify.program.worlds import World, run_world

pytestmark = [pytest.mark.platforms("torch"), pytest.mark.untraced]

WORLD = World(2, "torch", "threads")


def trained():
    """Train a small model for two steps."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.randn(6, 5)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_repeats_run_until_what_was_asked_for_is_true():
    """Each answer comes after one more repeat; with the last one the program runs again as it is, and then no more."""
    phases: list[str] = []
    with (
        Scratch(None, None) as scratch,
        run_reference(find_program(trained, (), "FILE"), WORLD, 3, phases.append, scratch) as reference,
    ):
        key = next(iter(reference.bounds.reference))
        before, answers = len(phases), iter([False, True])
        assert reference.widen(lambda: next(answers))
        assert phases[before:] == [f"reference, further repeat {number} of 8" for number in (1, 2)]
        assert not reference.complete
        few = reference.bounds.allowed(key)
        reference.complete_bounds()
        assert phases[before + 2 :] == [
            *(f"reference, further repeat {number} of 8" for number in range(3, 9)), "reference, run again unchanged"
        ]  # fmt: skip
        assert reference.complete
        assert not reference.widen(lambda: False)
        assert (reference.bounds.allowed(key) >= few).all()


@pytest.mark.parametrize("off, repeats", [(0.0, 0), (1e3, 8)])
def test_repeats_run_while_a_value_is_out_of_its_bounds(off, repeats):
    """None for right values; all eight where none suffices: then the value differs."""
    phases: list[str] = []
    program = find_program(trained, (), "FILE")
    with (
        Scratch(None, None) as scratch,
        run_reference(program, WORLD, 3, phases.append, scratch) as reference,
        KeepSink(scratch, "ranks") as sink,
    ):
        run = run_world(program, replace(WORLD, limits=replace(WORLD.limits, sink=sink)))
        key = next(key for key in reference.bounds.reference if key[0] == "weight" and key[2] == 1)
        moved = np.array(reference.bounds.reference[key].value)
        moved.flat[17] += off * reference.bounds.allowed(key).flat[17]
        for rank in run.ranks:
            rank.records = [
                replace(record, value=moved) if record.key == key else record for record in rank.records
            ]  # fmt: skip
        _, verdict = compare_with(reference, run, None, None)
    assert verdict.equal == (repeats < 8), verdict.text()
    assert sum(phase.startswith("reference, further repeat") for phase in phases) == repeats


@pytest.mark.parametrize("ratio, within", [(0.7, True), (1.3, False), (None, False)])
def test_a_verdict_is_looked_at_again_when_all_that_differed_is_within_its_bounds(ratio, within):
    """A value whose distance is unknown, or still too large, keeps the repeats going; so do replicas that differ."""
    difference = SimpleNamespace(kind="weight", name="w", step=0, call=0, ranks=(1,))
    key = ("weight", "w", 0, 0)
    runs = SimpleNamespace(
        bounds=SimpleNamespace(reference={key: None}),
        ranks=[{}, {key: None}],
        distance=lambda *_: None if ratio is None else SimpleNamespace(ratio=ratio),
    )
    verdict = SimpleNamespace(differences=[difference], replicas=[])
    assert _within_bounds(runs, verdict) is within
    assert not _within_bounds(runs, SimpleNamespace(differences=[difference], replicas=["w"]))
    assert not _within_bounds(runs, SimpleNamespace(differences=[], replicas=[]))
    assert not _within_bounds(replaced(runs, ranks=[{}, {}]), verdict)
    assert not _within_bounds(replaced(runs, bounds=SimpleNamespace(reference={})), verdict)


def replaced(runs, **values):
    """Return runs with other values."""
    return SimpleNamespace(**{**vars(runs), **values})
