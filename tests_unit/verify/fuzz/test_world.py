"""Every outcome is distinguished from the others: shown by operators and rules that are broken on purpose."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from hyper_parallel import DTensor, Partial, Replicate, Shard
from hyper_parallel._text import first_line
from hyper_parallel.core.shard.rule import Row
from hyper_parallel.errors import LayoutError
from hyper_parallel.platform.torch.ops.registry import functions
from hyper_parallel.transport.base import active_transport
from hyper_parallel.verify.checker.batch import _run_rank
from hyper_parallel.verify.frameworks.torch import programs as language
from hyper_parallel.verify.fuzz import campaign, world
from hyper_parallel.verify.fuzz.program import Program
from hyper_parallel.verify.fuzz.world import rows_used, run_programs
from hyper_parallel.verify.launch import launch
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


@pytest.fixture
def broken(monkeypatch):
    """Return a function that makes a function the operator ``torch.broken``."""
    usual = language.call_named

    def make(function):
        monkeypatch.setattr(language, "call_named", lambda name: function if name == "torch.broken" else usual(name))

    return make


def run(*programs, **options):
    """Return the outcomes of programs in one world."""
    return run_programs("torch", programs, **options)


@pytest.mark.parametrize("mode", ["forward", "backward", "grad", "double"])
@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2), (1, 3)])
def test_a_right_program_is_equal(small, mesh, mode):
    """Values and gradients of integers are compared to the bit, on every rank."""
    (outcome,) = run(small.unary("torch.square", mesh=mesh, mode=mode))
    assert (outcome.kind, outcome.text) == ("equal", "")
    ranks = int(np.prod(mesh))
    assert outcome.exact
    assert outcome.compared >= ranks * (1 if mode == "forward" else 2)
    assert bool(outcome.gradients) == (mode != "forward")


def test_rounding_is_no_finding(small):
    """Real values may differ by what rounding does; that is not called exact."""
    program = small.unary("torch.sum", mesh=(3,), mode="forward", integral=False, dtype="float32")
    (outcome,) = run(program)
    assert (outcome.kind, outcome.exact) == ("equal", False)


@pytest.mark.parametrize("integral", [True, False])
def test_a_wrong_value_is_found(small, broken, integral):
    """A value that differs by more than rounding is wrong, with the first that does."""
    broken(lambda t: t * (1 + 1e-6) if isinstance(t, DTensor) else t * 1)
    (outcome,) = run(small.unary("torch.broken", mode="forward", integral=integral))
    assert outcome.kind == "wrong"
    assert outcome.text.startswith("value of x1 is ")
    assert outcome.first == 1


def test_a_wrong_gradient_is_found(small, broken):
    """A gradient that differs is wrong though the value is right."""
    broken(lambda t: t + (t - t.detach()) if isinstance(t, DTensor) else t * 1)
    (outcome,) = run(small.unary("torch.broken"))
    assert outcome.kind == "wrong"
    assert outcome.text.startswith("gradient of x0 is ")


def test_a_wrong_rule_is_found(small, monkeypatch):
    """A rule that lets pending sums through a square is found."""
    entry = functions()[torch.square]
    rule = entry.rule

    def strategies(call):
        answer = rule.strategies(call)
        pending = Row((Partial("sum"),), (Partial("sum"),))
        return replace(answer, rows=(pending, *answer.rows))

    program = small.unary("torch.square", mode="forward")
    program = replace(program, leaves={0: replace(program.leaves[0], placements=(Partial("sum"),))})
    assert run(program)[0].kind == "equal"
    with monkeypatch.context() as patch:
        patch.setattr(entry, "rule", replace(rule, strategies=strategies))
        entry.cache.clear()
        outcome = run(program)[0]
    entry.cache.clear()
    assert outcome.kind == "wrong"


@pytest.mark.parametrize(
    "spoil, text",
    [
        (lambda t: t.to_local(), "value of x1 is a plain tensor, on rank 0"),
        (lambda t: t.float(), "value of x1 has dtype float32, should have float64, on rank 0"),
        (lambda t: t[:2], "value of x1 has shape [2, 3], should have [5, 3], on rank 0"),
    ],
)
def test_a_result_of_another_kind_is_wrong(small, broken, spoil, text):
    """A plain tensor, another dtype and another shape are wrong."""
    broken(lambda t: spoil(t) if isinstance(t, DTensor) else t * 1)
    (outcome,) = run(small.unary("torch.broken", mode="forward"))
    assert (outcome.kind, outcome.text) == ("wrong", text)


def test_a_second_gradient_of_rounding_alone_may_be_missing(small):
    """PyTorch's second gradient of a product over one element is rounding of the cotangent, and none on ranks."""
    program = small.unary("torch.prod", mesh=(1,), mode="double", integral=False)
    program = replace(program, steps=(
        small.step("torch.unsqueeze", small.x(0), 1, outs=(5,)), small.step("torch.prod", small.x(5), 1),
    ))  # fmt: skip
    leaves = {**program.leaves, 3: small.leaf(seed=4, integral=False)}
    (outcome,) = run(replace(program, leaves=leaves, second=((0, 3),)))
    assert (outcome.kind, outcome.text) == ("equal", "")


