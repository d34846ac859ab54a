"""Random programs of MindSpore: equal on all ranks where they are right, told where not, written as user code."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from hyper_parallel import DTensor, Partial, Replicate, Shard
from hyper_parallel.verify.fuzz.campaign import run_batch
from hyper_parallel.verify.fuzz.generate import Generator
from hyper_parallel.verify.fuzz.language import language_of
from hyper_parallel.verify.fuzz.program import Leaf, Outcome, Program, Step, TensorRef
from hyper_parallel.verify.fuzz.reproduce import MOST_LINES, source_of
from hyper_parallel.verify.fuzz.world import run_programs

pytestmark = pytest.mark.platforms("mindspore")


@pytest.fixture(scope="module")
def language():
    """Return the language, whose module imports MindSpore."""
    return language_of("mindspore")


def leaf(shape, placements, seed=0, dtype="float64", *, requires_grad=True):
    """Return a leaf of small integers."""
    values = np.random.default_rng([seed, len(shape)]).integers(-3, 4, shape)
    return Leaf(values.astype(dtype), dtype, tuple(placements), requires_grad)


ROWS = (Shard(0),)


def square(call="Tensor.square", mode="backward", placements=ROWS):
    """Return a program of one call, differentiated, on three ranks."""
    leaves = {0: leaf((5, 3), placements), 2: leaf((5, 3), (Shard(1),), 1, requires_grad=False)}
    return Program((0, 0), (3,), leaves, (Step(call, (TensorRef(0),), {}, (1,)),), mode, (1,), (2,))


@pytest.mark.parametrize("mode", ["forward", "backward", "grad"])
@pytest.mark.parametrize("placements", [(Shard(0),), (Partial("sum"),), (Replicate(),)])
def test_a_right_program_is_equal(mode, placements):
    """Values and gradients of integers are compared to the bit on every rank."""
    (outcome,) = run_programs("mindspore", [square(mode=mode, placements=placements)])
    assert (outcome.kind, outcome.text, outcome.exact) == ("equal", "", True)
    assert outcome.compared == (3 if mode == "forward" else 6)
    assert outcome.gradients == (0 if mode == "forward" else 3)


def test_two_outputs_are_differentiated_with_their_own_seeds():
    """The gradient of several outputs is that of all of them, in both ways to differentiate."""
    leaves = {0: leaf((4, 3), (Shard(0),)), 3: leaf((4, 3), (Shard(1),), 1), 4: leaf((3, 4), (Replicate(),), 2)}
    steps = (
        Step("operator.mul", (TensorRef(0), 2.0), {}, (1,)),
        Step("mint.transpose", (TensorRef(0), 0, 1), {}, (2,), aliases=True),
    )
    programs = [Program((0, 0), (2,), leaves, steps, mode, (1, 2), (3, 4)) for mode in ("backward", "grad")]
    outcomes = run_programs("mindspore", programs)
    assert [(outcome.kind, outcome.text) for outcome in outcomes] == [("equal", "")] * 2


def broken(usual, name):
    """Return what is called for a call by name: some of them are broken."""
    if name == "Tensor.wrong":
        return lambda x: x * 2 if isinstance(x, DTensor) else x * 1
    if name == "Tensor.raises":
        return lambda x: x / (0 if not isinstance(x, DTensor) else "no number")
    if name == "Tensor.stops":
        return _gathers_on_one_rank
    return usual(name)


def _gathers_on_one_rank(x):
    if isinstance(x, DTensor) and x.device_mesh.coordinate == (0,):
        return x.redistribute(placements=[Replicate()]) * 1
    return x * 1


@pytest.fixture
def breakable(language, monkeypatch):
    """Let ranks, which are other processes, call what is broken on purpose."""
    from hyper_parallel.verify.checker import batch

    usual = batch._run_rank

    def run(*args):
        from hyper_parallel.verify.frameworks.mindspore import programs

        before = programs.call_named
        programs.call_named = partial(broken, before)
        try:
            return usual(*args)
        finally:
            programs.call_named = before

    monkeypatch.setattr(batch, "_run_rank", run)
    monkeypatch.setattr(language, "call_named", partial(broken, language.call_named))


def test_programs_after_a_failed_one_are_judged(breakable):
    """A wrong value, an error and a collective of one rank are findings; those around them are equal."""
    programs = [square(f"Tensor.{name}") for name in ("wrong", "raises", "square", "stops", "square")]
    kinds = [outcome.kind for outcome in run_programs("mindspore", programs)]
    assert kinds == ["wrong", "internal error", "equal", "hang", "equal"]


def test_a_gradient_after_a_failed_one_is_right(language):
    """What a failed differentiation leaves behind is cleared: MindSpore's next gradients would be zeros."""
    import mindspore

    x, seed = (mindspore.Tensor(np.ones((2, 3), np.float32)) for _ in range(2))

    def fail(leaves):
        doubled = leaves[0] * 2
        msg = f"of {doubled.shape}"
        raise ValueError(msg)

    for mode in ("backward", "grad"):
        with pytest.raises(ValueError, match=r"of \(2, 3\)"):
            language.gradients(fail, {0: x, 1: seed}, (0,), mode, (1,), ())
        found = language.gradients(lambda leaves: [leaves[0] * 3], {0: x, 1: seed}, (0,), mode, (1,), ())
        assert found["gradient", 0].asnumpy().tolist() == [[3.0] * 3] * 2


