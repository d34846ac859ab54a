"""Rows of rules: what is proven, what is tested, and rows that are wrong."""

import json
from dataclasses import replace

import pytest

from hyper_parallel.cli import main
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.shard.rule import Row
from hyper_parallel.platform.select import current_platform, use_platform
from hyper_parallel.verify.frameworks.contract.primitives import Constant, Graph, Input, Opaque, Primitive, Step, kinds
from hyper_parallel.verify.frameworks.contract.sizes import Size
from hyper_parallel.verify.prove import operators
from hyper_parallel.verify.prove.checker import prove_row
from hyper_parallel.verify.prove.operators import graphs_of, prove_operator, prove_sample_row

pytestmark = pytest.mark.platforms("torch")

R, SUM, AVG = Replicate(), Partial("sum"), Partial("avg")


@pytest.fixture(scope="module")
def platform():
    """Return PyTorch's platform."""
    with use_platform("torch"):
        yield current_platform()


@pytest.fixture(scope="module")
def graphs(platform):
    """Return the first sample of some operators as primitives."""
    return {op: next(graphs_of(platform, op)) for op in ("linear", "softmax", "amax", "mul", "add", "relu")}


@pytest.mark.parametrize("op", ["linear", "softmax", "mul"])
def test_right_rows(op, platform, graphs):
    """Every row of these rules is proven, forward and backward."""
    for row in graphs[op].answer.rows:
        assert prove_sample_row(platform, graphs[op], row).level == "proven", row


@pytest.mark.parametrize(
    "op, row, why",
    [
        ("linear", Row((Shard(1), Shard(1), R), (SUM,)), "add: not linear, and an operand is a pending sum"),
        ("linear", Row((Shard(1), Shard(1), SUM), (R,)), "it is a pending sum, not whole"),
        ("linear", Row((Shard(1), R, SUM), (SUM,)), "operand 1: dim 1 of size s54 must be split as well"),
        ("softmax", Row((Shard(1),), (Shard(1),)), "sub: a pending operand meets a split one"),
        ("mul", Row((SUM, SUM), (SUM,)), "mul: not linear, and an operand is a pending sum"),
        ("add", Row((SUM, R), (SUM,)), "add: not linear, and an operand is a pending sum"),
        ("relu", Row((SUM,), (SUM,)), "relu: not linear, and an operand is a pending sum"),
        ("relu", Row((Shard(0),), (Shard(1),)), "a result of size s73 is split"),
    ],
)
def test_wrong_rows(op, row, why, graphs):
    """A wrong row is not proven, for a reason: a bias that every rank adds, a reduction that is forgotten."""
    proof = prove_row(graphs[op].graph, row)
    assert not proof.holds
    assert proof.forward == why


@pytest.mark.parametrize("op, holds", [("relu", True), ("exp", False), ("floor", True), ("tanh", False)])
def test_pending_extrema(op, holds, platform):
    """Relu of a pending maximum or minimum has its gradient where the operand has; of other functions none is known."""
    made = next(graphs_of(platform, op))
    for reduce in ("max", "min"):
        place = Partial(reduce)
        assert prove_row(made.graph, Row((place,), (place,))).holds == holds
        assert not prove_row(made.graph, Row((place,), (R,))).holds


def test_a_gradient_that_ranks_share(graphs):
    """The gradient of a whole operand that meets split ones is a pending sum; a whole one would be a multiple."""
    graph, split = graphs["linear"].graph, Row((Shard(0), R, R), (Shard(0),))
    assert prove_row(graph, Row((R, R, R), (R,))).holds
    assert prove_row(graph, split).holds
    x, weight, bias, _ = graph.gradients
    proof = prove_row(replace(graph, gradients=(x, graph.inputs[1], bias, None)), split)
    assert proof.backward == "it is whole, not a pending sum"
    assert prove_row(replace(graph, gradients=(x, weight, None, None)), split).holds


def test_paths_of_small_sizes():
    """A graph of sizes up to a number does not prove a row for every size; the limits of PyTorch are no other path."""
    size = Size(1, ("s28",))
    steps = (Step("x", Input(), (), (size,)), Step("exp", Primitive(((0,),), (0,)), (0,), (size,)))
    for bound, why in (
        ("s28 <= 25", "another algorithm is used where dim 0 of operand 0 > 25"), ("s28 <= 16777216", ""),
        ("s28 >= 2", ""), ("-s28 <= 25", ""),
    ):  # fmt: skip
        graph = Graph(steps, (0,), (1,), assumptions=((bound, ("s28",)),))
        proof = prove_row(graph, Row((Shard(0),), (Shard(0),)))
        assert (proof.forward, len(proof.sizes)) == (why, 1)


def test_conditions_on_sizes(platform):
    """A view merges a split dim if the ranks divide it; the row that does not ask for that is not proven."""
    made = next(graphs_of(platform, "view"))
    row = next(row for row in made.answer.rows if row.even and not row.cut)
    proven = prove_sample_row(platform, made, row)
    assert (proven.level, proven.conditions) == ("proven", ("the number of ranks divides dim 0 of operand 0",))
    unasked = prove_sample_row(platform, made, replace(row, even=(), sizes=()))
    assert unasked.why == "the row does not ask that the number of ranks divides dim 0 of operand 0"


