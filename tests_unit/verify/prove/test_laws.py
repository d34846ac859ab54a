"""The laws on every small case: what they say of a primitive is what happens to numbers, for every split of a label."""

import itertools
import math

import numpy as np
import pytest

from hyper_parallel.verify.frameworks.contract.primitives import Constant, Opaque, Primitive, Reshape, Step
from hyper_parallel.verify.frameworks.contract.sizes import ONE, Size
from hyper_parallel.verify.prove.laws import Relation, UnprovenError, after

SIZES = {"s": 5, "a": 2, "b": 3}
SPLIT = Size(1, ("s",))
SPLITS = [bounds for n in (1, 2, 3, 4) for bounds in itertools.combinations_with_replacement(range(6), n - 1)]
REDUCTIONS = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}


def size(text):
    """Return the size of a label: ``s`` is split."""
    return Size(1, (text,))


def parts(bounds):
    """Return the ranges of the split label on all ranks, empty ones included."""
    return list(itertools.pairwise((0, *bounds, SIZES["s"])))


def held(value, relation, bounds, rng):
    """Return what every rank has of ``value`` in a relation."""
    ranges = parts(bounds)
    if relation.kind == "whole":
        return [value for _ in ranges]
    if relation.kind == "part":
        outer, factor = relation.outer.value(SIZES), relation.factor.value(SIZES)
        rows = value.reshape(*value.shape[: relation.dim], outer, SIZES["s"], factor, *value.shape[relation.dim + 1 :])
        return [
            np.take(rows, range(low, high), relation.dim + 1).reshape(
                *value.shape[: relation.dim], outer * (high - low) * factor, *value.shape[relation.dim + 1 :]
            )
            for low, high in ranges
        ]
    drawn = [rng.integers(-3, 4, value.shape).astype(float) for _ in ranges[1:]]
    if relation.reduce == "sum":
        return [value - sum(drawn), *drawn] if drawn else [value]
    sign = 1 if relation.reduce == "max" else -1
    return [value - sign * np.abs(each) for each in [*drawn, np.zeros(value.shape)]]


def agrees(locals_, value, relation, bounds):
    """Whether what ranks have is in the relation to ``value``."""
    scale = [
        len(locals_) ** relation.ranks * ((high - low) / SIZES["s"]) ** relation.share for low, high in parts(bounds)
    ]
    if relation.zero:
        return not value.any() and not any(each.any() for each in locals_)
    if relation.kind == "pending":
        stacked = np.stack([each / (factor or 1) for each, factor in zip(locals_, scale, strict=True)])
        return np.allclose(REDUCTIONS[relation.reduce](stacked, 0), value)
    wanted = held(value, Relation(relation.kind, relation.dim, relation.outer, relation.factor), bounds, None)
    return all(np.shape(x) == np.shape(y) and np.allclose(x, y * factor)
               for x, y, factor in zip(locals_, wanted, scale, strict=True))  # fmt: skip


def added(x, i, y):
    """Return ``x`` with the rows of ``y`` added at the indices ``i``."""
    out = x.copy()
    np.add.at(out, i.astype(int) % 2, y)
    return out


LETTERS = "sab"
# Functions with their description: labels by letter, what they are linear in, and the function on arrays.
FUNCTIONS = [
    ("sa->sa", {}, np.tanh),
    ("sa,a->sa", {}, lambda x, y: np.tanh(x) * np.cos(y)),
    ("sa,sa->sa", {"joint": (0, 1)}, np.add),
    ("sa,a->sa", {"joint": (0, 1)}, np.add),
    ("sa,sa->sa", {"each": (0, 1)}, np.multiply),
    ("sa,a->sa", {"each": (0, 1)}, np.multiply),
    ("sa->as", {"joint": (0,), "increasing": True, "moves": True}, np.transpose),
    ("sa->a", {"joint": (0,), "reduce": "sum"}, lambda x: x.sum(0)),
    ("sa->s", {"joint": (0,), "reduce": "sum"}, lambda x: x.sum(1)),
    ("sa->a", {"reduce": "max", "increasing": True}, lambda x: x.max(0)),
    ("sa->s", {"reduce": "max", "increasing": True}, lambda x: x.max(1)),
    ("sa->a", {"reduce": "prod"}, lambda x: x.prod(0)),
    ("sa,sb->ab", {"each": (0, 1), "reduce": "sum"}, lambda x, y: x.T @ y),
    ("as,sb->ab", {"each": (0, 1), "reduce": "sum"}, lambda x, y: x @ y),
    ("sa,ab->sb", {"each": (0, 1), "reduce": "sum"}, lambda x, y: x @ y),
    ("sa->sa", {"whole": frozenset({0}), "joint": (0,)}, lambda x: np.cumsum(x, 0)),
    ("sa->sa", {"whole": frozenset({1}), "joint": (0,)}, lambda x: np.cumsum(x, 1)),
    ("sa->sa", {"increasing": True}, np.exp),
    ("sa,sa->sa", {}, lambda x, y: np.where(x > 0, x, y)),
    ("ab,s,sb->ab", {"joint": (0, 2), "reduce": "sum", "whole": frozenset({1})}, added),
    ("as,b,bs->as", {"joint": (0, 2), "reduce": "sum", "whole": frozenset({1})}, added),
    ("ab,s->sb", {"each": (0,), "moves": True, "whole": frozenset({1})}, lambda x, i: x[i.astype(int) % 2]),
    ("as,b->bs", {"each": (0,), "moves": True, "whole": frozenset({1})}, lambda x, i: x[i.astype(int) % 2]),
]


