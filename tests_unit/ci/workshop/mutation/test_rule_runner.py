"""Mutants of rules: what is changed, what the sweep notices, and which mutants are equivalent."""

import json

import pytest

from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.shard import rules
from hyper_parallel.core.shard.rule import Row, Rule, Strategies
from hyper_parallel.core.shard.sample import Sample, real
from hyper_parallel.platform.select import use_platform
from hyper_parallel.verify.ops import worker_pool
from workshop.commands import main
from workshop.mutation import rule_runner
from workshop.mutation.report import MutantResult, Score
from workshop.mutation.rule_mutants import Mutant
from workshop.mutation.rule_runner import run_rule_mutant

rules.load()

R, S0, SUM = Replicate(), Shard(0), Partial("sum")


def hunt(strategies, monkeypatch, op="relu"):
    """Return the mutants of `op` under a rule of the test's own."""
    monkeypatch.setattr(rule_runner, "find_rule", lambda _: Rule(op, "x", strategies))
    monkeypatch.setattr(rule_runner, "samples_of", lambda _: (Sample((real("ab"),)),))
    with use_platform("torch"):
        return rule_runner.OperatorMutants("torch", op)


def claiming(*rows):
    """Return a rule that claims `rows`."""
    return lambda call: Strategies((Row((R,), (R,)), *rows), (call["x"].shape,))


def verdicts(mutants):
    """Return the results of all mutants of an operator."""
    with use_platform("torch"):
        return [mutants.run(f"{mutants.op}#{number}", number, 0) for number in range(len(mutants.mutants))]


@pytest.mark.platforms("torch")
def test_what_is_changed(monkeypatch):
    """Every placement of a row is changed in every way, and false rows are added; no change occurs twice."""
    mutants = hunt(claiming(Row((S0,), (S0,))), monkeypatch)
    changes = [(mutant.kind, mutant.change) for mutant in mutants.mutants]
    assert ("dim of a result shifted", "Shard(0) -> Shard(0) becomes Shard(0) -> Shard(1)") in changes
    assert ("dim of an operand shifted", "Shard(0) -> Shard(0) becomes Shard(1) -> Shard(0)") in changes
    assert ("shard taken for replicated", "Shard(0) -> Shard(0) becomes Shard(0) -> Replicate()") in changes
    assert ("label dropped", "Shard(0) -> Shard(0) becomes Replicate() -> Shard(0)") in changes
    assert ("reduction invented", "Replicate() -> Replicate() becomes Replicate() -> Partial(sum)") in changes
    assert ("taken for linear", "Partial(sum) -> Partial(sum) is claimed") in changes
    assert ("gradient reduced twice", "of operand 0") in changes
    assert len(set(changes)) == len(changes)


@pytest.mark.platforms("torch")
def test_killed_and_equivalent_mutants(monkeypatch):
    """Relu: every false mutant is killed; dropping the reduction of a gradient that is never partial is equivalent."""
    results = verdicts(hunt(claiming(Row((S0,), (S0,))), monkeypatch))
    by = {(result.kind, result.change): result for result in results}
    outcomes = {result.outcome for result in results}
    assert outcomes == {"killed", "equivalent", "true"}
    assert by["taken for linear", "Partial(sum) -> Partial(sum) is claimed"].outcome == "killed"
    none = by["gradient not reduced", "of operand 0"]
    assert (none.outcome, none.detail) == ("equivalent", "the rule makes all of its claims too")
    # This rule does not claim it, so that the mutant cannot be distinguished from a correct rule.
    true = [result for result in results if result.outcome == "true"]
    assert {result.change for result in true} == {
        "Partial(max) -> Partial(max) is claimed", "Shard(1) -> Shard(1) is claimed",
    }  # fmt: skip
    assert all(result.detail.endswith("claims, and all hold") for result in true)


@pytest.mark.platforms("torch")
def test_mutants_of_a_wrong_rule_prove_nothing(monkeypatch):
    """A rule that does not hold is broken; none of its mutants counts as killed."""
    results = verdicts(hunt(claiming(Row((SUM,), (SUM,))), monkeypatch))
    assert {result.outcome for result in results} == {"broken"}
    score = Score("torch", 1, 0)
    score.add(results[0])
    assert not score.ok(0.0)


@pytest.mark.platforms("torch")
def test_a_condition_that_matters_only_on_other_sizes_is_no_equivalent(monkeypatch):
    """A mutant that claims a new row on any mesh or size of the full mode is not called equivalent."""
    own = hunt(claiming(Row((S0,), (S0,), even=((0, 0),))), monkeypatch)
    (mutant,) = [mutant for mutant in own.mutants if mutant.kind == "condition dropped"]
    with use_platform("torch"):
        assert not own._is_equivalent(mutant)
        assert own._is_equivalent(Mutant("none", "at all", lambda _, answer: answer))


def test_a_mutant_by_its_number(platform_name):
    """The same number and seed are the same mutant; past the last one there is none."""
    first, again = run_rule_mutant(platform_name, "softmax#0", 3), run_rule_mutant(platform_name, "softmax#0", 3)
    assert first == again
    assert first.outcome == "killed"
    assert run_rule_mutant(platform_name, f"softmax#{first.generated}", 3).outcome == "none"
    assert len({run_rule_mutant(platform_name, f"softmax#{number}", 3).change for number in range(3)}) > 1


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("as_json", [False, True])
def test_mutants_before_an_interrupt_are_reported(as_json, monkeypatch, capsys, tmp_path):
    """After an interrupt, finished results are written, the message names the rest as not run; status 130."""
    path = tmp_path / "mutation.json"

    def run_tasks(*_, **__):
        yield MutantResult("add#0", "torch", "label dropped", "c", "survived", "killed", 3)
        raise KeyboardInterrupt

    monkeypatch.setattr(worker_pool, "run_tasks", run_tasks)
    asked = ["--platform", "torch", "--op", "add", "--report", str(path), *(["--json"] if as_json else [])]
    assert main(["mutants", *asked]) == 130
    assert json.loads(path.read_text())["survivors"] == [
        {"op": "add", "kind": "label dropped", "change": "c", "full": "killed"}
    ]
    errors = capsys.readouterr().err
    assert "survived    add: label dropped: c (full mode: killed)" in errors
    assert "interrupted; the other mutants were not run" in errors


def test_the_command(platform_name, tmp_path, capsys):
    """The command runs the requested number of mutants per operator, and writes the report that the page reads."""
    path = tmp_path / "reports" / "mutation.json"
    asked = ["--op", "softmax", "matmul", "--each", "3", "--platform", platform_name, "--report", str(path)]
    assert main(["mutants", *asked, "--wanted", "6"]) == 0
    data = json.loads(path.read_text())
    assert (data["mutants"], data["killed"], data["survivors"]) == (6, 6, [])
    assert "6 killed, 0 survived, 0 equivalent, 0 true; score 100.00 %" in capsys.readouterr().out
    assert main(["mutants", *asked, "--wanted", "7"]) == 1
    assert main(["mutants", "--each", "0"]) == 2
    assert "argument --each: '0' must be an integer from 1 to 1000000" in capsys.readouterr().err
