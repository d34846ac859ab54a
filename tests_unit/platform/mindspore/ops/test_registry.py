"""Every kernel on MindSpore: it agrees with PyTorch's on plain tensors, and with its rule on their shards.

On DTensors, in every placement: ``hyper-parallel verify ops --platform mindspore``, the environment ``ops-mindspore``.
"""

from __future__ import annotations

from dataclasses import replace
from types import BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType

import numpy as np
import pytest

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Replicate
from hyper_parallel.core.shard import rules
from hyper_parallel.core.shard.entry import binder
from hyper_parallel.core.shard.rule import find_rule, rule_names
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.select import platform_named, use_platform
from hyper_parallel.verify.checker.difference import difference, rounding_bound
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.ops.selection import QUICK
from hyper_parallel.verify.ops.sweep import sweep_operator

rules.load()
RNG = np.random.default_rng(7)
F32 = np.float32


def real(*shape):
    """Random numbers of both signs."""
    return RNG.standard_normal(shape).astype(F32)


def positive(*shape):
    """Positive numbers."""
    return RNG.uniform(0.3, 2.0, shape).astype(F32)


def inside(*shape):
    """Numbers between -1 and 1."""
    return RNG.uniform(-0.9, 0.9, shape).astype(F32)


def whole(high, *shape):
    """Integers below ``high``."""
    return RNG.integers(0, high, shape).astype(np.int64)


def truth(*shape):
    """Random booleans."""
    return RNG.integers(0, 2, shape).astype(bool)


# Operator -> positional arguments (arrays are operands), keyword arguments.
SAMPLES = {}


def sample(names, *args, **kwargs):
    """Add one call to the samples of each of the operators."""
    for name in names.split():
        SAMPLES.setdefault(name, []).append((args, kwargs))


X = real(5, 3)
sample("abs neg exp expm1 square sin cos tan sinh cosh tanh asinh erf erfc sigmoid sign sgn ceil floor trunc round "
       "frac sinc isnan isfinite isinf isneginf isposinf nan_to_num signbit atan exp2 relu silu gelu hardswish "
       "hardsigmoid mish relu6 softplus logsigmoid elu celu selu hardtanh leaky_relu softshrink hardshrink clone "
       "contiguous detach ones_like", X)  # fmt: skip
sample("reciprocal log log1p log2 log10 sqrt rsqrt lgamma digamma", positive(5, 3))
sample("asin acos atanh erfinv", inside(5, 3))
sample("acosh", positive(5, 3) + 1)
sample("logit", positive(5, 3) / 3)
sample("threshold", X, 0.25, -2.0)
sample("logical_not bitwise_not", truth(5, 3))
sample("add sub rsub mul maximum minimum atan2 logaddexp fmod remainder floor_divide eq ne lt le gt ge isclose fmax "
       "fmin hypot copysign", X, positive(5, 3))  # fmt: skip
