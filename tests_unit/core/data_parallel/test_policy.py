"""Mixed precision: modules compute in one dtype, gradients are reduced in another, and shards keep their own."""

from __future__ import annotations

import copy

import pytest

from hyper_parallel import init_device_mesh
from hyper_parallel.core.data_parallel import MixedPrecisionPolicy, fully_shard, no_sync
from hyper_parallel.errors import ArgumentTypeError
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")


def make_model():
    """Three layers of odd sizes."""
    import torch
    from torch import nn

    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 3))


def inputs(rank, part):
    """One rank's batch."""
    import torch

    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * part + rank))


def set_expected_gradients(dense, world, parts):
    """Give ``dense`` the average over ranks, in float32, of the sums over parts of bfloat16 gradients."""
    import torch

    total = [torch.zeros_like(parameter) for parameter in dense.parameters()]
    for each in range(world):
        own = [torch.zeros_like(parameter) for parameter in dense.parameters()]
        for part in range(parts):
            low = copy.deepcopy(dense).bfloat16()
            low.zero_grad()
            low(inputs(each, part).bfloat16()).float().square().mean().backward()
            own = [value + parameter.grad.float() for value, parameter in zip(own, low.parameters(), strict=True)]
        total = [value + mine for value, mine in zip(total, own, strict=True)]
    for parameter, value in zip(dense.parameters(), total, strict=True):
        parameter.grad = value / world


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("accumulates", [False, True])
def test_bfloat16_compute_has_float32_master_weights(world, accumulates):
    """Gradients are the float32 average of each rank's bfloat16 gradients, also over passes without reduction."""
    import torch

    def rank():
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        dense, model = make_model(), make_model()
        low, wide = torch.bfloat16, torch.float32
        fully_shard(model[2], mesh=mesh, mp_policy=MixedPrecisionPolicy(low, wide))
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(low, wide, output_dtype=wide))
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (dense, model)]
        for _ in range(3):
            optimizers[1].zero_grad()
            set_expected_gradients(dense, world, 1 + accumulates)
            if accumulates:
                with no_sync(model):
                    model(inputs(mesh.rank, 0)).square().mean().backward()
            output = model(inputs(mesh.rank, int(accumulates)))
            assert output.dtype is wide
            output.square().mean().backward()
            for mine, theirs in zip(model.parameters(), dense.parameters(), strict=True):
                assert mine.dtype is mine.grad.dtype is wide
                torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-6, atol=1e-7)
            for optimizer in optimizers:
                optimizer.step()
            for mine, theirs in zip(model.parameters(), dense.parameters(), strict=True):
                torch.testing.assert_close(mine.full_tensor(), theirs.detach(), rtol=1e-5, atol=1e-6)
                with torch.no_grad():
                    theirs.copy_(mine.full_tensor())  # rounding must not choose another bfloat16 value

    simulate(rank, world, platform="torch")


def test_inputs_are_left_alone_where_the_policy_says_so():
    """Without ``cast_forward_inputs`` inputs keep their dtype; integers always do."""
    import torch

    class Look(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, x, *, index):
            return {"x": x.dtype, "index": index.dtype, "weight": self.weight.dtype, "y": x * 2}

    def rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        for casts, dtype in ((True, torch.bfloat16), (False, torch.float32)):
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, output_dtype=torch.float64, cast_forward_inputs=casts
            )
            seen = fully_shard(Look(), mesh=mesh, mp_policy=policy)(torch.ones(3), index=torch.arange(3))
            assert (seen["x"], seen["index"], seen["weight"]) == (dtype, torch.int64, torch.bfloat16)
            assert seen["y"].dtype is torch.float64

    simulate(rank, 2, platform="torch")


@pytest.mark.parametrize("accumulates", [False, True])
def test_integer_and_complex_parameters_keep_their_dtype(accumulates):
    """The dtypes of a policy are for floating parameters: indices above 256 and imaginary parts stay exact."""
    import torch

    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.tensor([257, 16777217, 3]), requires_grad=False)
            self.wave = torch.nn.Parameter(torch.tensor([1 + 2j, 3 - 1j, 0.5j], dtype=torch.complex128))
            self.scale = torch.nn.Parameter(torch.ones(3))

        def forward(self, x):
            assert (self.table.dtype, self.scale.dtype) == (torch.int64, torch.bfloat16)
            assert self.table.tolist() == [257, 16777217, 3]
            return (self.wave * self.wave.conj() * x.double()).real.sum() + self.scale.sum()

    def rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        dense = Mixed()
        model = fully_shard(Mixed(), mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        x = torch.tensor([1.0, 2.0, 4.0])
        if accumulates:
            with no_sync(model):
                model(x).backward()
        model(x).backward()
        expected = (2 * dense.wave * x * (1 + accumulates)).detach()
        assert model.wave.grad.full_tensor().equal(expected.to(torch.complex128))
        assert model.scale.grad.full_tensor().tolist() == [1.0 + accumulates] * 3
        assert model.table.grad is None

    simulate(rank, 2, platform="torch")


def test_policies_of_other_values_are_refused():
    """What is not a policy, and what is not a floating dtype of the framework."""
    import torch

    def rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        layer = torch.nn.Linear(3, 2)
        for policy, message in (
            (torch.bfloat16, "mp_policy=torch.bfloat16 must be MixedPrecisionPolicy(param_dtype=..., ...)"),
            (MixedPrecisionPolicy("bfloat16"), "mp_policy has param_dtype='bfloat16', "),
            (MixedPrecisionPolicy(reduce_dtype=torch.int32), "mp_policy has reduce_dtype=torch.int32, "),
            (MixedPrecisionPolicy(output_dtype=16), "mp_policy has output_dtype=16, "),
        ):
            with pytest.raises(ArgumentTypeError) as caught:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            end = "which must be None or a floating dtype of the framework" if message.endswith(", ") else ""
            assert str(caught.value) == f"fully_shard: {message}{end}"
        assert type(layer) is torch.nn.Linear
        fully_shard(layer, mesh=mesh, mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy(torch.bfloat16))
        assert layer(torch.ones(1, 3)).dtype is torch.bfloat16

    simulate(rank, 2, platform="torch")