def test_programs_are_random_and_depend_on_their_number():
    """A generator makes the same programs again; many calls, chains, dtypes and gradients are among them."""
    generator = Generator("mindspore")
    programs = [generator.program(3, number, 4) for number in range(40)]
    sources = [source_of(program, Outcome("equal"), "mindspore", generator.language) for program in programs]
    again = [Generator("mindspore").program(3, number, 4) for number in (7, 2)]
    assert [source_of(p, Outcome("equal"), "mindspore", generator.language) for p in again] == [sources[7], sources[2]]
    assert {program.mode for program in programs} == {"forward", "backward", "grad"}
    assert {leaf.dtype for program in programs for leaf in program.leaves.values()} >= {"float64", "float32", "float16"}
    calls = {step.call for program in programs for step in program.steps}
    homes = {call.rpartition(".")[0] for call in calls}
    assert homes >= {"mint", "ops", "Tensor", "operator"}
    assert len(calls) > 80
    for source in sources:
        compile(source, "program.py", "exec")


def test_a_batch_is_counted():
    """Programs of a batch are compared on ranks that are processes, gradients among them."""
    batch = run_batch("mindspore", 3, range(16))
    assert batch.outcomes.total() == 16
    assert batch.outcomes["equal"] >= 4
    assert min(batch.compared, batch.gradients) > 0


def test_a_call_has_its_public_spellings(language):
    """Functions and methods are found by the operator's name, and by those that MindSpore dispatches."""
    from hyper_parallel.core.shard import rules
    from hyper_parallel.core.shard.entry import binder
    from hyper_parallel.core.shard.rule import find_rule

    rules.load()
    canonical = binder(find_rule("sum").signature)
    bound = canonical.bind((1.0,), {"dim": 0})
    spelled = language.forms("sum", bound, canonical, writes=False)
    assert {"mint.sum", "ops.sum", "Tensor.sum"} <= {name for name, _ in spelled}
    passed = [arguments(bound) for _, arguments in spelled]
    assert ([1.0], {"dim": 0}) in passed
    assert ([1.0], {"axis": 0}) in passed
    assert ([1.0, 0], {}) in passed
    assert language.forms("sum", bound, canonical, writes=True) == []


def test_what_is_no_truth_is_left_out(language):
    """Calls of which MindSpore's own results are wrong are left out for the operands of which they are."""
    assert language.unsound("ops.softmax", [(3, 1)], "float32").startswith("after a gradient of an axis of one element")
    assert language.unsound("ops.softmax", [(3, 2)], "float32") == ""
    assert language.unsound("ops.eigvals", [(0, 0)], "float32") == "its kernel is not known to serve empty operands"
    assert language.unsound("mint.add", [(0, 3)], "float32") == ""
    assert language.unsound("mint.split", [(4, 3)], "float32").startswith("its gradient is wrong where one of several")
    assert language.unsound("ops.log2", [(2, 3)], "float64") == "it rounds the logarithm of 2 to float32"
    assert language.unsound("ops.log2", [(2, 3)], "float32") == ""
    assert language.unsound("ops.hypot", [(2, 3)], "float64") == "it, or its gradient, is rounded to float32"
    assert language.unsound("mint.lerp", [(2, 3)], "float16") == "its gradient is float32"
    assert language.unsound("mint.lerp", [(2, 3)], "bfloat16") == ""
    assert language.unsound("mint.cross", [(2, 3, 1), (1, 3, 1)], "float32") == "it leaves elements unwritten"
    assert language.unsound("mint.cross", [(2, 3), (2, 3)], "float32") == ""


