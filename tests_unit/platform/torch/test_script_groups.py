"""Meshes of this library as groups of PyTorch's functions, and groups that a script builds."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from hyper_parallel.core.dtensor.mesh import DeviceMesh, init_device_mesh
from hyper_parallel.errors import MeshError
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


@pytest.mark.parametrize("world", [2, 3])
def test_functional_collectives_take_our_mesh(world):
    """A mesh, or a mesh and an axis, is the group of that axis, in forward and in backward."""

    def rank():
        from torch.distributed import _functional_collectives as functional

        mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
        own = torch.arange(6.0).reshape(2, 3) * (mesh.rank + 1)
        total = torch.arange(6.0).reshape(2, 3) * sum(range(1, world + 1))
        groups = (mesh["tp"], (mesh, 1), (mesh, "tp"), (mesh, -1), mesh.get_group("tp"))
        for group in groups:
            assert torch.equal(functional.all_reduce(own, "sum", group), total)
        assert torch.equal(functional.all_reduce(own, "sum", (mesh, 0)), own)
        rows = functional.all_gather_tensor(own, 0, mesh["tp"])
        assert rows.shape == (2 * world, 3)
        assert torch.equal(functional.reduce_scatter_tensor(rows, "sum", 0, (mesh, 1)), own * world)
        x = own.clone().requires_grad_()
        functional.all_gather_tensor_autograd(x, 0, mesh["tp"]).mul(rows).sum().backward()
        assert torch.equal(x.grad, own * world)
        with pytest.raises(MeshError) as caught:
            functional.all_reduce(own, "sum", mesh)
        return str(caught.value)

    assert simulate(rank, world, "torch")[0] == "get_group: the mesh has axes ('dp', 'tp'); name one of them"


def test_functional_collectives_refuse_a_mesh_whose_ranks_descend():
    """Their results would be in the order of ranks, which is not that of the mesh; an axis that ascends is taken."""

    def rank():
        from torch.distributed import _functional_collectives as functional

        mesh = DeviceMesh("cpu", [[1, 0], [3, 2]], mesh_dim_names=("dp", "tp"))
        own = torch.tensor([float(mesh.rank)])
        assert functional.all_gather_tensor(own, 0, (mesh, "dp")).tolist() == mesh.get_rank_list_along_axis("dp")
        texts = []
        for group in ((mesh, "tp"), mesh["tp"]):
            with pytest.raises(MeshError) as caught:
                functional.all_gather_tensor(own, 0, group)
            texts.append(str(caught.value))
        return texts

    assert simulate(rank, 4, "torch")[0] == [
        f"PyTorch's groups order their ranks, and along axis tp of DeviceMesh(cpu, {shown}) ranks descend, so that its "
        "collectives would take shards for those of other ranks; make the mesh with ranks that ascend along every "
        "axis, or use this library's own functions, such as redistribute() and full_tensor()"
        for shown in ("dp=2, tp=2, ranks=[1, 0, 3, 2]", "tp=2, ranks=[1, 0]")
    ]


def test_groups_of_a_mesh_are_pytorchs():
    """``dist`` takes the group of a mesh, and this library takes it back; equal ranks have one group."""

    def rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        platform = platform_named("torch")
        for axis in ("tp", "dp"):
            group = mesh.get_group(axis)
            assert group is mesh[axis].get_group()
            assert torch.distributed.get_process_group_ranks(group) == mesh.get_rank_list_along_axis(axis)
            x = torch.tensor([float(mesh.rank)])
            torch.distributed.all_reduce(x, group=group)
            assert x.item() == sum(mesh.get_rank_list_along_axis(axis))
            assert platform.all_reduce(torch.ones(2), group).tolist() == [2.0, 2.0]
            assert DeviceMesh.from_group(group, "cpu", mesh_dim_names=(axis,)) is mesh[axis]
            platform.mark_created_groups(group)
            assert platform.get_created_group(mesh.get_rank_list_along_axis(axis)) is not None
            platform.destroy_process_group(group)
        assert mesh.flatten().get_group() is torch.distributed.group.WORLD
        return platform.get_created_group(mesh.get_rank_list_along_axis("tp"))

    assert simulate(rank, 4, "torch") == [None] * 4


@pytest.fixture(name="world")
def _world(tmp_path):
    """A real gloo world of this process, and the builds of groups that its transport was asked for."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    transport = platform_named("torch").transport()
    plain, asked = transport.built, []
    transport.built = lambda ranks, build: asked.append(ranks) or plain(ranks, build)
    yield asked
    torch.distributed.destroy_process_group()


def test_groups_of_a_script_are_built_with_the_limit_of_the_world(world):
    """``new_group`` over gloo, and the groups of the platform, end with an error where members cannot be reached."""
    from torch.distributed import new_group

    assert new_group([0]).size() == new_group(backend="GLOO").size() == 1
    assert platform_named("torch").transport().build_group((0,), timeout=timedelta(seconds=30)).size() == 1
    assert len(world) == 3
    with pytest.raises(AssertionError, match="Unknown backend type other"):
        new_group(backend="other")
    assert world == [(0,)] * 3


def test_groups_of_simulated_ranks_are_those_of_the_simulation():
    """Their members meet within the process, where no link can be cut."""

    def rank():
        group = torch.distributed.new_group([0, 1])
        return torch.distributed.get_process_group_ranks(group)

    assert simulate(rank, 2, "torch") == [[0, 1]] * 2


def test_a_model_that_is_split_into_stages_trains():
    """The first messages of a middle stage come from both neighbors; losses and gradients are those of one device."""
    from torch import nn
    from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 6), nn.Linear(6, 5))

    def body():
        split = {"1": SplitPoint.BEGINNING, "2": SplitPoint.BEGINNING}
        rank = torch.distributed.get_rank()
        stage = pipeline(make(), (inputs[:2],), split_spec=split).build_stage(rank, torch.device("cpu"))
        schedule, losses = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss), []
        schedule.step(*([] if rank else [inputs]), **({"target": targets, "losses": losses} if rank == 2 else {}))
        return losses, [x.grad for x in stage.submod.parameters()]

    torch.manual_seed(1)
    inputs, targets = torch.randn(2, 8, 5).unbind()
    model, expected = make(), []
    for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
        expected.append(nn.functional.mse_loss(model(x), y))
        (expected[-1] / 4).backward()
    ranks = simulate(body, 3, "torch")
    torch.testing.assert_close(ranks[2][0], expected)
    assert not ranks[0][0]
    gradients = [grad for _, own in ranks for grad in own]
    torch.testing.assert_close(gradients, [x.grad for x in model.parameters()])
