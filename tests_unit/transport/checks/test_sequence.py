"""Collectives that are agreed upon once per pass: ranks that leave the order together go on, alone they all raise."""

from __future__ import annotations

import copy

import pytest

from hyper_parallel import init_device_mesh
from hyper_parallel.core.data_parallel import fully_shard
from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.platform.select import get_torch_platform
from hyper_parallel.pytest_plugin.ranks import require_transport
from hyper_parallel.transport.checks.sequence import AgreedSequence
from hyper_parallel.verify import simulate
from hyper_parallel.verify.launch import launch

pytestmark = pytest.mark.platforms("torch")


def _nothing(place):
    """Called between layers."""
    del place


def make_model():
    """Four layers, of which ``order`` says which are called; ``between(place)`` is called before each."""
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, k), nn.Linear(k, 5)) for k in (3, 4, 6, 2))
            self.order, self.between = (0, 1, 2, 3), _nothing

        def forward(self, x):
            for place, index in enumerate(self.order):
                self.between(place)
                x = self.layers[index](x)
            return x

    torch.manual_seed(0)
    return Model().double()


def sharded_pair(world):
    """A plain model, and one sharded by layer and as a whole."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    plain = make_model()
    model = copy.deepcopy(plain)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return mesh, plain, fully_shard(model, mesh=mesh)


def check_step(mesh, plain, model):
    """The gradients of one step are those of all ranks' batches."""
    import torch

    model.zero_grad(), plain.zero_grad()
    world, inputs = mesh.size(), [torch.arange(10.0).double().view(2, 5) / (rank + 3) for rank in range(mesh.size())]
    model(inputs[mesh.rank]).sin().sum().backward()
    for x in inputs:
        (plain(x).sin().sum() / world).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


def test_ranks_that_change_the_order_together_are_served(monkeypatch):
    """Gradients stay right when all ranks change, shorten or extend the order, and an order that is kept is prefetched.

    A kept order is agreed upon once per window: no step of it is agreed upon by itself.
    """
    starts = []
    launch_step = AgreedSequence._launch

    def recorded(self, step, rows, finish):
        if self._carrier.transport().rank == 0:
            starts.append((step.operation, step.owner.split(" ")[0]))
        return launch_step(self, step, rows, finish)

    monkeypatch.setattr(AgreedSequence, "_launch", recorded)

    def rank():
        mesh, plain, model = sharded_pair(2)
        for order in ((0, 1, 2, 3), (0, 1, 2, 3), (0, 2, 1), (0, 2, 1), (3, 0, 1, 2), (), (1, 1), (0, 1, 2, 3)):
            model.order = plain.order = order
            if order:
                check_step(mesh, plain, model)
            else:
                model(plain.layers[0][0].weight.detach())
        if mesh.rank == 0:
            starts.clear()
        check_step(mesh, plain, model)
        check_step(mesh, plain, model)

    simulate(rank, 2, platform="torch")
    gathers, reduces = [("all_gather", str(n)) for n in range(4)], [("reduce_scatter", str(n)) for n in range(4)]
    backward = [gathers[3], gathers[2], reduces[3], gathers[1], reduces[2], gathers[0], reduces[1], reduces[0]]
    assert starts == (gathers + backward) * 2


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("order", [(1, 2, 3), (0, 2, 3), (0, 1, 2), (0, 1, 3), (3, 2, 1, 0), (0, 1, 2, 3, 0), (0,)])
def test_a_rank_that_leaves_the_order_alone_is_an_error_on_every_rank(world, order):
    """All ranks raise, none waits for another, and the next collective of all ranks is right."""
    import torch

    def rank():
        mesh, plain, model = sharded_pair(world)
        for _ in range(2):
            check_step(mesh, plain, model)
        if mesh.rank == world - 1:
            model.order = order
        with pytest.raises(CollectiveMismatchError):
            check_step(mesh, plain, model)
        assert get_torch_platform().all_reduce(torch.ones(1)).item() == world

    simulate(rank, world, platform="torch")


def test_another_collective_ends_what_was_agreed_upon():
    """Collectives between modules are right on all ranks, and an error on every rank if one rank calls them alone."""
    import torch

    def rank():
        mesh, plain, model = sharded_pair(2)
        platform = get_torch_platform()

        def between(place):
            if place == 2:
                assert platform.all_reduce(torch.full((3,), 2.0)).tolist() == [4.0] * 3

        for model.between in (_nothing, between, between, _nothing, _nothing):
            check_step(mesh, plain, model)
            check_step(mesh, plain, model)
        if mesh.rank:
            model.between = between
        with pytest.raises(CollectiveMismatchError) as info:
            check_step(mesh, plain, model)
        assert str(info.value) == (
            "fully_shard: ranks [1] of [0, 1] did not call the all_gather of module group 3 (Sequential) (17 elements "
            "of torch.float64), which all ranks called in the pass before; let all ranks call the same modules in the "
            "same order"
        )

    simulate(rank, 2, platform="torch")


def _over_gloo():
    import torch

    world = 2
    mesh, plain, model = sharded_pair(world)
    for _ in range(3):
        check_step(mesh, plain, model)
    orders = ((0, 2, 1), (0, 1, 2, 3), (0, 1, 2, 3))
    for model.order in orders:
        plain.order = model.order
        check_step(mesh, plain, model)
    if mesh.rank:
        model.order = (0, 1, 3)
    with pytest.raises(CollectiveMismatchError) as info:
        check_step(mesh, plain, model)
    assert get_torch_platform().all_reduce(torch.ones(1)).item() == world
    return str(info.value)


def test_over_gloo_a_rank_that_leaves_the_order_is_an_error_on_every_rank():
    """The same in real processes, where buffers of unequal sizes would end a process."""
    require_transport("torch")
    first, second = launch(_over_gloo, 2, "torch", timeout=120)
    assert first == second
    assert first.startswith("fully_shard: ranks [1] of [0, 1] did not call the ")
