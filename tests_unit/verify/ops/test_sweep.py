"""Wrong rules are caught, correct rules pass, and a rule without any check fails."""

from dataclasses import replace

import pytest

from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.shard import rule as rule_module, rules, strategy
from hyper_parallel.core.shard.dispatch import Ops
from hyper_parallel.core.shard.rule import LocalCall, Row, Rule, Strategies, find_rule
from hyper_parallel.core.shard.sample import Sample, between, real, samples_of, shuffled
from hyper_parallel.errors import LayoutError
from hyper_parallel.platform.select import platform_named, use_platform
from hyper_parallel.verify.ops.report import OperatorReport, SweepReport
from hyper_parallel.verify.ops.selection import Effort
from hyper_parallel.verify.ops.sweep import Sweep, sweep_operator

rules.load()
R = Replicate()
RULE_LEVEL = Effort(meshes=((2,), (3,), (2, 2)), choices=1, splits=1, public=False, reproducers=False, missing=0)
PUBLIC = Effort(
    meshes=((2,), (3,)), choices=1, splits=1, rule_level=False, redistributed=2, reproducers=False, missing=0
)


def swept(platform, op, change=None, effort=RULE_LEVEL, samples=None):
    """Return the report on `op` under its own rule, or under what `change` makes of its strategies."""
    rule = find_rule(op)
    if change is not None:
        rule = replace(rule, strategies=lambda call, own=rule.strategies: change(own(call)))
    report = OperatorReport(op, platform)
    with use_platform(platform):
        Sweep(report, platform, op, rule, samples_of(op) if samples is None else samples, effort).run()
    return report


def with_rows(change):
    """Return a change that rewrites rows with `change`, and drops the rows for which it returns None."""

    def changed(answer):
        rows = (change(row) for row in answer.rows)
        return replace(answer, rows=tuple(row for row in rows if row is not None))

    return changed


OPERATORS = ["add", "relu", "matmul", "linear", "softmax", "mean", "tril", "view", "index_select", "copy", "layer_norm"]


@pytest.mark.parametrize("op", OPERATORS)
def test_true_rules_hold(platform_name, op):
    """The library's rules hold on plain tensors, gradients included, and every claimed row is reached."""
    report = swept(platform_name, op)
    assert report.outcome == "ok", report.text()
    assert report.checks == report.ok > 10
    assert 0 < report.backward <= report.checks
    assert report.features["uneven"]


@pytest.mark.parametrize("op", ["add", "matmul", "mean", "zero", "dropout", "cross_entropy"])
def test_true_rules_hold_on_dtensors(platform_name, op):
    """The library's rules hold through dispatch, redistribution and collectives, also where operands have to move."""
    report = swept(platform_name, op, effort=PUBLIC)
    assert report.outcome == "ok", report.text()
    assert report.public == report.checks > 4


# -- injected faults ---------------------------------------------------------------------------------------------------


def dropped_partial(row):
    """A contraction over a sharded dim whose output is not a partial value."""
    return replace(row, outputs=tuple(R if placement == Partial("sum") else placement for placement in row.outputs))


def swapped_dim(row):
    """The output is sharded along the other dim."""
    swap = {Shard(0): Shard(1), Shard(1): Shard(0)}
    return replace(row, outputs=tuple(swap.get(placement, placement) for placement in row.outputs))


def bias_twice(row):
    """The bias is replicated although the product is a partial value: every rank adds it."""
    if len(row.inputs) == 3 and row.outputs == (Partial("sum"),):
        return replace(row, inputs=(*row.inputs[:2], R))
    return row


def wrong_kind(row):
    """Partial sums are declared as partial averages."""
    return replace(
        row, outputs=tuple(Partial("avg") if placement == Partial("sum") else placement for placement in row.outputs)
    )


def nonlinear_passes(answer):
    """Partial values pass through an operator that is not linear."""
    return replace(answer, rows=(*answer.rows, Row((Partial("sum"),), (Partial("sum"),))))


def product_of_partial_values(answer):
    """Both factors may be partial values."""
    both = (Partial("sum"), Partial("sum"))
    return replace(answer, rows=(*answer.rows, Row(both, (Partial("sum"),))))


def decreasing_passes(answer):
    """A partial maximum passes through an operator that does not increase."""
    return replace(answer, rows=(*answer.rows, Row((Partial("max"),), (Partial("max"),))))


