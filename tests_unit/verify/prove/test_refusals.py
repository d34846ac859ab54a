"""What the laws, the checker and the reports answer where something is not proven, on graphs made by hand."""

from dataclasses import replace

import pytest

from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.shard.rule import Row
from hyper_parallel.platform.select import current_platform, use_platform
from hyper_parallel.verify.frameworks.contract.primitives import Constant, Graph, Input, Primitive, Reshape, Step
from hyper_parallel.verify.frameworks.contract.sizes import Size
from hyper_parallel.verify.prove.checker import prove_row
from hyper_parallel.verify.prove.laws import Relation, UnprovenError, after
from hyper_parallel.verify.prove.operators import ProvenRow
from hyper_parallel.verify.prove.report import ProofReport

S, A, LESS = Size(1, ("s",)), Size(1, ("a",)), Size(0, ("s",), "s - 1")
PART, WHOLE, ZERO = Relation("part", 0), Relation("whole"), Relation("whole", zero=True)
R, MAX = Replicate(), Partial("max")

pytestmark = pytest.mark.platforms("torch")


@pytest.fixture
def platform():
    """Return PyTorch's platform."""
    with use_platform("torch"):
        yield current_platform()


@pytest.mark.parametrize(
    "does, shape, operands, message",
    [
        (Input(), (S,), [], "f: an operand that was not given"),
        (Primitive(((0,),), (), reduce="max", joint=(0,)), (), [Relation("part", 0, ranks=1)],
         "f: a max of scaled values"),
        (Primitive(((0,), ()), (), reduce="sum", joint=(0, 1)), (), [PART, WHOLE],
         "f: operand 1 would be added once per rank"),
        (Primitive(((0, 1), (0, 1)), (0, 1)), (S, S), [PART, Relation("part", 1)],
         "f: operands are split along different dims"),
        (Primitive(((0, 0),), (0,)), (S,), [PART], "f: two dims of one operand are split"),
        (Primitive(((),), (), moves=True), (), [Relation("pending", reduce="max", ranks=1)],
         "f: a pending max is scaled"),
        (Primitive(((), ()), (), joint=(0, 1)), (),
         [Relation("pending", reduce="sum"), Relation("pending", reduce="max")],
         "f: operands are pending by max and sum"),
        (Primitive(((),), (), times=(A, LESS)), (), [WHOLE], "a factor s - 1 that is not a product of sizes"),
        (Constant(), (LESS,), [], "f: a dim of size s - 1 is split"),
        (Primitive(((0,),), (0,)), (Size(2, ("s",)),), [PART], "f: dim 0 of its result has local size 2*s"),
    ],
)  # fmt: skip
def test_laws_that_do_not_apply(does, shape, operands, message):
    """A law is refused with the reason where its conditions do not hold."""
    step = Step("f", does, tuple(range(len(operands))), shape)
    with pytest.raises(UnprovenError) as raised:
        after(step, [()] * len(operands), operands, "s", set())
    assert str(raised.value) == message


def test_zeros():
    """Zero stays zero under a linear function of zeros, and under a product with a zero factor."""
    added = Step("add", Primitive(((0,), (0,)), (0,), joint=(0, 1)), (0, 1), (S,))
    assert after(added, [(S,), (S,)], [ZERO, ZERO], "s", set()) == ZERO
    assert after(added, [(S,), (S,)], [ZERO, PART], "s", set()) == PART
    times = Step("mul", Primitive(((0,), (0,)), (0,), each=(0, 1)), (0, 1), (S,))
    assert after(times, [(S,), (S,)], [ZERO, PART], "s", set()) == ZERO
    assert after(Step("zeros", Constant(zero=True), (), (S,)), [], [], "s", set()) == ZERO


def graph(does, source=(S,), result=(S,), **facts):
    """Return a graph of one step with one operand."""
    operands = (0,) if not isinstance(does, Constant) else ()
    return Graph((Step("x", Input(), (), source), Step("f", does, operands, result)), (0,), (1,), **facts)


def test_a_result_that_is_zero():
    """A zero result is in every placement that its local sizes fit."""
    zeros = graph(Constant(zero=True))
    assert prove_row(zeros, Row((Shard(0),), (Shard(0),))).holds
    whole = prove_row(zeros, Row((Shard(0),), (R,)))
    assert whole.forward == "it is zero with local sizes in dims [0], not whole"
    numbers = graph(Constant(zero=True), (S,), (A,))
    assert prove_row(numbers, Row((Shard(0),), (R,))).holds
    assert prove_row(numbers, Row((Shard(0),), (Partial("sum"),))).holds


