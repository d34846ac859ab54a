"""Local calls that ranks share: which calls are the same."""

from dataclasses import replace

import pytest

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.shard import rules
from hyper_parallel.core.shard.rule import LocalCall, find_rule
from hyper_parallel.core.shard.sample import samples_of
from hyper_parallel.platform.select import use_platform
from hyper_parallel.verify.ops.claims import mesh_of
from hyper_parallel.verify.ops.local_calls import CallCache, name_of
from hyper_parallel.verify.ops.report import OperatorReport
from hyper_parallel.verify.ops.selection import Effort
from hyper_parallel.verify.ops.sweep import Sweep
from hyper_parallel.verify.ops.values import FilledSample

rules.load()
R = Replicate()


class Recorded:
    """A platform that counts the operators' local calls."""

    def __init__(self, platform):
        self.platform, self.count = platform, 0

    def __getattr__(self, name):
        return getattr(self.platform, name)

    def local_op(self, op):
        """Return the operator with its calls counted; the harness's own copies are not counted."""
        implementation = self.platform.local_op(op)
        if op == "clone":
            return implementation

        def counted(**args):
            self.count += 1
            return implementation(**args)

        return counted


def swept(op, change=None, meshes=((1,), (2,), (2, 2))):
    """Return a sweep's report, and the number of its local calls."""
    effort = Effort(meshes=meshes, choices=1, splits=1, both_values=False, public=False, reproducers=False, missing=0)
    rule = find_rule(op)
    if change is not None:
        rule = replace(rule, strategies=lambda call, own=rule.strategies: change(own(call)))
    report = OperatorReport(op, "torch")
    with use_platform("torch"):
        sweep = Sweep(report, "torch", op, rule, samples_of(op), effort)
        sweep.platform = Recorded(sweep.platform)
        sweep.run()
    return report, sweep.platform.count


@pytest.mark.platforms("torch")
def test_ranks_that_compute_the_same_compute_once():
    """Ranks with equal local calls share them: there are less than half as many calls as ranks."""
    report, count = swept("add")
    assert report.outcome == "ok"
    ranks = report.by_mesh["1"] + 2 * report.by_mesh["2"] + 4 * report.by_mesh["2x2"]
    assert count < ranks / 2


@pytest.mark.platforms("torch")
def test_an_adapter_that_is_wrong_on_one_rank_is_caught():
    """An adapter that is wrong on the last of four ranks is reported: its local call is not shared with the others."""

    def wrong(answer):
        def off(call, targets, outputs):
            local = answer.localize(call, targets, outputs)
            if local is None or "diagonal" not in (local.args or {}) or call.mesh.coordinate != (1, 1):
                return local
            return LocalCall({"diagonal": local.args["diagonal"] + 1})

        return replace(answer, localize=off)

    assert swept("tril")[0].outcome == "ok"
    report, _ = swept("tril", wrong)
    assert report.outcome == "wrong"
    assert {finding.mesh for finding in report.wrong} == {(2, 2)}


@pytest.mark.platforms("torch")
def test_only_equal_local_calls_have_one_name():
    """Types, signs of zeros and closures distinguish calls; a call that cannot be named is never shared."""

    def adding(number):
        return lambda platform, args: (platform, args, number)

    assert name_of({"dim": [1, 2]}) == name_of({"dim": [1, 2]})
    assert name_of(adding(1)) == name_of(adding(1))
    different = [1, 1.0, True, 0.0, -0.0, (1,), [1], slice(1), slice(1, 2), None, adding(1), adding(2), adding(1.0)]
    assert len({name_of(value) for value in different}) == len(different)
    with pytest.raises(TypeError, match="unhashable"):
        name_of({"held": {1, 2}})


def test_shards_are_identified_by_box_and_sample(platform_name):
    """Equal boxes are one shard on meshes of all shapes; partial values differ by operand and by sample."""
    import numpy as np

    values = np.arange(6.0).reshape(2, 3)
    filled = FilledSample((), {}, (values, values), (True, True), {}, integral=True)
    with use_platform(platform_name):
        calls = CallCache(None, None, filled, 3)
    line = Layout.place(mesh_of((2,)), [Shard(0)], values.shape)
    square = Layout.place(mesh_of((2, 2)), [R, Shard(0)], values.shape)
    first, second = calls.operand(0, line, 0)
    assert calls.operand(0, square, 0) == [first, second, first, second]
    assert first.array.tolist() == [[0.0, 1.0, 2.0]]
    pending = Layout.place(mesh_of((2,)), [Partial("sum")], values.shape)
    drawn = [calls.operand(index, pending, draw) for index in (0, 1) for draw in (0, 1)]
    assert len({shard.array.tobytes() for pair in drawn for shard in pair}) == 8
    assert all((first.array + second.array == values).all() for first, second in drawn)
