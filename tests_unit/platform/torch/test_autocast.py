"""Autocast and checkpointing over DTensors: dtypes, values and gradients of the plain run."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.verify.checker.function import check_function

pytestmark = pytest.mark.platforms("torch")

ROUGHLY = 0.06  # eight bits, and sums in another order
TARGET = np.array([0, 3, 2, 1, 4])


def half(fn):
    """`fn` under autocast, with an assertion that its dtypes are those of the plain call."""
    dtypes = []

    def run(*tensors):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = fn(*tensors)
        if not hasattr(out, "placements"):
            dtypes.append(out.dtype)
        assert out.dtype == dtypes[0]
        return out.float()

    return run


def layer(x, weight):
    """A linear layer, which autocast runs in bfloat16."""
    return F.linear(x, weight)


X, W, Y = (5, 4), (6, 4), (5, 6)
CASTS = {
    "linear": (layer, X, W),
    "added to float32": (lambda x, w: layer(x, w) + x.sum(), X, W),
    "softmax": (lambda x, w: layer(x, w).softmax(-1), X, W),
    "cross entropy": (lambda x, w, t: F.cross_entropy(layer(x, w), t, label_smoothing=0.1), X, W, TARGET),
    "nll": (lambda x, w, t: F.nll_loss(layer(x, w).log_softmax(-1), t, reduction="none"), X, W, TARGET),
    "mse": (lambda x, w, y: F.mse_loss(layer(x, w), y), X, W, Y),
    "layer norm": (lambda x, w: F.layer_norm(layer(x, w), (6,)), X, W),
    "batch norm": (lambda x, w: F.batch_norm(layer(x, w), None, None, training=True), X, W),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (2, 5, 4), (2, 5, 4), (2, 5, 3),
    ),
    "convolution": (lambda x, w: F.max_pool2d(F.conv2d(x, w), 2), (5, 3, 5, 4), (2, 3, 2, 2)),
    "upsampled": (
        lambda x, w: F.interpolate(F.conv2d(x, w), scale_factor=2, mode="bilinear"), (5, 3, 4, 4), (2, 3, 2, 2),
    ),
    "product": (lambda x, w: layer(x, w).prod(0), X, W),
    "checkpoint": (lambda x, w: checkpoint(lambda x, w: F.gelu(layer(x, w)), x, w, use_reentrant=False), X, W),
}  # fmt: skip


@pytest.mark.parametrize("name", CASTS)
def test_autocast(name):
    """A DTensor under autocast has the dtype, the values and the gradients that a plain tensor has."""
    fn, *specs = CASTS[name]
    rng = np.random.default_rng(4)
    arrays = [spec if isinstance(spec, np.ndarray) else rng.standard_normal(spec).astype(np.float32) for spec in specs]
    report = check_function(half(fn), arrays, (2,), platform="torch", limit=9, partial=(), tolerance=ROUGHLY)
    assert report.ok, report.wrong[:3]
    assert not report.rejected, report.rejected[:1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    """Checkpointed functions have the plain gradients for every placement."""

    def block(x, weight, bias):
        return F.gelu(F.linear(x, weight, bias)).softmax(-1) * x.sum(-1, keepdim=True)

    def fn(*tensors):
        return checkpoint(block, *tensors, use_reentrant=reentrant)

    arrays = [
        np.random.default_rng(seed).standard_normal(shape) for seed, shape in enumerate(((5, 3, 4), (6, 4), (6,)))
    ]
    places = [
        [(Shard(0),), (Shard(1),), (Partial(),)],
        [(Replicate(),), (Shard(0),), (Shard(1),)],
        [(Replicate(),), (Shard(0),)],
    ]  # fmt: skip
    for world in (2, 3):
        report = check_function(fn, arrays, (world,), platform="torch", placements=places)
        assert report.ok, report.wrong[:3]
        assert not report.rejected, report.rejected[:1]