@pytest.mark.parametrize(
    "numbers, place, why",
    [
        ("b", "sum", "of a result of booleans no sum is taken"),
        ("b", "max", "of a result of booleans no max is taken"),
        ("i", "avg", "of a result of integers no avg is taken"),
        ("c", "any", "of a result of complex numbers no any is taken"),
        ("b", "any", ""),
        ("i", "sum", ""),
        ("c", "avg", ""),
    ],
)
def test_results_of_which_nothing_is_reduced(numbers, place, why):
    """A pending value has a dtype that the library reduces; of operands that cannot be pending nothing is claimed."""
    x, zeros = Step("x", Input(), (), (S,), "f"), Step("f", Constant(zero=True), (), (A,), numbers)
    assert prove_row(Graph((x, zeros), (0,), (1,)), Row((Shard(0),), (Partial(place),))).forward == why
    impossible = Graph((Step("x", Input(), (), (A,), "b"), zeros), (0,), (1,))
    assert prove_row(impossible, Row((Partial("sum"),), (Partial(place),))).holds


def test_a_part_of_each_block():
    """A split dim that is merged behind another one is not a part of the merged dim."""
    proof = prove_row(graph(Reshape(), (A, S), (Size(1, ("a", "s")),)), Row((Shard(1),), (Shard(0),)))
    assert proof.forward == "of dim 0 ranks have rows of each of a blocks"


def test_a_dim_without_a_symbol():
    """A dim whose size is a number, or a formula, cannot be split in a proof for all sizes."""
    same, row = Primitive(((0,),), (0,)), Row((Shard(0),), (Shard(0),))
    assert prove_row(graph(same, (Size(12),), (Size(12),)), row).forward == "a dim of size 12 is split"
    assert prove_row(graph(same, (LESS,), (LESS,)), row).forward == "a dim of size s - 1 is split"


def test_the_gradient_of_an_extremum():
    """A pending maximum has a gradient only where the operator moves elements or is strict, and none that is whole."""
    steps = (
        Step("x", Input(), (), (A,)),
        Step("f", Primitive(((0,),), (0,), increasing=True, moves=True), (0,), (A,)),
        Step("dy", Input(), (), (A,)),
        Step("g", Primitive(((0,),), (0,), joint=(0,)), (2,), (A,)),
    )
    moved = Graph(steps, (0,), (1,), (2,), (3,))
    assert prove_row(moved, Row((MAX,), (MAX,))).holds
    exp = Step("f", Primitive(((0,),), (0,), increasing=True), (0,), (A,))
    computed = Graph((steps[0], exp, *steps[2:]), (0,), (1,), (2,), (3,))
    proof = prove_row(computed, Row((MAX,), (MAX,)))
    assert (proof.forward, proof.backward) == ("", "the gradient of an extremum goes to the ranks that attain it")
    strict = replace(exp, does=replace(exp.does, strict=True))
    assert prove_row(Graph((steps[0], strict, *steps[2:]), (0,), (1,), (2,), (3,)), Row((MAX,), (MAX,))).holds
    floor = Graph((*computed.steps[:3], Step("g", Constant(zero=True), (), (A,))), (0,), (1,), (2,), (3,))
    assert prove_row(floor, Row((MAX,), (MAX,))).holds
    reduced = prove_row(moved, Row((MAX,), (R,)))
    assert reduced.forward == "it is a pending max, not whole"
    assert reduced.backward == "it is whole, not whole times n^-99"


def test_the_report_of_operators(platform):
    """Refuted rows are listed; rows that are tested are counted by reason, six operators named; details list all."""
    ops = ["relu", "exp", "neg", "tanh", "sin", "cos", "abs", "relu"]
    rows = [ProvenRow(op, 0, "S", "tested", "no law") for op in ops]
    rows += [
        ProvenRow("add", 1, "P", "refuted", "it differs", ("even",), ("l > 0",)),
        ProvenRow("mul", 0, "S", "proven"),
    ]
    report = ProofReport(rows=rows, composed=["flatten"])
    lines = report.text().splitlines()
    refuted = ["refuted  add sample 1: P", "    it differs", "    even", "    not covered: local sizes with l > 0"]
    assert lines[-6:-2] == refuted
    assert lines[-2:] == ["not proven:", "    8 no law (relu, exp, neg, tanh, sin, cos and 1 more)"]
    assert "1 operators have no rows of their own: they are composed of others" in lines
    assert (report.ok, report.json()["composed"]) == (False, ["flatten"])
    report.detailed = True
    assert report.text().splitlines()[-1] == "proven   mul sample 0: S"
    assert not ProofReport().ok
    few = ProofReport(rows=rows[:2])
    assert few.ok
    assert few.text().splitlines()[-1] == "    2 no law (relu, exp)"
