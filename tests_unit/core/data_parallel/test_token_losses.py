"""Losses by the global count: the value and the gradients of one device, however tokens are distributed."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from hyper_parallel import (
    Replicate,
    distribute_tensor,
    fully_shard,
    global_mean,
    init_device_mesh,
    no_sync,
    replicate,
)
from hyper_parallel.errors import PlanError
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.simulate import simulate

RNG = np.random.default_rng(5)


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("apply", [replicate, fully_shard])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_gradients_are_those_of_one_device(world, apply):
    """Over ranks with unequal tokens, none on one of them, and two passes."""
    import torch
    from torch import nn

    torch.manual_seed(4)
    dense = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    batches = [[torch.randn(rank * 2 + part, 5).double() for part in range(2)] for rank in range(world)]
    total = sum(len(batch) for parts in batches for batch in parts)
    loss = sum(dense(batch).square().sum() for parts in batches for batch in parts) / total
    loss.backward()
    expected = [parameter.grad for parameter in dense.parameters()]
    dense.zero_grad()

    def rank():
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        model = copy.deepcopy(dense)
        apply(model, mesh=mesh)
        first, second = batches[mesh.rank]
        count = torch.tensor(len(first) + len(second))
        with no_sync(model), mesh:
            value = global_mean(model(first).square().sum(), count)
            value.backward()
        last = global_mean(model(second).square().sum(), count, mesh)
        last.backward()
        torch.testing.assert_close((value + last).detach(), loss.detach())
        for mine, theirs in zip(model.parameters(), expected, strict=True):
            gradient = mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad
            torch.testing.assert_close(gradient, theirs)

    simulate(rank, world, platform="torch")


@pytest.mark.parametrize("world", [2, 3, 4])
def test_both_frameworks_have_it(platform_name, world):
    """The value is the mean of all, the same on every rank; a sum's gradient is the ranks' number over the count."""
    sums, counts = RNG.standard_normal(world) * 10.0 ** np.arange(world), [3 * rank for rank in range(world)]

    def rank():
        platform = platform_named(platform_name)
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        own = platform.from_numpy(np.array(sums[mesh.rank], np.float64))
        if platform_name == "torch":
            value = global_mean(own.requires_grad_(), counts[mesh.rank], mesh)
            value.backward()
            gradient = own.grad
        else:
            value, gradient = platform.value_and_grad(lambda x: global_mean(x, counts[mesh.rank], mesh))(own)
        np.testing.assert_allclose(platform.tensor_to_numpy(platform.detach(value)), sums.sum() / sum(counts))
        np.testing.assert_allclose(platform.tensor_to_numpy(gradient), world / sum(counts))
        return platform.tensor_to_numpy(platform.detach(value)).tobytes()

    assert len(set(simulate(rank, world, platform=platform_name))) == 1


@pytest.mark.platforms("torch")
def test_wrong_counts_are_errors_on_all_ranks():
    """A negative count, none at all, no number, and sums that are no plain scalars."""
    import torch

    def rank():
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        value = torch.tensor(1.0)
        for loss_sum, count, text in (
            (
                value,
                -mesh.rank,
                "count is negative or not a number on ranks [1, 2]; pass the number of tokens of each rank",
            ),
            (
                value,
                "many",
                "count is negative or not a number on ranks [0, 1, 2]; pass the number of tokens of each rank",
            ),
            (value, 0, "count is zero on all ranks; pass the number of tokens of each rank"),
            (torch.ones(2), 1, "loss_sum has the shape [2]; pass a 0-d sum"),
            (
                distributed := distribute_tensor(value, mesh, [Replicate()]),
                1,
                f"loss_sum is a DTensor {distributed.layout.notation(value.dtype)}; pass loss_sum.full_tensor()",
            ),
        ):
            with pytest.raises(PlanError) as info:
                global_mean(loss_sum, count, mesh)
            assert str(info.value) == f"global_mean: {text}"

    simulate(rank, 3, platform="torch")