def sharded_whole_dim(answer):
    """The dim along which the operator works may be sharded."""
    rows = [Row((Shard(dim),), (Shard(dim),)) for dim in range(len(answer.outputs[0]))]
    return replace(answer, rows=(*answer.rows, *rows))


def sum_of_truths(answer):
    """Booleans are declared as partial sums."""
    return replace(answer, rows=tuple(replace(row, outputs=(Partial("sum"),)) for row in answer.rows))


def no_localize(answer):
    """The local call is the caller's own."""
    return replace(answer, localize=None)


def wrong_localize(answer):
    """The local call is off by one."""

    def off(call, targets, outputs):
        local = answer.localize(call, targets, outputs)
        if local is None or not local.args or "diagonal" not in local.args:
            return local
        return LocalCall({"diagonal": local.args["diagonal"] + 1})

    return replace(answer, localize=off)


def uneven_condition(row):
    """The condition that sizes divide is dropped."""
    return replace(row, even=(), sizes=(), cut=())


FAULTS = [
    ("matmul", with_rows(dropped_partial)),
    ("sum", with_rows(dropped_partial)),
    ("matmul", with_rows(swapped_dim)),
    ("transpose", with_rows(swapped_dim)),
    ("linear", with_rows(bias_twice)),
    ("addmm", with_rows(bias_twice)),
    ("sum", with_rows(wrong_kind)),
    ("relu", nonlinear_passes),
    ("abs", nonlinear_passes),
    ("gelu", nonlinear_passes),
    ("mul", product_of_partial_values),
    ("neg", decreasing_passes),
    ("abs", decreasing_passes),
    ("softmax", sharded_whole_dim),
    ("cumsum", sharded_whole_dim),
    ("flip", sharded_whole_dim),
    ("roll", sharded_whole_dim),
    ("signbit", sum_of_truths),
    ("nextafter", lambda answer: replace(answer, rows=(*answer.rows, Row((R, Partial("sum")), (R,))))),
    ("mean", no_localize),
    ("tril", no_localize),
    ("index_select", no_localize),
    ("embedding", no_localize),
    ("tril", wrong_localize),
    ("view", with_rows(uneven_condition)),
    ("repeat_interleave", with_rows(uneven_condition)),
]


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("op, fault", FAULTS, ids=[f"{op}-{index}" for index, (op, _) in enumerate(FAULTS)])
def test_wrong_rules_are_caught(op, fault):
    """A changed row, condition or adapter is reported: results or gradients differ, or the local call fails."""
    report = swept("torch", op, fault)
    assert report.outcome in {"wrong", "crash"}, report.text()


@pytest.mark.untraced
@pytest.mark.platforms("torch")
@pytest.mark.parametrize("op", ["mul", "matmul", "linear", "index_select", "layer_norm"])
def test_a_missing_backward_reduction_is_caught(op, monkeypatch):
    """A replicated operand beside sharded ones whose gradient is not reduced is reported."""
    monkeypatch.setattr(strategy, "_varying", lambda *_: ())
    report = swept("torch", op)
    assert report.outcome == "wrong"
    assert all("gradient of operand" in finding.problem for finding in report.wrong)


@pytest.mark.platforms("torch")
def test_a_wrong_rule_is_caught_on_dtensors(monkeypatch):
    """The public path reports a wrong rule by itself: it runs what dispatch runs."""
    own = find_rule("matmul")
    wrong = replace(own, strategies=lambda call: with_rows(dropped_partial)(own.strategies(call)))
    dispatcher = platform_named("torch").dispatcher
    monkeypatch.setitem(rule_module._RULES, "matmul", wrong)
    monkeypatch.setattr(dispatcher, "ops", Ops(dispatcher))
    report = sweep_operator("torch", "matmul", PUBLIC)
    assert report.outcome == "wrong"
    assert {finding.where for finding in report.wrong} == {"public"}


# -- what is not checked -----------------------------------------------------------------------------------------------


@pytest.mark.platforms("torch")
def test_nothing_checked_is_red():
    """A rule without samples, or whose samples check nothing, fails."""
    report = swept("torch", "relu", samples=())
    assert report.outcome == "unexercised"
    assert not report.holds
    assert "nothing checked: it has no samples" in report.text()
    constant = swept("torch", "mul", samples=(Sample((real("ab"), 0)),))
    assert constant.outcome == "unexercised"
    assert constant.skipped["sample 0 has outputs that a wrong result could equal"] == 1
    assert not SweepReport([report], 1).ok
    assert not SweepReport([], 0).ok


