from __future__ import annotations

import pytest

from hyper_parallel import (
    ColwiseParallel,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    loss_parallel,
    parallelize_module,
    record_events,
)

pytestmark = pytest.mark.platforms("torch")

OPTIONS = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"ignore_index": 3},
    {"label_smoothing": 0.2},
    {"label_smoothing": 0.2, "reduction": "sum", "ignore_index": 3},
]


def dense(twin, rows, classes, options, weight=None):
    """Loss and gradient of the logits on one device."""
    import torch
    import torch.nn.functional as F

    logits = twin.random(rows, classes).requires_grad_()
    labels = torch.arange(rows) * 5 % classes
    loss = F.cross_entropy(logits, labels, weight=weight, **options)
    loss.backward(torch.ones_like(loss))
    return logits, labels, loss


@pytest.mark.untraced
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("plain", [True, False])
def test_the_loss_of_sharded_logits_is_the_dense_one(twin, options, world, plain):
    """Loss and gradient equal the dense ones with plain and distributed labels, and no logits travel."""
    import torch
    import torch.nn.functional as F

    theirs, labels, expected = dense(twin, 6, 10, options)

    def rank(mesh):
        logits = distribute_tensor(theirs.detach().requires_grad_(), mesh, [Shard(1)])
        mine = labels if plain else distribute_tensor(labels, mesh, [Replicate()])
        with loss_parallel(), record_events() as log:
            loss = F.cross_entropy(logits, mine, **options)
        twin.same(loss, expected, "loss")
        loss.backward(distribute_tensor(torch.ones_like(expected), mesh, [Replicate()]))
        twin.same(logits.grad, theirs.grad, "gradient of the logits")
        return max(event.bytes for event in log)

    assert max(twin.on_mesh((world,), rank)) <= 2 * 6 * 8


@pytest.mark.parametrize("grid", [(2, 2), (2, 3)])
def test_rows_over_dp_and_classes_over_tp(twin, grid):
    """The mean loss is over all rows, also if uneven over dp, and class weights apply."""
    import torch.nn.functional as F

    weight = twin.random(10, seed=5).abs()
    theirs, labels, expected = dense(twin, 5, 10, {}, weight)

    def rank(mesh):
        logits = distribute_tensor(theirs.detach().requires_grad_(), mesh, [Shard(0), Shard(1)])
        mine = distribute_tensor(labels, mesh, [Shard(0), Replicate()])
        with loss_parallel():
            loss = F.cross_entropy(logits, mine, distribute_tensor(weight, mesh, [Replicate(), Replicate()]))
        twin.same(loss, expected, "loss")
        loss.backward()
        twin.same(logits.grad, theirs.grad, "gradient of the logits")

    twin.on_mesh(grid, rank, ("dp", "tp"))


@pytest.mark.parametrize("world", [2, 3])
def test_a_model_trains_with_its_loss_in_parallel(twin, world):
    """A model with tied embedding and head and a sharded-vocabulary loss has the dense gradients."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.tok, self.head = nn.Embedding(10, 7), nn.Linear(7, 10, bias=False)
            self.head.weight = self.tok.weight

        def forward(self, ids):
            return self.head(self.tok(ids).tanh())

    ids, labels = torch.tensor([0, 9, 3, 3, 7]), torch.tensor([1, 2, 9, 0, 4])
    ref = twin.Twin(twin.randomized(Tied()), ids)
    theirs = ref.copy()
    expected = F.cross_entropy(theirs(ids), labels)
    expected.backward()

    def rank(mesh):
        plan = {"tok": RowwiseParallel(), "head": ColwiseParallel(use_local_output=False)}
        model = parallelize_module(ref.copy(), mesh, plan)
        with loss_parallel():
            loss = F.cross_entropy(model(ids), labels)
        twin.same(loss, expected, "loss")
        loss.backward()
        twin.same(model.tok.weight.grad, theirs.tok.weight.grad, "gradient")

    twin.on_mesh((world,), rank)
