"""Mutants of local calls and of backward reductions: each is noticed if it makes a difference."""

from __future__ import annotations

import pytest

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.shard import rules
from hyper_parallel.core.shard.rule import LocalCall, OpCall, Operand, Row, Rule, Strategies
from hyper_parallel.core.shard.sample import Sample, real
from hyper_parallel.platform.select import use_platform
from workshop.mutation import rule_runner
from workshop.mutation.rule_mutants import mutants_of

pytestmark = pytest.mark.platforms("torch")

rules.load()
R, S0, SUM = Replicate(), Shard(0), Partial("sum")


def judged(operator):
    """Return the outcome of every mutant of an operator."""
    with use_platform("torch"):
        results = [operator.run(operator.op, number, 0) for number in range(len(operator.mutants))]
    return {(result.kind, result.change): result.outcome for result in results}


def test_slips_behind_the_rule_are_noticed():
    """Expand: a local call that is unadapted, off by one or the next rank's is killed, and a gradient reduced twice."""
    with use_platform("torch"):
        operator = rule_runner.OperatorMutants("torch", "expand")
    operator.mutants = [mutant for mutant in operator.mutants if mutant.changes_adapter or mutant.change_claim]
    assert judged(operator) == {
        ("adapter dropped", "the local call is the caller's own"): "killed",
        ("adapter off by one", "the first integer"): "killed",
        ("adapter of the next rank", "the local call of the next rank"): "killed",
        ("gradient not reduced", "of operand 0"): "equivalent",
        ("gradient reduced twice", "of operand 0"): "killed",
    }


@pytest.mark.parametrize("args", [None, {"x": 1.5}])
def test_an_adapter_that_changes_nothing_has_equivalent_mutants(monkeypatch, args):
    """If an adapter changes nothing, dropping it, shifting it or using the neighbour's is an equivalent mutant."""

    def strategies(call):
        rows = (Row((R,), (R,)), Row((S0,), (S0,)))
        localize = lambda *_: None if args is None else LocalCall({}, None)  # noqa: E731 - short
        return Strategies(rows, (call["x"].shape,), localize)

    monkeypatch.setattr(rule_runner, "find_rule", lambda _: Rule("relu", "x", strategies))
    monkeypatch.setattr(rule_runner, "samples_of", lambda _: (Sample((real("ab"),)),))
    with use_platform("torch"):
        operator = rule_runner.OperatorMutants("torch", "relu")
    operator.mutants = [mutant for mutant in operator.mutants if mutant.changes_adapter]
    outcomes = judged(operator)
    assert len(outcomes) == 3
    assert set(outcomes.values()) <= {"equivalent", "true"}
    assert outcomes["adapter of the next rank", "the local call of the next rank"] == "equivalent"


def call_of(*shapes):
    """Return a call on operands of these shapes, each replicated on two ranks."""
    mesh = DeviceMesh._interned("cpu", (2,), (0, 1), ("x",), 0)
    layouts = [Layout.place(mesh, [R], shape) for shape in shapes]
    operands = tuple(Operand(name, layout) for name, layout in zip("xyz", layouts, strict=False))
    return OpCall("f", mesh, operands, dict(zip("xyz", operands, strict=False)))


def test_changes_keep_to_calls_that_they_fit():
    """A changed row applies where the operands have its dims; other calls get the rule's own answer."""
    call, flat = call_of((4, 3)), call_of((4,))
    answer = Strategies((Row((S0,), (S0,)),), ((4, 3),))
    other = Strategies((Row((S0,), (S0,)),), ((4,),))
    by = {(mutant.kind, mutant.change): mutant for mutant in mutants_of([(call, answer)], [()])}
    shifted = by["dim of a result shifted", "Shard(0) -> Shard(0) becomes Shard(0) -> Shard(1)"]
    assert shifted.change_strategies(call, answer).rows == (Row((S0,), (Shard(1),)),)
    assert shifted.change_strategies(flat, other) is other
    added = by["taken for linear", "Partial(sum) -> Partial(sum) is claimed"]
    assert added.change_strategies(call, answer).rows[-1] == Row((SUM,), (SUM,))
    two = Strategies(answer.rows, ((4, 3), (4, 3)))
    assert added.change_strategies(call, two) is two
    assert not any(kind.startswith("gradient") for kind, _ in by)


def test_off_by_one_is_the_first_whole_number():
    """The off-by-one mutant changes the first integer that is not a boolean; arguments without one stay the same."""
    call = call_of((4, 3))
    for args, changed in (
        ({"keepdim": True, "dim": 1, "start": 2}, {"keepdim": True, "dim": 2, "start": 2}),
        ({"size": (3, 5)}, {"size": (4, 5)}),
        ({"size": [3, 5]}, {"size": [4, 5]}),
        ({"value": 1.5, "names": ()}, {"value": 1.5, "names": ()}),
        ({}, {}),
    ):
        answer = Strategies((Row((R,), (R,)),), ((4, 3),), lambda *_, args=args: LocalCall(args, None))
        by = {mutant.kind: mutant for mutant in mutants_of([(call, answer)], [()])}
        slipped = by["adapter off by one"].change_strategies(call, answer)
        assert slipped.localize(call, (), ()).args == changed
        assert by["adapter dropped"].change_strategies(call, answer).localize is None
        bare = Strategies(answer.rows, answer.outputs)
        assert by["adapter dropped"].change_strategies(call, bare) is bare
