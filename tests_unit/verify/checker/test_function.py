from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.shard.entry import OpEntry, binder
from hyper_parallel.core.shard.rule import Row, Rule, Strategies
from hyper_parallel.errors import LayoutError, RankFailedError
from hyper_parallel.platform.select import get_torch_platform
from hyper_parallel.verify.checker.checker import on_other_device
from hyper_parallel.verify.checker.function import CheckReport, _PlainRuns, all_placements, check_function
from hyper_parallel.verify.checker.shards import local_shard

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def sample(*shape, seed=0):
    """Return random float64 values."""
    return np.random.default_rng(seed).standard_normal(shape)


def operator(func, *rows, shape=None, signature="x"):
    """Return a function of plain tensors or DTensors with a rule of its own, right or wrong."""
    rule = Rule("probe", signature, lambda call: Strategies(rows, (shape or call.operands[0].shape,)))
    entry = OpEntry("probe", func, binder(signature), rule, func)

    def call(*args):
        if any(isinstance(arg, DTensor) for arg in args):
            return get_torch_platform().dispatcher.dispatch(entry, args, {})
        return func(*args)

    return call


def test_all_placements():
    """All kinds occur on every axis, with at most one kind of Partial at a time."""
    assert len(all_placements(2, 1)) == 4
    assert len(all_placements(2, 2)) == 16
    assert all_placements(0, 1, partial=()) == [(R,)]
    both = all_placements(1, 2, partial=("sum", "max"))
    assert (P, P) in both
    assert (P, Partial("max")) not in both


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 3)])
def test_decompositions_reduce_to_the_value(op, mesh_shape):
    """Reducing the partial values of all ranks gives the array back, and no two ranks have the same."""
    array, count = sample(4, 3), int(np.prod(mesh_shape))
    locals_ = []
    for rank in range(count):
        mesh = DeviceMesh._interned("cpu", mesh_shape, tuple(range(count)), None, rank)
        placements = [Partial(op)] + [R] * (len(mesh_shape) - 1)
        locals_.append(local_shard(array, Layout.place(mesh, placements, array.shape), 7))
    along = locals_[:: count // mesh_shape[0]]
    reduce = {"sum": sum, "avg": lambda all_: sum(all_) / len(all_), "max": np.maximum.reduce, "min": np.minimum.reduce}
    np.testing.assert_allclose(reduce[op](along), array, rtol=1e-12)
    assert not np.array_equal(along[0], along[1])


@pytest.mark.platforms("torch", "mindspore")
def test_another_number_of_outputs_is_wrong(platform_name):
    """A function that returns one output for DTensors and two for plain tensors is reported as wrong."""

    def pair(x):
        return x * 2 if hasattr(x, "placements") else (x * 2, x)

    report = check_function(pair, [sample(3)], (2,), platform=platform_name, partial=())
    assert report.wrong == [
        f"rank {rank}: [{placement!r}]: gives 1 outputs, should give 2" for rank in (0, 1) for placement in (R, S0)
    ]
    assert (report.forward, report.backward) == (2, 0)


@pytest.mark.platforms("torch")
def test_a_right_rule_passes_everywhere():
    """A correct rule passes on every placement, and the counts are the numbers of comparisons."""
    double = operator(lambda x: x * 2.0, Row((R,), (R,)), Row((S0,), (S0,)), Row((S1,), (S1,)), Row((P,), (P,)))
    report = check_function(double, [sample(5, 3)], (2, 3), platform="torch")
    assert report.ok
    assert (report.forward, report.backward, report.rejected) == (16, 16, [])


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("func, row, line_part", [
    (lambda x: x.abs(), Row((P,), (P,)), "[Partial(sum)]: output 0"),
    (lambda x: x + 1.0, Row((P,), (P,)), "[Partial(sum)]: output 0"),
    (lambda x: x.cumsum(0), Row((S0,), (S0,)), "[Shard(0)]: output 0"),
    (lambda x: x - x.mean(), Row((S1,), (S1,)), "[Shard(1)]: output 0"),
])  # fmt: skip
def test_a_wrong_row_is_caught(func, row, line_part):
    """Nonlinear or affine on partial values, a scan or a mean over shards: the placement is reported."""
    report = check_function(operator(func, Row((R,), (R,)), row), [sample(5, 3)], (2,), platform="torch")
    assert not report.ok
    assert any(line_part in line for line in report.wrong)
    assert not any(line.startswith("rank 0: [Replicate()]") for line in report.wrong)


@pytest.mark.platforms("torch")
def test_a_missing_varying_view_is_caught():
    """A replicated operand with only this rank's share of its gradient is reported, though all outputs are right."""

    def leaky(x, w):
        if not isinstance(x, DTensor):
            return x * w
        platform = get_torch_platform()
        return platform.wrap(x.to_local() * w.to_local(), x.layout)

    arrays, placements = [sample(4, 3), sample(3, seed=1)], [[(S0,)], [(R,)]]
    report = check_function(leaky, arrays, (2,), platform="torch", placements=placements)
    assert report.wrong
    assert all("gradient of input 1" in line for line in report.wrong)
    assert check_function(lambda x, w: x * w, arrays, (2,), platform="torch", placements=placements).ok


@pytest.mark.platforms("torch")
def test_a_wrong_scale_of_the_gradient_is_caught():
    """A backward that is off by the number of ranks is reported."""
    import torch

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            del ctx
            return x * 1.0

        @staticmethod
        def backward(ctx, grad):
            del ctx
            return grad * (2.0 if isinstance(grad, DTensor) else 1.0)

    report = check_function(Scaled.apply, [sample(4)], (2,), platform="torch")
    assert report.wrong
    assert all("gradient of input 0" in line for line in report.wrong)


@pytest.mark.platforms("torch")
def test_a_plain_return_is_an_error():
    """A function that turns DTensors into plain tensors fails, however right the values."""
    with pytest.raises(RankFailedError) as caught:
        check_function(lambda x: getattr(x, "to_local", x.clone)(), [sample(4)], (2,), platform="torch")
    assert "returned a plain Tensor instead of a DTensor" in str(caught.value)


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("func", [lambda x: x * 0.0, lambda x: x * float("nan")])
def test_degenerate_samples_are_refused(func):
    """A sample whose outputs are all zero or not finite proves nothing and is an error."""
    with pytest.raises(RankFailedError) as caught:
        check_function(func, [sample(4)], (2,), platform="torch")
    assert "the sample gives outputs that are all zero or not finite: anything would pass" in str(caught.value)


@pytest.mark.platforms("torch")
def test_zero_checked_is_not_ok():
    """A report that compared nothing is not ok: everything rejected, or nothing to try."""

    def refuse(x):
        if isinstance(x, DTensor):
            msg = "not here"
            raise LayoutError(msg)
        return x * 2.0

    report = check_function(refuse, [sample(4)], (2,), platform="torch")
    assert (report.forward, report.wrong) == (0, [])
    assert report.rejected == [f"[{placement!r}]: not here" for placement in (R, S0, P)]
    assert not report.ok
    assert not check_function(lambda x: x * 2.0, [sample(4)], (2,), platform="torch", placements=[[]]).ok
    assert not CheckReport().ok


@pytest.mark.platforms("torch")
def test_a_limited_choice_is_repeatable():
    """A limit chooses the same combinations again for the same seed."""
    counts = [
        check_function(lambda x, y: x + y, [sample(4, 3)] * 2, (2, 2), platform="torch", limit=5, seed=4).forward
        for _ in range(2)
    ]
    assert counts == [5, 5]


@pytest.mark.platforms("torch")
def test_a_rule_that_contradicts_itself_is_not_a_refusal():
    """A rule that the dispatcher reports as wrong ends the check; it does not count as a refused placement."""
    wrong = operator(lambda x: x * 2.0, Row((R,), (R,)), shape=(9,))
    with pytest.raises(RankFailedError, match="this is a bug in the rule; please report it"):
        check_function(wrong, [sample(4)], (2,), platform="torch")


def test_all_held_means_that_nothing_was_refused():
    """A report with a refusal is ok, but not all held; a report that compared nothing is neither."""
    assert CheckReport(1, 0).all_held
    assert CheckReport(1, 0, ["no"]).ok
    assert not CheckReport(1, 0, ["no"]).all_held
    assert not CheckReport(1, 0, [], ["bad"]).all_held
    assert not CheckReport().all_held


@pytest.mark.platforms("torch", "mindspore")
def test_small_gradients_are_compared_at_their_own_size(platform_name):
    """An error of one percent in gradients or outputs of magnitude 1e-4 is found; correct ones pass."""

    def scaled(wrong):
        return lambda x: x * (1e-4 * wrong if hasattr(x, "placements") else 1e-4)

    x = sample(5, 3).astype(np.float32)
    for mesh in ((2,), (3,)):
        assert check_function(scaled(1.0), [x], mesh, platform=platform_name).ok
    wrong = check_function(scaled(1.01), [x], (2,), platform=platform_name).wrong
    assert sum("output 0" in line for line in wrong) == sum("gradient of input 0" in line for line in wrong) == 8
    small = check_function(lambda y: y * y, [x * 1e-4], (2,), platform=platform_name)
    assert small.ok, small.wrong


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)])
def test_sums_that_cancel_are_no_false_alarm(mesh):
    """Sums and gradients that are only the rounding of larger terms pass on every placement."""
    import torch

    x = sample(7, 5).astype(np.float32)
    for fn in (
        lambda x: (x - x.mean(0, keepdim=True)).sum(0),
        lambda x: x.softmax(1).sum(1),
        lambda x: (x * 1e-3 + 1).sum(0) - (x.sum(0) * 1e-3 + 7),
        lambda x: torch.cat([x, -x]).sum(0),
        lambda x: (x.sum(1, keepdim=True) - x.sum(1, keepdim=True)) * x,
    ):
        report = check_function(lambda x, fn=fn: (fn(x), x), [x], mesh, platform="torch")
        assert report.ok, report.wrong[:3]


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
def test_partial_values_of_one_number_keep_its_dtype(op):
    """Every rank's partial value of a single float32 is a float32."""
    array = np.array(1.5, np.float32)
    for rank in range(3):
        mesh = DeviceMesh._interned("cpu", (3,), (0, 1, 2), None, rank)
        assert local_shard(array, Layout.place(mesh, [Partial(op)], ()), 7).dtype == np.float32


