"""Every canonical operator on MindSpore: as PyTorch's on plain tensors, and its rules hold on pieces of them.

On DTensors, in every placement: ``hyper-parallel verify ops --platform mindspore``, the environment ``ops-mindspore``.
"""

from __future__ import annotations

from dataclasses import replace
from types import BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType

import numpy as np
import pytest

from hyper_parallel.core.shard import rules
from hyper_parallel.core.shard.entry import binder
from hyper_parallel.core.shard.rule import find_rule, rule_names
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.compare import elementwise_difference
from hyper_parallel.verify.ops.selection import QUICK
from hyper_parallel.verify.ops.sweep import sweep_operator

rules.load()
RNG = np.random.default_rng(7)
F32 = np.float32


def real(*shape):
    """Numbers of either sign."""
    return RNG.standard_normal(shape).astype(F32)


def positive(*shape):
    """Numbers that logarithms and roots take."""
    return RNG.uniform(0.3, 2.0, shape).astype(F32)


def inside(*shape):
    """Numbers between -1 and 1."""
    return RNG.uniform(-0.9, 0.9, shape).astype(F32)


def whole(high, *shape):
    """Integers below ``high``."""
    return RNG.integers(0, high, shape).astype(np.int64)


def truth(*shape):
    """Truth values."""
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

CASES = [(name, *one) for name in sorted(SAMPLES) for one in SAMPLES[name]]
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
    return [one for item in tree for one in _arrays(item)] if isinstance(tree, (list, tuple)) else []


def _filled(tree, values):
    if isinstance(tree, np.ndarray):
        return next(values)
    return type(tree)(_filled(item, values) for item in tree) if isinstance(tree, (list, tuple)) else tree


@pytest.mark.platforms("mindspore")
def test_every_rule_has_a_sample():
    """A new rule that MindSpore serves brings a sample here, or the reason why it is tested elsewhere."""
    from hyper_parallel.core.shard.rule import Rule
    from hyper_parallel.platform.mindspore.ops.registry import kernels

    known = {name for name in rule_names() if isinstance(find_rule(name), Rule) and name in kernels()}
    assert known - set(SAMPLES) - ELSEWHERE == set()


@pytest.mark.platforms("mindspore")
@pytest.mark.parametrize("name", sorted(SAMPLES))
@pytest.mark.untraced
def test_rules_hold_on_pieces(name):
    """What a rank computes of its pieces is its piece of the plain outputs and gradients, uneven and empty too."""
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


@pytest.mark.platforms("torch", "mindspore", together=True)
@pytest.mark.parametrize("name, args, kwargs", [case for case, _ in SHARED], ids=[name for _, name in SHARED])
def test_operator_equals_pytorchs(name, args, kwargs):
    """The two frameworks' implementations of a canonical operator agree, values and gradients, dtypes and shapes."""
    found = {}
    for framework in ("torch", "mindspore"):
        platform, arrays = platform_named(framework), _arrays(args)
        rng = np.random.default_rng(3)

        def run(*tensors, platform=platform):
            out = _local(platform, name, _filled(args, iter(tensors)), kwargs)
            return list(out) if isinstance(out, (list, tuple)) else [out]

        def seeds(outs, platform=platform, rng=rng):
            return [_seed(platform, rng, one) for one in outs]

        wanted = [one.dtype.kind == "f" and name not in STEPS for one in arrays]
        wanted[1:] = [want and name not in FIRST_ONLY for want in wanted[1:]]
        outs, grads = platform.vjp(run, [platform.from_numpy(one) for one in arrays], seeds, wanted)
        found[framework] = [platform.tensor_to_numpy(one) for one in [*outs, *grads] if one is not None]
    for ours, theirs in zip(found["mindspore"], found["torch"], strict=True):
        # The worst is the gradient of sinc, a difference of near values: 20 units in the last place, of 64.
        assert elementwise_difference(ours, theirs, None) is None


