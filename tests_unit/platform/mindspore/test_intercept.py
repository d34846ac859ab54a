"""MindSpore's own spellings on DTensors: functions, methods, operators, layers and legacy primitives."""

from __future__ import annotations

import importlib
import re

import numpy as np
import pytest

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.platform.select import platform_named, use_platform
from hyper_parallel.verify.checker.function import check_function

pytestmark = pytest.mark.platforms("mindspore")

RNG = np.random.default_rng(0)


def real(*shape):
    """Normal values."""
    return RNG.standard_normal(shape).astype(np.float32)


def positive(*shape):
    """Values away from zero."""
    return RNG.uniform(0.3, 2.0, shape).astype(np.float32)


def whole(high, *shape):
    """Indices."""
    return RNG.integers(0, high, shape).astype(np.int64)


def truth(*shape):
    """Booleans."""
    return RNG.integers(0, 2, shape).astype(bool)


X, Y, P, Q = real(5, 3), real(4, 2, 3), positive(5, 3), positive(5, 3)

# Expressions over x, y, z, w as a MindSpore program writes them -> operands. Plain tensors run the same expression.
SPELLED = [
    (
        (X,),
        """
        mint.abs(x) | -x | mint.exp(x) | mint.square(x) | mint.tanh(x) | mint.sigmoid(x) | mint.floor(x) | mint.round(x)
        mint.isfinite(x) | F.relu(x) | F.silu(x) | F.hardswish(x) | ops.gelu(x) | x + 1 | 1 + x | x - 1 | 1 - x | x * 2
        2 * x | x / 2 | x > 0 | x == 0 | x ** 2 | 2 ** x | x % 2 | x.float() | x * ops.stop_gradient(x)
        ops.zeros_like(x) + x | ops.full_like(x, 3.0) + x | mint.clamp(x, -0.5, 0.5) | x.clamp(min=0.0) | x.masked_fill(x > 0, 2.0)
        mint.sum(x) | mint.sum(x, 0) | x.sum(axis=0) | x.sum(1, keepdims=True) | mint.mean(x) | x.mean(axis=0) | mint.mean(x, (0, 1))
        ops.ReduceSum(keep_dims=True)(x, 0) | ops.ReduceMean()(x, 1) | mint.amax(x, 0) | mint.prod(x, 0) | mint.max(x)
        mint.max(x, 1) | ops.max(x, 1)[0] | ops.cumsum(x, 0) | mint.cumprod(x, 1) | ops.argmax(x, 1) | x.norm() | ops.norm(x)
        F.softmax(x, -1) | ops.softmax(x, 0) | ops.log_softmax(x, 0) | mint.nansum(x) | x.T | mint.t(x) | ops.flatten(x)
        x[[0, 2, 1]] | mint.triu(x) | x.max(axis=0) | ops.leaky_relu(x) | ops.relu6(x) | ops.logsumexp(x, 0)
    """,
    ),
    (
        (Y,),
        """
        x.reshape(2, 2, 6) | x.reshape((-1, 6)) | x.view(8, 3) | x.transpose(2, 0, 1) | mint.permute(x, (1, 0, 2))
        mint.transpose(x, 0, 2) | x.swapaxes(0, 1) | mint.flatten(x, 1) | x.ravel() | mint.unsqueeze(x, 1) | x.expand_dims(0)
        mint.squeeze(mint.unsqueeze(x, 1), 1) | mint.tile(x, (2, 1, 1)) | mint.broadcast_to(x, (2, 4, 2, 3))
        x.broadcast_to((2, 4, 2, 3)) | mint.split(x, 2, 0) | mint.split(x, [1, 3], 0) | mint.chunk(x, 2, 0) | x.split(2, 0)
        x.chunk(2, 0) | mint.narrow(x, 0, 1, 2) | mint.flip(x, (0,)) | ops.transpose(x, (2, 1, 0)) | ops.reshape(x, (4, 6))
        ops.movedim(x, 0, 2) | x[0] | x[1:3] | x[:, 1:] | x[..., None] | x[::2] | x[-1] | list(x) | ops.split(x, 2, 0)
        ops.tile(x, (1, 2, 1)) | ops.squeeze(ops.expand_dims(x, 0), 0)
    """,
    ),
    ((P,), "mint.log(x) | mint.sqrt(x) | mint.rsqrt(x) | 2 / x | mint.reciprocal(x)"),
    (
        (P, Q),
        """
        x + y | x - y | x * y | x / y | x // y | mint.maximum(x, y) | mint.minimum(x, y) | mint.pow(x, y) | x <= y | x != y
        mint.fmod(x, y) | mint.remainder(x, y) | mint.xlogy(x, y) | mint.lerp(x, y, 0.3) | mint.add(x, y, alpha=2)
        mint.add(x, other=y) | mint.div(x, y, rounding_mode="floor") | ops.mse_loss(x, y) | F.smooth_l1_loss(x, y)
        mint.cat([x, y], 0) | ops.cat([x, y], 1) | ops.stack([x, y], 0) | ops.addn([x, y]) | mint.where(x > y, x, y)
    """,
    ),
    (
        (truth(5, 3), truth(5, 3)),
        "x & y | mint.logical_or(x, y) | mint.logical_xor(x, y) | ~x | mint.any(x, 0) | mint.all(y, 1)",
    ),
    ((X, real(3, 4)), "mint.matmul(x, y) | x @ y | ops.matmul(x, y)"),
    ((X, real(4, 3)), "ops.MatMul(transpose_b=True)(x, y) | F.linear(x, y)"),
    ((X, real(4, 3), real(4)), "F.linear(x, y, z) | ops.bias_add(ops.MatMul(transpose_b=True)(x, y), z)"),
    ((real(2, 5, 3), real(2, 4, 3)), "ops.BatchMatMul(transpose_b=True)(x, y)"),
    ((X, whole(5, 4, 3)), "mint.gather(x, 0, y) | ops.gather_elements(x, 0, y)"),
    ((X, whole(3, 4)), "ops.gather(x, y, 0) | ops.gather(x, y, 1) | x[y] | x[:, y]"),
    ((whole(5, 4),), "ops.one_hot(x, 5)"),
    (
        (real(2, 3, 4, 6), real(4, 3, 2, 2)),
        """
        ops.Conv2D(4, 2, pad_mode="same")(x, y) | ops.Conv2D(4, 2, pad_mode="pad", pad=(1, 0, 2, 1), stride=2)(x, y)
    """,
    ),
    ((real(2, 3, 4, 6),), "ops.MaxPool(2, 2)(x) | ops.AvgPool(2, 2)(x)"),
    ((real(2, 3, 4, 4, 2),), 'ops.AvgPool3D(2, 2)(x) | ops.AvgPool3D(2, 2, "pad", 1)(x)'),
    ((X, real(3)), "ops.trapz(x, y) | ops.trapz(x, dx=0.5)"),
    ((X, P), 'ops.KLDivLoss("batchmean")(x, y)'),
]

