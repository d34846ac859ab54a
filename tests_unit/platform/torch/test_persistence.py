"""PyTorch's distributed checkpoints of our models and optimizers, and of PyTorch's own, on any mesh."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.verify.launch import launch
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


def make(shape):
    """A model of odd sizes over a mesh (dp, tp), and an optimizer that has stepped."""
    import torch

    from hyper_parallel import ColwiseParallel, RowwiseParallel, fully_shard, init_device_mesh, parallelize_module

    grid = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape) * (number + 1))
    parallelize_module(model, grid["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=grid["dp"])
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.linspace(-1, 1, 15).view(3, 5)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def whole(state):
    """Whole tensors by name."""
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def saved(folder, shape=(2, 1)):
    """Save; return the whole model."""
    from torch.distributed import checkpoint

    model, optimizer = make(tuple(shape))
    checkpoint.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    return {name: value.tolist() for name, value in whole(model.state_dict()).items()}


def loaded(folder, shape, expected):
    """Load into other values on another mesh."""
    import torch
    from torch.distributed import checkpoint

    model, optimizer = make(tuple(shape))
    moment = optimizer.state_dict()["state"][0]["exp_avg"].full_tensor()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
            optimizer.state[parameter]["exp_avg"].zero_()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint.load(state, checkpoint_id=folder)
    optimizer.load_state_dict(state["optimizer"])
    torch.testing.assert_close(optimizer.state_dict()["state"][0]["exp_avg"].full_tensor(), moment)
    return {name: value.tolist() for name, value in whole(model.state_dict()).items()} == expected


@pytest.mark.parametrize("first, second", [((2, 1), (3, 1)), ((2, 2), (1, 2)), ((2, 2), (4, 1))])
def test_models_and_optimizers_go_to_another_mesh(tmp_path, first, second):
    """What some ranks save, others load, with shards that are uneven or empty."""
    results = simulate(lambda: saved(tmp_path, first), int(np.prod(first)), platform="torch")
    assert all(simulate(lambda: loaded(tmp_path, second, results[0]), int(np.prod(second)), platform="torch"))


@pytest.mark.sweep
@pytest.mark.slow
def test_real_processes(tmp_path):
    """Over real processes as well."""
    (expected, _) = launch(saved, 2, "torch", (str(tmp_path),))
    assert launch(loaded, 2, "torch", (str(tmp_path), (1, 2), expected)) == [True, True]


def test_folders_of_plain_tensors_are_read_and_written(tmp_path):
    """What a program without our tensors saves, or loads, in one process."""
    import torch
    from torch.distributed import checkpoint

    from hyper_parallel import Replicate, Shard, distribute_tensor, init_device_mesh

    values = {"w": torch.randn(5, 3), "empty": torch.zeros(0, 3), "number": torch.tensor(2.0)}
    checkpoint.save(values, checkpoint_id=tmp_path / "plain", no_dist=True)

    def rank():
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        state = {
            "w": distribute_tensor(torch.zeros(5, 3), mesh, [Shard(1)]),
            "empty": distribute_tensor(torch.zeros(0, 3), mesh, [Shard(0)]),
            "number": distribute_tensor(torch.tensor(0.0), mesh, [Replicate()]),
        }
        checkpoint.load(state, checkpoint_id=tmp_path / "plain")
        assert all(torch.equal(state[name].full_tensor(), value) for name, value in values.items())
        checkpoint.save(state, checkpoint_id=tmp_path / "ours")

    simulate(rank, 3, platform="torch")
    read = {name: torch.ones_like(value) for name, value in values.items()}
    checkpoint.load(read, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert all(torch.equal(read[name], value) for name, value in values.items())


def test_ranks_outside_of_the_mesh_take_no_part():
    """They write and read nothing; a partial tensor is refused."""
    import torch

    from hyper_parallel import Partial, Shard, distribute_tensor, init_device_mesh
    from hyper_parallel.errors import CheckpointError

    def rank():
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        partial = distribute_tensor(torch.ones(3), mesh, [Partial()])
        with pytest.raises(CheckpointError) as info:
            partial.__create_write_items__("w", partial)
        assert str(info.value) == (
            f"save: w is a DTensor {partial.layout.notation(partial.dtype)}; reduce it first, with reduce_partial()"
        )
        sharded = distribute_tensor(torch.arange(2.0), mesh, [Shard(0)])
        assert len(sharded.__create_chunk_list__()) == (mesh.rank < 2)

    simulate(rank, 3, platform="torch")