def _ran(name, *args, **kwargs):
    platform = platform_named("mindspore")
    given = [platform.from_numpy(one) if isinstance(one, np.ndarray) else one for one in args]
    return platform.tensor_to_numpy(_local(platform, name, given, kwargs))


@pytest.mark.platforms("mindspore")
@pytest.mark.parametrize("norm", [None, "backward", "ortho", "forward"])
def test_half_transforms_are_the_same_every_time(norm):
    """MindSpore's own kernels of hfft and ihfft are right in every other call; ours always, as NumPy's."""
    x = real(4, 5).astype(np.float64)
    z = x + 1j * real(4, 5)
    for _ in range(3):
        assert np.allclose(_ran("hfft", z, norm=norm), np.fft.hfft(z, norm=norm), rtol=1e-13)
        assert np.allclose(_ran("ihfft", x, norm=norm), np.fft.ihfft(x, norm=norm), rtol=1e-13)


@pytest.mark.platforms("mindspore")
def test_complex_numbers_of_parts_of_two_shapes():
    """Parts are broadcast; MindSpore's own kernels read past the end of the smaller one, or fail."""
    x, y = positive(5, 1), real(3)
    assert np.allclose(_ran("complex", x, y), x + 1j * y)
    assert np.allclose(_ran("polar", x, y), x * np.exp(1j * y))


@pytest.mark.platforms("mindspore")
def test_places_depend_on_the_element_alone():
    """Among edges in no order a bisection goes astray: for each element in the same way, whatever its neighbours."""
    edges, x = np.array([0.4, -1.0, 2.0, 0.1, -0.3]), real(40).astype(np.float64)
    for right in (False, True):
        found = _ran("bucketize", x, edges, right=right)
        assert found.tolist() == [_ran("bucketize", x[at : at + 1], edges, right=right)[0] for at in range(40)]
        ordered = np.sort(edges)
        wanted = np.searchsorted(ordered, [*x, *ordered, np.nan], "right" if right else "left")
        assert _ran("bucketize", np.array([*x, *ordered, np.nan]), ordered, right=right).tolist() == wanted.tolist()


@pytest.mark.platforms("mindspore")
def test_places_in_empty_pieces_have_no_gradient():
    """Backward communicates alike on every rank, also where places were cast and a rank holds nothing."""
    from hyper_parallel.core.dtensor.placements import Shard
    from hyper_parallel.verify.check import check_function

    def placed(x):
        return x.argmax(0).float() * x.sum(0) + x.argsort(0).float() * x + (x > 0).float() * x

    on_both = [[(Shard(0), Shard(0)), (Shard(1), Shard(1))]]
    report = check_function(placed, [real(5, 3)], (2, 2), platform="mindspore", placements=on_both)
    assert report.all_held, (report.wrong, report.rejected)


@pytest.mark.platforms("mindspore")
def test_steps_of_empty_pieces_have_no_gradient():
    """Nothing flows back through signs and roundings: a rank without elements does not wait alone for the others."""
    from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
    from hyper_parallel.verify.check import check_function

    def stepped(x):
        ops, rows = platform_named("mindspore").dispatcher.ops, x
        if hasattr(x, "redistribute"):
            rows = x.redistribute(placements=[Shard(0)])  # two rows on three ranks
        return sum(getattr(ops, op)(rows) for op in ("sign", "sgn", "ceil", "round")) + x

    places = [[(Partial("sum"),), (Replicate(),), (Shard(1),)]]
    report = check_function(stepped, [3 * real(2, 3)], (3,), platform="mindspore", placements=places)
    assert report.all_held, (report.wrong, report.rejected)


