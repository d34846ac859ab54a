"""Losses on MindSpore: classes of a shard, and what fused losses are composed of."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")

RNG = np.random.default_rng(7)
F32 = np.float32


def real(*shape):
    """Random numbers of both signs."""
    return RNG.standard_normal(shape).astype(F32)


def test_classes_of_a_shard(kernel, refusal):
    """A rank counts targets in its own classes only; a target that is not a class is an error."""
    x, target = real(3, 5), np.array([1, 4, 6])
    assert kernel("take_class", x, target, 1, start=3, classes=7).tolist() == [0.0, x[1, 1], x[2, 3]]
    assert (kernel("take_class", x[:, :0], target, 1, start=3, classes=7) == np.zeros(3)).all()
    assert kernel("take_class", x[:0], target[:0], 1).shape == (0,)
    weight = real(5)
    assert kernel("take_weight", weight, target, start=3, classes=7).tolist() == [0.0, weight[1], weight[3]]
    assert (kernel("take_weight", weight[:0], target, start=3, classes=7) == np.zeros(3)).all()
    assert kernel("take_weight", weight, target[:0], start=3, classes=7).shape == (0,)
    assert refusal(IndexError, "take_class", x, target + 1, 1, start=3, classes=7) == "Target 7 is out of bounds."
    assert np.isneginf(kernel("class_max", x[:, :0], 1)).all()


FUSED = np.random.default_rng(23)
X, Y = FUSED.standard_normal((5, 4)), FUSED.standard_normal((5, 4))


SIGNS = np.array([1, -1, 1, -1, 1], np.int32)


MARGIN = 0.125  # exact in float32, to which MindSpore rounds Python numbers


REDUCED = {"mean": np.mean, "sum": np.sum, "none": lambda rows: rows}


def cosine(x, y, margin=MARGIN):
    """The cosine of each pair of rows."""
    losses = (x * y).sum(1) / np.sqrt(((x * x).sum(1) + 1e-12) * ((y * y).sum(1) + 1e-12))
    return np.where(SIGNS == 1, 1 - losses, np.maximum(losses - margin, 0))


def soft_margin(x, y):
    """The soft margin of each element; the second operand gives the signs."""
    return np.log1p(np.exp(-np.sign(y) * x))


def slopes(fn, x):
    """The numerical derivative of a number by each element."""
    losses = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[index] = 1e-5
        losses[index] = (fn(x + step) - fn(x - step)) / 2e-5
    return losses


def _on_dtensors(loss, values, weight, reduction):
    """Loss and gradient of sharded operands; unreduced losses are weighted."""
    from mindspore import Tensor, mint, ops

    from hyper_parallel import distribute_tensor
    from hyper_parallel.core.dtensor.mesh import init_device_mesh
    from hyper_parallel.core.dtensor.placements import Replicate, Shard
    from hyper_parallel.platform.select import current_platform

    mesh = init_device_mesh("cpu", (3,))
    x, y, signs = (distribute_tensor(Tensor(array), mesh, [Shard(0)]) for array in (*values, SIGNS))
    factor = distribute_tensor(Tensor(weight), mesh, [Replicate()])
    calls = {
        "cosine": lambda x: mint.nn.functional.cosine_embedding_loss(x, y, signs, MARGIN, reduction),
        "soft_margin": lambda x: ops.soft_margin_loss(x, ops.sign(y), reduction),
    }

    def total(x):
        losses = calls[loss](x)
        return (losses * factor).sum() if reduction == "none" else losses * float(weight.flat[0])

    value, grad = current_platform().value_and_grad(total)(x)
    return value.full_tensor().asnumpy(), grad.full_tensor().asnumpy()


@pytest.mark.parametrize("reduction", REDUCED)
@pytest.mark.parametrize("loss", ["cosine", "soft_margin"])
def test_losses_are_what_they_are_composed_of(loss, reduction):
    """On shards of unequal sizes, loss and gradient are those of the formula, in float64."""
    rows = {"cosine": cosine, "soft_margin": soft_margin}[loss]
    shape = np.shape(REDUCED[reduction](rows(X, Y))) or (1,)
    weight = FUSED.standard_normal(shape).astype(np.float32).astype(float)

    def total(x):
        return float((REDUCED[reduction](rows(x, Y)) * weight).sum())

    for value, grad in simulate(_on_dtensors, 3, "mindspore", (loss, (X, Y), weight, reduction)):
        np.testing.assert_allclose(value, total(X), rtol=1e-12)
        np.testing.assert_allclose(grad, slopes(total, X), rtol=1e-6, atol=1e-9)
