"""Sizes 0 and 1: a graph for general sizes is the operator there too, or the report names the sizes."""

from dataclasses import replace

import pytest

from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.core.shard.rule import Row
from hyper_parallel.platform.select import current_platform, use_platform
from hyper_parallel.verify.frameworks.contract.primitives import (
    Constant,
    Graph,
    Input,
    Opaque,
    Primitive,
    Reshape,
    Step,
)
from hyper_parallel.verify.frameworks.contract.sizes import ONE, Size
from hyper_parallel.verify.frameworks.contract.special_sizes import at_sizes, is_special_case, without_special_sizes
from hyper_parallel.verify.prove.checker import prove_row
from hyper_parallel.verify.prove.operators import graphs_of, prove_operator
from hyper_parallel.verify.prove.size_words import excluded_sizes

pytestmark = pytest.mark.platforms("torch")

A, B = Size(1, ("s1",)), Size(1, ("s2",))


@pytest.fixture(scope="module")
def platform():
    """Return PyTorch's platform."""
    with use_platform("torch"):
        yield current_platform()


def conditions(run, *shapes):
    """Return the conditions on sizes of a function's graph."""
    import torch

    from hyper_parallel.verify.frameworks.torch.primitives import traced

    operands = [torch.zeros(shape) for shape in shapes]
    graph = traced(lambda tensors, _: run(*tensors), operands, [True] * len(operands))
    return [text for text, _ in graph.assumptions]


def test_functions_that_are_the_same_at_every_size():
    """No size is left out if a function takes the same steps, or steps with the same result, at size 1 and 0."""
    import torch

    for run, shapes in (
        (torch.relu, [(11, 13)]),
        (lambda x, y: x + y, [(11, 13), (13,)]),
        (lambda x, y: x @ y.t(), [(11, 13), (17, 13)]),
        (lambda x: x.softmax(-1), [(11, 13)]),
        (lambda x: x.mean(0), [(11, 13)]),
        (lambda x: x.t().contiguous().relu(), [(11, 13)]),
    ):
        assert conditions(run, *shapes) == [], run


@pytest.mark.parametrize(
    "run, excluded",
    [
        (lambda x: x * 2 if x.shape[0] == 1 else x * 3, {"Ne(s28, 1)"}),
        (lambda x: x * 2 if x.shape[0] * x.shape[1] < 2 else x * 3, {"Ne(s28*s73, 1)"}),
        (lambda x: x.t() * 2 if x.t().is_contiguous() else x.t() * 3, {"Ne(s28, 1)", "Ne(s73, 1)"}),
        (lambda x: x.sum() * 2 if x.numel() < 2 else x.sum() * 3, {"Ne(s28, 0)", "Ne(s73, 0)", "Ne(s28*s73, 1)"}),
    ],
)
def test_functions_that_are_others_at_some_sizes(run, excluded):
    """A size at which a function computes something else is left out of the proof, also if layouts decide."""
    assert set(conditions(run, (11, 13))) == excluded


def graph_of(*steps, inputs=(0,), output=None, **facts):
    """Return a graph of steps whose last one is the result."""
    return Graph(tuple(steps), inputs, (len(steps) - 1 if output is None else output,), **facts)


def given(*shape):
    """Return an operand."""
    return Step("x", Input(), (), shape, "f")


MOVED = {"joint": (0,), "increasing": True, "moves": True}


def test_steps_that_pass_on_their_operand():
    """At size 1, an expansion, a sum and a product with the size are the operand; of other sizes they are not."""
    expand = Step("expand", Primitive(((0, None),), (0, 1), frozenset({1}), **MOVED), (0,), (A, B), "f")
    total = Step("sum", Primitive(((0, 1),), (0,), reduce="sum", joint=(0,)), (0,), (A,), "f")
    mean = Step("div", Primitive(((0,),), (0,), each=(0,), per=(B,), numbers="[]"), (1,), (A,), "f")
    for step, shape, wanted in ((expand, (A, ONE), (A, B)), (total, (A, B), (A,))):
        graph = graph_of(given(*shape), step)
        shapes = [tuple(at_sizes(size, {"s2": 1}) for size in each) for each in (shape, wanted)]
        special = graph_of(given(*shapes[0]), Step("view", Reshape(), (0,), shapes[1], "f"))
        assert is_special_case(graph, special, {"s2": 1})
        assert not is_special_case(graph, special, {"s1": 1})
    graph = graph_of(given(A, B), total, mean)
    assert is_special_case(graph, graph_of(given(A, ONE), replace(total, shape=(A,))), {"s2": 1})


