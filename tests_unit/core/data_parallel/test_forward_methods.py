"""Methods of modules under ``fully_shard`` that run as forward does."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import hyper_parallel
from hyper_parallel import Shard, fully_shard, init_device_mesh
from hyper_parallel.errors import PlanError
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")


class Model(nn.Module):
    """A sharded module inside, a weight of its own, and several ways to compute with both."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)).double()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 5, dtype=torch.float64))

    def forward(self, x):
        """Like ``x``."""
        return self.inner(x) * self.weight

    def loss(self, x, *, scale, fails=False):
        """A number."""
        weight = self.weight * scale
        if fails:
            raise KeyError("x")
        return (self.inner(x) * weight).square().mean()

    def twice(self, x):
        """Forward of forward."""
        return self(self(x))


def batch(rank, step):
    """Input of one rank."""
    return torch.randn(2, 5, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


@pytest.mark.parametrize("world", [2, 3])
def test_a_registered_method_runs_as_forward(world):
    """``register_fsdp_forward_method``: gathered parameters, right gradients, copies of their own, and no traces."""

    def rank(mesh):
        torch.manual_seed(0)
        dense = Model()
        model = copy.deepcopy(dense)
        hyper_parallel.register_fsdp_forward_method(model, "loss")
        assert "loss" not in vars(model)  # nothing is sharded yet
        fully_shard(model.inner, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for name in ("loss", "twice", "loss"):
            hyper_parallel.register_fsdp_forward_method(model, name)
        with pytest.raises(PlanError, match=r"^register_fsdp_forward_method: Model has no method 'los'$"):
            hyper_parallel.register_fsdp_forward_method(model, "los")
        hyper_parallel.share_comm_ctx([model])
        with pytest.raises(KeyError):
            model.loss(torch.zeros(2, 5, dtype=torch.float64), scale=1.0, fails=True)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
        for each in range(world):
            (dense.loss(batch(each, 0), scale=2.0) + dense.twice(batch(each, 1)).sum()).div(world).backward()
        for one in (model, *copies):
            loss = one.loss(batch(mesh.rank, 0), scale=2.0)
            torch.testing.assert_close(loss, dense.loss(batch(mesh.rank, 0), scale=2.0))
            (loss + one.twice(batch(mesh.rank, 1)).sum()).backward()
            for mine, theirs in zip(one.parameters(), dense.parameters(), strict=True):
                torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
            assert one.weight.placements == (Shard(0),)
            with torch.no_grad():
                torch.testing.assert_close(one.twice(batch(0, 2)), dense.twice(batch(0, 2)))
                one.weight.zero_()  # the others have weights of their own
                torch.testing.assert_close(one.loss(batch(0, 2), scale=2.0).item(), 0.0)

    simulate(lambda: rank(init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))), world)
