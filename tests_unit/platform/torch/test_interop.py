"""To PyTorch's own DTensor and back, on real processes; each launch holds many cases."""

from __future__ import annotations

import pytest

from hyper_parallel.errors import ArgumentTypeError, UnsupportedOnBackend
from hyper_parallel.verify.launch import launch
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


def round_trips():
    """Storage, placements, shapes, gradients and files, on this rank of two."""
    import torch
    from torch.distributed import tensor as peer

    from hyper_parallel import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
    from hyper_parallel.errors import UnsupportedOperatorError

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = torch.arange(15.0).reshape(5, 3)
    checked = []
    for ours, theirs in (
        (Shard(0), peer.Shard(0)),
        (Shard(1), peer.Shard(1)),
        (Replicate(), peer.Replicate()),
        (Partial(), peer.Partial()),
        (Partial("prod"), peer.Partial("product")),
        (Partial("max"), peer.Partial("max")),
    ):
        tensor = distribute_tensor(x, mesh, [ours])
        other = tensor.to_torch()
        assert isinstance(other, peer.DTensor)
        assert other.placements == (theirs,)
        assert other.shape == x.shape
        assert other.to_local().data_ptr() == tensor.to_local().data_ptr()
        assert torch.equal(other.full_tensor(), tensor.full_tensor())
        back = DTensor.from_torch(other)
        assert back.layout is tensor.layout
        assert back.to_local().data_ptr() == tensor.to_local().data_ptr()
        checked.append(repr(ours))

    weight = distribute_tensor(torch.randn(5, 3, generator=torch.Generator().manual_seed(1)), mesh, [Shard(0)])
    weight.requires_grad_()
    seed = torch.randn(5, 3, generator=torch.Generator().manual_seed(2))
    (DTensor.from_torch((weight * 2).to_torch() * 3)).backward(distribute_tensor(seed, mesh, [Shard(0)]))
    assert torch.allclose(weight.grad.full_tensor(), 6 * seed)
    checked.append("gradient")

    for made, kind in ((torch.ones(2), ArgumentTypeError), (3, TypeError)):
        with pytest.raises(kind):
            DTensor.from_torch(made)
    with pytest.raises(UnsupportedOperatorError) as caught:
        distribute_tensor(x > 3, mesh, [Partial("any")]).to_torch()
    checked.append(str(caught.value))
    return checked


def saved(folder):
    """A state dict of ours, saved and loaded by PyTorch's distributed checkpoint as its own."""
    import torch
    from torch.distributed import checkpoint

    from hyper_parallel import DTensor, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    weight = distribute_tensor(torch.arange(15.0).reshape(5, 3), mesh, [Shard(0)])
    checkpoint.save({"weight": weight.to_torch()}, checkpoint_id=folder)
    fresh = distribute_tensor(torch.zeros(5, 3), mesh, [Shard(1)])
    checkpoint.load({"weight": fresh.to_torch()}, checkpoint_id=folder)
    assert isinstance(fresh, DTensor)
    return fresh.full_tensor().tolist()


@pytest.mark.slow
def test_there_and_back():
    """Conversions keep storage, placements and graph; placements that PyTorch lacks are refused by name."""
    results = launch(round_trips, 2, "torch")
    assert results[0] == results[1]
    assert results[0][:7] == ["Shard(0)", "Shard(1)", "Replicate()", "Partial(sum)", "Partial(prod)", "Partial(max)",
                            "gradient"]  # fmt: skip
    assert results[0][7] == "to_torch: PyTorch's DTensor has no Partial(any); use x = x.reduce_partial() first"


@pytest.mark.slow
def test_distributed_checkpoint(tmp_path):
    """PyTorch's distributed checkpoint loads a tensor in another layout than it was saved, into our storage."""
    import torch

    assert launch(saved, 2, "torch", (str(tmp_path),)) == [torch.arange(15.0).reshape(5, 3).tolist()] * 2


def test_simulated_ranks_convert_as_well():
    """On simulated ranks, each rank gets its own shard as PyTorch's DTensor, whose collectives work."""
    import torch

    from hyper_parallel import Shard, distribute_tensor, init_device_mesh

    full = torch.randn(5, 2)

    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        converted = distribute_tensor(full, mesh, [Shard(0)]).to_torch()
        return torch.equal(converted.full_tensor(), full)

    assert simulate(body, 2, platform="torch") == [True, True]


def test_a_world_is_needed():
    """Without an initialised world, conversion to PyTorch's DTensor is refused with the fix."""
    import torch

    from hyper_parallel import Shard, distribute_tensor, init_device_mesh

    def body():
        torch.distributed.destroy_process_group()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(UnsupportedOnBackend) as caught:
            distribute_tensor(torch.zeros(2), mesh, [Shard(0)]).to_torch()
        return str(caught.value)

    assert simulate(body, 2, platform="torch")[0] == (
        "to_torch: PyTorch's DTensor needs an initialised world; call torch.distributed.init_process_group() first"
    )


def test_placements_of_each_library_in_the_others_words():
    """Strided shards convert both ways; what the other library lacks is refused by name."""
    from torch.distributed.tensor import Partial as TheirPartial
    from torch.distributed.tensor.placement_types import _StridedShard

    from hyper_parallel.core.dtensor.placements import Partial, StridedShard
    from hyper_parallel.errors import UnsupportedOperatorError
    from hyper_parallel.platform.torch import interop

    assert interop._theirs(StridedShard(1, 2)) == _StridedShard(1, split_factor=2)
    assert interop._ours(_StridedShard(1, split_factor=3)) == StridedShard(1, 3)
    with pytest.raises(UnsupportedOperatorError) as caught:
        interop._ours(TheirPartial("norm"))
    assert str(caught.value).endswith("has no counterpart here; redistribute the tensor to Shard or Replicate first")
    with pytest.raises(UnsupportedOperatorError) as caught:
        interop._theirs(Partial("all"))
    assert str(caught.value) == "to_torch: PyTorch's DTensor has no Partial(all); use x = x.reduce_partial() first"
