"""Accumulation over passes without reduction: one reduction, the same gradients, and no step before it."""

from __future__ import annotations

import copy

import pytest

from hyper_parallel import init_device_mesh
from hyper_parallel.core.data_parallel import fully_shard, no_sync, set_requires_gradient_sync
from hyper_parallel.errors import PlanError
from hyper_parallel.platform.select import get_torch_platform
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")


def make_model():
    """Two layers of odd sizes, the second with a parameter that is used in some passes only."""
    import torch
    from torch import nn

    class Sometimes(nn.Linear):
        used = False

        def __init__(self):
            super().__init__(7, 3)
            self.extra = nn.Parameter(torch.full((3,), 0.5))

        def forward(self, x):
            y = super().forward(x)
            return y * self.extra if self.used else y

    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), Sometimes()).double()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_accumulated_gradients_are_those_of_one_device(world, monkeypatch):
    """Three passes, two of them without reduction, have the gradients of one device with one reduction per group."""
    import torch

    reduced = []
    platform = get_torch_platform()
    reduce_scatter = platform.reduce_scatter_tensor

    def recorded(data, *args, **kwargs):
        reduced.append(data.numel())
        return reduce_scatter(data, *args, **kwargs)

    monkeypatch.setattr(platform, "reduce_scatter_tensor", recorded, raising=False)

    def rank():
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        dense = make_model()
        model = copy.deepcopy(dense)
        fully_shard(model[2], mesh=mesh)
        fully_shard(model, mesh=mesh)

        def x(each, part):
            return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * part + each)).double()

        for part in range(3):
            dense[2].used = model[2].used = part == 1
            for each in range(world):
                (dense(x(each, part)).square().sum() / world).backward()
            set_requires_gradient_sync(model, part == 2)
            model(x(mesh.rank, part)).square().sum().backward()
        for mine, theirs in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)

    simulate(rank, world, platform="torch")
    assert len(reduced) == 2 * world


def test_a_step_before_the_reduction_is_refused():
    """An optimizer step that would leave accumulated gradients out is an error; after a reduction it is served."""
    import torch

    def rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = fully_shard(make_model(), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(2, 5).double()
        with no_sync(model):
            model(x).sum().backward()
        with pytest.raises(PlanError) as info:
            optimizer.step()
        assert str(info.value) == (
            "optimizer step: the gradient of parameter 0 of group 0 is not reduced: it was accumulated under no_sync()"
            "; before the step, run the last backward outside of no_sync()"
        )
        model(x).sum().backward()
        optimizer.step()
        with pytest.raises(PlanError) as info, no_sync(model[0]):
            pass
        assert str(info.value) == (
            "no_sync: neither fully_shard nor replicate was applied to this Linear; pass a module that one of them "
            "returned"
        )
        set_requires_gradient_sync(model, False, recurse=False)
        assert not model._hyper_parallel_fully_sharded[0].reduces

    simulate(rank, 2, platform="torch")
