from __future__ import annotations

import pytest

from hyper_parallel import DTensor, Replicate, SequenceParallel, Shard, distribute_tensor, parallelize_module

pytestmark = pytest.mark.platforms("torch")


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("dim", [0, 1, -2])
def test_weights_are_whole_and_so_are_their_gradients(twin, world, local, dim):
    """Weights and their gradients are replicated, also for a sequence of odd length."""
    from torch import nn

    ref = twin.Twin(twin.randomized(nn.LayerNorm(7)), twin.random(5, 3, 7))
    sharded = [Shard(dim)]

    def rank(mesh):
        norm = parallelize_module(ref.copy(), mesh, SequenceParallel(sequence_dim=dim, use_local_output=local))
        x = twin.local_shard(ref.inputs[0], mesh, sharded).requires_grad_()
        y = norm(x)
        assert isinstance(y, DTensor) is not local
        y = y if local else y.to_local()
        twin.same(twin.gather(y, mesh, sharded, (5, 3, 7)), ref.output, "output")
        y.backward(twin.local_shard(ref.cotangent, mesh, sharded))
        twin.same(twin.gather(x.grad, mesh, sharded, (5, 3, 7)), ref.inputs[0].grad, "gradient of the input")
        ref.assert_gradients(norm)
        assert norm.weight.grad.placements == (Replicate(),)

    twin.on_mesh((world,), rank)


def test_a_replicated_dtensor_is_sliced(twin):
    """A DTensor is redistributed to the sequence's shards, without communication from a replicated one."""
    from torch import nn

    from hyper_parallel import record_events

    ref = twin.Twin(twin.randomized(nn.LayerNorm(7)), twin.random(2, 5, 7))

    def rank(mesh):
        norm = parallelize_module(ref.copy(), mesh, SequenceParallel())
        x = distribute_tensor(ref.inputs[0].detach().requires_grad_(), mesh, [Replicate()])
        with record_events() as log:
            y = norm(x)
        assert y.placements == (Shard(1),)
        y.backward(distribute_tensor(ref.cotangent, mesh, [Shard(1)]))
        twin.same(x.grad, ref.inputs[0].grad, "gradient of the input")
        ref.assert_gradients(norm)
        return log.collectives("forward")

    assert twin.on_mesh((3,), rank)[0] == []


def test_a_wrong_argument_names_module_and_argument(twin):
    """A wrong argument raises a ValueError that names module and argument."""

    def rank(mesh):
        model = parallelize_module(twin.Block(), mesh, {"norm": SequenceParallel()})
        with pytest.raises(ValueError, match="must be") as caught:
            model.norm("x")
        return str(caught.value)

    assert twin.on_mesh((2,), rank)[0] == "norm (LayerNorm): input must be a tensor, got str"


def test_options_are_shown():
    """``repr`` shows every option with its default."""
    assert repr(SequenceParallel()) == "SequenceParallel(sequence_dim=1, use_local_output=False)"
