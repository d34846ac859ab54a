"""MindSpore as users spell it, in float64: functions, methods and operators mean the same on DTensors.

The canonical operators are swept in test_local_ops.py; here the way from the user's call to them is.
"""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.verify.check import check_function

pytestmark = pytest.mark.platforms("mindspore")

RNG = np.random.default_rng(17)
X, Y, Z = (RNG.standard_normal(shape) for shape in ((5, 3), (5, 3), (3, 4)))
W = RNG.standard_normal((11, 3))
V = RNG.standard_normal((4, 2, 3))
POSITIVE = RNG.uniform(0.5, 2.0, (5, 3))
IDS = RNG.integers(0, 11, (5, 2))
ROWS = RNG.integers(0, 5, (4, 3))
LABELS = np.array([0, 2, 1, 2, 0], np.int32)


def spelled(name):
    """The function of this name: as the user would write it."""
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


OPERANDS = {
    "operators": [X, Y], "div": [X, POSITIVE], "mint pointwise": [X, Y], "relu": [X], "gelu": [X], "gelu tanh": [X],
    "mint.matmul": [X, Z], "@": [X, Z], "ops.matmul": [X, Z], "linear": [X, W], "sums": [X], "means": [X],
    "extrema": [X], "softmax": [X], "log_softmax": [X], "reshape": [V], "transpose": [V], "cat": [X, Y], "split": [V],
    "chunk": [X], "getitem": [V], "embedding": [IDS, W], "gather": [X, ROWS], "cross_entropy": [X, LABELS],
    "cross_entropy sum": [X, LABELS],
}  # fmt: skip


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", OPERANDS)
@pytest.mark.untraced
def test_spelling_means_the_same_on_dtensors(name, mesh):
    """Outputs and gradients equal the plain ones in float64 for placements drawn at random, pending sums included."""

    def run(*tensors):
        return spelled(name)(*tensors)

    report = check_function(run, OPERANDS[name], mesh, platform="mindspore", limit=8)
    assert report.ok, report.wrong[:3] or report.rejected[:3]
    assert report.rejected == []