def primitive(text, facts):
    """Return the description of a function."""
    left, _, right = text.partition("->")
    names = [tuple(map(LETTERS.index, term)) for term in left.split(",")]
    return Primitive(tuple(names), tuple(map(LETTERS.index, right)), **facts), left.split(","), right


def relations(term):
    """Return every relation in which an operand may be: one that has the split label is a part."""
    if "s" in term:
        return [Relation("part", term.index("s"))]
    pending = [Relation("pending", reduce=reduce, ranks=ranks)
               for reduce, ranks in (("sum", 0), ("sum", 1), ("max", 0), ("min", 0))]  # fmt: skip
    return [Relation("whole"), Relation("whole", ranks=-1), *pending]


def run(text, facts, function, renamed):
    """Compare the law with numbers on every split and relation; return how many cases it spoke of."""
    does, terms, right = primitive(text, facts)
    terms = [term.translate(renamed) for term in terms]
    shape = tuple(size(letter) for letter in right.translate(renamed))
    shapes = [tuple(map(size, term)) for term in terms]
    rng, spoken = np.random.default_rng(3), 0
    for given in itertools.product(*map(relations, terms)):
        needs = set()
        step = Step("f", does, tuple(range(len(terms))), shape)
        split = "s" if any("s" in term for term in terms) else ""
        try:
            relation = after(step, shapes, given, split, needs)
        except UnprovenError:
            continue
        spoken += 1
        for bounds in SPLITS:
            if needs and any(low == high for low, high in parts(bounds)):
                continue
            values = [rng.integers(-3, 4, [SIZES[letter] for letter in term]).astype(float) for term in terms]
            n = len(bounds) + 1
            locals_ = [
                held(value * n**each.ranks, each, bounds, rng) for value, each in zip(values, given, strict=True)
            ]
            results = [function(*each) for each in zip(*locals_, strict=True)]
            assert agrees(results, function(*values), relation, bounds), (text, given, relation, bounds)
    return spoken


@pytest.mark.parametrize("text, facts, function", FUNCTIONS, ids=lambda value: value if isinstance(value, str) else "")
def test_of_primitives(text, facts, function):
    """What the laws say of a labelled function holds for each split of a label into up to four parts, and pending."""
    spoken = run(text, facts, function, {})
    spoken += run(text, facts, function, str.maketrans("sa", "as"))
    spoken += run(text, facts, function, str.maketrans("s", "c"))
    assert spoken >= 2


SIZES["c"] = 4


@pytest.mark.parametrize(
    "source, target",
    [
        ("sa", ("sa",)),
        ("sab", ("sa", "b")),
        ("asb", ("as", "b")),
        ("abs", ("abs",)),
        ("asb", ("a", "sb")),
        ("s", ("s",)),
    ],
)
def test_of_reshapes(source, target):
    """A part of merged dims is what the laws say, and splitting them again gives the part back."""
    shape = tuple(map(size, source))
    merged = tuple(Size(1, tuple(sorted(term))) for term in target)
    given = Relation("part", source.index("s"))
    there = after(Step("view", Reshape(), (0,), merged), [shape], [given], "s", set())
    back = after(Step("view", Reshape(), (0,), shape), [merged], [there], "s", set())
    assert back == given
    value = np.arange(math.prod(SIZES[letter] for letter in source)).reshape([SIZES[letter] for letter in source])
    for bounds in SPLITS:
        local = [each.reshape([-1 if "s" in term else math.prod(SIZES[letter] for letter in term) for term in target])
                 if each.size else np.zeros([0 if "s" in term else math.prod(SIZES[letter] for letter in term)
                                             for term in target])
                 for each in held(value, given, bounds, None)]  # fmt: skip
        wanted = held(
            value.reshape([math.prod(SIZES[letter] for letter in term) for term in target]), there, bounds, None
        )
        assert all(np.array_equal(x, y) for x, y in zip(local, wanted, strict=True))


