"""Rows that are not proven: rules that are wrong, cannot be traced, or answer otherwise; and plans with such calls."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hyper_parallel import Partial, Replicate, Shard, init_device_mesh
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard import rule as rules
from hyper_parallel.core.shard.rule import LocalCall, Row
from hyper_parallel.platform.select import current_platform, use_platform
from hyper_parallel.transport.base import use_transport
from hyper_parallel.verify.explain import meta_tensors, rehearsed_transport
from hyper_parallel.verify.prove import operators, plan, tested
from hyper_parallel.verify.prove.operators import graphs_of, prove_operator, prove_sample_row
from hyper_parallel.verify.prove.plan import CallProof, Certificate
from hyper_parallel.verify.prove.seen import SeenCall

pytestmark = pytest.mark.platforms("torch")

R, SUM, SPLIT = Replicate(), Partial("sum"), Row((Shard(0),), (Shard(0),))
UNKNOWN = "its rule answers with whole layouts"
UNLIKE = "its results are not those of the rule"


@pytest.fixture(scope="module")
def platform():
    """Return PyTorch's platform."""
    with use_platform("torch"):
        yield current_platform()


@pytest.fixture
def relu(platform):
    """Return the first sample of relu as primitives."""
    return next(graphs_of(platform, "relu"))


def answering(monkeypatch, change):
    """Let the rule of relu answer with what ``change`` makes of its answer."""
    right = rules.find_rule("relu")
    wrong = replace(right, strategies=lambda call: change(right.strategies(call)))
    monkeypatch.setitem(rules._RULES, "relu", wrong)


def refuse(_):
    """Refuse a call as a rule does."""
    msg = "no"
    raise ValueError(msg)


def test_a_wrong_row_is_refuted(platform, monkeypatch):
    """Relu of a pending sum is not a pending sum: a test finds numbers for which it is not."""
    answering(monkeypatch, lambda answer: replace(answer, rows=[Row((SUM,), (SUM,))]))
    (row, *_) = prove_operator(platform, "relu")
    assert (row.row, row.level) == ("Partial(sum) -> Partial(sum)", "refuted")
    assert row.why


@pytest.mark.parametrize("change", [refuse, lambda _: None, lambda answer: replace(answer, open=True)])
def test_rules_without_rows(change, platform, monkeypatch):
    """A rule that refuses its samples, or answers without rows, is assumed; no size reaches a row of it."""
    answering(monkeypatch, change)
    assert [(row.level, row.why) for row in prove_operator(platform, "relu")] == [("assumed", UNKNOWN)]
    assert tested.TestedRows(platform, "relu", 0).result("Shard(0) -> Shard(0)") == "no size reaches it"


def test_samples_without_values(platform, monkeypatch):
    """A sample that has no values is not looked at; an operator that is composed of others has no rows."""
    assert list(graphs_of(platform, "flatten")) == []
    assert tested.TestedRows(platform, "flatten", 0).held == {}
    for module in (operators, tested):
        monkeypatch.setattr(module, "fill", lambda *_, **__: None)
    assert list(graphs_of(platform, "relu")) == []
    assert tested.TestedRows(platform, "relu", 0).held == {}


@pytest.mark.parametrize(
    "op, levels",
    [
        ("linspace", {"proven"}),
        ("cast", {"proven"}),
        ("copy", {"proven"}),
        ("dropout", {"proven"}),
        ("zero", {"proven"}),
    ],
)
def test_kinds_of_samples(op, levels, platform):
    """Samples without sizes, with dtypes, that write, and whose local call is another one have the levels they had."""
    rows = prove_operator(platform, op)
    assert {row.level for row in rows} == levels
    assert all(bool(row.why) == (row.level != "proven") for row in rows)


def test_local_calls(platform, relu):
    """A local call that fails, or has other results, is not proven; nor is a row that depends on other axes."""
    cut = prove_sample_row(platform, relu, replace(SPLIT, cut=((0, 0, 1),)))
    assert (cut.level, cut.why) == ("tested", "it depends on the axes before it")
    for localize, why in (
        (lambda *_: refuse(0), "not traced: no"),
        (lambda *_: LocalCall(run=lambda _, args: (args["x"] * 1, args["x"] * 2)), UNLIKE),
    ):
        made = replace(relu, answer=replace(relu.answer, localize=localize))
        row = prove_sample_row(platform, made, SPLIT)
        assert (row.level, row.why) == ("tested", f"its local call is not the caller's: {why}")