sample("add sub mul div maximum minimum floor_divide lt pow", positive(5, 3), positive(3))
sample("add sub mul div pow rsub", positive(5, 3), 1.5)
sample("add", X, real(5, 3), alpha=3)
sample("div", X, positive(5, 3), rounding_mode="floor")
sample("pow xlogy", positive(5, 3), positive(5, 3))
sample("heaviside", X, real(5, 3))
sample("logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor", truth(5, 3), truth(5, 3))
sample("lerp", X, real(5, 3), 0.3)
sample("addcmul addcdiv", X, real(5, 3), positive(5, 3), value=2)
sample("where", truth(5, 3), X, real(5, 3))
sample("clamp", X, -0.5, 0.5)
sample("masked_fill", X, truth(5, 3), 2.0)
sample("full_like", X, 3.0)
sample("sum mean nansum amax amin prod var std vector_norm count_nonzero", X)
sample("sum mean nansum amax amin prod var std argmax argmin logsumexp", X, dim=0)
sample("sum mean amax amin var std logsumexp vector_norm", real(4, 3, 5), dim=(0, 2), keepdim=True)
sample("any all", truth(5, 3), dim=1)
sample("max_along min_along", X, 1)
sample("median_along", X, 1)
sample("extreme_all", X, True)
sample("var_mean std_mean", X, 0)
sample("cumsum cumprod logcumsumexp softmax softmin log_softmax", X, 1)
sample("matmul", real(5, 3), real(3, 4))
sample("matmul", real(2, 5, 3), real(3, 4))
sample("mm", real(5, 3), real(3, 4))
sample("bmm", real(2, 5, 3), real(2, 3, 4))
sample("mv", real(5, 3), real(3))
sample("dot", real(5), real(5))
sample("outer", real(5), real(3))
sample("addmm", real(4), real(5, 3), real(3, 4), beta=2, alpha=3)
sample("baddbmm", real(2, 5, 4), real(2, 5, 3), real(2, 3, 4))
sample("addmv", real(5), real(5, 3), real(3))
sample("linear", real(5, 3), real(4, 3), real(4))
sample("linear", real(2, 5, 3), real(4, 3))
sample("einsum", "bij,jk->bik", real(2, 5, 3), real(3, 4))
Y = real(4, 2, 3)
sample("view", Y, (8, 3))
sample("view", Y, (2, 2, 6))
sample("transpose", Y, 0, 2)
sample("permute", Y, (2, 0, 1))
sample("movedim", Y, 0, 2)
sample("t reversed_dims", real(5, 3))
sample("matrix_transpose", Y)
sample("squeeze", real(4, 1, 3), 1)
sample("unsqueeze", Y, 1)
sample("expand", real(4, 1, 3), (5, 4, 2, 3))
sample("narrow", Y, 0, 1, 2)
sample("slice", Y, 0, 0, 4, 2)
sample("select", Y, 1, 1)
sample("unbind", Y, 1)
sample("split", Y, 3, 0)
sample("chunk", Y, 2, 0)
sample("repeat", real(4, 3), (2, 1))
sample("repeat_interleave", Y, 2, 1)
sample("cat", [real(4, 3), real(5, 3)], 0)
sample("stack", [real(4, 3), real(4, 3)], 1)
sample("roll", Y, 1, 0)
sample("flip", Y, (0, 2))
sample("tril triu", real(5, 3))
sample("getitem", Y, (slice(1, 3), None, 1))
sample("index", real(5, 3), (whole(5, 4),))
sample("gather", real(5, 3), 0, whole(5, 4, 3))
sample("index_select", real(5, 3), 0, whole(5, 4))
sample("scatter", real(5, 3), 0, np.stack([RNG.permutation(5)[:4] for _ in range(3)], 1), real(4, 3))
sample("scatter_add", real(5, 3), 0, whole(5, 4, 3), real(4, 3))
sample("index_add", real(5, 3), 0, whole(5, 4), real(4, 3))
sample("one_hot", whole(5, 4, 2), 5)
sample("embedding", whole(7, 4, 2), real(7, 3))
sample("embedding", whole(7, 4, 2), real(7, 3), 2)
sample("layer_norm", real(5, 3), (3,), real(3), real(3))
sample("native_layer_norm", real(5, 3), (3,), real(3), real(3), 1e-5)
sample("rms_norm", real(5, 3), (3,), real(3), 1e-6)
sample("group_norm", real(3, 4, 2), 2, real(4), real(4))
sample("scaled_dot_product_attention", real(2, 2, 5, 4), real(2, 2, 3, 4), real(2, 2, 3, 4))
sample("scaled_dot_product_attention", real(2, 2, 5, 4), real(2, 2, 5, 4), real(2, 2, 5, 4), is_causal=True)

sample("addbmm", real(5, 4), real(2, 5, 3), real(2, 3, 4), beta=2, alpha=3)
sample("diagonal", real(5, 3, 4), 1, 0, 2)
sample("unfold", real(3, 7), 1, 3, 2)
sample("take_class", real(5, 7, 2), whole(7, 5, 2), 1)
sample("take_weight", real(7), whole(7, 5, 2))
sample("class_max", real(5, 7), 1)
sample("mse_loss_elements l1_loss_elements soft_margin_loss_elements", X, real(5, 3))
sample("smooth_l1_loss_elements", X, real(5, 3), 0.5)
sample("huber_loss_elements", X, real(5, 3), 0.75)
sample("binary_cross_entropy_elements", positive(5, 3) / 3, positive(5, 3) / 3, positive(5, 3))
sample("binary_cross_entropy_with_logits_elements", X, positive(5, 3) / 3, positive(3), positive(3))
sample("kl_div_elements", X, positive(5, 3))
sample("bessel_j0 bessel_j1 i0 i0e i1 i1e modified_bessel_i0 modified_bessel_i1", X)
sample("bessel_y0 bessel_y1 modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1",
       positive(5, 3))  # fmt: skip
