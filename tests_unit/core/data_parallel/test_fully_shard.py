from __future__ import annotations

import copy

import pytest

from hyper_parallel import DTensor, Shard, clip_grad_norm_, init_device_mesh
from hyper_parallel.core.data_parallel import fully_shard
from hyper_parallel.errors import MeshError, PlanError
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")


def random(*shape, seed=0):
    """Normal float64 values from a fresh generator."""
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_model():
    """Three blocks of odd sizes: one called twice, one tied weight, a frozen and an unused parameter."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width, hidden):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
            self.scale = nn.Parameter(torch.ones(1))
            self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)
            self.unused = nn.Parameter(torch.ones(3, 2))

        def forward(self, x):
            return x * self.frozen + self.fc2(torch.tanh(self.fc1(x))) * self.scale

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 5)
            self.first, self.second = Block(5, 7), Block(5, 3)
            self.head = nn.Linear(5, 11)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(self.first(self.second(self.first(self.embed(tokens)))))

    model = Model().double()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(random(*parameter.shape, seed=50 + index) * 0.5)
    return model


def batch(rank, step):
    """Tokens and cotangent of one rank's batch."""
    import torch

    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 11, (2, 3), generator=generator), random(2, 3, 11, seed=7 + 100 * step + rank)


def assert_same(mine, theirs, what):
    """Equal up to rounding in float64."""
    import torch

    assert (mine is None) == (theirs is None), what
    if mine is not None:
        whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
        torch.testing.assert_close(
            whole.detach(), theirs.detach(), rtol=1e-10, atol=1e-10, msg=lambda t: f"{what}: {t}"
        )


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("reshard", [None, True, False])
def test_training_equals_one_device(world, reshard):
    """Gradients, clipped norms and weights over AdamW steps are those of one device, for uneven and empty shards."""
    import torch

    source = make_model()

    def rank():
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        dense, model = copy.deepcopy(source), copy.deepcopy(source)
        for block in (model.first, model.second, model):
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (dense, model)]
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for each in range(world):
                tokens, cotangent = batch(each, step)
                dense(tokens).backward(cotangent / world)
            tokens, cotangent = batch(mesh.rank, step)
            model(tokens).backward(cotangent)
            pairs = list(zip(dense.named_parameters(), model.parameters(), strict=True))
            assert len(pairs) == 16
            for (name, theirs), mine in pairs:
                assert mine.placements == (Shard(0),)
                assert_same(mine.grad, theirs.grad, f"gradient of {name}")
            norms = [torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.5), clip_grad_norm_(model.parameters(), 0.5)]
            assert_same(norms[1], norms[0], "norm")
            for optimizer in optimizers:
                optimizer.step()
            for (name, theirs), mine in pairs:
                assert_same(mine, theirs, name)

    simulate(rank, world, platform="torch")
