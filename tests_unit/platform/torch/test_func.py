"""``torch.func`` on DTensors: values of one device, or a refusal that names what works."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import Replicate, Shard, distribute_tensor, implicit_replication, init_device_mesh
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")

PICKED = torch.tensor([0, 1, 1, 2])
RIGHT = {
    "product": lambda a, x: (x @ a).exp().sum(),
    "softmax": lambda a, x: (x @ a).softmax(-1).square().sum(),
    "solve": lambda a, x: torch.linalg.solve(a, x.transpose(1, 2)).square().sum(),
    "index": lambda a, x: (x[:, PICKED].square() * a.sum()).sum(),
    "reduced": lambda a, x: (x.amax(1) @ a).logsumexp(-1).sum(),
}
REFUSED = {
    "gelu_backward": lambda a, x: F.gelu(x @ a).sum(),
    "tanh_backward": lambda a, x: (x @ a).tanh().sum(),
    "select_backward": lambda a, x: (x[0] @ a).sum(),
}


def on_ranks(function):
    """``function(a, x)`` with the placements of x along 2 and 3 ranks."""

    def rank(world, place):
        mesh = init_device_mesh("cpu", (world,))
        a, x = values()
        with implicit_replication():
            return function(distribute_tensor(a, mesh, [Replicate()]), distribute_tensor(x, mesh, [place]))

    for world in (2, 3):
        for place in (Replicate(), Shard(0), Shard(1)):
            yield from simulate(lambda world=world, place=place: rank(world, place), world, "torch")


def values():
    """A matrix that can be solved, and a batch."""
    generator = torch.Generator().manual_seed(0)
    a, x = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((2, 2), (5, 4, 2)))
    return a + 3 * torch.eye(2, dtype=torch.float64), x


@pytest.mark.parametrize("name", RIGHT)
def test_vjp_and_grad_are_those_of_one_device(name):
    """Of every input, with a cotangent that is not one."""
    function = RIGHT[name]
    leaves = [value.requires_grad_() for value in values()]
    wanted = torch.autograd.grad(function(*leaves), leaves)

    def gradients(a, x):
        value, pull = torch.func.vjp(function, a, x)
        pulled = pull(torch.full_like(value, 0.3))
        return [grad.full_tensor() for grad in (*pulled, *torch.func.grad(function, argnums=(0, 1))(a, x))]

    for first, second, *others in on_ranks(gradients):
        torch.testing.assert_close([first / 0.3, second / 0.3], list(wanted))
        torch.testing.assert_close(others, list(wanted))


@pytest.mark.parametrize("name", REFUSED)
def test_gradients_by_operators_of_their_own_are_refused(name):
    """PyTorch differentiates below the functions that have rules; the message names the way that works."""
    for message in on_ranks(lambda a, x: _refusal(torch.func.grad(REFUSED[name], argnums=1), a, x)):
        assert message.startswith(f"operator aten.{name}.default has no sharding rule (layouts: ")
        assert "and torch.func differentiates with it; use torch.autograd.grad instead of torch.func.grad" in message


@pytest.mark.parametrize("transform", [torch.func.jacfwd, torch.func.hessian])
def test_forward_mode_is_refused(transform):
    """It would need a tangent beside each local tensor."""
    for message in on_ranks(lambda a, x: _refusal(transform(RIGHT["product"]), a, x)):
        assert message.startswith(
            "forward-mode differentiation (torch.func.jvp, torch.autograd.forward_ad) does not support "
        )
        assert message.endswith("; use torch.autograd.functional.jvp, which runs backward twice")


def _refusal(call, *args):
    with pytest.raises(UnsupportedOperatorError) as caught:
        call(*args)
    return str(caught.value)


def test_vmap_maps_over_samples():
    """Whatever the placement of the mapped dim."""
    wanted = torch.func.vmap(lambda x: F.gelu(x).sum(-1))(values()[1])
    for got in on_ranks(lambda _, x: torch.func.vmap(lambda x: F.gelu(x).sum(-1))(x).full_tensor()):
        torch.testing.assert_close(got, wanted)