def test_shares_of_a_mean():
    """A sum divided by the local size is not a pending sum, until it is multiplied by it: each rank has its share."""
    total = after(Step("sum", Primitive(((0,),), (), reduce="sum", joint=(0,)), (0,), ()), [(SPLIT,)],
                  [Relation("part", 0)], "s", set())  # fmt: skip
    assert total == Relation("pending", reduce="sum")
    divided, needs = Primitive(((),), (), each=(0,), per=(SPLIT,)), set()
    mean = after(Step("div", divided, (0,), ()), [()], [total], "s", needs)
    assert (mean.share, needs) == (-1, {("full", SPLIT)})
    times = Primitive(((),), (), each=(0,), times=(SPLIT,))
    assert after(Step("mul", times, (0,), ()), [()], [mean], "s", set()) == total


@pytest.mark.parametrize(
    "step, shapes, operands, message",
    [
        (Step("f", Opaque("unknown"), (), ()), [], [], "unknown"),
        (Step("f", Primitive(((0,), (0,)), (0,)), (0, 1), (SPLIT,)), [(SPLIT,), (SPLIT,)],
         [Relation("part", 0), Relation("whole")],
         "f: operand 1 has all elements of a dim that is split in another one"),
        (Step("f", Primitive(((0,),), (0,), whole=frozenset({0})), (0,), (SPLIT,)), [(SPLIT,)], [Relation("part", 0)],
         "f: its result depends on all elements along a split dim"),
        (Step("f", Primitive(((0,),), ()), (0,), ()), [(SPLIT,)], [Relation("part", 0)],
         "f: its result depends on all elements along a split dim"),
        (Step("f", Primitive(((),), (), values=(SPLIT,)), (0,), ()), [()], [Relation("whole")],
         "f: its values depend on the local size"),
        (Step("f", Primitive(((0,), ()), (), reduce="sum", joint=(0,)), (0, 1), ()), [(SPLIT,), ()],
         [Relation("part", 0), Relation("pending", reduce="sum")], "f: a pending operand meets a split one"),
        (Step("f", Primitive(((), (0,)), (), reduce="sum", joint=(0, 1)), (0, 1), ()), [(), (SPLIT,)],
         [Relation("pending", reduce="max"), Relation("part", 0)], "f: a pending operand meets a split one"),
        (Step("f", Primitive(((), (0,), ()), (), reduce="sum", joint=(0, 1, 2)), (0, 1, 2), ()), [(), (SPLIT,), ()],
         [Relation("pending", reduce="sum"), Relation("part", 0), Relation("whole")],
         "f: a pending operand meets a split one"),
        (Step("f", Primitive(((), (0,), (0,)), (0,), joint=(0, 1)), (0, 1, 2), (SPLIT,)), [(), (SPLIT,), (SPLIT,)],
         [Relation("pending", reduce="sum"), Relation("part", 0), Relation("part", 0)],
         "f: a pending operand meets a split one"),
        (Step("f", Primitive(((), ()), (), each=(0,), moves=True), (0, 1), ()), [(), ()],
         [Relation("pending", reduce="max"), Relation("pending", reduce="max")],
         "f: not known to be increasing, and an operand is a pending max"),
        (Step("f", Primitive(((),), ()), (0,), ()), [()], [Relation("pending", reduce="sum")],
         "f: not linear, and an operand is a pending sum"),
        (Step("f", Primitive(((), ()), (), each=(0, 1)), (0, 1), ()), [(), ()],
         [Relation("pending", reduce="sum")] * 2, "f: not linear, and an operand is a pending sum"),
        (Step("f", Primitive(((),), ()), (0,), ()), [()], [Relation("pending", reduce="max")],
         "f: not known to be increasing, and an operand is a pending max"),
        (Step("f", Primitive(((),), ()), (0,), ()), [()], [Relation("whole", ranks=-1)],
         "f: not linear, and an operand is scaled"),
        (Step("f", Constant(), (), (SPLIT, SPLIT)), [], [], "f: two dims of its result are split"),
        (Step("f", Primitive(((),), (0,)), (0,), (SPLIT,)), [()], [Relation("whole")],
         "f: dim 0 of its result has local size s"),
        (Step("view", Reshape(), (0,), (size("a"), SPLIT)), [(SPLIT, size("a"))], [Relation("part", 0)],
         "view: the part is not a block of the result"),
    ],
)  # fmt: skip
def test_refusals(step, shapes, operands, message):
    """Where no law applies, the reason says which one is missing."""
    with pytest.raises(UnprovenError) as raised:
        after(step, shapes, operands, "s", set())
    assert str(raised.value) == message


def test_sizes():
    """Products of sizes are divided where the quotient is one; formulas only by themselves."""
    a, formula = size("a"), Size(0, ("a",), "a - 1")
    assert str(Size(2) * a * SPLIT) == "2*a*s"
    assert (a * SPLIT).over(SPLIT) == a
    assert a.over(SPLIT) is None
    assert Size(6).over(Size(4)) is None
    assert (formula.over(formula), formula.over(a), formula.value(SIZES)) == (ONE, None, -1)
    assert str(formula * a) == "(a - 1)*(a)"
