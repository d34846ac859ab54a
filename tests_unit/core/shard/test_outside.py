"""Programs that run on all ranks over tensors of a mesh of some of them: the other ranks hold nothing."""

import pytest
import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    Partial,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    clip_grad_norm_,
    distribute_tensor,
    init_device_mesh,
    local_map,
    parallelize_module,
)
from hyper_parallel.core.dtensor import factories, random
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.errors import (
    MeshLookupError,
    ShardMismatchError,
    UnsupportedOperatorError,
)
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")

NOT_IN = (
    "rank 2 is not in DeviceMesh(cpu, 2, ranks=[0, 1]): it holds no shard of tensors on that mesh and takes no part in "
    "its collectives; leave it out with 'if mesh.get_coordinate() is not None:'"
)


def first_two():
    """The mesh of the first two ranks."""
    return init_device_mesh("cpu", (2,), rank_list=[0, 1])


def refused(kind, call):
    """The message with which ``call`` is refused."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def model():
    """A small model with the same values on all ranks."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))


def trained(net, x, y, see):
    """Train for two steps, and show each loss to ``see``."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for clip in (clip_grad_norm_, nn.utils.clip_grad_norm_):
        optimizer.zero_grad()
        loss = ((net(x) - y) ** 2).mean()
        loss.backward()
        see(loss)
        clip(net.parameters(), 0.5)
        optimizer.step()
    return net


@pytest.mark.parametrize("world, shape, ranks", [(3, (2,), [2, 0]), (4, (1, 2), [1, 3])])
def test_one_script_trains_on_the_ranks_of_the_mesh(world, shape, ranks):
    """All ranks run one training loop: those of the mesh get the values of one device, the others hold nothing."""
    x, y = torch.randn(4, 5), torch.randn(4, 3)
    losses = []
    expected = trained(model(), x, y, lambda loss: losses.append(loss.item())).state_dict()

    def on_rank():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :], rank_list=ranks)["tp"]
        plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel(use_local_output=False)}
        net, inside, seen = parallelize_module(model(), mesh, plan), mesh.get_coordinate() is not None, []
        trained(net, x, distribute_tensor(y, mesh), seen.append)
        assert all(isinstance(loss, DTensor) and loss.shape == () for loss in seen)
        assert all(parameter.grad.shape == parameter.shape for parameter in net.parameters())
        if inside:
            torch.testing.assert_close([loss.item() for loss in seen], losses)
            values = {name: value.full_tensor() for name, value in net.state_dict().items()}
            torch.testing.assert_close(values, dict(expected))
        else:
            assert {value.to_local().numel() for value in net.state_dict().values()} == {0}
            refused(MeshLookupError, seen[0].item)
            assert clip_grad_norm_(net.parameters(), 0.5).shape == (0,)
        return inside

    assert simulate(on_rank, world, "torch") == [rank in ranks for rank in range(world)]


def test_a_tensor_outside_of_its_mesh_has_all_but_values():
    """Outside, shape, dtype, placements and gradients are those of the mesh; whatever reads values is refused."""

    def on_rank():
        mesh, leaf = first_two(), torch.randn(3, 4, requires_grad=True)
        x = DTensor.from_local(leaf, mesh, [Shard(0)], shape=(3 if mesh.rank == 2 else 6, 4))
        if mesh.coordinate is None:
            x = DTensor.from_local(leaf, mesh, [Shard(0)])
        whole = x.redistribute(placements=[Replicate()])
        scaled = (x.double() * 2 + 1).transpose(0, 1)
        values, indices = scaled.sort(dim=1)
        values.sum().backward()
        facts = [(t.shape, t.dtype, t.placements, t.requires_grad) for t in (x, whole, scaled, values, indices)]
        same = x.contiguous() is x
        with torch.no_grad():
            written = x.mul_(2) is x
        if mesh.coordinate is None:
            assert {t.to_local().numel() for t in (x, whole, scaled, values, indices, x[0, 0])} == {0}
            assert leaf.grad.count_nonzero() == 0
            for read in (
                whole.full_tensor,
                x[0, 0].item,
                lambda: bool(x[0, 0] > 0),
                lambda: torch.equal(x, x),
                x.tolist,
            ):
                assert refused(MeshLookupError, read) == NOT_IN
            assert refused(MeshLookupError, lambda: torch.nonzero(x)) == NOT_IN
            assert refused(MeshLookupError, lambda: torch.cov(x)) == NOT_IN
            assert x.redistribute(placements=[Replicate()]).to_local([Partial()]).shape == (0, 0)
            assert refused(MeshLookupError, lambda: whole.local_for(whole.layout, ())) == NOT_IN
            assert torch._foreach_norm([x])[0].to_local().shape == (0,)
            assert refused(MeshLookupError, lambda: local_map(torch.neg, [Shard(0)])(x)) == NOT_IN
            with pytest.raises(TypeError):
                x + "a"
        else:
            assert torch.equal(leaf.grad, torch.full((3, 4), 2.0))
        return facts, same, written

    inside, _, outside = simulate(on_rank, 3, "torch")
    assert outside == inside


def test_what_cannot_be_served_outside_says_why():
    """An empty local without shape, a recorded write, and gradients of several meshes are refused with the reason."""

    def on_rank():
        mesh = first_two()
        x = distribute_tensor(torch.ones(3, requires_grad=True), mesh, [Shard(0)])
        if mesh.coordinate is not None:
            return None
        buffer, plain = distribute_tensor(torch.zeros(3), mesh, [Shard(0)]), nn.Parameter(torch.ones(2))
        x.sum().backward()
        plain.grad = torch.ones(2)
        return [
            refused(ShardMismatchError, lambda: DTensor.from_local(x.to_local(), mesh, [Shard(0)])),
            refused(UnsupportedOperatorError, lambda: buffer.add_(x)),
            refused(MeshLookupError, lambda: clip_grad_norm_([x, plain], 1.0)),
        ]

    empty = (
        "from_local: local is empty, [0], on rank 2, which is not in DeviceMesh(cpu, 2, ranks=[0, 1]); its shape "
        "does not determine the global shape; pass shape= to from_local, or keep the DTensor (use_local_output=False "
        "in a style)"
    )
    recorded = (
        "add(x=f32[3@0], y=f32[3@0]): rank 2 is outside of the mesh, where a write that needs a gradient is not "
        "recorded; use the out-of-place form, or torch.no_grad()"
    )
    assert simulate(on_rank, 3, "torch")[2] == [empty, recorded, NOT_IN]


def test_random_calls_are_counted_outside():
    """After random calls on a mesh of some ranks, all ranks draw the same numbers on a mesh of all."""

    def on_rank():
        mesh, world = first_two(), init_device_mesh("cpu", (3,))
        random.manual_seed(3)
        small = factories.rand(4, device_mesh=mesh, placements=[Shard(0)])
        nn.functional.dropout(small, 0.5)
        factories.randn((), device_mesh=mesh)
        return factories.rand(4, device_mesh=world, placements=[Shard(0)]).full_tensor()

    first, *others = simulate(on_rank, 3, "torch")
    assert all(torch.equal(first, other) for other in others)


def test_a_plain_shard_enters_a_module_outside():
    """A plain shard whose global sizes the module knows may enter it on all ranks; others only on those of the mesh."""

    def on_rank():
        mesh = first_two()
        net = parallelize_module(nn.Linear(4, 2), mesh, RowwiseParallel(use_local_output=False))
        norm = parallelize_module(nn.LayerNorm(2), mesh, SequenceParallel())
        if mesh.coordinate is None:
            assert refused(MeshLookupError, lambda: norm(torch.ones(1, 3, 2))) == NOT_IN
        return net(torch.ones(3, 2)).shape

    assert simulate(on_rank, 3, "torch") == [(3, 2)] * 3


def test_an_outside_rank_takes_the_submesh_of_the_first():
    """A rank outside of a mesh is outside of its submeshes, which can be taken there too."""
    mesh = DeviceMesh.abstract("cpu", (2, 2), (4, 5, 6, 7), ("dp", "tp"))
    assert (mesh["tp"].ranks, mesh["dp"].ranks, mesh["tp"].coordinate) == ((4, 5), (4, 6), None)
