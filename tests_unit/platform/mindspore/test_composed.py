"""Operators that MindSpore has no kernel for on CPU: on DTensors they run as what they are composed of.

There is no plain call to compare with here, so NumPy says what they are. Against PyTorch's: environment ``both``.
"""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")

RNG = np.random.default_rng(23)
X, Y = RNG.standard_normal((5, 4)), RNG.standard_normal((5, 4))
SIGNS = np.array([1, -1, 1, -1, 1], np.int32)
MARGIN = 0.125  # MindSpore rounds Python numbers to float32: one that float32 has
REDUCED = {"mean": np.mean, "sum": np.sum, "none": lambda rows: rows}


def cosine(x, y, margin=MARGIN):
    """Row by row."""
    found = (x * y).sum(1) / np.sqrt(((x * x).sum(1) + 1e-12) * ((y * y).sum(1) + 1e-12))
    return np.where(SIGNS == 1, 1 - found, np.maximum(found - margin, 0))


def soft_margin(x, y):
    """Element by element; the second operand gives the signs."""
    return np.log1p(np.exp(-np.sign(y) * x))


def slopes(fn, x):
    """Derivative of a number by each element, from both sides."""
    found = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[place] = 1e-5
        found[place] = (fn(x + step) - fn(x - step)) / 2e-5
    return found


def _on_dtensors(loss, values, weight, reduction):
    """Loss and gradient on cut operands, weighted elements where nothing is reduced."""
    from mindspore import Tensor, mint, ops

    from hyper_parallel import distribute_tensor
    from hyper_parallel.core.dtensor.mesh import init_device_mesh
    from hyper_parallel.core.dtensor.placements import Replicate, Shard
    from hyper_parallel.platform.select import current_platform

    mesh = init_device_mesh("cpu", (3,))
    x, y, signs = (distribute_tensor(Tensor(one), mesh, [Shard(0)]) for one in (*values, SIGNS))
    factor = distribute_tensor(Tensor(weight), mesh, [Replicate()])
    calls = {
        "cosine": lambda x: mint.nn.functional.cosine_embedding_loss(x, y, signs, MARGIN, reduction),
        "soft_margin": lambda x: ops.soft_margin_loss(x, ops.sign(y), reduction),
    }

    def total(x):
        found = calls[loss](x)
        return (found * factor).sum() if reduction == "none" else found * float(weight.flat[0])

    value, grad = current_platform().value_and_grad(total)(x)
    return value.full_tensor().asnumpy(), grad.full_tensor().asnumpy()


@pytest.mark.parametrize("reduction", REDUCED)
@pytest.mark.parametrize("loss", ["cosine", "soft_margin"])
def test_losses_are_what_they_are_composed_of(loss, reduction):
    """On pieces of unequal sizes, loss and gradient are those of the formula, in float64."""
    rows = {"cosine": cosine, "soft_margin": soft_margin}[loss]
    shape = np.shape(REDUCED[reduction](rows(X, Y))) or (1,)
    weight = RNG.standard_normal(shape).astype(np.float32).astype(float)

    def total(x):
        return float((REDUCED[reduction](rows(x, Y)) * weight).sum())

    for value, grad in simulate(_on_dtensors, 3, "mindspore", (loss, (X, Y), weight, reduction)):
        np.testing.assert_allclose(value, total(X), rtol=1e-12)
        np.testing.assert_allclose(grad, slopes(total, X), rtol=1e-6, atol=1e-9)


def _reduced():
    from mindspore import Tensor, ops
    from mindspore.ops import operations as primitives

    from hyper_parallel import distribute_tensor
    from hyper_parallel.core.dtensor.mesh import init_device_mesh
    from hyper_parallel.core.dtensor.placements import Shard

    mesh = init_device_mesh("cpu", (3,))
    x, y = (distribute_tensor(Tensor(one.astype(np.float32)), mesh, [Shard(0)]) for one in (X, Y))
    found = {
        "sums of squares": primitives.SquareSumAll()(x, y),
        "histogram": [primitives.Histogram(4, -2.0, 2.0)(x)],
        "length 1": [ops.L2Normalize(0)(x)],
        "running least": ops.cummin(x, 0),
        "median": ops.median(x, 0),
        "median of all": [ops.Median(True)(x)[0]],
    }
    return {name: [one.full_tensor().asnumpy() for one in several] for name, several in found.items()}


def test_reductions_are_what_they_are_composed_of():
    """Along a cut dim, values and places are those of the whole tensor."""
    x, y = X.astype(np.float32), Y.astype(np.float32)
    least = np.minimum.accumulate(x, 0)
    middle = np.sort(x, 0)[2]
    wanted = {
        "sums of squares": [(x * x).sum(), (y * y).sum()],
        "histogram": [np.histogram(x, 4, (-2, 2))[0]],
        "length 1": [x / np.sqrt((x * x).sum(0))],
        "running least": [least, [[int(np.argmin(x[: row + 1, col])) for col in range(4)] for row in range(5)]],
        "median": [middle, (x == middle).argmax(0)],
        "median of all": [np.sort(x, None)[9]],
    }
    for found in simulate(_reduced, 3, "mindspore"):
        assert found.keys() == wanted.keys()
        for name, several in found.items():
            for one, right in zip(several, wanted[name], strict=True):
                np.testing.assert_allclose(one, right, rtol=1e-6, err_msg=name)
        assert [one.dtype for one in found["running least"]] == [np.float32, np.int32]


def _dropped():
    from mindspore import Tensor, mint, ops
    from mindspore.ops import operations as primitives

    from hyper_parallel import distribute_tensor
    from hyper_parallel.core.dtensor.mesh import init_device_mesh
    from hyper_parallel.core.dtensor.placements import Shard

    mesh = init_device_mesh("cpu", (3,))
    flat, deep = (
        distribute_tensor(Tensor(np.ones((7, 9, *inner), np.float32)), mesh, [Shard(0)])
        for inner in ((2, 2), (2, 2, 2))
    )
    same = mint.nn.functional.dropout2d(flat, 0.4, training=False)
    found = [
        mint.nn.functional.dropout2d(flat, 0.4),
        ops.dropout3d(deep, 0.4),
        *primitives.Dropout2D(0.6)(flat),
        *primitives.Dropout3D(0.6)(deep),
    ]
    return [one.full_tensor().asnumpy() for one in (same, *found)]


def test_channels_are_dropped_whole():
    """Channels are 0 or 1 / (1 - p) throughout, alike on all ranks; the mask says which; evaluation keeps all."""
    ranks = simulate(_dropped, 3, "mindspore")
    for same, mint2d, ops3d, prim2d, mask2d, prim3d, mask3d in ranks:
        assert (same == 1).all()
        for found in (mint2d, ops3d, prim2d, prim3d):
            channels = found.reshape(63, -1)
            assert (channels == channels[:, :1]).all()
            np.testing.assert_allclose(np.unique(channels), [0, 1 / 0.6], rtol=1e-6)
            assert 0.3 < (channels[:, 0] > 0).mean() < 0.9
        assert (mask2d == (prim2d > 0)).all()
        assert (mask3d == (prim3d > 0)).all()
    for others in zip(*ranks, strict=True):
        assert all((one == others[0]).all() for one in others)
