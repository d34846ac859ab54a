"""Recomputed cells with fully sharded parameters: training is that of one device, in every order of the two."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")

ORDERS = (
    "recompute, shard blocks", "shard blocks, recompute", "recompute, shard root", "shard root, recompute",
    "shard blocks, shard root, recompute root", "recompute, shard blocks, shard root", "recompute, shard layers",
    "recompute root, shard root", "recompute root, shard blocks",
)  # fmt: skip


def make_net(ms):
    """Two blocks of a residual network, one of them with a frozen parameter."""
    from mindspore import nn, ops

    class Block(nn.Cell):
        def __init__(self, hidden):
            super().__init__()
            self.up, self.down = nn.Dense(5, hidden), nn.Dense(hidden, 5)
            self.frozen = ms.Parameter(ms.Tensor(np.arange(5), ms.float32), requires_grad=False)

        def construct(self, x, scale):
            return x + self.down(ops.tanh(self.up(x * self.frozen))) * scale

    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.blocks = nn.CellList([Block(7), Block(3)])
            self.last = nn.Dense(5, 5)

        def construct(self, x, scale):
            for block in self.blocks:
                x = block(x, scale)
            return self.last(x)

    net, rng = Net(), np.random.default_rng(3)
    for parameter in net.get_parameters():
        parameter.set_data(ms.Tensor(rng.standard_normal(parameter.shape), ms.float32))
    return net


def gradients(ms, net, calls):
    """Gradients of inputs and parameters for a random cotangent, with the value."""
    from mindspore import Tensor

    rng = np.random.default_rng(4)
    x, scale, cotangent = (Tensor(rng.standard_normal(shape), ms.float32) for shape in ((3, 5), (5,), (3, 5)))

    def run(x, scale):
        y = x
        for _ in range(calls):
            y = net(y, scale)
        return (y * cotangent).sum()

    value, (by_inputs, by_weights) = ms.value_and_grad(run, (0, 1), ms.ParameterTuple(net.trainable_params()))(x, scale)
    found = [value, *by_inputs, *by_weights]
    return [(each.full_tensor() if hasattr(each, "full_tensor") else each).asnumpy() for each in found]


def differences(world, orders, calls=1):
    """Orders of recomputing and sharding after which gradients are not those of one device."""
    import mindspore as ms

    from hyper_parallel import fully_shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    wanted = gradients(ms, make_net(ms), calls)
    wrong = []
    for order in orders:
        for reentrant in (True, False):
            net = make_net(ms)
            layers = [layer for block in net.blocks for layer in (block.up, block.down)]
            steps = {
                "recompute": lambda net=net, how=reentrant: [b.recompute(use_reentrant=how) for b in net.blocks],
                "recompute root": lambda net=net, how=reentrant: net.recompute(use_reentrant=how),
                "shard blocks": lambda net=net: [fully_shard(block, mesh=mesh) for block in net.blocks],
                "shard root": lambda net=net: fully_shard(net, mesh=mesh),
                "shard layers": lambda layers=layers: [fully_shard(layer, mesh=mesh) for layer in layers],
            }
            for step in order.split(", "):
                steps[step]()
            for _ in range(2):
                found = gradients(ms, net, calls)
                if not all(np.allclose(*both, rtol=1e-4, atol=1e-4) for both in zip(found, wanted, strict=True)):
                    wrong.append(f"{order}, reentrant={reentrant}")
    return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_recomputed_cells_train_fully_sharded(world):
    """Gradients of inputs and shards are those of one device, whatever was first and whichever cells are shared out."""
    assert simulate(differences, world, platform="mindspore", args=(world, ORDERS), timeout=400) == [[]] * world


def test_recomputed_cells_that_are_called_twice_train_fully_sharded():
    """Each call of a recomputed cell is recomputed with its own inputs, and its gradients are added up."""
    assert simulate(differences, 2, platform="mindspore", args=(2, ORDERS[:3], 2), timeout=400) == [[]] * 2


def recomputed_by_function(_):
    """Whether ``ms.recompute`` of blocks in a fully sharded root has the gradients of one device."""
    import mindspore as ms

    from hyper_parallel import fully_shard, init_device_mesh

    wanted, net = gradients(ms, make_net(ms), 1), make_net(ms)

    def construct(x, scale):
        for block in net.blocks:
            x = ms.recompute(block, x, scale)
        return net.last(x)

    net.construct = construct
    fully_shard(net, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    found = gradients(ms, net, 1)
    return all(np.allclose(*both, rtol=1e-4, atol=1e-4) for both in zip(found, wanted, strict=True))


def test_recompute_as_a_function_trains_fully_sharded():
    """A block that ``ms.recompute`` runs has the parameters that the root gathers."""
    assert simulate(recomputed_by_function, 2, platform="mindspore", args=(None,)) == [True, True]