def test_a_missing_gradient_is_wrong(small, broken):
    """A gradient that exists only on a single device, or only here, is wrong."""
    broken(lambda t: t.detach() + torch.zeros_like(t) * 0 if isinstance(t, DTensor) else t * 1)
    program = small.unary("torch.broken", mode="grad")
    program = replace(program, leaves={**program.leaves, 3: small.leaf(seed=3)}, steps=(
        *program.steps, small.step("torch.add", small.x(1), small.x(3), outs=(4,)),
    ), outputs=(4,))  # fmt: skip
    (outcome,) = run(program)
    assert (outcome.kind, outcome.text) == ("wrong", "gradient of x0 is missing, on rank 0")


def test_a_gradient_of_zeros_need_not_exist(small, broken):
    """Zeros are no finding where a single device has no gradient, and other numbers are."""
    for factor, kind in ((0.0, "equal"), (1e-9, "wrong")):

        def linked(t, factor=factor):
            return t.detach() + factor * t if isinstance(t, DTensor) else t.detach() + torch.zeros_like(t)

        broken(linked)
        program = small.unary("torch.broken", mode="grad")
        program = replace(program, leaves={**program.leaves, 3: small.leaf(seed=3)}, steps=(
            *program.steps, small.step("torch.add", small.x(1), small.x(3), outs=(4,)),
        ), outputs=(4,))  # fmt: skip
        assert run(program)[0].kind == kind


@pytest.mark.parametrize("mesh", [(2,), (3,)])
def test_a_gradient_exists_on_all_ranks_or_on_none(small, broken, mesh):
    """Ranks that disagree on whether there is a gradient are a finding, also where it would be zeros."""

    def on_first(t):
        first = not isinstance(t, DTensor) or active_transport().rank == 0
        return t.detach() + (t * 0.0 if first else torch.zeros_like(t))

    broken(on_first)
    program = small.unary("torch.broken", mode="grad", mesh=mesh)
    program = replace(program, leaves={**program.leaves, 3: small.leaf(seed=3)}, steps=(
        *program.steps, small.step("torch.add", small.x(1), small.x(3), outs=(4,)),
    ), outputs=(4,))  # fmt: skip
    (outcome,) = run(program)
    assert (outcome.kind, outcome.text) == ("wrong", "gradient of x0 exists on ranks [0] only")