sample("deg2rad rad2deg", X)
sample("gcd lcm", whole(9, 5, 3) + 1, whole(9, 5, 3) + 1)
sample("bitwise_left_shift bitwise_right_shift", whole(9, 5, 3), whole(4, 5, 3))
sample("igamma igammac", positive(5, 3), positive(5, 3))
sample("zeta", positive(5, 3) + 1, positive(5, 3))
sample("nextafter logaddexp2", X, real(5, 3))
sample("ldexp", X, whole(4, 5, 3))
sample("xlog1py", positive(5, 3), positive(5, 3))
sample("mvlgamma", positive(5, 3) + 1, 2)
sample("polygamma", positive(5, 3), 1)
sample("renorm", X, 2.0, 0, 1.0)
sample("addr", X, real(5), real(3), beta=2, alpha=3)
sample("bucketize", X, np.array([-1.0, 0.0, 0.5], F32))
sample("searchsorted", np.sort(real(5, 3), -1), real(5, 2))
sample("bincount_to", whole(6, 7), None, 6)
sample("histc", X, 4, -2.0, 2.0)
sample("cummax cummin", X, 0)
sample("cummax cummin", whole(3, 5, 3).astype(F32), 1)
sample("median_all", X)
sample("nanmedian_along", np.where(real(5, 3) > 0.5, np.float32("nan"), real(5, 3)), 1, True)
sample("aminmax", X, dim=0)
sample("block_diag", real(2, 3), real(3), real(1, 2))
sample("cdist", real(2, 5, 3), real(2, 4, 3))
sample("convolution", real(2, 4, 6, 5), real(6, 4, 3, 2), real(6), (2, 1), (1, 0), (1, 1), False, (0, 0), 1)
sample("convolution", real(2, 4, 6, 5), real(6, 2, 3, 2), None, (1, 1), (0, 0), (1, 2), False, (0, 0), 2)
sample("convolution", real(2, 4, 9), real(6, 4, 3), real(6), (2,), (1,), (1,), False, (0,), 1)
sample(
    "convolution", real(2, 2, 4, 5, 4), real(4, 2, 2, 3, 2), None, (1, 1, 1), (1, 0, 1), (1, 1, 1), False, (0, 0, 0), 1
)
sample("avg_pool2d", real(2, 3, 6, 5), (3, 2), (2, 1), (1, 0))
sample("avg_pool3d", real(2, 3, 4, 5, 4), (2, 3, 2))
sample("max_pool2d", real(2, 3, 6, 5), (3, 2), (2, 1), (1, 0))
sample("max_pool3d", real(2, 3, 4, 5, 4), (2, 3, 2))
sample("adaptive_avg_pool2d adaptive_max_pool2d", real(2, 3, 6, 5), (3, 2))
sample("adaptive_avg_pool3d", real(2, 3, 4, 5, 4), (2, 2, 3))
sample("grid_sample", real(2, 3, 6, 5), inside(2, 4, 3, 2))
sample("im2col", real(2, 3, 6, 5), (3, 2), (1, 1), (1, 0), (1, 1))
sample("col2im", real(2, 12, 20), (6, 5), (2, 2), (1, 1), (0, 0), (1, 1))
sample("pad", X, (1, 2, 0, 1), 1.5)
sample("prelu", X, real(3))
sample("sort", X, 1, True)
sample("argsort", X, 0)
sample("topk", X, 2, 1)
sample("kthvalue", X, 2, 1)
sample("cross", X, real(5, 3), 1)
sample("inv det slogdet", np.eye(3, dtype=F32) * 3 + real(2, 3, 3) / 3)
sample("matrix_power", np.eye(3, dtype=F32) + real(2, 3, 3) / 3, 3)
sample("hfft irfft", real(5, 3))

CASES = [(name, *array) for name in sorted(SAMPLES) for array in SAMPLES[name]]
IDS = [f"{name}-{index}" for name in sorted(SAMPLES) for index in range(len(SAMPLES[name]))]