def test_a_cell_is_called_with_parameters(language):
    """Parameters of a cell are leaves of the program, in the call as in its source."""
    import mindspore

    x, w, b = (mindspore.Tensor(np.ones(shape, np.float32)) for shape in ((2, 3), (4, 3), (4,)))
    assert language.call_named("nn.Dense")(3, 4, x, w, b).asnumpy().tolist() == [[4.0] * 4] * 2
    text = language.source("nn.Dense", ["3", "4", "x", "w", "b"], {})
    assert text == "(lambda cell: cell._params.update(weight=w, bias=b) or cell.construct(x))(nn.Dense(3, 4))"
    assert language.source("nn.GELU", ["x"], {}) == "nn.GELU()(x)"
    values = {"nn": mindspore.nn, "x": x, "w": w, "b": b}
    assert eval(text, values).asnumpy().tolist() == [[4.0] * 4] * 2  # noqa: S307 - written two lines above


def test_a_reproducer_is_user_code_of_few_lines(language):
    """Differentiation, values, dtypes and constants are written as users write them, in twenty lines."""
    source = source_of(square(), Outcome("wrong"), "mindspore", language)
    assert "    return [*ops.GradOperation(get_all=True, sens_param=True)(body)(x0, x2), *kept]" in source
    assert len(source.splitlines()) <= MOST_LINES
    several = replace(square(mode="grad"), outputs=(1, 1), cotangents=(2, 2))
    source = source_of(several, Outcome("wrong"), "mindspore", language)
    assert len(source.splitlines()) <= MOST_LINES
    assert "    return (x1 * x2).sum() + (x1 * x2).sum()" in source
    assert "return [*mindspore.value_and_grad(body, (0,))(x0)[1], *kept]" in source
    assert language.values_of(np.zeros((0, 2), np.bool_), "bool") == (
        "Tensor(numpy.array([], numpy.bool_).reshape((0, 2)))"
    )
    from hyper_parallel.core.shard.sample import DType

    assert [language.literal(value) for value in (DType("bool"), DType("float32"), 2)] == [
        "mindspore.bool_", "mindspore.float32", "2",
    ]  # fmt: skip


def test_rounding_is_no_finding():
    """Programs of real values are compared within what perturbed repeats of them earn."""
    program = square("ops.exp", mode="grad")
    leaves = {number: replace(a, array=a.array * np.float64(0.37)) for number, a in program.leaves.items()}
    total = (*program.steps, Step("Tensor.sum", (TensorRef(1),), {}, (3,)))
    seeded = {**leaves, 4: replace(leaf((), (Replicate(),)), array=np.array(0.7), requires_grad=False)}
    program = replace(program, leaves=seeded, steps=total, outputs=(3,), cotangents=(4,), integral=False)
    (outcome,) = run_programs("mindspore", [program])
    assert (outcome.kind, outcome.exact) == ("equal", False)


def test_what_random_programs_found_stays_mended():
    """Keywords of methods, the gradient of relu6 where it bends, and counts of float16 are as on a single device."""
    bends = replace(leaf((4, 3), (Shard(0),), dtype="float32"), array=np.arange(-3, 9, dtype=np.float32).reshape(4, 3))
    seed = leaf((4, 3), (Replicate(),), 1, "float32", requires_grad=False)
    half = leaf((5, 3), (Shard(0),), dtype="float16", requires_grad=False)
    bending = Step("ops.relu6", (TensorRef(0),), {}, (1,))
    histogram = Step("ops.histc", (TensorRef(0),), {"bins": 4, "min": -2, "max": 2}, (1,))
    programs = [
        Program((0, 0), (3,), {0: leaf((1, 3, 1), (Shard(1),))}, (
            Step("Tensor.squeeze", (TensorRef(0),), {"axis": 0}, (1,)),
            Step("Tensor.squeeze", (TensorRef(0),), {}, (2,)),
        )),
        Program((0, 0), (3,), {0: bends, 2: seed}, (bending,), "backward", (1,), (2,)),
        Program((0, 0), (3,), {0: half}, (histogram,)),
    ]  # fmt: skip
    assert [(outcome.kind, outcome.text) for outcome in run_programs("mindspore", programs)] == [("equal", "")] * 3


def test_a_keyword_without_a_rule_is_refused():
    """A parameter that a composed operator does not have is refused in words, never ignored."""
    from hyper_parallel.errors import UnsupportedOperatorError
    from hyper_parallel.platform.mindspore.intercept import interception

    handler = interception().handlers["Squeeze"]
    with pytest.raises(UnsupportedOperatorError) as caught:
        handler(interception().dispatcher, None, (None,), {"depth": 2})
    assert str(caught.value) == (
        "operator Squeeze: depth=2 has no sharding rule; redistribute the operands and use to_local()"
    )
