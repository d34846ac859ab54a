"""Guards of MindSpore's calls: what they say about optimizers that they refuse."""

import re

import numpy as np
import pytest

from hyper_parallel import ColwiseParallel, init_device_mesh, parallelize_module
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("mindspore")

SHARDS = (
    "its step over DTensor parameters would see this rank's shards as if they were whole, and is not "
    "known to update each element by itself; use"
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


def test_centralised_gradients_are_refused_by_name():
    """An optimizer that steps by elements is refused for the option that does not, which the message names."""
    message = (
        "SGD: grad_centralization takes means of whole gradients, and its step would see this rank's shards as if they "
        "were whole; leave grad_centralization out"
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
