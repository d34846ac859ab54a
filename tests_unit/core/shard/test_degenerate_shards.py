"""Shards of few elements."""

import pytest
import torch

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.core.shard.degenerate_shards import is_thin
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


def test_a_shard_is_thin_where_a_dim_has_more_elements_elsewhere():
    """One element of one is not a thin shard, one of several or none of any is; of an unknown shape none is known."""

    def on_rank():  # of four rows the last of three ranks has none, of seven one
        mesh = init_device_mesh("cpu", (3,))
        places = [([Shard(0)], (4, 1)), ([Shard(1)], (4, 1)), ([Replicate()], (4, 1)), ([Shard(0)], (7, 2))]
        known = [is_thin(Layout.place(mesh, placements, shape)) for placements, shape in places]
        return [*known, is_thin(Layout.place(mesh, [Shard(0)], (4, 1)).with_shape(None))]

    assert simulate(on_rank, 3, "torch") == [
        [False, False, False, False, False],
        [False, True, False, False, False],
        [True, True, False, True, False],
    ]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("rows", [2, 3, 5])
def test_a_write_to_a_view_of_a_copied_slice_arrives(world, rows):
    """A copy of a slice has no gaps on one device, so it has none on a rank with one row, whose shard might keep them.

    The gap stands in the stride of the dim with one element. A rank that took it for the whole tensor's would make
    copies where others make views.
    """
    operators = {
        "clone": torch.clone,
        "to": lambda x: x.to(torch.float64),
        "sum": lambda x: x + x,
        "turned": lambda x: x.transpose(1, 2).exp().transpose(1, 2),
    }

    def program(x, w, operator):
        y = operator(x[:, :2])
        y.contiguous().mul_(w)
        flat = y.reshape(-1)
        y.sum().backward()
        return y.detach(), w.grad, flat.detach() * 1.0

    values, factors = torch.randn(rows, 4, 2), torch.randn(rows, 2, 2)

    def on_rank():
        mesh, results = init_device_mesh("cpu", (world,)), []
        for operator in operators.values():
            x = distribute_tensor(values, mesh, [Shard(0)])
            w = distribute_tensor(factors, mesh, [Shard(0)]).requires_grad_()
            results.append([result.full_tensor() for result in program(x, w, operator)])
        return results

    for results in simulate(on_rank, world, "torch"):
        for (name, operator), result in zip(operators.items(), results, strict=True):
            expected = program(values, factors.clone().requires_grad_(), operator)
            for actual, expects in zip(result, expected, strict=True):
                torch.testing.assert_close(actual, expects, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("world", [2, 3])
def test_ravel_copies_a_vector_with_gaps(world):
    """Ravel of what does not lie in order is a copy, as on one device, and a view of what does."""

    def program(x):
        taken = [operand.ravel().mul_(3.0) for operand in (x[:, 0, 0], torch.ones_like(x), x[0, 0, 0].clone())]
        return [x, *taken]

    values = torch.randn(6, 2, 3)

    def on_rank():
        x = distribute_tensor(values, init_device_mesh("cpu", (world,)), [Shard(0)])
        whole = torch.ravel(x)
        whole.mul_(2.0)
        return [result.full_tensor() for result in program(x)]

    for results in simulate(on_rank, world, "torch"):
        torch.testing.assert_close(results, program(values * 2.0))


@pytest.mark.parametrize("world", [2, 3])
def test_no_element_of_one_is_copied_where_the_one_is(world):
    """A rank that has nothing of a dim of one element copies what the rank with that element has to copy."""
    values = torch.randn(2, 1, 4)

    def program(x):
        y = x.sigmoid()
        z = y.select(2, 0).contiguous()
        with torch.no_grad():
            z.mul_(3.0)
        ((y**2).sum() + (z**2).sum()).backward()
        return y.detach(), z.detach(), x.grad

    def on_rank():
        mesh = init_device_mesh("cpu", (world,))
        return [
            result.full_tensor() for result in program(distribute_tensor(values, mesh, [Shard(1)]).requires_grad_())
        ]

    for results in simulate(on_rank, world, "torch"):
        for actual, expects in zip(results, program(values.clone().requires_grad_()), strict=True):
            torch.testing.assert_close(actual, expects)


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
    """Order in memory is not a view: after a write over the whole result no rank has a gradient of its operands."""

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