@pytest.mark.platforms("mindspore")
def test_scatter_into_a_vector_after_one_into_a_matrix():
    """MindSpore's CPU kernel uses the matrix' sizes for the vector then, and writes elsewhere: values and gradients."""
    import mindspore
    from mindspore import Tensor, mint

    local = platform_named("mindspore").local_op("scatter")
    matrix, vector, weights = real(5, 3), real(15), Tensor(real(15))
    for _ in range(3):
        mint.scatter(Tensor(matrix), 0, Tensor(np.zeros((1, 3), np.int64)), Tensor(real(1, 3)))
        places, source = RNG.permutation(15)[:4], real(4)
        wanted = vector.copy()
        wanted[places] = source
        assert (_ran("scatter", vector, 0, places, source) == wanted).all()

        def weighed(x, src, places=places):
            return (local(x=x, dim=0, index=Tensor(places), src=src) * weights).sum()

        grads = mindspore.grad(weighed, (0, 1))(Tensor(vector), Tensor(source))
        kept = weights.asnumpy().copy()
        kept[places] = 0
        assert (grads[0].asnumpy() == kept).all()
        assert (grads[1].asnumpy() == weights.asnumpy()[places]).all()


@pytest.mark.platforms("mindspore")
def test_scatter_of_a_value_and_with_a_reduction():
    """A number is written by either name; a reduction that MindSpore lacks is refused, never left out."""
    x, places = real(5, 3), np.array([[0, 1, 2]])
    wanted = x.copy()
    wanted[[0, 1, 2], [0, 1, 2]] = 1.5
    assert (_ran("scatter", x, 0, places, 1.5) == wanted).all()
    assert (_ran("scatter", x, 0, places, value=1.5) == wanted).all()
    with pytest.raises(UnsupportedOperatorError) as caught:
        _ran("scatter", x, 0, places, real(1, 3), reduce="add")
    assert str(caught.value) == "scatter with reduce='add': MindSpore has no such operator; scatter_add adds"


@pytest.mark.platforms("mindspore")
def test_no_sum_is_lost_where_places_repeat():
    """MindSpore's own kernel for places along a dim adds in several threads at once, and loses every tenth sum here."""
    rng = np.random.default_rng(0)
    for dim in (0, 1):
        for _ in range(100):
            x, index = rng.integers(-4, 5, (50, 20)).astype(np.float64), rng.integers(0, 20, (200, 20))
            index = index if dim == 0 else index.reshape(50, 80)
            source = rng.integers(-4, 5, index.shape).astype(np.float64)
            wanted = x.copy()
            np.add.at(wanted, (index, np.arange(20)) if dim == 0 else (np.arange(50)[:, None], index), source)
            assert (_ran("scatter_add", x, dim, index, source) == wanted).all()


@pytest.mark.platforms("mindspore")
def test_places_beyond_the_end_are_an_error():
    """A place that does not exist is refused, and is not one in the next row; negative ones count from the end."""
    x, source = np.zeros((3, 4), np.float32), np.ones((1, 2), np.float32)
    assert _ran("scatter_add", x, 1, np.array([[-1, 0]]), source)[0].tolist() == [1, 0, 0, 1]
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        _ran("scatter_add", x, 1, np.array([[4, 0]]), source)


@pytest.mark.platforms("mindspore")
def test_operands_of_two_shapes_are_broadcast():
    """MindSpore's own kernel of nextafter reads past the end of the smaller operand."""
    x, y = real(5, 3).astype(np.float64), real(3).astype(np.float64)
    assert (_ran("nextafter", x, y) == np.nextafter(x, y)).all()


def _piece(name, *args, **kwargs):
    """The local implementation as dispatch calls it, with the arguments of pieces."""
    platform = platform_named("mindspore")
    given = [platform.from_numpy(one) if isinstance(one, np.ndarray) else one for one in args]
    return platform.tensor_to_numpy(platform.local_op(name)(*given, **kwargs))


def _rejected(kind, name, *args, **kwargs):
    with pytest.raises(kind) as caught:
        _piece(name, *args, **kwargs)
    return str(caught.value)


