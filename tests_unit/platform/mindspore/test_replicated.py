"""``replicate`` on MindSpore: gradients are those of one device, in buckets; local ones reach no optimizer."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    RowwiseParallel,
    defer_grad_reduce,
    get_platform,
    init_device_mesh,
    no_sync,
    parallelize_module,
    replicate,
)
from hyper_parallel.errors import PlanError, UnsupportedOnBackend
from hyper_parallel.pytest_plugin.ranks import require_transport
from hyper_parallel.verify.launch import launch
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")


def array(*shape, seed=0):
    """Normal float32 values from a fresh generator."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def make_model():
    """Layers of odd sizes and two dtypes; one parameter is tied, one frozen, one used by some ranks, one by none."""
    import mindspore as ms
    from mindspore import nn, ops

    class Model(nn.Cell):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = nn.Dense(5, 7), nn.Dense(7, 5), nn.Dense(5, 7, has_bias=False)
            self.head.weight = self.first.weight
            self.extra, self.never = ms.Parameter(ms.Tensor(array(3))), ms.Parameter(ms.Tensor(array(2)))
            self.wide = ms.Parameter(ms.Tensor(array(7).astype(np.float64)))
            self.second.bias.requires_grad = False
            self.register_buffer("table", ms.Tensor(array(3)))

        def construct(self, x, use_extra):
            y = self.head(self.second(ops.tanh(self.first(x)))) * self.wide
            return y * self.extra.sum() if use_extra else y

    model = Model()
    for index, parameter in enumerate(model.get_parameters()):
        parameter.set_data(ms.Tensor(array(*parameter.shape, seed=50 + index), dtype=parameter.dtype))
    return model


def gradients_of(model, weights, *losses):
    """Return the gradients of the sum of ``losses``, functions of the model."""
    import mindspore as ms

    return ms.value_and_grad(lambda: sum(loss(model) for loss in losses), None, weights)()[1]


def loss_of(rank, world, part=0):
    """Return the loss of a rank's rank + 1 samples, scaled so that the average is the mean over all samples."""
    import mindspore as ms

    samples = world * (world + 1) // 2
    x = ms.Tensor(array(rank + 1, 5, seed=10 * part + rank))
    return lambda model: (model(x, rank == 0) ** 2).sum() * (world / samples)


def whole(value):
    """The values of the whole tensor."""
    return np.array((value.full_tensor() if isinstance(value, DTensor) else value).asnumpy())


def assert_same(mine, theirs):
    """Equal up to rounding in float32."""
    for left, right in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(whole(left), whole(right), rtol=5e-5, atol=5e-5)


def train(world, bucket=25.0):
    """Steps on uneven batches, with accumulation, have the gradients and weights of one device."""
    import mindspore as ms
    from mindspore import nn

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    dense, model = make_model(), make_model()
    for value in (*model.get_parameters(), model.table):
        value.copy_(ms.Tensor(whole(value) + mesh.rank))
    assert replicate(model, mesh, bucket_cap_mb=bucket) is model
    assert_same([model.table], [dense.table])
    weights = [model.trainable_params(), dense.trainable_params()]
    optimizers = [nn.Momentum(each, 0.001, 0.9) for each in weights]
    for _ in range(3):
        with no_sync(model):
            before = gradients_of(model, weights[0], loss_of(mesh.rank, world, 0))
            assert not any(whole(gradient).any() for gradient in before)
        mine = gradients_of(model, weights[0], loss_of(mesh.rank, world, 1))
        losses = [loss_of(rank, world, part) for rank in range(world) for part in range(2)]
        theirs = [gradient / world for gradient in gradients_of(dense, weights[1], *losses)]
        assert_same(mine, theirs)
        optimizers[0](mine)
        optimizers[1](tuple(theirs))
        assert_same(*weights)
    return len(model._hyper_parallel_replicated.buckets)


@pytest.mark.parametrize("world, bucket", [(1, 25.0), (2, 25.0), (3, 0.0001), (4, 0.0001)])
def test_gradients_are_those_of_one_device(world, bucket):
    """Uneven batches, tied, frozen and unused parameters, one bucket per dtype run or many, accumulation."""
    counts = simulate(train, world, platform="mindspore", args=(world, bucket))
    assert set(counts) == {3 if bucket == 25.0 else 5}


