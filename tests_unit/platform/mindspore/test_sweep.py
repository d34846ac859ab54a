"""A subset of the sweep over MindSpore's public names, and regressions that the sweep revealed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.select import platform_named, use_platform
from hyper_parallel.verify.checker.function import check_function
from hyper_parallel.verify.frameworks import harness_of

pytestmark = pytest.mark.platforms("mindspore")


def _sweep():
    path = Path(__file__).with_name("sweep.py")
    spec = importlib.util.spec_from_file_location("hyper_parallel_mindspore_sweep", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


SWEEP = _sweep()
# One spelling of each way in: functions replaced whole, composed primitives, methods of their own, writers, operators.
# MindSpore's own gradient of fftshift without dims reads memory that nobody wrote, and is wrong in every other call.
EXPRESSIONS = """
ops.max(x) | ops.min(x, 0, True) | ops.tril(x, 1) | ops.squeeze(one) | ops.softmax(x, 0) | ops.float_power(p64, 2.5)
ops.div(x, p, rounding_mode="floor") | ops.fmod(x, p) | n & 3 | n // 2 | x // 2.0 | ops.isposinf(x) | ops.count_nonzero(x)
ops.diff(x) | ops.trapz(x) | ops.clip_by_global_norm([x, y], 1.0) | ops.diag_embed(x) | ops.diag(r) | ops.addcmul(x, y, p, o)
ops.meshgrid(s, r, indexing="xy") | ops.slice(x, (1, 0), (3, 2)) | ops.strided_slice(x, (0, 0), (5, 3), (2, 1)) | ops.trace(sq)
ops.std(x) | ops.var(x, 1) | ops.norm(x, 2, 0) | ops.gather_nd(x, pairs) | ops.masked_select(x, t)
ops.tensor_scatter_add(x, pairs, r) | ops.tensor_scatter_elements(x, rows, src, 0, "add") | ops.unsorted_segment_sum(x, seg32, 3)
ops.scatter_nd(pairs, r, (5, 3)) | ops.prelu(x, r) | ops.prelu(i2, ch) | ops.kl_div(x, w) | ops.softsign(x) | x.std(0) | x.argmin()
x.count_nonzero() | _written(x, lambda c: c.mul_(y))
mint.nn.functional.interpolate(i2, (9, 7)) | ops.interpolate(i2, (9, 7)) | ops.fftshift(x, (0, 1))
ops.matrix_power(spd, 3) | ops.ifftshift(x, (0, 1)) | ops.hfft(x) | ops.ihfft2(x)
x[0] | [*x] | ops.real(z1) | ops.view_as_real(z1)
ops.conv2d(i2, c2, bias6) | ops.lp_pool2d(i2, 2.0, 2) | ops.max_pool2d(i2, 2) | ops.adaptive_avg_pool1d(i1, 3)
ops.pad(x, [1, 0, 0, 2], value=1.5) | ops.batch_norm(i2, ch, chp, ch2, chp2) | ops.logcumsumexp(x, 0) | x.aminmax()
ops.index_fill(x, 0, ids32, 2.0) | ops.nanmedian(x) | ops.nanmean(x) | ops.matrix_band_part(x, 1, 1) | ops.inverse(spd)
ops.Softmax()(x) | ops.TopK()(x, 2) | ops.L2Normalize()(x) | ops.L2Loss()(x) | ops.MulNoNan()(x, p) | ops.Cast()(x, mindspore.float16)
ops.SquaredDifference()(x, y) | ops.Identity()(x) | ops.Meshgrid(indexing="ij")((s, r)) | ops.matrix_diag(x) | r.diag()
ops.tensor_scatter_update(x, pairs, r) | x.scatter_sub(pairs, r) | x.gather(ids, 0) | ops.argsort(x, 1) | ops.argmin(x)
ops.bucketize(x, [-1.0, 0.0, 1.0]) | sorted_.searchsorted(x) | ops.logit(w) | ops.xdivy(x, p) | ops.polygamma(three, p)
ops.atleast_3d(r) | ops.expand_as(r, x) | ops.view_as(v, d4) | ops.unbind(v, 1) | ops.block_diag(x, a) | x.repeat_interleave(2, 1)
ops.truncate_div(x, p) | ops.truncate_mod(x, p) | ops.addcdiv(x, y, p, o) | ops.fast_gelu(x) | ops.log_matrix_determinant(spd)
ops.isneginf(x) | ops.isreal(x) | x.isreal() | x.approximate_equal(y) | ops.argwhere(x) | x.cumsum(axis=0) | x.type_as(h)
mint.cross(x, y, 1) | mint.nn.functional.binary_cross_entropy(w, w2) | mint.nn.functional.binary_cross_entropy_with_logits(x, w)
_drawn(ops.dropout3d(i3)) | _drawn(ops.gumbel_softmax(x)) | _drawn(ops.bernoulli(w)) | _drawn(ops.randint_like(n, 0, 5))
ops.SoftmaxCrossEntropyWithLogits()(x, w) | ops.SigmoidCrossEntropyWithLogits()(x, w)
x.median() | x.median(axis=0, keepdims=True) | x.sort(0, True) | x.sort(axis=1) | x.argsort() | x.argsort(axis=0) | x.topk(2)
x.argmin(axis=0) | line.bincount() | line.bincount(minlength=12) | n.mean() | n.mean(0) | ops.kl_div(x, y) | ops.kl_div(x, y, "none")
_drawn(ops.randn_like(x)) | _drawn(ops.rrelu(x)) | ops.dyn_shape(x) | ops.bincount(line) | sq.trace()
ops.stop_gradient(h).histc(bins=3) | ops.histc(ops.stop_gradient(h), 3) | line.bincount(line.double()) | ops.bincount(line, line.double()) | ops.stop_gradient(x)[:0].chunk(2, 0)
mint.chunk(ops.stop_gradient(x)[:0], 3, 0) | x.chunk(2, 1) | ops.cross(h, h, 1) + h
ops.Pad(((1, 2), (0, 1)))(x) | ops.MirrorPad("REFLECT")(x, Tensor([[1, 2], [0, 1]])) | ops.pad(i1, (1, 2), mode="reflect")
ops.MirrorPad("SYMMETRIC")(x, Tensor([[1, 2], [0, 1]])) | ops.pad(i2, (1, 2, 0, 1), mode="replicate") | t.any(axis=0)
x.take(ids, axis=1) | x.take(ids, axis=0, mode="wrap") | t.any(axis=1, keep_dims=True) | ops.index_add(x * 1, ids32, row3, 0)
ops.CumSum(exclusive=True)(x, 0) | ops.CumSum(True, True)(x, 1) | ops.CumProd(exclusive=True, reverse=True)(x, 0)
ops.AvgPool(3, 2, "same")(i2) | ops.MaxPool(3, 2, "same")(i2) | ops.AvgPool3D(3, 2, "same")(i3)
"""
CASES = [tensor.strip() for tensor in EXPRESSIONS.replace("\n", " | ").split(" | ") if tensor.strip()]


@pytest.mark.parametrize("text", CASES)
def test_name_is_served_on_one_rank(text):
    """On a world of one rank a name has the plain values and shapes."""
    expression = SWEEP.Expression(text)
    platform = platform_named("mindspore")
    plain_tensors = [platform.from_numpy(np.asarray(tensor)) for tensor in expression.arrays()]
    with use_platform("mindspore"):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("m",))
        dtensors = [
            DTensor.from_local(tensor, mesh, [Shard(0) if tensor.ndim else Replicate()]) for tensor in plain_tensors
        ]
        plain, served = SWEEP._tensors(expression.value(plain_tensors)), SWEEP._tensors(expression.value(dtensors))
    assert len(served) == len(plain)
    for tensor, wanted in zip(served, plain, strict=True):
        outcome = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).asnumpy()
        assert outcome.dtype == wanted.asnumpy().dtype
        np.testing.assert_allclose(outcome, wanted.asnumpy(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("text", CASES)
@pytest.mark.untraced
def test_name_means_the_same_on_dtensors(text):
    """Values, dtypes and gradients are those of plain tensors, in every placement tried on two ranks."""
    (outcome,) = SWEEP.run_case(SWEEP.Case(text, (text,)), meshes=((2,),), limit=3)
    assert (outcome.kind, outcome.note.partition("reference")[0].strip()) == ("ok", "")
    assert outcome.compared > 0


@pytest.mark.platforms("torch", "mindspore", together=True)
def test_name_without_a_plain_kernel_means_what_it_does_on_pytorch():
    """A name without a plain CPU kernel in MindSpore has PyTorch's values."""
    text = "_written(x, lambda c: c.scatter_(0, perm, src))"
    (outcome,) = SWEEP.run_case(SWEEP.Case(text, (text,)), meshes=((2,),), limit=3)
    assert (outcome.kind, outcome.note.partition("reference")[0].strip()) == ("ok", "")
    assert outcome.compared > 0


