from __future__ import annotations

import pytest

from hyper_parallel import (
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    parallelize_module,
    record_events,
    strict,
)

pytestmark = pytest.mark.platforms("torch")


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("target", [None, Shard(0)])
def test_a_plain_shard_of_uneven_features(twin, world, bias, target):
    """Ten features over three ranks work without implicit redistribution, and the bias is added once."""
    from torch import nn

    ref = twin.Twin(twin.randomized(nn.Linear(10, 7, bias=bias)), twin.random(5, 10))
    leaving = target or Replicate()

    def rank(mesh):
        layer = parallelize_module(ref.copy(), mesh, RowwiseParallel(output_layouts=target))
        x = twin.local_shard(ref.inputs[0], mesh, [Shard(1)]).requires_grad_()
        with strict(), record_events() as log:
            y = layer(x)
        twin.same(twin.gather(y, mesh, [leaving], (5, 7)), ref.output, "output")
        y.backward(twin.local_shard(ref.cotangent, mesh, [leaving]))
        twin.same(twin.gather(x.grad, mesh, [Shard(1)], (5, 10)), ref.inputs[0].grad, "gradient of the input")
        ref.assert_gradients(layer)
        return log.collectives("forward")

    expected = ["all_reduce"] if target is None else ["reduce_scatter"]
    assert twin.on_mesh((world,), rank)[0] == expected


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("vocabulary", [7, 10, 2])
def test_embedding_by_rows(twin, world, vocabulary):
    """A table sharded by rows, some ranks without any, has the dense output and gradient."""
    import torch
    from torch import nn

    ids = torch.tensor([[0, 1, vocabulary - 1], [1, 0, 0]])
    ref = twin.Twin(twin.randomized(nn.Embedding(vocabulary, 5)), ids)

    def rank(mesh):
        layer = parallelize_module(ref.copy(), mesh, RowwiseParallel())
        y = layer(ids)
        twin.same(y, ref.output, "output")
        y.backward(ref.cotangent)
        ref.assert_gradients(layer)
        return layer.weight.placements

    assert twin.on_mesh((world,), rank)[0] == (Shard(0),)


@pytest.mark.parametrize("shape", [(2, 2), (2, 3)])
def test_embedding_on_two_axes(twin, shape):
    """Ids sharded over dp and rows over tp give the dense embedding."""
    import torch
    from torch import nn

    ids = torch.tensor([[0, 6, 3], [1, 0, 5], [2, 2, 4]])
    ref = twin.Twin(twin.randomized(nn.Embedding(7, 5)), ids)
    batch = [Shard(0), Replicate()]

    def rank(mesh):
        layer = parallelize_module(ref.copy(), mesh, RowwiseParallel(use_local_output=False))
        y = layer(distribute_tensor(ids, mesh, batch))
        twin.same(y, ref.output, "output")
        y.backward(distribute_tensor(ref.cotangent, mesh, batch))
        ref.assert_gradients(layer)

    twin.on_mesh(shape, rank, ("dp", "tp"))


def test_tied_embedding_and_head_train_as_one(twin):
    """The gradient of a tied weight is the sum of both uses, on the one parameter that both paths hold."""
    import torch
    from torch import nn

    from hyper_parallel import ColwiseParallel

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.tok, self.head = nn.Embedding(10, 7), nn.Linear(7, 10, bias=False)
            self.head.weight = self.tok.weight

        def forward(self, ids):
            return self.head(self.tok(ids).tanh())

    ids = torch.tensor([[0, 9, 3, 3], [1, 0, 5, 8]])
    ref = twin.Twin(twin.randomized(Tied()), ids)
    plan = {"tok": RowwiseParallel(), "head": ColwiseParallel(output_layouts=Replicate())}

    def rank(mesh):
        def run(model):
            model(ids).backward(ref.cotangent)

        model = parallelize_module(ref.copy(), mesh, plan)
        run(model)
        ref.assert_gradients(model)
        ref.assert_trains(lambda model: parallelize_module(model, mesh, plan), run, "adamw")

    twin.on_mesh((3,), rank)


def test_options_are_shown():
    """``repr`` shows every option with its default."""
    assert repr(RowwiseParallel()) == (
        "RowwiseParallel(input_layouts=(Shard(-1),), output_layouts=(Replicate(),), use_local_output=True)"
    )