# Expressions that plain tensors cannot run on CPU, with the canonical operator that gives the reference.
REFERRED = [
    ((X,), {
        "F.gelu(x)": "gelu(x)", "F.elu(x)": "elu(x)", "F.selu(x)": "selu(x)", "F.leaky_relu(x)": "leaky_relu(x)",
        "F.hardtanh(x)": "hardtanh(x)", "F.mish(x)": "mish(x)", "F.softplus(x)": "softplus(x)", "mint.frac(x)": "frac(x)",
        "F.logsigmoid(x)": "logsigmoid(x)", "mint.exp2(x)": "exp2(x)", "mint.atan(x)": "atan(x)", "x.clone()": "clone(x)",
        "mint.ones_like(x) + x": "add(x, 1)", "mint.var(x, dim=0)": "var(x, 0)", "mint.std(x)": "std(x)",
        "mint.argmax(x, dim=0)": "argmax(x, 0)", "mint.logsumexp(x, dim=0)": "logsumexp(x, 0)", "mint.norm(x)": "vector_norm(x)",
        "mint.cumsum(x, dim=0)": "cumsum(x, 0)", "mint.count_nonzero(x)": "count_nonzero(x)", "mint.roll(x, 1, 0)": "roll(x, 1, 0)",
        "mint.var_mean(x, dim=0)": "var_mean(x, 0)", "F.log_softmax(x, -1)": "log_softmax(x, -1)", "mint.tril(x)": "tril(x)",
        "mint.repeat_interleave(x, 2, 1)": "repeat_interleave(x, 2, 1)", "mint.unbind(x, 1)": "unbind(x, 1)",
        "mint.select(x, 1, 1)": "select(x, 1, 1)", "F.layer_norm(x, (3,))": "layer_norm(x, (3,))", "x.repeat(2, 1)": "repeat(x, 2, 1)",
    }),
    ((P,), {"mint.log2(x)": "log2(x)", "mint.log10(x)": "log10(x)"}),
    ((X, P), {
        "mint.atan2(x, y)": "atan2(x, y)", "mint.logaddexp(x, y)": "logaddexp(x, y)", "mint.stack([x, y], 1)": "stack([x, y], 1)",
        "F.mse_loss(x, y)": "mse_loss(x, y)", "F.l1_loss(x, y)": "l1_loss(x, y)",
    }),
    ((X, real(3, 4)), {"mint.mm(x, y)": "mm(x, y)"}),
    ((X, real(3)), {"mint.mv(x, y)": "mv(x, y)"}),
    ((real(4), X, real(3, 4)), {"mint.addmm(x, y, z)": "addmm(x, y, z)"}),
    ((whole(7, 4, 2), real(7, 3)), {"F.embedding(x, y)": "embedding(x, y)", "F.embedding(x, y, 2)": "embedding(x, y, 2)"}),
    ((X, real(3), real(3)), {"F.layer_norm(x, (3,), y, z)": "layer_norm(x, (3,), y, z)",
                            "ops.LayerNorm(1, 1, 1e-5)(x, y, z)[0]": "layer_norm(x, (3,), y, z, 1e-5)"}),
    ((real(3, 4, 2), real(4), real(4)), {"F.group_norm(x, 2, y, z)": "group_norm(x, 2, y, z)"}),
    ((X, real(3)), {"ops.rms_norm(x, y)[0]": "rms_norm(x, (3,), y, 1e-6)"}),
    ((real(5, 7), whole(7, 5)), {"F.cross_entropy(x, y)": "cross_entropy(x, y)",
                                "F.nll_loss(x, y, reduction='sum')": "nll_loss(x, y, reduction='sum')"}),
    # Kernels that only NPU has: their values are those of the reference, here and on any device.
    ((real(2, 4, 5, 6), real(2, 4, 3, 6), real(2, 4, 3, 6)), {
        "ops.flash_attention_score(x, y, z, 4, input_layout='BNSD', scalar_value=0.3)":
            "scaled_dot_product_attention(x, y, z, scale=0.3)",
        "ops.flash_attention_score(x, y, z, 4, input_layout='BNSD', sparse_mode=2)":
            "scaled_dot_product_attention(x, y, z, is_causal=True, scale=1.0)",
        "ops.prompt_flash_attention(x, y, z, num_heads=4, scale_value=0.3, input_layout='BNSD')":
            "scaled_dot_product_attention(x, y, z, scale=0.3)",
        "ops.speed_fusion_attention(x, y, z, 4, 'BNSD', scale=0.3)[0]": "scaled_dot_product_attention(x, y, z, scale=0.3)",
    }),
    ((real(2, 4, 5, 6), real(2, 2, 3, 6), real(2, 2, 3, 6)), {
        "ops.flash_attention_score(x, y, z, 4, input_layout='BNSD')":
            "scaled_dot_product_attention(x, y, z, scale=1.0, enable_gqa=True)"}),
    ((real(2, 5, 8), real(2, 3, 8), real(2, 3, 8)), {
        "ops.flash_attention_score(x, y, z, 4, scalar_value=0.3)": f"view(canonical.permute(canonical."
            f"scaled_dot_product_attention({', '.join(f'canonical.permute(canonical.view({tensor}, (2, -1, 4, 2)), (0, 2, 1, 3))' for tensor in 'xyz')}"
            ", scale=0.3), (0, 2, 1, 3)), (2, 5, 8))",
    }),
    ((real(5, 2, 8), real(3, 2, 8), real(3, 2, 8)), {
        "ops.flash_attention_score(x, y, z, 4, input_layout='SBH')": f"view(canonical.permute(canonical."
            f"scaled_dot_product_attention({', '.join(f'canonical.permute(canonical.view({tensor}, (-1, 2, 4, 2)), (1, 2, 0, 3))' for tensor in 'xyz')}"
            ", scale=1.0), (2, 0, 1, 3)), (5, 2, 8))",
    }),
    ((real(2, 4, 5, 6), real(1, 1, 5, 6), real(1, 1, 5, 6)), {
        "ops.rotary_position_embedding(x, y, z)":
            "add(x * y, canonical.cat([-x[..., 3:], x[..., :3]], -1) * z)",
        "ops.rotary_position_embedding(x, y, z, 1)":
            "add(x * y, canonical.view(canonical.stack([-x[..., 1::2], x[..., ::2]], -1), (2, 4, 5, 6)) * z)"}),
    ((X, real(5, 3), real(3)), {"ops.add_rms_norm(x, y, z)[0]": "rms_norm(x + y, (3,), z, 1e-6)"}),
    ((X, real(5, 3), real(3), real(3)), {"ops.add_layer_norm(x, y, z, w)[0]": "layer_norm(x + y, (3,), z, w)"}),
    ((X, real(3, 4)), {'mint.einsum("ij,jk->ik", x, y)': "matmul(x, y)", "mint.diag(x)": "diagonal(x, 0, 0, 1)"}),
    ((whole(4, 5),), {"F.one_hot(x, 4)": "one_hot(x, 4)"}),
    ((X,), {"F.pad(x, [1, 0, 0, 2], value=1.5)": "pad(x, [1, 0, 0, 2], 1.5)"}),
    ((real(2, 3, 6),), {
        "F.avg_pool1d(x, 3)": "mean(canonical.view(x, (2, 3, 2, 3)), -1)",
        "F.adaptive_avg_pool1d(x, 3)": "mean(canonical.view(x, (2, 3, 3, 2)), -1)"}),
    ((real(2, 3, 4, 6),), {
        "F.avg_pool2d(x, 2)": "mean(canonical.view(x, (2, 3, 2, 2, 3, 2)), (3, 5))",
        "F.max_pool2d(x, 2)": "amax(canonical.view(x, (2, 3, 2, 2, 3, 2)), (3, 5))"}),
    ((real(2, 3, 5, 6), real(4, 3, 1, 1), real(4)), {
        "F.conv2d(x, y, z)": "add(canonical.einsum('nchw,ocxy->nohw', x, y), canonical.view(z, (4, 1, 1)))",
        "F.conv2d(x[0], y, z)": "add(canonical.einsum('chw,ocxy->ohw', x[0], y), canonical.view(z, (4, 1, 1)))"}),
    ((real(5, 6),), {"ops.swiglu(x, -1)": "mul(canonical.silu(x[:, :3]), x[:, 3:])", "mint.npu_gelu(x)": "gelu(x)"}),
]  # fmt: skip

