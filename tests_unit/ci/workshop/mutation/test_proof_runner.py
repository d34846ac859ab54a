"""Mutants of rules against their proofs: a changed row loses its proof; what is proven in spite of it is checked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.core.shard import rules
from hyper_parallel.core.shard.rule import Row
from hyper_parallel.platform.select import use_platform
from workshop.mutation import proof_runner, tasks
from workshop.mutation.report import MutantResult, Score
from workshop.mutation.rule_mutants import Mutant

pytestmark = pytest.mark.platforms("torch")

rules.load()
S0 = Shard(0)


@pytest.fixture(scope="module")
def add():
    """Return the mutants of addition."""
    with use_platform("torch"):
        return proof_runner._ProofMutants("torch", "add")


def test_mutants_of_rows_and_gradients_break_their_proofs(add):
    """Every mutant of addition loses a proof, or changes a row that has none."""
    score = Score("torch", 0, 0)
    with use_platform("torch"):
        for number in range(len(add.mutants)):
            score.add(add.run(f"add#{number}", number, 0))
    outcomes = [result.outcome for result in score.results]
    assert set(outcomes) <= {"killed", "unproven", "true"}, score.text()
    assert outcomes.count("killed") > len(outcomes) / 2
    kinds = {result.kind for result in score.results if result.outcome == "killed"}
    assert {"reduction forgotten", "shard taken for replicated", "gradient not reduced"} <= kinds
    assert score.score == 1
    assert ("change no row that has a proof" in score.text()) == ("unproven" in outcomes)


def test_a_mutant_that_is_proven(monkeypatch):
    """A row that holds is true; if the quick sweep finds a wrong value with it, it has survived."""
    row = Row((S0,), (S0,), full=((0, 0),))
    mutant = Mutant("row twice", "none", lambda _, answer: replace(answer, rows=(*answer.rows, row)))
    result = MutantResult("neg#0", "torch")
    with use_platform("torch"):
        neg = proof_runner._ProofMutants("torch", "neg")
        neg.graphs = [made for made in neg.graphs if made.answer.outputs[0]]
        monkeypatch.setattr(proof_runner._ProofMutants, "noticed", lambda *_: "")
        assert neg.judged(result, mutant).outcome == "true"
        monkeypatch.setattr(proof_runner._ProofMutants, "noticed", lambda *_: "wrong: 3")
        survived = neg.judged(result, mutant)
    assert (survived.outcome, survived.detail) == ("survived", "proven, and the quick sweep fails: wrong: 3")


def test_tasks_of_proofs():
    """A task says whether its mutants are proven; a worker runs them so."""
    (task,) = tasks.mutant_tasks("torch", ["neg"], 1, 0, proofs=True)
    assert task["proofs"]
    assert tasks.run_mutant(task, "neg#0").outcome in {"killed", "true", "unproven"}
    assert tasks.run_mutant(task, "neg#100000").outcome == "none"
