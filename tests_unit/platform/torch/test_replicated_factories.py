"""``torch.distributions`` over DTensors: densities are those of one device, samples those of one rank."""

from __future__ import annotations

import pytest
import torch
from torch import distributions

from hyper_parallel import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from hyper_parallel.core.dtensor import random
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")

PLACES = [Replicate(), Shard(0), Shard(1)]


def numbers(*shape, seed=0):
    """Random values, equal on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole(values):
    """Plain tensors off the graph."""
    return [(value.full_tensor() if isinstance(value, DTensor) else value).detach() for value in values]


def on_ranks(function, world):
    """``function(place)`` on every rank, for each placement; ``place(values)`` distributes them."""

    def rank():
        mesh = init_device_mesh("cpu", (world,))
        torch.manual_seed(mesh.rank)  # programs may seed each rank of plain tensors differently
        return [whole(function(lambda value, at=at: distribute_tensor(value, mesh, [at]))) for at in PLACES]

    return simulate(rank, world, "torch")


DENSITIES = {
    "Normal": lambda x: distributions.Normal(x, x.exp()),
    "Categorical": lambda x: distributions.Categorical(logits=x),
    "Beta": lambda x: distributions.Beta(x.exp(), x.exp() + 1),
    "Independent": lambda x: distributions.Independent(distributions.Laplace(x, x.exp()), 1),
}


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", DENSITIES)
def test_densities_and_entropies_are_those_of_one_device(name, world):
    """Parameters and samples are checked by the library's own reductions; gradients reach the parameters."""

    def run(place):
        x = place(numbers(5, 3)).requires_grad_()
        sample = distribute_tensor(drawn, x.device_mesh, [Replicate()])
        return finished(DENSITIES[name](x), sample, x)

    def finished(distribution, sample, x):
        density, entropy = distribution.log_prob(sample), distribution.entropy()
        (density.sum() + entropy.square().sum()).backward()
        return [density, entropy, x.grad]

    x = numbers(5, 3).requires_grad_()
    drawn = torch.tensor([0, 2, 1, 1, 0]) if name == "Categorical" else torch.sigmoid(numbers(5, 3, seed=1))
    wanted = [value.detach() for value in finished(DENSITIES[name](x), drawn, x)]
    for results in on_ranks(run, world):
        for result in results:
            torch.testing.assert_close(result, wanted)


def test_a_sample_out_of_range_is_refused_on_every_rank():
    """A check that fails on one rank's part fails on all ranks."""

    def rank():
        mesh = init_device_mesh("cpu", (2,))
        scale = distribute_tensor(torch.tensor([1.0, 1.0, -1.0]), mesh, [Shard(0)])
        with pytest.raises(ValueError, match="to satisfy the constraint GreaterThan"):
            distributions.Normal(scale * 0, scale, validate_args=True)  # torch.compile turns the default off
        return bool(torch._is_any_true(scale < 0)), bool(torch._is_any_true(scale > 5))

    assert simulate(rank, 2, "torch") == [(True, False)] * 2


SAMPLES = {
    "Normal": lambda x: distributions.Normal(x, x.exp()),
    "MultivariateNormal": lambda x: distributions.MultivariateNormal(x[:, 0], scale_tril=torch.diag(x[:, 1].exp())),
    "Gumbel": lambda x: distributions.Gumbel(x, x.exp()),
    "RelaxedOneHotCategorical": lambda x: distributions.RelaxedOneHotCategorical(x[:1, 0].exp(), logits=x),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_with_gradients_are_those_of_one_rank(name):
    """Reparametrised samples are equal for every number of ranks and layout, however a program has seeded its ranks."""

    def run(place):
        x = place(numbers(4, 3)).requires_grad_()
        distribution = SAMPLES[name](x)
        random.manual_seed(7)
        sample = distribution.rsample((2,))
        sample.square().sum().backward()
        return [sample, x.grad]

    alone, *others = (on_ranks(run, world) for world in (1, 2, 3))
    for results in others:
        for result in results:
            for values, wanted in zip(result, alone[0], strict=True):
                torch.testing.assert_close(values, wanted)


def test_plain_distributions_stay_pytorchs():
    """Without a DTensor nothing changes: plain parameters, plain samples of PyTorch's generator."""
    torch.manual_seed(0)
    sample = distributions.Normal(torch.zeros(3), torch.ones(3)).rsample()
    torch.manual_seed(0)
    assert torch.equal(sample, torch.empty(3).normal_())