@pytest.mark.parametrize("place", [R, SUM, Shard(1)])
def test_local_calls_of_other_sizes(place, platform):
    """A local call whose result has another size than the rule says is not proven, replicated operands included."""
    made = next(graphs_of(platform, "narrow"))
    row, longer = Row((place,), (place,)), lambda *_: LocalCall({"length": 8})
    assert prove_sample_row(platform, made, row).level == "proven"
    longer_by_one = prove_sample_row(platform, replace(made, answer=replace(made.answer, localize=longer)), row)
    assert longer_by_one.why == "its local call is not the caller's: result 0 has size [8, 11], [7, 11] is the rule's"


@pytest.mark.parametrize(
    "op, row, problem",
    [
        (
            "adaptive_max_pool2d",
            Row((Shard(1),), (Shard(1), Shard(1))),
            ("RuntimeError: adaptive_max_pool2d(): Expected input to have non-zero size for non-batch dimensions, but "
             "input has sizes [3, 0, 6, 5] with dimension 1 being empty"),
        ),
        ("relu", Row((Shard(0),), (Shard(0),)), ""),
    ],
)  # fmt: skip
def test_empty_parts(op, row, problem, platform):
    """A row that lets a rank have an empty part is not proven if the operator fails on it; one that does not, is."""
    made = next(graphs_of(platform, op))
    proven = prove_sample_row(platform, made, row)
    assert (proven.level, proven.why) == (("tested", f"an empty part: {problem}") if problem else ("proven", ""))
    full = replace(row, full=((0, row.inputs[0].dim),))
    assert prove_sample_row(platform, made, full).level == "proven"


def test_empty_parts_that_no_size_reaches(platform, monkeypatch):
    """A row that no size of the sample with an empty part reaches is not proven; sizes that fail are passed over."""
    (made, *_) = graphs_of(platform, "relu")
    rule, size = rules.find_rule("relu"), made.letters["a"]
    for change in (refuse, lambda _: None, lambda answer: replace(answer, open=True)):
        wrong = replace(rule, strategies=lambda call, change=change: change(rule.strategies(call)))
        empties = tested.EmptyParts(platform, wrong, made.sample, made.letters)
        assert empties.problem(SPLIT, size) == "no size reaches it"
    monkeypatch.setattr(tested, "fits_values", lambda *_: False)
    empties = tested.EmptyParts(platform, rule, made.sample, made.letters)
    assert empties.problem(SPLIT, size) == "no size reaches it"


def test_layouts_that_a_local_call_sees(relu):
    """An adapter sees the placement on the one axis, global and local sizes, and what is replicated."""
    call, letters = relu.sample_call.call, relu.letters
    (shape,) = (operand.shape for operand in call.operands)
    seen = SeenCall(call, relu.answer, SPLIT, letters, letters, [(3, *shape[1:])])
    (x,), (out,) = seen.operands(), seen.outputs()
    assert (x.placement_on(0), x.is_replicated, x.shape, x.local_shape) == (Shard(0), False, shape, (3, *shape[1:]))
    assert (out.placement_on(0), out.local_shape) == (Shard(0), (3, *shape[1:]))
    (begin, end), *rest = x.local_box()
    assert rest == [(0, size) for size in shape[1:]]
    for use in (lambda: begin == 0, lambda: bool(end), lambda: begin.real, lambda: x.mesh.own_coordinate()[0] == 0):
        with pytest.raises(ValueError, match=r"^it depends on the rank, such as on where its part starts$"):
            use()
    assert (x.mesh.coordinate, x.mesh.size()) == (None, 1)
    (whole,) = SeenCall(call, relu.answer, Row((R,), (R,)), letters, letters, [shape]).operands()
    assert (whole.is_replicated, whole.ndim, whole.partials) == (True, len(shape), ())