CASES = [
    (tensor.strip(), tensor.strip(), arrays)
    for arrays, text in SPELLED
    for tensor in text.replace("\n", " | ").split(" | ")
    if tensor.strip()
]
REFERENCES = [(tensor, right, arrays) for arrays, pairs in REFERRED for tensor, right in pairs.items()]


def _spelled(expression, right):
    """The expression on DTensors, and its plain reference; skips functions that MindSpore itself does not have."""
    mint = importlib.import_module("mindspore.mint")
    if missing := [name for name in re.findall(r"\bmint\.(\w+)", expression) if not hasattr(mint, name)]:
        pytest.skip(f"MindSpore itself has no mint.{missing[0]}")

    def run(*tensors):
        import mindspore
        from mindspore import mint, ops

        names = {"mindspore": mindspore, "mint": mint, "ops": ops, "F": mint.nn.functional}
        operands = dict(zip("xyzw", tensors, strict=False))
        if right == expression or any(isinstance(tensor, DTensor) for tensor in tensors):
            return eval(expression, names | operands)
        canonical = platform_named("mindspore").dispatcher.ops
        return eval(f"canonical.{right}", {"canonical": canonical} | operands)

    return run


def on_one_rank(run, arrays):
    """Results of ``run`` on plain tensors and on DTensors of a world of one, as arrays."""
    platform = platform_named("mindspore")
    with use_platform("mindspore"):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("m",))
        plain_tensors = [platform.from_numpy(np.asarray(tensor)) for tensor in arrays]
        dtensors = [
            DTensor.from_local(tensor, mesh, [Shard(0) if tensor.ndim else Replicate()]) for tensor in plain_tensors
        ]
        return _arrays(run(*plain_tensors)), _arrays(run(*dtensors))