@pytest.mark.platforms("torch")
def test_a_claimed_row_that_no_sample_meets_is_listed():
    """A row that no sample reaches is listed, and does not count as checked."""

    def claims_truths(answer):
        return replace(answer, rows=(*answer.rows, Row((Partial("any"),), (Partial("any"),))))

    report = swept("torch", "neg", claims_truths, samples=(Sample((real("ab"),)),))
    assert report.unexercised == ["Partial(any) -> Partial(any)"]


@pytest.mark.platforms("torch")
def test_a_refused_sample_is_a_rejection():
    """A sample that the rule refuses is counted with its message, and is neither wrong nor checked."""

    def strategies(call):
        msg = "not today"
        raise ValueError(msg)

    report = OperatorReport("relu", "torch")
    rule = Rule("relu", "x", strategies)
    with use_platform("torch"):
        Sweep(report, "torch", "relu", rule, samples_of("relu"), RULE_LEVEL).run()
    assert report.rejected["relu: not today"]
    assert report.outcome == "unexercised"


def _refusing_where(condition):
    """Strategies whose local call refuses on the ranks whose first operand meets the condition."""

    def run(platform, args):
        if condition(args["x"]):
            msg = "not here"
            raise LayoutError(msg)
        return platform.local_op("relu")(**args)

    return lambda answer: replace(answer, localize=lambda *_: LocalCall(run=run))


@pytest.mark.platforms("torch")
def test_ranks_that_refuse_alone_are_a_crash():
    """A refusal on some ranks only is a crash, because the others would hang."""
    sample = (Sample((real("ab"),)),)
    alone = swept("torch", "relu", _refusing_where(lambda x: 0 in x.shape), samples=sample)
    assert alone.outcome == "crash"
    (problem,) = {finding.problem for finding in alone.crash}
    assert problem == "refused at [(1, 1)] alone, where others would wait: LayoutError: not here"
    everywhere = swept("torch", "relu", _refusing_where(lambda _: True), samples=sample)
    assert not everywhere.crash
    assert everywhere.rejected


@pytest.mark.platforms("torch")
def test_a_sample_that_has_no_values_costs_itself():
    """A sample without values is reported with its sizes; the other samples are checked."""
    broken = Sample((real("ab"), 0, shuffled(1, "ab"), real("ab")))
    report = swept("torch", "scatter", samples=(broken, *samples_of("scatter")[:1]))
    assert report.outcome == "crash"
    (problem,) = {finding.problem for finding in report.crash}
    assert problem == "ValueError: dim 0 needs 5 different indices, and there are only 1"
    assert report.ok == report.checks > 10


@pytest.mark.platforms("torch")
def test_an_operator_without_a_gradient_is_compared_forward():
    """If the framework has no derivative, outputs are still compared, and the report lists the missing gradients."""
    values = between(0.3, 4.0, "ab")
    report = swept("torch", "igamma", samples=[Sample((values, values))])
    assert report.outcome == "ok", report.text()
    assert report.checks > 0
    assert report.backward == 0
    (skipped,) = report.skipped
    assert skipped.startswith("gradients of sample 0 has no plain result: NotImplementedError: the derivative for"), (
        skipped
    )


@pytest.mark.platforms("torch")
def test_a_rule_without_an_implementation_is_absent():
    """An operator that the framework lacks is listed as absent, and does not fail."""
    report = OperatorReport("nowhere", "torch")
    rule = Rule("nowhere", "x", lambda call: Strategies((Row((R,), (R,)),), (call["x"].shape,)))
    with use_platform("torch"):
        Sweep(report, "torch", "nowhere", rule, (Sample((real("ab"),)),), RULE_LEVEL).run()
    assert report.outcome == "absent"
    assert report.holds


@pytest.mark.platforms("torch")
def test_reports_travel_as_json():
    """A report is the same after it was written as JSON and read again."""
    report = swept("torch", "softmax", sharded_whole_dim, replace(RULE_LEVEL, reproducers=True))
    again = OperatorReport.from_json(report.json())
    assert again.json() == report.json()
    assert again.text() == report.text()
    assert any(finding.reproducer for finding in again.wrong)