# Tested elsewhere: writers and makers in test_dtensor.py, random operators by value in test_random.py.
ELSEWHERE = {
    "setitem", "zero", "zeros_like", "fill", "copy", "cast", "empty_like", "new_zeros", "new_ones", "new_empty",
    "new_full", "dropout", "uniform", "normal", "bernoulli", "bernoulli_fill", "random_fill", "rand_like",
    "randn_like", "randint_like", "multinomial", "lookup",
    # Complex numbers, and what has no derivative on CPU, by the sweep.
    "fft", "fft2", "fftn", "ifft", "ifft2", "ifftn", "hfft2", "hfftn", "ihfft", "ihfft2", "ihfftn", "rfft", "rfft2",
    "rfftn", "irfft2", "irfftn", "cholesky", "real", "imag", "conj", "view_as_real", "complex", "polar",
    # Every interpolation has arguments of its own: by their spellings, in the sweep.
    "upsample",
}  # fmt: skip


def _arrays(tree):
    if isinstance(tree, np.ndarray):
        return [tree]
    return [array for item in tree for array in _arrays(item)] if isinstance(tree, (list, tuple)) else []


def _filled(tree, values):
    if isinstance(tree, np.ndarray):
        return next(values)
    return type(tree)(_filled(item, values) for item in tree) if isinstance(tree, (list, tuple)) else tree


@pytest.mark.platforms("mindspore")
def test_every_rule_has_a_sample():
    """Each rule that MindSpore serves has a sample here, or the reason why it is tested elsewhere."""
    from hyper_parallel.core.shard.rule import Rule
    from hyper_parallel.platform.mindspore.ops.registry import kernels

    known = {name for name in rule_names() if isinstance(find_rule(name), Rule) and name in kernels()}
    assert known - set(SAMPLES) - ELSEWHERE == set()


@pytest.mark.platforms("mindspore")
@pytest.mark.parametrize("name", sorted(SAMPLES))
@pytest.mark.untraced
def test_rules_hold_on_shards(name):
    """From its input shards a rank computes its shards of the plain outputs and gradients, also empty ones."""
    effort = replace(QUICK, meshes=((3,),), public=False, reproducers=False)
    report = sweep_operator("mindspore", name, effort)
    assert report.outcome == "ok", report.text()
    assert report.checks == report.ok > 0


# PyTorch has no derivative of these.
STEPS = {
    "floor_divide", "heaviside", "sgn", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "modified_bessel_i0",
    "modified_bessel_i1", "modified_bessel_k0", "modified_bessel_k1", "scaled_modified_bessel_k0",
    "scaled_modified_bessel_k1", "igamma", "igammac", "zeta", "nextafter", "histc",
}  # fmt: skip
# Of these PyTorch differentiates the first operand only.
FIRST_ONLY = {
    "binary_cross_entropy_elements",
    "binary_cross_entropy_with_logits_elements",
    "soft_margin_loss_elements",
}
# PyTorch calls these under its own names; its table has no implementation by canonical ones.
SPELLED = {
    "contiguous", "full_like", "ones_like", "gelu", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
    "adaptive_max_pool2d", "avg_pool2d", "avg_pool3d", "max_pool2d", "max_pool3d", "col2im", "im2col", "grid_sample",
    "pad", "prelu",
}  # fmt: skip
SHARED = [(case, name) for case, name in zip(CASES, IDS, strict=True) if case[0] not in SPELLED]


def _local(platform, name, args, kwargs):
    """The framework's implementation by canonical names; PyTorch's table also holds builtins, which take positions."""
    local = platform.local_op(name)
    if isinstance(local, BuiltinFunctionType | MethodDescriptorType | WrapperDescriptorType):
        return local(*args, **kwargs)
    return local(**binder(find_rule(name).signature).bind(args, kwargs))


def _seed(platform, rng, out):
    if not platform.is_floating(out):
        return None
    return platform.from_numpy(np.asarray(rng.standard_normal(tuple(out.shape)), dtype=F32))


def _differentiable(name):
    """Whether the installed PyTorch differentiates the operator; that of 2.10 has no derivative of ``aminmax``."""
    import torch

    if name != "aminmax":
        return name not in STEPS
    x = torch.ones(2, 2, requires_grad=True)
    try:
        x.aminmax(dim=0).min.sum().backward()
    except RuntimeError as error:
        if str(error) != "derivative for aten::aminmax is not implemented":
            raise
        return False
    return True