@pytest.mark.platforms("mindspore")
def test_rows_of_a_part_of_a_table():
    """Of rows 1 to 2 of a table of 4, others contribute nothing, a part without rows too, and no index gives no row."""
    table, none = real(2, 3), np.zeros((0, 3), F32)
    places = np.array([0, 1, 2, 3])
    wanted = np.concatenate([np.zeros((1, 3), F32), table, np.zeros((1, 3), F32)])
    for name, args in {
        "index_select": (table, 0, places),
        "gather": (table, 0, np.tile(places[:, None], (1, 3))),
        "embedding": (places, table),
    }.items():
        assert (_piece(name, *args, window=(1, 3, 4)) == wanted).all()
        empty = [none if one is table else one for one in args]
        assert (_piece(name, *empty, window=(4, 4, 4)) == np.zeros((4, 3))).all()
        nowhere = [one[:0] if isinstance(one, np.ndarray) and one.dtype == np.int64 else one for one in args]
        assert _piece(name, *nowhere, window=(1, 3, 4)).shape == (0, 3)
        beyond = [one + 4 if isinstance(one, np.ndarray) and one.dtype == np.int64 else one for one in args]
        said = "index out of range: indices are 4 to 7, the dim has size 4"
        assert _rejected(IndexError, name, *beyond, window=(1, 3, 4)) == said


@pytest.mark.platforms("mindspore")
def test_what_embedding_does_not_do_is_refused():
    """Rows of bounded norm and gradients by frequency are PyTorch's."""
    said = "embedding: max_norm, scale_grad_by_freq and sparse are not served on MindSpore"
    assert _rejected(NotImplementedError, "embedding", whole(4, 2), real(4, 3), max_norm=1.0) == said


@pytest.mark.platforms("mindspore")
def test_sums_at_places_of_a_number():
    """A tensor without dims has one place, 0."""
    assert _piece("scatter_add", np.asarray(1.5, F32), 0, np.asarray(0), np.asarray(2.0, F32)) == 3.5


@pytest.mark.platforms("mindspore")
def test_classes_of_a_part():
    """A rank takes what lies in its classes, 0 of the others; no class or sample gives nothing, 7 of 7 an error."""
    x, target = real(3, 5), np.array([1, 4, 6])
    assert _piece("take_class", x, target, 1, start=3, classes=7).tolist() == [0.0, x[1, 1], x[2, 3]]
    assert (_piece("take_class", x[:, :0], target, 1, start=3, classes=7) == np.zeros(3)).all()
    assert _piece("take_class", x[:0], target[:0], 1).shape == (0,)
    weight = real(5)
    assert _piece("take_weight", weight, target, start=3, classes=7).tolist() == [0.0, weight[1], weight[3]]
    assert (_piece("take_weight", weight[:0], target, start=3, classes=7) == np.zeros(3)).all()
    assert _piece("take_weight", weight, target[:0], start=3, classes=7).shape == (0,)
    assert _rejected(IndexError, "take_class", x, target + 1, 1, start=3, classes=7) == "Target 7 is out of bounds."
    assert np.isneginf(_piece("class_max", x[:, :0], 1)).all()


@pytest.mark.platforms("mindspore")
def test_powers_of_matrices():
    """Negative powers are those of the inverse, the zeroth is 1, and the first is the matrix in storage of its own."""
    x = np.array([[2.0, 1.0], [0.0, 4.0]])
    for power in (-2, -1, 0, 1, 2, 5):
        assert np.allclose(_piece("matrix_power", x, power), np.linalg.matrix_power(x, power), rtol=1e-12)


@pytest.mark.platforms("mindspore")
def test_orders_of_a_number():
    """A tensor without dims is in order."""
    for descending in (False, True):
        assert _piece("argsort", np.asarray(2.0, F32), -1, descending=descending) == 0


