"""Reductions that MindSpore has as fused primitives."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")


RNG = np.random.default_rng(23)


X, Y = RNG.standard_normal((5, 4)), RNG.standard_normal((5, 4))


def _reduced():
    from mindspore import Tensor, ops
    from mindspore.ops import operations as primitives

    from hyper_parallel import distribute_tensor
    from hyper_parallel.core.dtensor.mesh import init_device_mesh
    from hyper_parallel.core.dtensor.placements import Shard

    mesh = init_device_mesh("cpu", (3,))
    x, y = (distribute_tensor(Tensor(tensor.astype(np.float32)), mesh, [Shard(0)]) for tensor in (X, Y))
    results = {
        "sums of squares": primitives.SquareSumAll()(x, y),
        "histogram": [primitives.Histogram(4, -2.0, 2.0)(x)],
        "length 1": [ops.L2Normalize(0)(x)],
        "running least": ops.cummin(x, 0),
        "median": ops.median(x, 0),
        "median of all": [ops.Median(True)(x)[0]],
    }
    return {name: [tensor.full_tensor().asnumpy() for tensor in several] for name, several in results.items()}


def test_reductions_are_what_they_are_composed_of():
    """Fused reductions along a sharded dim have the values and indices of the global tensor."""
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
    for results in simulate(_reduced, 3, "mindspore"):
        assert results.keys() == wanted.keys()
        for name, several in results.items():
            for tensor, right in zip(several, wanted[name], strict=True):
                np.testing.assert_allclose(tensor, right, rtol=1e-6, err_msg=name)
        assert [tensor.dtype for tensor in results["running least"]] == [np.float32, np.int32]


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.int64, np.bool_, np.float16])
def test_legacy_sums_and_products_keep_the_dtype(kind):
    """ReduceSum and ReduceProd of shards have the dtype and the values of one device, also where they overflow."""
    from mindspore import Tensor, ops

    from hyper_parallel import Shard, distribute_tensor, init_device_mesh

    whole = np.array([[1, 0, 1], [100, 100, 90], [2, 1, 0], [1, 1, 1]]).astype(kind)

    def results(x):
        sums = [ops.reduce_sum(x), ops.ReduceSum()(x, 1), ops.ReduceSum(keep_dims=True)(x, 0)]
        return [*sums, *(() if kind == np.bool_ else (ops.ReduceProd()(x, 1),))]

    def on_rank():
        mesh = init_device_mesh("cpu", (3,))
        return [each.asnumpy() for each in results(distribute_tensor(Tensor(whole), mesh, [Shard(0)]))]

    expected = [each.asnumpy() for each in results(Tensor(whole))]
    for result in simulate(on_rank, 3, platform="mindspore"):
        for ours, theirs in zip(result, expected, strict=True):
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)