@pytest.mark.platforms("torch")
def test_tensors_on_another_device_are_named():
    """Which tensor is not on the device, and where it is; nothing for tensors that are there, or on the CPU."""
    import torch

    tensors = [torch.empty(2, device="meta"), torch.empty(2)]
    assert on_other_device(tensors, "meta") == "1 is on cpu, and --device is meta"
    assert on_other_device(tensors[:1], "meta") == on_other_device(tensors, "cpu") == ""


@pytest.mark.platforms("torch")
def test_a_function_that_leaves_the_device_is_an_error():
    """A check on a device of a function whose plain results are elsewhere would verify nothing there."""
    runs = _PlainRuns(get_torch_platform(), lambda x: x * 2.0, [sample(3)], 0, None)
    with pytest.raises(ValueError, match=r"^on one device, the function's output 0 is on cpu, and --device is cuda$"):
        runs.expected("cuda")


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("double", ["has no kernel", "has another shape"])
def test_functions_of_single_precision_alone_are_checked_at_the_size_of_numbers_around_one(double):
    """Where double precision gives no rounding to compare with, correct results pass and an error of 1e-3 fails."""
    import torch

    def scaled(by):
        def call(x):
            if x.dtype == torch.float64:
                if double == "has no kernel":
                    raise TypeError(x.dtype)
                return x[:1]
            return x * (by if hasattr(x, "placements") else 1.0)

        return call

    x = sample(5, 3).astype(np.float32)
    assert check_function(scaled(1.0), [x], (2,), platform="torch").ok
    wrong = check_function(scaled(1.001), [x], (2,), platform="torch").wrong
    assert sum("output 0" in line for line in wrong) == sum("gradient of input 0" in line for line in wrong) == 8


@pytest.mark.platforms("torch")
def test_a_missing_gradient_is_wrong():
    """A gradient that only one device computes is zeros on the ranks, and wrong."""
    report = check_function(
        lambda x, y: x * (y.detach() if hasattr(y, "placements") else y),
        [sample(3), sample(3)],
        (2,),
        platform="torch",
        placements=[[(R,)], [(R,)]],
    )
    assert (report.forward, report.backward) == (1, 2)
    assert [line.split(", should be")[0] for line in report.wrong] == [
        f"rank {rank}: [Replicate()] [Replicate()]: gradient of input 1 is 0.0 at [0]" for rank in (0, 1)
    ]
