"""A failing program is made small, and becomes a file of plain user code that fails by itself."""

from dataclasses import replace

import pytest

from hyper_parallel import Partial, Shard
from hyper_parallel.verify.fuzz.language import language_of
from hyper_parallel.verify.fuzz.program import Outcome, Program
from hyper_parallel.verify.fuzz.report import Finding
from hyper_parallel.verify.fuzz.reproduce import MOST_LINES, fails, source_of
from hyper_parallel.verify.fuzz.shrink import shrink

pytestmark = pytest.mark.platforms("torch")


def long_program(small):
    """Return a program of seven steps, of which one is sought."""
    leaves = {0: small.leaf((6, 4), (Shard(0), Partial("sum"))), 1: small.leaf((6, 4), (Shard(1), Shard(0)), seed=1)}
    steps = (
        small.step("torch.add", small.x(0), small.x(1), outs=(2,)),
        small.step("operator.mul", small.x(2), 2.0, outs=(3,)),
        small.step("torch.neg", small.x(1), outs=(4,)),
        small.step("redistribute", small.x(3), [Shard(1), Shard(0)], outs=(5,)),
        small.step("torch.Tensor.cumsum", small.x(5), 0, outs=(6,)),
        small.step("Tensor.chunk", small.x(6), 2, 1, outs=(7, 8), several=True, aliases=True),
        small.step("operator.iadd", small.x(4), small.x(2), outs=(9,), aliases=True),
    )
    return Program((3, 8), (2, 2), leaves, steps, "backward", (7,), (10,)).with_used_leaves()


def whole_program(small):
    """Return the program with the leaf that it is differentiated with."""
    program = long_program(small)
    seed = small.leaf((6, 2), (Shard(0), Shard(1)), seed=2, requires_grad=False)
    return Program(**{**program.__dict__, "leaves": {**program.leaves, 10: seed}})


def test_steps_placements_sizes_and_axes_are_left_out(small):
    """Only what the failure needs is left: here a cumulative sum of a sharded tensor of two rows."""

    def judge(program):
        sums = [s for s in program.steps if s.call == "torch.Tensor.cumsum"]
        rows = [leaf.array.shape[0] for leaf in program.leaves.values() if leaf.array.ndim == 2]
        return Outcome("wrong" if sums and max(rows, default=0) > 1 else "equal")

    small, outcome = shrink(whole_program(small), Outcome("wrong"), judge, "torch")
    assert outcome.kind == "wrong"
    assert [s.call for s in small.steps] == ["torch.Tensor.cumsum"]
    assert (small.mode, small.outputs, small.mesh) == ("forward", (), (1,))
    (only,) = small.leaves.values()
    assert only.array.shape == (2, 1)


def test_a_gradient_is_kept_where_it_is_what_fails(small):
    """What only fails in backward stays differentiated."""

    def judge(program):
        return Outcome("wrong" if program.mode == "backward" and program.outputs else "equal")

    small, _ = shrink(whole_program(small), Outcome("wrong"), judge, "torch")
    assert small.mode == "backward"
    assert len(small.steps) <= 1


def test_second_gradients_and_their_outputs_are_left_out(small):
    """Of a program with second gradients of two outputs, what only needs first gradients keeps those of one."""
    leaf = {"placements": (Shard(0),), "integral": False}
    leaves = {0: small.leaf(**leaf), 1: small.leaf(**leaf, seed=1)}
    seeds = {number: small.leaf(**leaf, seed=number) for number in (4, 5, 6, 7)}
    steps = (small.step("torch.exp", small.x(0), outs=(2,)), small.step("torch.sin", small.x(1), outs=(3,)))
    program = Program((0, 0), (3,), {**leaves, **seeds}, steps, "double", (2, 3), (4, 5), ((0, 6), (1, 7)))

    def judge(candidate):
        return Outcome("wrong" if candidate.mode != "forward" and candidate.outputs else "equal")

    smaller, outcome = shrink(program, Outcome("wrong"), judge, "torch")
    assert outcome.kind == "wrong"
    assert (smaller.mode, smaller.second) == ("grad", ())
    assert len(smaller.outputs) == len(smaller.differentiated) == 1


def test_a_framework_without_random_programs_is_refused():
    """The message names the frameworks that have some."""
    message = r"^no random programs are written for 'numpy'; there are some for torch, mindspore$"
    with pytest.raises(ValueError, match=message):
        language_of("numpy")


def test_a_long_reproducer_has_several_statements_on_a_line(small):
    """A program of more than twenty lines joins as many as it must; the report tells the lines of one that cannot."""
    steps = tuple(small.step("torch.neg", small.x(number), outs=(number + 1,)) for number in range(9))
    program = Program((0, 0), (2,), {0: small.leaf((4, 3))}, steps)
    source = source_of(program, Outcome("wrong", "text"), "torch", language_of("torch"))
    assert len(source.splitlines()) == MOST_LINES
    assert "    x1 = torch.neg(x0); x2 = torch.neg(x1)" in source
    assert max(len(line) for line in source.splitlines() if "torch.neg" in line) <= 120
    wide = [small.step("torch.add", small.x(0), 10**60 + number, outs=(number + 1,)) for number in range(9)]
    source = source_of(replace(program, steps=tuple(wide)), Outcome("wrong"), "torch", language_of("torch"))
    count = len(source.splitlines())
    assert count > MOST_LINES
    finding = Finding("torch", "wrong", "text", 0, 0, (2,), source, "f.py", True)
    assert finding.lines()[1] == f"  torch, seed 0, program 0, mesh 2: f.py ({count} lines)"


def test_another_kind_of_failure_is_not_followed(small):
    """A smaller program with another outcome does not count."""

    def judge(program):
        return Outcome("wrong" if len(program.steps) == 7 else "internal error")

    program = whole_program(small)
    assert len(shrink(program, Outcome("wrong"), judge, "torch")[0].steps) == 7


def test_no_time_leaves_the_program_as_it_is(small):
    """Shrinking ends in its time."""
    program = whole_program(small)
    assert shrink(program, Outcome("wrong"), lambda _: Outcome("wrong"), "torch", seconds=0.0)[0] is program


@pytest.mark.sweep
def test_a_reproducer_of_a_right_program_ends_with_zero(small, tmp_path):
    """The file runs by itself and compares: a right program is equal, and a wrong one fails."""
    outcome = Outcome("wrong", "value of x1\nmore", exact=True)
    source = source_of(whole_program(small), outcome, "torch", language_of("torch"))
    path = tmp_path / "program.py"
    path.write_text(source)
    assert source.startswith("# hyper-parallel fuzz --seed 3, program 8: wrong: value of x1\nimport operator, torch\n")
    assert not fails(path)
    path.write_text(source.replace("x2 * 2.0", "x2 * (2.0 + isinstance(x2, DTensor))"))
    assert fails(path)


def test_a_reproducer_that_never_ends_fails(tmp_path):
    """A hang shows as well."""
    path = tmp_path / "program.py"
    path.write_text("while True: pass\n")
    assert fails(path, seconds=0.5)
    assert MOST_LINES == 20