@pytest.mark.platforms("torch", "mindspore", together=True)
@pytest.mark.parametrize("name, args, kwargs", [case for case, _ in SHARED], ids=[name for _, name in SHARED])
def test_operator_equals_pytorchs(name, args, kwargs):
    """The two frameworks' implementations of a canonical operator agree, values and gradients, dtypes and shapes."""
    results = {}
    for framework in ("torch", "mindspore"):
        platform, arrays = platform_named(framework), _arrays(args)
        rng = np.random.default_rng(3)

        def run(*tensors, platform=platform):
            out = _local(platform, name, _filled(args, iter(tensors)), kwargs)
            return list(out) if isinstance(out, (list, tuple)) else [out]

        def seeds(outs, platform=platform, rng=rng):
            return [_seed(platform, rng, array) for array in outs]

        wanted = [array.dtype.kind == "f" and _differentiable(name) for array in arrays]
        wanted[1:] = [want and name not in FIRST_ONLY for want in wanted[1:]]
        outs, grads = harness_of(platform).vjp(run, [platform.from_numpy(array) for array in arrays], seeds, wanted)
        results[framework] = [platform.tensor_to_numpy(array) for array in [*outs, *grads] if array is not None]
    for ours, theirs in zip(results["mindspore"], results["torch"], strict=True):
        # The worst is the gradient of sinc, a difference of near values: 20 units in the last place, of 64.
        assert difference(ours, theirs, rounding_bound(theirs)) == ""


# -- options without a rule --------------------------------------------------------------------------------------------

WAY_OUT = "redistribute the operands and use to_local()"


def _attention(x, **options):
    from mindspore import ops

    return ops.flash_attention_score(x, x, x, options.pop("heads", 2), **{"input_layout": "BNSD", **options})


def _calls(make):
    """The calls by the message of their refusal."""
    from mindspore import mint, ops

    x, q = make((2, 3)), make((1, 2, 3, 4))
    flash = "operator FlashAttentionScore"
    return {
        "operator ops.bernoulli: a tensor as p has no sharding rule; pass a number, or use mint.bernoulli": lambda: (
            ops.bernoulli(x, x)
        ),
        "operator ops.max: where= has no sharding rule; use masked_fill first": lambda: ops.max(x, where=x > 0),
        f"operator ops.min: initial=1.0 has no sharding rule, initial=None has; {WAY_OUT}": lambda: ops.min(
            x, initial=1.0
        ),
        f"operator ops.clip_by_global_norm: use_norm=2.0 has no sharding rule, use_norm=None has; {WAY_OUT}": lambda: (
            ops.clip_by_global_norm([x], 1.0, 2.0)
        ),
        "operator einsum: every operand must be a DTensor, and the equation comes first": lambda: mint.einsum(
            "ij,kj->ik", x, x.to_local()
        ),
        f"{flash}: padding_mask='a tensor' has no sharding rule, padding_mask=None has; {WAY_OUT}": lambda: _attention(
            q, padding_mask=q
        ),
        f"{flash}: sparse_mode=4 has no sharding rule, sparse_mode=0 has; {WAY_OUT}": lambda: _attention(
            q, sparse_mode=4
        ),
        f"{flash}: real_shift='a tensor' has no sharding rule, real_shift=None has; {WAY_OUT}": lambda: _attention(
            q, sparse_mode=2, real_shift=q
        ),
        f"{flash}: head_num=3 has no sharding rule, head_num=2 has; {WAY_OUT}": lambda: _attention(q, heads=3),
        f"operator PromptFlashAttention: pre_tokens=3 has no sharding rule, pre_tokens=2147483647 has; {WAY_OUT}": (
            lambda: ops.prompt_flash_attention(q, q, q, num_heads=2, input_layout="BNSD", pre_tokens=3)
        ),
        "operator nothing is not implemented on MindSpore; compose it of others, or use PyTorch": lambda: (
            platform_named("mindspore").local_op("nothing")
        ),
    }


@pytest.mark.platforms("mindspore")
def test_options_without_a_rule_are_refused():
    """Each refusal names the option without a rule, the value that has one, and the fix."""
    with use_platform("mindspore"):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("m",))
        ones = lambda shape: platform_named("mindspore").from_numpy(np.ones(shape, np.float32))  # noqa: E731 - short
        for message, call in _calls(lambda shape: DTensor.from_local(ones(shape), mesh, [Replicate()])).items():
            with pytest.raises(UnsupportedOperatorError) as caught:
                call()
            assert str(caught.value) == message
