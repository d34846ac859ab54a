"""Random operators on MindSpore: numbers go by the global index, so every layout samples the same."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel import Replicate, Shard, init_device_mesh
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.checker.shards import local_shard
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")


A = np.random.default_rng(5).uniform(0.5, 2.0, (9, 7)).astype(np.float32)


def _sampled(name, placement):
    from mindspore import mint, nn, ops
    from mindspore.mint.nn import functional as F

    from hyper_parallel.core.dtensor import random

    platform = platform_named("mindspore")
    mesh = init_device_mesh("cpu", (platform.get_world_size(),), mesh_dim_names=["tp"])
    layout = Layout.place(mesh, (placement,), A.shape)
    x = platform.wrap(platform.from_numpy(local_shard(A, layout, 0)), layout)
    random.manual_seed(3, mesh)
    calls = {
        "dropout": lambda: F.dropout(x, 0.5, True),
        "Dropout cell": lambda: nn.Dropout(p=0.5).set_train()(x),
        "rand_like": lambda: mint.rand_like(x),
        "ops.rand_like": lambda: ops.rand_like(x),
        "randn_like": lambda: mint.randn_like(x),
        "bernoulli": lambda: mint.bernoulli(x / 2),
        "normal_": x.normal_,
        "uniform_": x.uniform_,
        "multinomial": lambda: mint.multinomial(x, 3),
        "multinomial with replacement": lambda: mint.multinomial(x, 4, True),
    }
    return calls[name]().full_tensor().asnumpy()


@pytest.mark.parametrize(
    "name",
    [
        "dropout",
        "Dropout cell",
        "rand_like",
        "ops.rand_like",
        "randn_like",
        "bernoulli",
        "normal_",
        "uniform_",
        "multinomial",
        "multinomial with replacement",
    ],
)
def test_every_layout_samples_the_same(name):
    """One seed gives one global tensor for every layout on two and three ranks, and calls differ."""
    first = simulate(_sampled, 1, platform="mindspore", args=(name, Replicate()))[0]
    assert len(np.unique(first)) > 1
    for world in (2, 3):
        for placement in (Replicate(), Shard(0), Shard(1)):
            for outputs in simulate(_sampled, world, platform="mindspore", args=(name, placement)):
                np.testing.assert_array_equal(outputs, first)


def test_indices_are_picked_by_their_weights(kernel, refusal):
    """Only positive weights are sampled, none twice without replacement; other weights are refused."""
    weights, numbers = np.array([[0.0, 1.0, 3.0, 0.0]]), np.array([[0.1, 0.3, 0.7, 0.9]])
    assert kernel("pick", weights, numbers, 4, replacement=True).tolist() == [[1, 2, 2, 2]]
    assert sorted(kernel("pick", weights, numbers, 2, replacement=False)[0].tolist()) == [1, 2]
    few = "multinomial: fewer than 3 weights are positive, and none may be drawn twice"
    assert refusal(RuntimeError, "pick", weights, numbers, 3, replacement=False) == few
    bad = "multinomial: weights must be finite, not negative, and not all zero"
    for wrong in (-weights, weights * 0, np.where(weights > 0, np.inf, 0.0)):
        assert refusal(RuntimeError, "pick", wrong, numbers, 1, replacement=True) == bad


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
    outputs = [
        mint.nn.functional.dropout2d(flat, 0.4),
        ops.dropout3d(deep, 0.4),
        *primitives.Dropout2D(0.6)(flat),
        *primitives.Dropout3D(0.6)(deep),
    ]
    return [tensor.full_tensor().asnumpy() for tensor in (same, *outputs)]


def test_channels_are_dropped_whole():
    """Channels are scaled by 0 or 1 / (1 - p), alike on all ranks and as in the mask; evaluation keeps all."""
    ranks = simulate(_dropped, 3, "mindspore")
    for same, mint2d, ops3d, prim2d, mask2d, prim3d, mask3d in ranks:
        assert (same == 1).all()
        for outputs in (mint2d, ops3d, prim2d, prim3d):
            channels = outputs.reshape(63, -1)
            assert (channels == channels[:, :1]).all()
            np.testing.assert_allclose(np.unique(channels), [0, 1 / 0.6], rtol=1e-6)
            assert 0.3 < (channels[:, 0] > 0).mean() < 0.9
        assert (mask2d == (prim2d > 0)).all()
        assert (mask3d == (prim3d > 0)).all()
    for others in zip(*ranks, strict=True):
        assert all((tensor == others[0]).all() for tensor in others)