def test_a_rounded_share_of_an_average_is_no_finding(small):
    """The average of integers over ranks may differ by a unit in the last place though it needs no rounding."""
    values = np.array([[-3.0, -3, 2, -2, -3, 1], [-1, -4, 1, 0, 3, 0]], np.float32).reshape(2, 6, 1)
    leaf = replace(small.leaf((2, 6, 1), (Shard(1),), "float32"), array=values)
    program = Program((0, 0), (3,), {0: leaf}, (small.step("torch.mean", small.x(0)),))
    (outcome,) = run(program)
    assert (outcome.kind, outcome.exact) == ("equal", False)


@pytest.mark.parametrize("call, placement, exact", [
    ("torch.square", Partial("min"), False), ("torch.square", Partial("sum"), True), ("torch.det", Replicate(), False),
])  # fmt: skip
def test_programs_that_round_are_not_exact(small, call, placement, exact):
    """Gradients shared out among three ranks, and integers that come from a decomposition, have earned bounds."""
    leaf = small.leaf((3, 3), (placement,), "float64")
    program = Program((0, 0), (3,), {0: leaf}, (small.step(call, small.x(0)),))
    (outcome,) = run(program)
    assert (outcome.kind, outcome.exact) == ("equal", exact)


def test_a_refusal_is_counted_with_its_words(small, broken):
    """An error of this library on all ranks is a refusal."""

    def refuse(tensor):
        if isinstance(tensor, DTensor):
            raise LayoutError("not in this layout")
        return tensor * 1

    broken(refuse)
    (outcome,) = run(small.unary("torch.broken"))
    assert (outcome.kind, outcome.text) == ("refused", "LayoutError: not in this layout")


def test_what_a_single_device_refuses_must_be_refused(small):
    """Refused by both, or accepted: then there is nothing to compare with."""
    unequal = Program((0, 0), (2,), {0: small.leaf((5, 3)), 1: small.leaf((4, 3), seed=1)}, (
        small.step("torch.add", small.x(0), small.x(1), outs=(2,)),
    ), refused=True)  # fmt: skip
    assert run(unequal)[0].kind == "refused by both"


def test_what_only_a_single_device_refuses_is_accepted(small, broken):
    """A program that only the single device refuses is distinguished from an equal one."""

    def lenient(tensor):
        if not isinstance(tensor, DTensor):
            raise TypeError("not a number")
        return tensor * 1

    broken(lenient)
    (outcome,) = run(small.unary("torch.broken"))
    assert (outcome.kind, outcome.text) == ("accepted", "a single device refuses with TypeError: not a number")


def test_another_error_is_an_internal_error(small, broken):
    """An error that is not a refusal, on all ranks or on some, is internal; the programs after it still run."""

    def fail(tensor):
        if isinstance(tensor, DTensor):
            return {}["none"]
        return tensor * 1

    broken(fail)
    right = small.unary("torch.square")
    outcomes = run(right, small.unary("torch.broken"), right)
    assert [outcome.kind for outcome in outcomes] == ["equal", "internal error", "equal"]
    assert outcomes[1].text.startswith("KeyError: 'none'\n")


def test_an_error_on_some_ranks_is_an_internal_error(small, broken):
    """Where one rank fails and the others communicate, the error of that rank is reported."""

    def fail_on_one(tensor):
        if not isinstance(tensor, DTensor):
            return tensor * 1
        if active_transport().rank == 1:
            raise ZeroDivisionError("on one rank")
        return tensor.redistribute(placements=[Replicate()])

    broken(fail_on_one)
    right = small.unary("torch.square")
    outcomes = run(right, small.unary("torch.broken"), right)
    assert [outcome.kind for outcome in outcomes] == ["equal", "internal error", "equal"]
    assert outcomes[1].text.startswith("on some ranks only: ZeroDivisionError: on one rank")


def test_ranks_that_do_not_call_the_same_hang(small, broken):
    """A rank that leaves out a collective is a hang, named by the simulation."""

    def leave_out(tensor):
        if isinstance(tensor, DTensor) and active_transport().rank != 1:
            tensor.redistribute(placements=[Replicate()])
        return tensor * 1

    broken(leave_out)
    right = small.unary("torch.square")
    outcomes = run(right, small.unary("torch.broken"), right)
    assert [outcome.kind for outcome in outcomes] == ["equal", "hang", "equal"]
    assert "rank 1" in outcomes[1].text