def _arrays(value):
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _arrays(item)]
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return [value.asnumpy()] if hasattr(value, "asnumpy") else []


@pytest.mark.parametrize(
    "expression, right, arrays", CASES + REFERENCES, ids=[tensor[0] for tensor in CASES + REFERENCES]
)
def test_spelling_is_served_on_one_rank(expression, right, arrays):
    """On a world of one rank a spelling has the plain values, shapes and dtypes."""
    run = _spelled(expression, right)
    plain, served = on_one_rank(run, arrays)
    assert [(tensor.shape, tensor.dtype) for tensor in served] == [(tensor.shape, tensor.dtype) for tensor in plain]
    for tensor, wanted in zip(served, plain, strict=True):
        np.testing.assert_allclose(tensor, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("mesh", [(2,), (3,)], ids=str)
@pytest.mark.parametrize(
    "expression, right, arrays", CASES + REFERENCES, ids=[tensor[0] for tensor in CASES + REFERENCES]
)
@pytest.mark.untraced
def test_spelling_means_the_same_on_dtensors(expression, right, arrays, mesh):
    """Each MindSpore spelling is dispatched, and right forward and backward in every placement."""
    report = check_function(_spelled(expression, right), list(arrays), mesh, platform="mindspore", limit=8)
    assert report.ok, report.wrong[:3] or report.rejected[:3]
    assert not report.rejected, report.rejected[:3]


# -- in float64 ---------------------------------------------------------------------------------------------------------

WIDE = np.random.default_rng(17)
X64, Y64, Z64 = (WIDE.standard_normal(shape) for shape in ((5, 3), (5, 3), (3, 4)))
W64 = WIDE.standard_normal((11, 3))
V64 = WIDE.standard_normal((4, 2, 3))
POSITIVE = WIDE.uniform(0.5, 2.0, (5, 3))
ROW_IDS = WIDE.integers(0, 11, (5, 2))
ROWS = WIDE.integers(0, 5, (4, 3))
LABELS = np.array([0, 2, 1, 2, 0], np.int32)


def in_float64(name):
    """The function of this name."""
    from mindspore import mint, ops

    return {
        "operators": lambda x, y: (x + y) * x - y / 2.0,
        "div": lambda x, y: x / y,
        "mint pointwise": lambda x, y: mint.exp(mint.mul(x, y)),
        "relu": ops.relu,
        "gelu": ops.gelu,
        "gelu tanh": lambda x: ops.gelu(x, approximate="tanh"),
        "mint.matmul": mint.matmul,
        "@": lambda x, z: x @ z,
        "ops.matmul": ops.matmul,
        "linear": mint.nn.functional.linear,
        "sums": lambda x: (x.sum(), mint.sum(x, 0), x.sum(1, keepdims=True)),
        "means": lambda x: (x.mean(), mint.mean(x, dim=0), x.mean(-1, keepdim=True)),
        "extrema": lambda x: (mint.amax(x, 0), mint.max(x), mint.min(x, dim=1)[0]),
        "softmax": lambda x: (mint.nn.functional.softmax(x, dim=0), ops.softmax(x, axis=-1)),
        "log_softmax": lambda x: ops.log_softmax(x, -1),
        "reshape": lambda v: (v.reshape(8, 3), mint.reshape(v, (2, 2, 6)), v.view(4, 6)),
        "transpose": lambda v: (v.transpose(0, 2), mint.permute(v, (2, 0, 1)), mint.swapaxes(v, 0, 1)),
        "cat": lambda x, y: (mint.cat([x, y], 0), ops.cat((x, y), axis=1)),
        "split": lambda v: list(mint.split(v, 3, 0)),
        "chunk": lambda x: list(mint.chunk(x, 3, 0)),
        "getitem": lambda v: (v[1:3, None, 1], v[..., -1], v[::2]),
        "embedding": lambda ids, w: ops.gather(w, ids, 0),
        "gather": lambda x, rows: mint.gather(x, 0, rows),
        "cross_entropy": ops.cross_entropy,
        "cross_entropy sum": lambda x, labels: ops.cross_entropy(x, labels, ignore_index=2, reduction="sum"),
    }[name]


OPERANDS64 = {
    "operators": [X64, Y64], "div": [X64, POSITIVE], "mint pointwise": [X64, Y64], "relu": [X64], "gelu": [X64], "gelu tanh": [X64],
    "mint.matmul": [X64, Z64], "@": [X64, Z64], "ops.matmul": [X64, Z64], "linear": [X64, W64], "sums": [X64], "means": [X64],
    "extrema": [X64], "softmax": [X64], "log_softmax": [X64], "reshape": [V64], "transpose": [V64], "cat": [X64, Y64], "split": [V64],
    "chunk": [X64], "getitem": [V64], "embedding": [ROW_IDS, W64], "gather": [X64, ROWS], "cross_entropy": [X64, LABELS],
    "cross_entropy sum": [X64, LABELS],
}  # fmt: skip


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", OPERANDS64)
@pytest.mark.untraced
def test_spelling_means_the_same_in_float64(name, mesh):
    """Outputs and gradients equal the plain ones in float64 for random placements, partial values included."""

    def run(*tensors):
        return in_float64(name)(*tensors)

    report = check_function(run, OPERANDS64[name], mesh, platform="mindspore", limit=8)
    assert report.ok, report.wrong[:3] or report.rejected[:3]
    assert report.rejected == []
