"""What trainers do around ``fully_shard``: checkpoints into meta tensors, full-precision modules, scaled float16."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hyper_parallel import MixedPrecisionPolicy, fully_shard, init_device_mesh, load, save
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")


def make(dtype=torch.float32):
    """Two layers and a norm between, of odd sizes."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_checkpoints_load_into_modules_of_the_meta_device(world, tmp_path):
    """By load() after to_empty, and by assignment of a state dict, values and training are those of one device."""

    def rank():
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        dense = make()
        source = fully_shard(copy.deepcopy(dense), mesh=mesh)
        save(source, tmp_path / "checkpoint")
        for assigns in (True, False):
            with torch.device("meta"):
                model = make()
            fully_shard(model[0], mesh=mesh)
            fully_shard(model, mesh=mesh)
            if assigns:
                model.load_state_dict(source.state_dict(), assign=True)
            else:
                model.to_empty(device="cpu")
                load(model, tmp_path / "checkpoint")
            expected = copy.deepcopy(dense)
            inputs = torch.randn(world, 2, 5, generator=torch.Generator().manual_seed(1))
            for each in inputs:
                (expected(each).square().sum() / world).backward()
            model(inputs[mesh.rank]).square().sum().backward()
            for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
                assert torch.equal(mine.full_tensor(), theirs)
                torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)

    simulate(rank, world, platform="torch")


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_module_inside_keeps_full_precision(world):
    """The norm computes in float32 between layers in bfloat16; each rank's output has the bits of such a model."""

    def rank():
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        dense, model = make(), make()
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model[1], mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.float32, output_dtype=torch.bfloat16))
        fully_shard(model, mesh=mesh, mp_policy=half)
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(mesh.rank))
        first, last = copy.deepcopy(dense[0]).bfloat16(), copy.deepcopy(dense[2]).bfloat16()
        expected = last(dense[1](first(x.bfloat16()).float()).bfloat16())
        y = model(x)
        assert torch.equal(y, expected)
        y.float().sum().backward()
        assert all(parameter.grad.dtype == parameter.dtype == torch.float32 for parameter in model.parameters())

    simulate(rank, world, platform="torch")


@pytest.mark.parametrize("world", [2, 3, 4])
def test_an_infinity_in_one_shard_skips_the_step_on_every_rank(world):
    """A gradient scaler finds it on all ranks, halves its scale, and leaves all weights; the next step trains."""

    def rank():
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        model = fully_shard(make(), mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(mesh.rank))
        before = [parameter.full_tensor().clone() for parameter in model.parameters()]
        for spoiled in (True, False):
            scaler.scale(model(x).float().square().mean()).backward()
            if spoiled and mesh.rank == world - 1:
                model[2].weight.grad.to_local().view(-1)[:1] = float("inf")
                model[0].weight.grad.to_local().view(-1)[:1] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            unchanged = [
                torch.equal(mine.full_tensor(), old) for mine, old in zip(model.parameters(), before, strict=True)
            ]
            assert all(unchanged) if spoiled else not any(unchanged[:1])
            assert scaler.get_scale() == 32.0

    simulate(rank, world, platform="torch")
