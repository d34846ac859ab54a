"""PyTorch's own data parallelism takes meshes of this library, and refuses its DTensors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from hyper_parallel.core.data_parallel import fully_shard, replicate
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from hyper_parallel.errors import PlanError
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


def _trained(model, rank, world):
    """Gradients of the mean over all ranks' unequal batches' sums, by name."""
    generator = torch.Generator().manual_seed(7)
    batches = [torch.randn(2, 4, generator=generator) for _ in range(world)]
    for batch in batches if rank is None else [batches[rank]]:
        (model(batch).square().sum() / (world if rank is None else 1)).backward()
    return {
        name.removeprefix("module."): value.grad.full_tensor() if hasattr(value.grad, "full_tensor") else value.grad
        for name, value in model.named_parameters()
    }


@pytest.mark.parametrize("world", [2, 3])
def test_pytorchs_data_parallelism_takes_our_mesh(world):
    """``fully_shard`` over one axis and over replicas, and DDP, train plain modules as one device does."""
    torch.manual_seed(0)
    dense = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    expected = _trained(copy.deepcopy(dense), None, world)

    def rank():
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("replica", "dp"))
        wrapped = [
            fully_shard(copy.deepcopy(dense), mesh=mesh["dp"]),
            fully_shard(copy.deepcopy(dense), mesh=mesh),
            DistributedDataParallel(copy.deepcopy(dense), device_mesh=mesh["dp"]),
            DistributedDataParallel(copy.deepcopy(dense), process_group=mesh.get_group("dp")),
        ]
        for model in wrapped:
            for name, gradient in _trained(model, mesh.rank, world).items():
                torch.testing.assert_close(gradient, expected[name])

    simulate(rank, world, "torch")


def test_pytorchs_data_parallelism_refuses_our_dtensors():
    """PyTorch's wrappers over a tensor-parallel module say what to use; the module is as before, and that works."""
    torch.manual_seed(0)
    dense = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    expected = _trained(copy.deepcopy(dense), None, 2)

    def rank():
        from torch.distributed import fsdp

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        messages = []
        for ours in (replicate, lambda model, axis: fully_shard(model, mesh=axis)):
            model = copy.deepcopy(dense)
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            for wrap in (
                lambda: DistributedDataParallel(model, process_group=mesh.get_group("dp")),  # noqa: B023 - called here
                lambda: fsdp.fully_shard(model, mesh=mesh["dp"]),  # noqa: B023 - as above
                lambda: fsdp.FullyShardedDataParallel(model, process_group=mesh.get_group("dp")),  # noqa: B023
            ):
                with pytest.raises(PlanError) as caught:
                    wrap()
                messages.append(str(caught.value))
            ours(model, mesh["dp"])
            for name, gradient in _trained(model, mesh.coordinate[0], 2).items():
                torch.testing.assert_close(gradient, expected[name])
        assert messages[:3] == messages[3:]
        return messages[:3]

    rest = (
        "of hyper_parallel; use {} of hyper_parallel, with the data axis of one mesh whose other axes are those of "
        "tensor parallelism"
    )
    sharded = "a DTensor f32[5@tp, 4] " + rest.format("fully_shard(module, mesh=mesh)")
    assert simulate(rank, 4, "torch")[0] == [
        "PyTorch's DistributedDataParallel does not know parameter 0.weight, a DTensor f32[5@tp, 4] "
        + rest.format("replicate(module, mesh)"),
        f"PyTorch's fully_shard does not know parameter weight, {sharded}",
        f"PyTorch's FullyShardedDataParallel does not know parameter 0.weight, {sharded}",
    ]
