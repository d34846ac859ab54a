"""Shards of few elements."""

import pytest
import torch

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.core.shard.thin_shards import is_thin
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


def test_a_shard_is_thin_where_a_dim_has_more_elements_elsewhere():
    """One element of one is no thin shard, one or none of several is; of an unknown shape none is known."""

    def on_rank():  # of four rows the last of three ranks has none, of seven one
        mesh = init_device_mesh("cpu", (3,))
        places = [([Shard(0)], (4, 1)), ([Shard(1)], (4, 1)), ([Replicate()], (4, 1)), ([Shard(0)], (7, 2))]
        known = [is_thin(Layout.place(mesh, placements, shape)) for placements, shape in places]
        return [*known, is_thin(Layout.place(mesh, [Shard(0)], (4, 1)).with_shape(None))]

    assert simulate(on_rank, 3, "torch") == [
        [False, False, False, False, False],
        [False, False, False, False, False],
        [True, False, False, True, False],
    ]


@pytest.mark.parametrize("world", [2, 3])
def test_an_operand_that_no_operator_takes_is_refused_on_every_rank(world):
    """A thin shard leaves the refusal of a foreign operand to whoever refuses it elsewhere."""

    def on_rank():
        x = distribute_tensor(torch.arange(6.0).reshape(2, 3), init_device_mesh("cpu", (world,)), [Shard(0)])
        with pytest.raises(TypeError) as raised:
            x + object()
        return str(raised.value)

    messages = simulate(on_rank, world, "torch")
    assert len(set(messages)) == 1, messages
    assert "object" in messages[0]


@pytest.mark.parametrize("world", [2, 3])
def test_a_write_over_a_thin_result_takes_it_off_its_graph_on_every_rank(world):
    """Order in memory is no view: after a write over the whole result no rank has a gradient of its operands."""

    def program(x, y, source, cotangent):
        result = (x.t() * y.t()).copy_(source)
        return result, torch.autograd.grad(result, [x, y], cotangent, allow_unused=True)

    def on_rank():
        mesh = init_device_mesh("cpu", (world,))
        leaves = [distribute_tensor(leaf, mesh, [Shard(0)]) for leaf in (x, y, source.t().contiguous())]
        operands = [leaf.requires_grad_() for leaf in leaves[:2]]
        result, gradients = program(*operands, leaves[2].t(), distribute_tensor(source, mesh, [Replicate()]))
        return result.full_tensor().detach(), [gradient.full_tensor() for gradient in gradients]

    x, y, source = torch.randn(world - 1, 3), torch.randn(world - 1, 3), torch.randn(3, world - 1)
    _, expected = program(x.clone().requires_grad_(), y.clone().requires_grad_(), source, source)
    for result, gradients in simulate(on_rank, world, "torch"):
        assert torch.equal(result, source)
        for gradient, value in zip(gradients, expected, strict=True):
            assert torch.equal(gradient, value)