def test_an_operator_that_never_ends_hangs(small, broken):
    """A world that does not end in its time is a hang; the stack shows where."""

    def endless(tensor):
        while isinstance(tensor, DTensor):
            time.sleep(0.01)
        return tensor * 1

    broken(endless)
    (outcome,) = run(small.unary("torch.broken"), timeout=5.0)
    assert outcome.kind == "hang"
    assert "did not finish within 5 s" in outcome.text
    assert "endless" in outcome.text


def test_a_broken_rule_that_says_so_is_an_internal_error(small, monkeypatch):
    """A local result that contradicts its rule ends the world, and is an internal error."""
    entry = functions()[torch.square]
    rule = entry.rule

    def strategies(call):
        answer = rule.strategies(call)
        return replace(answer, outputs=((7, 7),))

    with monkeypatch.context() as patch:
        patch.setattr(entry, "rule", replace(rule, strategies=strategies))
        entry.cache.clear()
        (outcome,) = run(small.unary("torch.square", mode="forward"))
    entry.cache.clear()
    assert outcome.kind == "internal error"
    assert outcome.text.startswith("ShardMismatchError: ")


def test_pending_results_are_reduced_only_at_the_end(small):
    """A pending result that a later step reads is not compared; the last one is."""
    sharded = small.leaf((4, 3), (Shard(0),))
    program = Program((0, 0), (2,), {0: sharded}, (
        small.step("torch.sum", small.x(0), 0, outs=(1,)), small.step("torch.neg", small.x(1), outs=(2,)),
    ))  # fmt: skip
    (outcome,) = run(program)
    assert (outcome.kind, outcome.compared) == ("equal", 2)
    assert world.SECONDS > 0


def bits(runs):
    """Return what programs left on one rank: the line of an error, and of every result its dtype and bytes."""
    return [
        (
            first_line(run.error) if run.error else "",
            {key: None if piece is None else (piece.dtype, piece.problem, np.array(piece.array).tobytes())
             for key, piece in run.pieces.items()},
        )
        for run in runs
    ]  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("ranks, count", [(3, 24), (2, 640), (4, 640)])
def test_simulated_and_real_ranks_agree_to_the_bit(ranks, count):
    """Random programs leave the same bits and the same refusals on threads as on processes over gloo."""
    generator = campaign._generator("torch")
    programs = [generator.program(3, number, ranks) for number in range(count)]
    # LAPACK's least squares rounds by where in memory its operands lie.
    programs = [program for program in programs if "torch.linalg.lstsq" not in {step.call for step in program.steps}]
    simulated, launched = (
        run(
            _run_rank,
            ranks,
            "torch",
            (world._prepare, ("torch",), programs, [[] for _ in range(ranks)], [0] * ranks, False),
        )
        for run in (simulate, launch)
    )
    for rank, (threads, processes) in enumerate(zip(simulated, launched, strict=True)):
        assert len(threads) == len(programs) > 0.9 * count
        pairs = enumerate(zip(bits(threads), bits(processes), strict=True))
        assert [number for number, (simulated_bits, real_bits) in pairs if simulated_bits != real_bits] == [], rank
    assert sum(not run.error for run in simulated[0]) > count / 2


def test_the_rows_that_a_program_uses(small, broken):
    """They are those of all its calls, backward included; a program that the first rank cannot run has none."""
    calls = rows_used("torch", small.unary("torch.exp"))
    assert next((call.op, call.rows) for call in calls) == ("exp", ("Shard(0) -> Shard(0)",))
    assert {call.op for call in rows_used("torch", small.unary("torch.exp", mode="forward"))} == {"exp"}

    def fails(_):
        raise ValueError

    broken(fails)
    assert rows_used("torch", small.unary("torch.broken")) == ()