def test_rules_of_calls(platform, relu, monkeypatch):
    """A call of an operator without rows, or whose rule refuses it, is tested, with the reason."""
    call = relu.sample_call.call
    assert plan._prove(platform, call, SPLIT, 2, {})[0] == "proven"
    other = plan._prove(platform, replace(call, op="flatten"), SPLIT, 2, {})
    assert other == ("tested", "its rule is the user's", ())
    answering(monkeypatch, lambda _: None)
    assert plan._prove(platform, call, SPLIT, 2, {}) == ("tested", UNKNOWN, ())
    answering(monkeypatch, refuse)
    assert plan._prove(platform, call, SPLIT, 2, {}) == ("tested", "no", ())


def test_calls_that_cannot_be_traced(platform, relu, monkeypatch):
    """A call that fails on sizes alone is tested; the reason is kept for the next call alike."""
    call, graphs = relu.sample_call.call, {}
    monkeypatch.setattr(type(platform), "local_op", lambda *_: refuse)
    for _ in range(2):
        level, why, _ = plan._prove(platform, call, SPLIT, 2, graphs)
        assert (level, why.startswith("not traced: "), len(graphs)) == ("tested", True, 1)


def test_a_gradient_that_is_not_reduced():
    """An operand that ranks share while others differ must have its gradient reduced; the operator is named."""
    found = Certificate("model", {"tp": 2})
    targets = [SimpleNamespace(placement_on=lambda _: Shard(0)), SimpleNamespace(placement_on=lambda _: R)]
    for varying in (((), (0,)), ((), ())):
        choice = SimpleNamespace(targets=targets, varying=varying)
        plan._check_varying(found, "0", SimpleNamespace(choice=choice, call=SimpleNamespace(op="linear")), 0)
    assert found.wrong == ["0: linear does not reduce the gradient of operand 1 as it must"]


def test_the_border():
    """What enters as a plain tensor is noted where ranks differ; what leaves as a pending sum is named once."""
    import torch

    found = Certificate("model", {"tp": 2})
    with use_platform("torch"), use_transport(rehearsed_transport("torch", 2, 0)), meta_tensors():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with plan._border(found):
            for place in (R, Shard(0), SUM, SUM):
                DTensor.from_local(torch.ones(2, requires_grad=True) * 2, mesh, [place], run_check=False).to_local()
    assert found.wrong == ["(model): a value that is a pending sum over tp leaves as a plain tensor, not reduced"]
    assert found.open == [
        "(model): that a plain tensor is [4@tp]",
        "(model): what is computed with its plain output [4@tp]",
        "(model): that a plain tensor is [2] + Partial(sum)@tp",
    ]


def test_the_text_of_a_certificate():
    """A call that is not proven is a line with its reason; counts above one are named."""
    call = CallProof("relu", "", "tp", "Shard(0) -> Shard(0)", ((4,),), "tested", "no law")
    found = Certificate("model", {"tp": 2}, [call], Counter({"all_reduce": 2}), Counter({"all_gather": 1}))
    lines = found.text().splitlines()
    assert lines[1:6] == [
        "proven for these sizes: 0 of 1 rows of operators",
        "tested: relu in (model) on tp: Shard(0) -> Shard(0): no law",
        "0 gradients are laid out as their parameters ask",
        "reduced: all_reduce (2 times)",
        "moved: all_gather",
    ]
    same = (
        "they are those of one device: 0 losses, gradients and values of parameters and buffers have the same "
        "expressions"
    )
    assert lines[-1] == (f"certificate: all calls are proven, except 1 row of an operator that rests on tests; {same}")
    found.open = ["an average", "a norm"]
    lines = found.text().splitlines()
    assert lines[6:8] == ["not covered: an average", "not covered: a norm"]
    assert (lines[-1], found.status) == ("INCONCLUSIVE: not covered: an average (and 1 more)", 3)
    found.calls, found.open = [replace(call, level="proven")], []
    assert (found.text().splitlines()[-1], found.status) == (f"certificate: all calls are proven; {same}", 0)
    found.wrong = ["0: no"]
    assert (found.text().splitlines()[-1], found.status) == ("REFUTED: 0: no", 1)