def test_sizes_that_a_sample_gives_as_numbers(platform):
    """A dim of size 1 that broadcasts, or of 3 that the operator demands, stays this number, and cannot be split."""
    for op, sizes in (("mul", {"1"}), ("cross", {"1", "3"})):
        for made in graphs_of(platform, op):
            operands = [made.graph.steps[number].shape for number in made.graph.inputs]
            numbers = {(at, dim, str(size)) for at, shape in enumerate(operands) for dim, size in enumerate(shape)
                       if not size.symbols}  # fmt: skip
            assert {size for *_, size in numbers} <= sizes
            assert {prove_sample_row(platform, made, row).level for row in made.answer.rows} == {"proven"}
            for at, dim, size in numbers:
                places = [Shard(dim) if at == each else R for each in range(len(made.answer.rows[0].inputs))]
                proof = prove_row(made.graph, replace(made.answer.rows[0], inputs=tuple(places)))
                assert proof.forward == f"a dim of size {size} is split"


def test_as_many_results_as_a_dim_is_long(platform, monkeypatch):
    """Results that are alike are proven for every number of them; of others, no row is proven."""
    made = next(graphs_of(platform, "unbind"))
    assert len(made.graph.outputs) == made.letters["b"]
    assert {prove_sample_row(platform, made, row).level for row in made.answer.rows} == {"proven"}
    wrong = Row((Shard(1),), (R,) * len(made.graph.outputs))
    assert prove_sample_row(platform, made, wrong).why == "a dim of size 13 is split"
    monkeypatch.setattr(operators, "kinds", id)
    made = next(graphs_of(platform, "unbind"))
    assert (made.graph, made.why) == (None, "its results are not alike")


def test_kinds_of_steps():
    """A graph with more results and operands that are alike has the same kinds; one with another step has not."""
    size = Size(1, ("s",))
    piece = Primitive(((0, 1),), (0,), whole=frozenset({1}), joint=(0,), moves=True)

    def graph(count, does=piece):
        steps = [Step("x", Input(), (), (size, Size(count)))]
        steps += [Step("unbind", piece, (0,), (size,)) for _ in range(count - 1)] + [
            Step("unbind", does, (0,), (size,))
        ]
        together = Primitive(((0,),) * count, (0,), joint=tuple(range(count)))
        steps.append(Step("add", together, tuple(range(1, count + 1)), (size,)))
        return Graph(tuple(steps), (0,), (*range(1, count + 1), count + 1))

    assert kinds(graph(2)) == kinds(graph(5))
    for other in (replace(piece, moves=False), Constant(), Opaque("no")):
        assert kinds(graph(2)) != kinds(graph(5, other))
    whole = replace(graph(2), outputs=(1, 2))
    assert kinds(whole) != kinds(graph(2))


def test_of_the_command(capsys):
    """Each row has a level, a row that is not proven a reason; JSON has the same."""
    assert main(["prove", "ops", "--op", "maximum", "flatten", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    levels = {(row["row"], row["level"]) for row in document["rows"]}
    assert ("Shard(0), Shard(0) -> Shard(0)", "proven") in levels
    assert ("Partial(max), Partial(max) -> Partial(max)", "tested") in levels
    assert (document["ok"], document["composed"]) == (True, ["flatten"])
    assert all(row["why"] for row in document["rows"] if row["level"] != "proven")


def test_random_numbers(platform):
    """What ranks draw by global indices are parts of what one device draws; no rank has all of it."""
    made = next(graphs_of(platform, "uniform"))
    assert {prove_sample_row(platform, made, row).level for row in made.answer.rows} == {"proven"}
    assert made.graph is None
    assert prove_sample_row(platform, made, Row((Shard(0),), (R,))).level == "tested"


def test_one_call_on_all_ranks(platform):
    """Ranks that have all operands compute what one device does, whatever that is, unless it is random."""
    made = next(graphs_of(platform, "masked_scatter"))
    row = Row((R, R, R), (R,))
    assert prove_sample_row(platform, replace(made, graph=None), row).level == "proven"
    for other in (
        replace(made, graph=None, why="unknown", sample=replace(made.sample, random=True)),
        replace(made, graph=None, why="unknown", answer=replace(made.answer, localize=lambda *_: None)),
    ):
        assert prove_sample_row(platform, other, row).why == "unknown"
    assert prove_sample_row(platform, replace(made, graph=None, why="unknown"), Row((R,) * 3, (SUM,))).why == "unknown"


@pytest.mark.parametrize("op", ["scatter_add", "index", "rfft", "floor", "bilinear"])
def test_operators_that_write_or_look_up(op, platform):
    """Every row of the first sample is proven; a row that splits another dim of the result is not."""
    made = next(graphs_of(platform, op))
    for row in made.answer.rows:
        assert prove_sample_row(platform, made, row).level == "proven", row
        changed = tuple(R if place.is_shard() else Shard(0) for place in row.outputs)
        assert prove_sample_row(platform, made, replace(row, outputs=changed)).level == "tested", row


def test_of_what_cannot_be_traced(platform, capsys):
    """An operator that decides by values what it does is tested; a rule without rows is assumed, with the reason."""
    assert {row.level for row in prove_operator(platform, "multinomial")} <= {"tested", "assumed"}
    assert [row.level for row in prove_operator(platform, "unique_consecutive")] == ["assumed"]
    assert main(["prove", "ops", "--op", "neg"]) == 0
    assert "proven" in capsys.readouterr().out


def test_an_operator_that_has_no_rule(capsys):
    """A name that no rule has is invalid input."""
    assert main(["prove", "ops", "--op", "linera"]) == 2
    error = "hyper-parallel: error: --op: there is no operator 'linera'; did you mean linear or bilinear?\n"
    assert capsys.readouterr().err == error