@pytest.fixture
def dtensor():
    """A function that makes a DTensor of an array on a mesh of one rank."""
    with use_platform("mindspore"):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("m",))
        make = platform_named("mindspore").from_numpy
        yield lambda array: DTensor.from_local(make(np.asarray(array)), mesh, [Replicate()])


def test_options_of_primitives_without_a_rule_are_refused(dtensor):
    """Constructor options of a legacy primitive are served or refused, never ignored."""
    from mindspore import ops

    x = dtensor(np.ones((2, 3), np.float32))
    with pytest.raises(UnsupportedOperatorError) as caught:
        ops.CumulativeLogsumexp(exclusive=True)(x, 0)
    assert str(caught.value) == (
        "operator CumulativeLogsumexp: exclusive=True has no sharding rule, exclusive=False has; "
        "redistribute the operands and use to_local()"
    )
    with pytest.raises(UnsupportedOperatorError) as caught:
        ops.flash_attention_score(x.reshape(1, 2, 3), x.reshape(1, 2, 3), x.reshape(1, 2, 3), 3, keep_prob=0.5)
    assert str(caught.value) == (
        "operator FlashAttentionScore: keep_prob=0.5 has no sharding rule, keep_prob=1.0 has; "
        "redistribute the operands and use to_local()"
    )


