"""Mutants of the library's own code in forked processes."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace

import pytest

from hyper_parallel.core.dtensor.transition import plan_transition
from hyper_parallel.verify.checker.redistribution import first_wrong
from workshop.commands import main
from workshop.mutation import source_runner
from workshop.mutation.source_mutants import EQUIVALENT, apply_mutant, source_mutants
from workshop.mutation.suite.checks import MODULE_CHECKS


@pytest.mark.sweep
@pytest.mark.platforms("torch")
def test_slips_in_the_library_are_noticed(capsys, tmp_path):
    """The command changes the library in child processes only, and lists the mutants that survived."""
    path = tmp_path / "sources.json"
    own = ["core.shard.entry", "core.shard.op_plan"]
    asked = ["mutants", "--source", *own, "--each", "2", "--seed", "1", "--floor", "0", "--report", str(path)]
    assert main(asked) == 0
    report = json.loads(path.read_text())
    assert report["mutants"] == 4
    assert report["killed"] + report["survived"] + report["equivalent"] == 4
    assert report["killed"]
    assert list(report["operators"]) == ["hyper_parallel.core.shard.entry", "hyper_parallel.core.shard.op_plan"]
    assert first_wrong("torch", (2,), targets=2) == ""
    assert callable(plan_transition)
    capsys.readouterr()


@pytest.mark.platforms("torch")
@pytest.mark.parametrize(
    "wrong, text",
    [
        (
            ["--op", "relu"],
            "--op selects rules of operators, and --source changes the library's own code; leave out one",
        ),
        (["core.shard.rules"], "--source core.shard.rules: this module is not mutated; modules: core.dtensor.steps, "),
        (
            ["core.shard.entry", "--platform", "mindspore"],
            "both frameworks run the same code, which is mutated on",
        ),
    ],
)
def test_modules_that_are_not_mutated_are_refused(wrong, text, capsys):
    """Operators, unknown modules and MindSpore are refused with what there is."""
    assert main(["mutants", "--source", *wrong]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("asked", [[], ["core.shard.entry"]])
def test_all_modules_are_mutated_unless_some_are_asked_for(asked, monkeypatch, capsys):
    """Without names there are tasks for every module that has checks; a run without mutants is not a success."""
    tasks = []
    monkeypatch.setattr(
        "hyper_parallel.verify.ops.worker_pool.run_tasks", lambda _, asked, __: tasks.extend(asked) or []
    )
    assert main(["mutants", "--source", *asked, "--each", "1"]) == 1
    modules = {f"hyper_parallel.{module}" for module in asked} or set(MODULE_CHECKS)
    assert {mutant.partition("#")[0] for task in tasks for mutant in task["ops"]} == modules
    assert capsys.readouterr().out.startswith("torch: 0 mutants")


@pytest.mark.platforms("torch")
def test_a_forked_change_stays_in_its_process():
    """A fork reports a difference, none, the same code, an exception or a signal; this process stays unchanged."""
    mutant = next(
        mutant for mutant in source_mutants("hyper_parallel.core.shard.entry") if mutant.where == "Binder.bind"
    )

    def dies():
        os.kill(os.getpid(), signal.SIGKILL)
        yield ""

    assert source_runner.run_in_fork(mutant, (lambda: iter(["", "seen"]),)) == "seen"
    assert source_runner.run_in_fork(mutant, (lambda: iter([""]), lambda: iter(()))) == ""
    assert source_runner.run_in_fork(None, (lambda: iter(()),)) == ""
    assert source_runner.run_in_fork(replace(mutant, edit=lambda _: None), ()) == "the same code"
    assert source_runner.run_in_fork(mutant, (lambda: 1 / 0,)) == "ZeroDivisionError: division by zero"
    assert source_runner.run_in_fork(mutant, (dies,)) == "killed by SIGKILL"
    assert not apply_mutant(replace(mutant, edit=lambda _: None)), "this process has the library as it is"


@pytest.mark.platforms("torch")
def test_a_mutant_that_hangs_is_ended(monkeypatch):
    """A mutant that hangs ends after its time limit, and does not count as noticed: a busy machine is as slow."""
    monkeypatch.setattr(source_runner, "_SECONDS", 0.2)

    def endless():
        while True:
            time.sleep(0.01)

    assert source_runner.run_in_fork(None, (endless,)) == "not finished"


@pytest.mark.platforms("torch")
def test_verdicts(monkeypatch):
    """A noticed mutant is killed; others are equivalent if a reason is listed, and survive otherwise or on timeout."""
    module = "hyper_parallel.core.shard.entry"
    reasoned = [entry.slip for entry in EQUIVALENT if entry.module == module]
    plain = next(mutant for mutant in source_mutants(module) if mutant.slip not in reasoned)
    known = next(mutant for mutant in source_mutants(module) if mutant.slip in reasoned)
    outcomes = [
        source_runner._result("op", "torch", *case, 1).outcome
        for case in ((plain, "seen"), (plain, ""), (known, ""), (plain, "the same code"), (known, "not finished"))
    ]
    assert outcomes == ["killed", "survived", "equivalent", "equivalent", "survived"]
    monkeypatch.setattr(source_runner, "MODULE_CHECKS", {module: (lambda: iter(["wrong already"]),)})
    broken = source_runner.run_source_mutant("torch", f"{module}#0", 0)
    assert (broken.outcome, broken.detail) == ("broken", "wrong already")
    assert source_runner.run_source_mutant("torch", f"{module}#1", 0).outcome == "killed"
    assert source_runner.run_source_mutant("torch", f"{module}#10000", 0).outcome == "none"