@pytest.mark.platforms("mindspore")
def test_places_are_picked_by_their_weights():
    """Only positive weights are drawn, none twice without replacement; what cannot be drawn from is refused."""
    weights, drawn = np.array([[0.0, 1.0, 3.0, 0.0]]), np.array([[0.1, 0.3, 0.7, 0.9]])
    assert _piece("pick", weights, drawn, 4, replacement=True).tolist() == [[1, 2, 2, 2]]
    assert sorted(_piece("pick", weights, drawn, 2, replacement=False)[0].tolist()) == [1, 2]
    few = "multinomial: fewer than 3 weights are positive, and none may be drawn twice"
    assert _rejected(RuntimeError, "pick", weights, drawn, 3, replacement=False) == few
    bad = "multinomial: weights must be finite, not negative, and not all zero"
    for wrong in (-weights, weights * 0, np.where(weights > 0, np.inf, 0.0)):
        assert _rejected(RuntimeError, "pick", wrong, drawn, 1, replacement=True) == bad


@pytest.mark.platforms("mindspore")
def test_what_is_added_to_an_empty_product_has_no_gradient():
    """Kernels leave memory as it was where they sum over no element: a bias that is broadcast gets zeros."""
    import mindspore

    platform = platform_named("mindspore")
    for name, shapes in (("linear", [(0, 5), (3, 5), (1,)]), ("addmm", [(3,), (0, 5), (5, 3)])):
        run = platform.local_op(name)
        operands = [mindspore.Tensor(real(*shape)) for shape in shapes]
        for _ in range(5):
            junk = [real(*shape) + 1 for shape in shapes for _ in range(20)]  # to be found by who leaves it
            del junk
            grads = mindspore.grad(lambda *args, run=run: run(*args).sum(), (0, 1, 2))(*operands)
            assert [one.shape for one in grads] == shapes
            assert not any(one.asnumpy().any() for one in grads)


@pytest.mark.platforms("mindspore")
def test_counts_of_no_element_are_zero():
    """A rank whose piece is empty counts nothing, and goes on to the sum over all ranks."""
    assert _ran("bincount_to", whole(5, 0), None, 7).tolist() == [0] * 7
    assert _ran("histc", real(0), 4, -1, 1).tolist() == [0.0] * 4
    assert _ran("dot", real(0), real(0)).tolist() == 0.0


@pytest.mark.platforms("mindspore")
def test_the_special_function_of_no_element_has_none():
    """Its kernel refuses the zeros by which others are asked for their shapes; it is right about empty pieces."""
    assert _ran("mvlgamma", real(0, 5), 2).shape == (0, 5)


@pytest.mark.platforms("mindspore")
def test_results_of_empty_pieces():
    """Several results, slices, what is not written into, and what nobody can say of no element."""
    import mindspore

    from hyper_parallel.platform.mindspore.ops.registry import write_back

    run = platform_named("mindspore").local_op
    empty, whole_ = mindspore.Tensor(real(0, 4)), mindspore.Tensor(real(3, 4))
    values, places = run("topk")(empty, 2, -1)
    assert (values.shape, places.shape, str(places.dtype)) == ((0, 2), (0, 2), "Int64")
    assert [one.shape for one in run("unbind")(empty, 1)] == [(0,)] * 4
    assert run("slice")(empty, 1, 1, 4, 2).shape == (0, 2)
    rows, nowhere = mindspore.Tensor(real(0, 4)), mindspore.Tensor(whole(3, 0))
    same, grads = mindspore.value_and_grad(lambda x, rows: run("index_add")(x, 0, nowhere, rows), (0, 1))(whole_, rows)
    assert (same.asnumpy() == whole_.asnumpy()).all()
    assert [one.asnumpy().tolist() for one in grads] == [np.ones((3, 4)).tolist(), []]
    assert _rejected(UnsupportedOperatorError, "amax", real(0, 4), (0,)) == (
        "amax: this rank's shard is empty and the result over no element is not defined; redistribute it first"
    )
    into = mindspore.Tensor(real(3))
    with pytest.raises(UnsupportedOperatorError) as caught:
        write_back(mindspore.mint.add)(into, mindspore.Tensor(real(3).astype(np.complex64)))
    assert str(caught.value) == (
        "a result of Complex64 cannot be written into a tensor of Float32; use the out-of-place form"
    )