def test_indices_out_of_bounds_are_refused(dtensor):
    """An index out of bounds is an error, as in MindSpore, and never another element."""
    from mindspore import ops

    x, places = dtensor(np.ones((5, 3), np.float32)), dtensor(np.array([[0, 7]], np.int64))
    with pytest.raises(IndexError, match=r"^index 7 does not exist in dim 1 of size 3$"):
        ops.gather_nd(x, places)


def test_what_would_work_on_local_tensors_is_refused(dtensor):
    """Compiled functions, functions and Cells with a derivative of their own, and sparse conversions are refused."""
    import mindspore
    from mindspore import nn
    from mindspore.common._grad_function import _Function

    class Doubled(_Function):
        @staticmethod
        def forward(_, x):
            return x * 2

        @staticmethod
        def backward(_, grad):
            return grad * 2

    class Own(nn.Cell):
        def construct(self, x):
            return x * 2

        def bprop(self, *plain_tensors):
            return (plain_tensors[-1] * 2,)

    x = dtensor(np.ones((2, 3), np.float32))
    what = "it would see this rank's shards as if they were complete; "
    rule = "use hyper_parallel.DFunction, whose rule declares how its results are placed"
    calls = {
        f"_Function.apply: {what}{rule}": lambda: Doubled.apply(x),
        f"a Cell with a bprop of its own: {what}{rule}": lambda: mindspore.grad(lambda y: Own()(y).sum())(x),
        f"a function compiled by ms.jit: {what}call it uncompiled, or on x.to_local() by local_map": lambda: (
            mindspore.jit(_doubled)(x)
        ),
        "this method of MindSpore acts on storage, of which a rank has a shard only; use to_local() for the shard": x.to_coo,
    }
    for message, call in calls.items():
        with pytest.raises(UnsupportedOperatorError) as caught:
            call()
        assert str(caught.value) == message


def _doubled(x):
    return x * 2


def test_recomputed_cells_take_dtensors():
    """Cells under ``ms.recompute`` take DTensors, with right values and gradients."""

    def run(x, y):
        import mindspore
        from mindspore import mint, nn

        class Layer(nn.Cell):
            def construct(self, x, y):
                return mint.exp(mint.matmul(x, y)).sum(0)

        return mindspore.recompute(Layer(), x, y)

    arrays = [SWEEP.SAMPLES.OPERANDS[name] for name in ("x", "a")]
    report = check_function(run, arrays, (2,), platform="mindspore", limit=6)
    assert report.ok, report.wrong[:3]
    assert not report.rejected


def test_assigning_writes_parameters_and_refuses_results(dtensor):
    """``ops.assign_add`` writes parameters and refuses results of operators, since it has no derivative."""
    from mindspore import Parameter, ops

    weight = Parameter(dtensor(np.ones((2, 3), np.float32)), name="weight")
    ops.assign_add(weight, dtensor(np.full((2, 3), 2, np.float32)))
    assert (weight.full_tensor().asnumpy() == 3).all()

    def assigned(x):
        return ops.assign(x * 1, x)

    with pytest.raises(UnsupportedOperatorError) as caught:
        platform_named("mindspore").value_and_grad(assigned)(dtensor(np.ones((2, 3), np.float32)))
    assert str(caught.value) == (
        "operator Assign: MindSpore does not differentiate it; use the in-place methods of tensors"
    )


def test_mindspore_works_after_a_failed_differentiation():
    """Tensors can be indexed after an exception in a differentiated function, unlike in MindSpore alone."""
    import mindspore
    from mindspore import ops

    platform = platform_named("mindspore")
    x = platform.from_numpy(np.ones((5, 3), np.float32))
    with pytest.raises(ZeroDivisionError):
        mindspore.grad(lambda tensor: tensor / (1 // 0))(x)
    assert x[0].shape == (3,)
    with pytest.raises(ZeroDivisionError):
        mindspore.value_and_grad(mindspore.grad(lambda tensor: tensor / (1 // 0)))(x)
    assert x[0].shape == (3,)

    def failing(tensor):
        return [tensor * 2, 1 / 0]

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            harness_of(platform).vjp(failing, [x], [None, None], [True])
        with pytest.raises(ZeroDivisionError):
            platform.value_and_grad(lambda tensor: failing(tensor)[0])(x)
    assert x[0].shape == (3,)
    assert ops.stop_gradient(x)[0].shape == (3,)


def test_scales_that_give_no_whole_size_are_refused(dtensor):
    """Resizing by a scale that gives no whole size is refused; the size must be given."""
    from mindspore import mint

    x = dtensor(np.ones((1, 2, 3, 5), np.float32))
    with pytest.raises(UnsupportedOperatorError) as caught:
        mint.nn.functional.interpolate(x, scale_factor=(1.5, 1.0))
    assert str(caught.value) == "interpolate: scale_factor [1.5, 1.0] of [3, 5] gives no integer sizes; pass size="
    assert mint.nn.functional.interpolate(x, scale_factor=(2.0, 3.0)).shape == (1, 2, 6, 15)