@pytest.mark.slow
def test_real_processes():
    """Over real processes as well."""
    require_transport("mindspore")
    assert launch(train, 2, "mindspore", (2, 0.0001)) == [5, 5]


def test_over_tensor_parallel_modules():
    """Gradients that are DTensors are averaged shard by shard, those whose reduction is deferred too."""

    def rank():
        import mindspore as ms
        from mindspore import nn

        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ms.set_seed(1)
        dense, model = (nn.SequentialCell(nn.Dense(5, 7), nn.Tanh(), nn.Dense(7, 3)) for _ in range(2))
        for left, right in zip(model.get_parameters(), dense.get_parameters(), strict=True):
            left.set_data(right)
        parallelize_module(model, grid["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        replicate(model, grid["dp"])
        x = [ms.Tensor(array(part + 1, 5, seed=part)) for part in range(2)]
        losses = [lambda cell, part=part: (cell(x[part]) ** 2).sum() for part in range(2)]
        theirs = [gradient / 2 for gradient in gradients_of(dense, dense.trainable_params(), *losses)]
        own = losses[grid["dp"].get_local_rank()]
        for _ in range(2):
            assert_same(gradients_of(model, model.trainable_params(), own), theirs)
        with defer_grad_reduce():
            _, mine = get_platform().value_and_grad(lambda: own(model), None, model.trainable_params())()
            assert_same(mine, theirs)

    simulate(rank, 4, platform="mindspore")


def test_every_transform_returns_averages():
    """By inputs and weights at once, by one weight, by some; by inputs alone nothing is averaged."""

    def rank():
        import mindspore as ms
        from mindspore import nn

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = nn.Dense(4, 3)
        model.weight.set_data(ms.Tensor(array(3, 4)))
        replicate(model, mesh)
        x = ms.Tensor(array(2, 4, seed=mesh.rank))
        both = [array(2, 4, seed=rank).sum(0) for rank in range(2)]
        right = np.broadcast_to(sum(both) / 2, (3, 4))

        def loss(x):
            return model(x).sum()

        _, by_weight = ms.grad(loss, 0, [model.weight])(x)
        assert_same(by_weight, [ms.Tensor(right)])
        assert_same([ms.grad(loss, None, model.weight)(x)], [ms.Tensor(right)])
        assert_same([ms.grad(loss)(x)], [ms.Tensor(np.broadcast_to(array(3, 4).sum(0), (2, 4)))])
        return np.array(by_weight[0].asnumpy())

    first, second = simulate(rank, 2, platform="mindspore")
    assert np.array_equal(first, second)


def test_local_gradients_are_refused():
    """An optimizer step before the reduction, the gradient of an averaged gradient, and parameters from since."""

    def rank():
        import mindspore as ms
        from mindspore import nn

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = nn.SequentialCell(nn.Dense(4, 3), nn.Dense(3, 2))
        model[1].bias.requires_grad = False
        replicate(model, mesh, src_data_rank=None)
        weights = model.trainable_params()
        optimizer = nn.SGD(weights, 0.1)
        x = ms.Tensor(array(2, 4, seed=mesh.rank))
        with no_sync(model):
            gradients = gradients_of(model, weights, lambda cell: cell(x).sum())
        with pytest.raises(PlanError) as info:
            optimizer(gradients)
        assert str(info.value) == (
            "optimizer step: the gradient of 0.weight is not reduced: it was accumulated under no_sync(); "
            "before the step, run the last backward outside of no_sync()"
        )
        # By one parameter only: the others of its bucket have what was accumulated.
        by_one = ms.grad(lambda: model(x).sum(), None, [weights[0]])()
        optimizer(gradients)

        def inner(x):
            return ms.grad(lambda x: (model(x) ** 2).sum(), None, weights)(x)[0].sum()

        with pytest.raises(UnsupportedOnBackend) as info:
            ms.grad(inner)(x)
        assert str(info.value) == (
            "replicate: the gradient of a gradient is not supported; gradients are averaged off the graph"
        )
        model[1].bias.requires_grad = True
        with pytest.raises(
            PlanError, match=r"^replicate: parameters 1.bias were replaced, added or unfrozen after replicate; "
        ):
            model(x)
        return np.array(by_one[0].asnumpy())

    simulate(rank, 2, platform="mindspore")
