"""Random operators on MindSpore: numbers go by the global index, so every layout draws the same."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.check import decompose
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")

A = np.random.default_rng(5).uniform(0.5, 2.0, (9, 7)).astype(np.float32)


def _drawn(name, place):
    from mindspore import mint, nn, ops
    from mindspore.mint.nn import functional as F

    from hyper_parallel.core.dtensor import random

    platform = platform_named("mindspore")
    mesh = init_device_mesh("cpu", (platform.get_world_size(),), mesh_dim_names=["tp"])
    layout = Layout.place(mesh, (place,), A.shape)
    x = platform.wrap(platform.from_numpy(decompose(A, layout, 0)), layout)
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
def test_every_layout_draws_the_same(name):
    """Two and three ranks, whole, row- or column-sharded: one seed gives one global tensor, and it varies."""
    first = simulate(_drawn, 1, platform="mindspore", args=(name, Replicate()))[0]
    assert len(np.unique(first)) > 1
    for world in (2, 3):
        for place in (Replicate(), Shard(0), Shard(1)):
            for found in simulate(_drawn, world, platform="mindspore", args=(name, place)):
                np.testing.assert_array_equal(found, first)