def test_steps_that_differ():
    """Another function, argument, order of operands, constant or unknown step is another value."""
    does = Primitive(((0,), (0,)), (0,), joint=(0, 1), numbers="[2]")
    graph = graph_of(given(A), given(A), Step("sub", does, (0, 1), (A,), "f"), inputs=(0, 1))
    one = given(ONE)

    def special(name="sub", does=does, operands=(0, 1), **facts):
        return graph_of(one, one, Step(name, does, operands, (ONE,), "f"), inputs=(0, 1), **facts)

    at = {"s1": 1}
    assert is_special_case(graph, special(), at)
    for other in (
        special(name="add"), special(does=replace(does, numbers="[3]")), special(operands=(1, 0)),
        special(does=Opaque("unknown")), special(does=Constant(number="1"), operands=()),
        special(no_backward="none"), special(gradients=(0, None)), special(output=0),
    ):  # fmt: skip
        assert not is_special_case(graph, other, at)
    product = graph_of(given(A), given(A), Step("mul", Primitive(((0,), (0,)), (0,), each=(0, 1)), (0, 1), (A,), "f"),
                       inputs=(0, 1))  # fmt: skip
    swapped = graph_of(one, one, Step("mul", Primitive(((0,), (0,)), (0,), each=(0, 1)), (1, 0), (ONE,), "f"),
                       inputs=(0, 1))  # fmt: skip
    assert is_special_case(product, swapped, at)
    unknown = graph_of(given(A), Step("empty", Constant(), (), (A,), "f"), Step("empty", Constant(), (), (A,), "f"))
    same = graph_of(one, Step("empty", Constant(), (), (ONE,), "f"), output=1)
    assert not is_special_case(replace(unknown, outputs=(2,)), same, at)


def test_selected_indices():
    """The index that is selected of one element is 0; of more elements it counts."""

    def selected(index, size):
        does = Primitive(((0, 1),), (1,), whole=frozenset({0}), numbers=f"[0, {index}]", **MOVED)
        return graph_of(given(size, A), Step("select", does, (0,), (A,), "f"))

    assert is_special_case(selected(0, B), selected(-1, ONE), {"s2": 1})
    assert not is_special_case(selected(0, Size(3)), selected(1, Size(3)), {"s2": 1})


def test_conditions_that_stay():
    """A condition stays if the operator cannot be traced at the size, or is another one there."""
    step = Step("exp", Primitive(((0,),), (0,)), (0,), (A,), "f")
    graph = graph_of(given(A), step, assumptions=(("Ne(s1, 1)", ("s1",)), ("s1 >= 2", ("s1",))))

    def retrace(values):
        size = at_sizes(A, values)
        return graph_of(given(size), replace(step, shape=(size,)))

    assert without_special_sizes(graph, retrace).assumptions == ()
    assert without_special_sizes(graph, lambda _: None).assumptions == (("Ne(s1, 0)", ("s1",)), ("Ne(s1, 1)", ("s1",)))
    with_own = (("s2 >= 3", ("s2",)),)
    asked = without_special_sizes(graph, lambda values: replace(retrace(values), assumptions=with_own))
    assert asked.assumptions == with_own
    other = replace(graph, assumptions=(("Ne(s1, 1)", ("s1",)), ("s1 <= 25", ("s1",))))
    assert without_special_sizes(other, retrace) == other


def test_sizes_in_words(platform):
    """What a proof leaves out is named by the operands' dims, without symbols."""
    names = {"s1": "dim 0 of operand 0", "s2": "dim 1 of operand 0"}
    for condition, words in (
        ("Ne(s1*s2, 1)", "dim 0 of operand 0 = 1 and dim 1 of operand 0 = 1"),
        ("s1 >= 2", "dim 0 of operand 0 < 2"),
        ("Eq(Mod(s1, 2), 0)", "(dim 0 of operand 0) % (2) != 0"),
        ("Ne((s1//2), 1)", "(dim 0 of operand 0 // 2) = 1"),
        ("(FloatTrueDiv(1.0, FloatPow(ToFloat(s1), 0.5))) >= 0.0", "(1.0 / (dim 0 of operand 0) ** 0.5) < 0.0"),
        ("Eq(s1, 1) | Eq(s2, 0)", "those without: Eq(dim 0 of operand 0, 1) | Eq(dim 1 of operand 0, 0)"),
    ):
        assert excluded_sizes(condition, names) == words
    made = next(graphs_of(platform, "relu"))
    known = replace(made.graph, assumptions=(("Ne(s73, 1)", ("s73",)),))
    assert prove_row(known, Row((Shard(0),), (Shard(0),))).sizes == ("dim 1 of operand 0 = 1",)


@pytest.mark.parametrize("op", ["add", "linear", "layer_norm", "gelu"])
def test_rows_without_exceptions(op, platform):
    """Rows of these operators are proven for every size."""
    rows = prove_operator(platform, op)
    assert {(row.level, row.sizes) for row in rows} == {("proven", ())}
