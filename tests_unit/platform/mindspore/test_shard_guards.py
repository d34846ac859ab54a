"""Guards of MindSpore's calls: what they say about optimizers that they refuse."""

import re

import numpy as np
import pytest

from hyper_parallel import ColwiseParallel, Shard, distribute_tensor, init_device_mesh, parallelize_module
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("mindspore")

SHARDS = (
    "its step over DTensor parameters would see this rank's shards as if they were complete, and is not "
    "known to update each element independently; use"
)


def step_of(optimizer_name, options):
    """Take a step over a sharded layer of odd width on a simulated rank."""
    import mindspore
    from mindspore import nn

    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    net = nn.SequentialCell(nn.Dense(5, 7))
    parallelize_module(net, mesh, {"0": ColwiseParallel()})
    optimizer = getattr(nn, optimizer_name)(net.trainable_params(), **options)
    gradient = mindspore.value_and_grad(lambda x: net(x).sum(), None, net.trainable_params())
    _, gradients = gradient(mindspore.Tensor(np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)))
    optimizer(gradients)


@pytest.mark.parametrize(
    "optimizer_name, message",
    [
        ("LazyAdam", f"LazyAdam: {SHARDS} nn.Adam"),
        (
            "AdaFactor",
            f"AdaFactor: {SHARDS} nn.Adam or nn.AdamWeightDecay or nn.SGD",
        ),
    ],
)
def test_an_optimizer_that_is_refused_is_named_with_one_that_is_not(optimizer_name, message):
    """The message says which optimizer, why, and what to use."""

    def step():
        with pytest.raises(UnsupportedOperatorError, match=re.escape(message) + "$"):
            step_of(optimizer_name, {})

    simulate(step, 3, platform="mindspore")


@pytest.mark.parametrize("world", [2, 3])
def test_lars_is_refused_over_dtensors(world):
    """``nn.LARS`` scales by norms of whole parameters: it is refused before the optimizer inside takes its step."""

    def step():
        import mindspore
        from mindspore import nn

        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        net = nn.SequentialCell(nn.Dense(5, 7))
        parallelize_module(net, mesh, {"0": ColwiseParallel()})
        optimizer = nn.LARS(nn.Momentum(net.trainable_params(), 0.1, 0.9), coefficient=0.05)
        before = net[0].weight.to_local().asnumpy().copy()
        x = mindspore.Tensor(np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32))
        _, gradients = mindspore.value_and_grad(lambda x: net(x).sum(), None, net.trainable_params())(x)
        message = f"LARS: {SHARDS} nn.Adam or nn.AdamWeightDecay or nn.SGD"
        with pytest.raises(UnsupportedOperatorError, match=f"^{re.escape(message)}$"):
            optimizer(gradients)
        np.testing.assert_array_equal(net[0].weight.to_local().asnumpy(), before)
        return True

    assert simulate(step, world, platform="mindspore") == [True] * world


def test_centralised_gradients_are_refused_by_name():
    """An optimizer that steps by elements is refused for the option that does not, which the message names."""
    message = (
        "SGD: grad_centralization takes means of complete gradients, and its step would see this rank's shards as if "
        "they were complete; leave grad_centralization out"
    )

    def step():
        from mindspore import nn

        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        net = nn.SequentialCell(nn.Dense(5, 7))
        parallelize_module(net, mesh, {"0": ColwiseParallel()})
        optimizer = nn.SGD([{"params": net.trainable_params(), "grad_centralization": True}])
        with pytest.raises(UnsupportedOperatorError, match=re.escape(message) + "$"):
            optimizer(tuple(net.trainable_params()))

    simulate(step, 3, platform="mindspore")


@pytest.mark.parametrize("name, options", [("SGD", {"momentum": 0.9}), ("Adam", {}), ("SGD", {})])
def test_an_optimizer_that_cannot_count_its_steps_is_refused(name, options):
    """On CPU, mint.optim would begin anew at each step; what keeps nothing from step to step is served."""
    message = (
        f"mint.optim.{name} on CPU: MindSpore loses the write that counts its steps, so every step would be "
        f"computed as the first one; use mindspore.nn.{name} or mindspore.experimental.optim.{name}"
    )

    def step():
        from mindspore import Parameter, Tensor, mint

        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        whole = np.arange(7, dtype=np.float32)
        weight = Parameter(distribute_tensor(Tensor(whole), mesh, [Shard(0)]), name="w")
        gradient = distribute_tensor(Tensor(whole + 1), mesh, [Shard(0)])
        optimizer = mint.optim.__dict__[name]([weight], lr=0.5, **options)
        if options or name == "Adam":
            with pytest.raises(UnsupportedOperatorError, match=re.escape(message) + "$"):
                optimizer((gradient,))
            np.testing.assert_array_equal(weight.full_tensor().asnumpy(), whole)
        else:
            for _ in range(2):
                optimizer((gradient,))
            np.testing.assert_array_equal(weight.full_tensor().asnumpy(), whole - (whole + 1))

    simulate(step, 3, platform="mindspore")
