"""Redistribution's own code changed in one place: what is changed, and that the check notices."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from dataclasses import replace

import pytest

from hyper_parallel.cli import main
from hyper_parallel.core.dtensor import cheapest_steps
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.steps import Slice
from hyper_parallel.core.dtensor.transition import plan
from hyper_parallel.platform.select import use_platform
from hyper_parallel.verify.ops.sources import SourceMutant, applied, source_mutants
from hyper_parallel.verify.ops.trials import prices, verdicts
from hyper_parallel.verify.ops.trials.functions import FUNCTIONS, functions_noticed
from hyper_parallel.verify.ops.trials.reasons import EQUIVALENT
from hyper_parallel.verify.ops.trials.scenarios import SCENARIOS
from hyper_parallel.verify.ops.trials.stage import Stage, never, raises
from hyper_parallel.verify.redistribution import first_wrong
from hyper_parallel.verify.simulate import simulate

MODULE = """
from functools import cached_property
LIMIT = 3
def piece(n, ranks, rank, op="sum"):
    if n < 0:
        raise ValueError(f"{n} + 1")
    msg = "avg" + str(n + 1)
    return min(n, rank * -(-n // ranks)), op == "avg" and not msg
class Step:
    @cached_property
    def size(self) -> "max":
        return 7 if self else 8
    def messages(self):
        return list(zip([1], [2], strict=True))
    @staticmethod
    def word():
        return "sum"
    @property
    def on(self):
        return True
    def __repr__(self):
        return "a" + "b"
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of ours, as a file."""
    (tmp_path / "changed_in_place.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("changed_in_place")
    sys.modules.pop("changed_in_place")


def test_what_is_changed(module):
    """Expressions of functions slip; refusals, messages, texts, annotations and constants of the module do not."""
    found = source_mutants(module.__name__)
    kinds = [(one.kind, f"line {one.line}") for one in found]
    assert sorted(kinds) == sorted([
        ("another function", "line 8"), ("another operation", "line 8"), ("another operation", "line 8"),
        ("comparison turned", "line 8"), ("another reduction", "line 8"), ("and for or", "line 8"),
        ("condition negated", "line 12"), ("off by one", "line 12"), ("off by one", "line 12"),
        ("off by one", "line 14"), ("off by one", "line 14"),
        ("another reduction", "line 17"), ("constant turned", "line 20"),
    ])  # fmt: skip
    assert sorted({one.where for one in found}) == ["Step.messages", "Step.on", "Step.size", "Step.word", "piece"]
    changes = {one.change for one in found}
    assert {"piece, line 8: op == 'avg' -> op != 'avg'", "Step.size, line 12: self -> not self"} <= changes
    assert "piece, line 8: min(n, rank * -(-n // ranks)) -> max(n, rank * -(-n // ranks))" in changes


@pytest.mark.parametrize(
    "kind, before, after",
    [
        ("another function", (1, False), (5, False)),
        ("and for or", (1, False), (1, False)),
        ("comparison turned", (1, False), (1, False)),
    ],
)
def test_functions_run_the_changed_code(module, kind, before, after):
    """Whoever holds the function runs it: it is the same object."""
    held = module.piece
    assert held(5, 5, 1) == before
    (mutant,) = [one for one in source_mutants(module.__name__) if one.kind == kind]
    assert applied(mutant)
    assert module.piece is held
    assert held(5, 5, 1) == after


def test_methods_and_properties_run_it_too(module):
    """Static methods, properties and cached ones are given the changed code; what changes nothing is told."""
    step = module.Step()
    for mutant in source_mutants(module.__name__):
        if mutant.line in (12, 17, 20) and mutant.kind != "off by one":
            assert applied(mutant)
            got = {12: lambda: step.size, 17: step.word, 20: lambda: step.on}[mutant.line]()
            assert got == {12: 8, 17: "max", 20: False}[mutant.line]
    first = source_mutants(module.__name__)[0]
    none = SourceMutant(first.module, first.node, "", "", "", 0, lambda _: None)
    assert applied(none)  # back to what it was
    assert step.on
    assert not applied(none)


@pytest.mark.platforms("torch")
def test_slips_in_the_library_are_noticed(capsys, tmp_path):
    """The command changes the library in children; this process is as it was, and what survived is listed."""
    path = tmp_path / "sources.json"
    own = ["core.shard.entry", "core.shard.op_plan"]
    asked = ["verify", "mutants", "--source", *own, "--each", "2", "--seed", "1", "--floor", "0", "--report", str(path)]
    assert main(asked) == 0
    said = json.loads(path.read_text())
    assert said["mutants"] == 4
    assert said["killed"] + said["survived"] + said["equivalent"] == 4
    assert said["killed"]
    assert list(said["operators"]) == ["hyper_parallel.core.shard.entry", "hyper_parallel.core.shard.op_plan"]
    assert first_wrong("torch", (2,), targets=2) == ""
    assert callable(plan)
    capsys.readouterr()
    for wrong, text in (
        (["--op", "relu"], "--source changes the library's own code, which has none"),
        (["core.shard.rules"], "--source core.shard.rules: no module on trial; there are core.dtensor.steps, "),
        (["--platform", "mindspore"], "both frameworks run the same code, which is tried on torch only"),
    ):
        assert main(["verify", "mutants", "--source", *wrong]) == 2
        assert text in capsys.readouterr().err


@pytest.mark.platforms("torch")
@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_dispatcher_as_it_is_passes(scenario):
    """Each scenario holds on the library as it is: what a change is blamed for, the change did."""
    simulate(lambda: scenario(Stage((3,))), 3, "torch")


@pytest.mark.platforms("torch")
def test_functions_hold_as_they_are(monkeypatch):
    """Nothing is noticed where nothing was changed; a function that means something else on DTensors is."""
    monkeypatch.setattr("hyper_parallel.verify.ops.trials.functions._MESHES", (((2,), 4),))
    assert list(functions_noticed()) == []
    wrong = replace(FUNCTIONS[0], name="wrong", call=lambda _, x, y: x * 1 if isinstance(x, DTensor) else x * 2 + 0 * y)
    monkeypatch.setattr("hyper_parallel.verify.ops.trials.functions.FUNCTIONS", (wrong,))
    (said,) = functions_noticed()
    assert said.startswith("wrong on (2,): rank 0: ")


@pytest.mark.platforms("torch")
def test_a_forked_change_stays_in_its_process():
    """What notices is told from what does not, from the same code, from a death and from what does not end."""
    mutant = next(one for one in source_mutants("hyper_parallel.core.shard.entry") if one.where == "Binder.bind")

    def dies():
        os.kill(os.getpid(), signal.SIGKILL)
        yield ""

    assert verdicts.noticed(mutant, (lambda: iter(["", "seen"]),)) == "seen"
    assert verdicts.noticed(mutant, (lambda: iter([""]), lambda: iter(()))) == ""
    assert verdicts.noticed(None, (lambda: iter(()),)) == ""
    assert verdicts.noticed(replace(mutant, edit=lambda _: None), ()) == "the same code"
    assert verdicts.noticed(mutant, (lambda: 1 / 0,)) == "ZeroDivisionError: division by zero"
    assert verdicts.noticed(mutant, (dies,)) == "killed by SIGKILL"
    assert not applied(replace(mutant, edit=lambda _: None)), "this process has the library as it is"


@pytest.mark.platforms("torch")
def test_what_does_not_end_is_ended(monkeypatch):
    """A change that waits for ever costs its time; nothing noticed it, for a busy machine is as slow."""
    monkeypatch.setattr(verdicts, "_SECONDS", 0.2)

    def endless():
        while True:
            time.sleep(0.01)

    assert verdicts.noticed(None, (endless,)) == "not finished"


@pytest.mark.platforms("torch")
@pytest.mark.filterwarnings("ignore:Using backward")
def test_trials_say_nothing_of_the_library_as_it_is(monkeypatch):
    """Changes of placement, scenarios and prices: each kind passes here, and a price that changes is told."""
    assert list(verdicts._moves((2,), targets=2)) == [""]
    monkeypatch.setattr(verdicts, "SCENARIOS", SCENARIOS[:1])
    monkeypatch.setattr(verdicts, "_MESHES", ((2,),))
    assert list(verdicts._scenarios()) == []
    monkeypatch.setattr(prices, "_ON_TWO", ((2,),))
    monkeypatch.setattr(prices, "_CALLS", prices._CALLS[4:5])
    with use_platform("torch"):
        for of in (prices.plan_prices, prices.efforts, prices.choice_prices):
            assert all(any(price) for price in of().values())
            assert list(verdicts._prices(of)) == []
    changing = [{"softmax": (1, 2)}, {"softmax": (1, 3)}]
    assert list(verdicts._prices(lambda: changing.pop(0))) == ["softmax: (1, 3), (1, 2) before"]
    verdicts._kept.cache_clear()


def test_planning_ends(monkeypatch):
    """After so many layouts the search takes the best plan that it has; one that goes on is noticed."""
    assert list(prices.plans_come_in_time()) == []
    assert cheapest_steps.MOST_STATES == 2000
    monkeypatch.setattr(cheapest_steps, "search", lambda source, _: (Slice(source, source, ()),))
    said = list(prices.plans_come_in_time())
    assert [one.partition(": ")[0] for one in said] == [f"0 layouts looked at of {limit}" for limit in (1, 2, 3)]


@pytest.mark.platforms("torch")
def test_verdicts(monkeypatch):
    """What is noticed is killed; the rest is equivalent with its reason, or survives, as does what had no time."""
    module = "hyper_parallel.core.shard.entry"
    reasoned = [one.slip for one in EQUIVALENT if one.module == "shard.entry"]
    plain = next(one for one in source_mutants(module) if one.slip not in reasoned)
    known = next(one for one in source_mutants(module) if one.slip in reasoned)
    outcomes = [
        verdicts._verdict("op", "torch", *one, 1).outcome
        for one in ((plain, "seen"), (plain, ""), (known, ""), (plain, "the same code"), (known, "not finished"))
    ]
    assert outcomes == ["killed", "survived", "equivalent", "equivalent", "survived"]
    monkeypatch.setattr(verdicts, "SOURCES", {module: (lambda: iter(["wrong already"]),)})
    broken = verdicts.judged("torch", f"{module}#0", 0)
    assert (broken.outcome, broken.detail) == ("broken", "wrong already")
    assert verdicts.judged("torch", f"{module}#1", 0).outcome == "killed"
    assert verdicts.judged("torch", f"{module}#10000", 0).outcome == "none"


def test_the_stage_refuses_what_must_not_happen():
    """A scenario that expects an error does not pass without it, nor with a call that must not be made."""
    with pytest.raises(AssertionError, match="ValueError was expected"):
        raises(ValueError, lambda: None)
    assert raises(AssertionError, never) == "the spelling cannot run on locals"


def test_reasons_are_of_changes_that_there_are():
    """An entry of the table of equivalent changes that matches none is stale; none stands there twice."""
    keys = [(f"hyper_parallel.core.{one.module}", one.where, one.slip) for one in EQUIVALENT]
    there = {(one.module, one.where, one.slip) for module in verdicts.SOURCES for one in source_mutants(module)}
    assert [one for one in keys if one not in there] == []
    assert len(set(keys)) == len(keys)
    assert all(one.reason for one in EQUIVALENT)
