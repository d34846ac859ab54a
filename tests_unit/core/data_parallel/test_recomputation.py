"""Recomputed activations in fully sharded modules: the same gradients, dropout masks included."""

from __future__ import annotations

import pytest

from hyper_parallel import (
    ColwiseParallel,
    RowwiseParallel,
    init_device_mesh,
    manual_seed,
    parallelize_module,
)
from hyper_parallel.core.data_parallel import fully_shard
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")


def checkpointed(**options):
    """A way to call a block that recomputes it."""

    def call(block, x):
        import torch
        from torch.utils import checkpoint

        given = dict(options)
        if given.pop("selective", False):
            products = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
            given["context_fn"] = lambda: checkpoint.create_selective_checkpoint_contexts(products)
        return checkpoint.checkpoint(block, x, **given)

    return call


WAYS = {
    "not reentrant": checkpointed(use_reentrant=False),
    "reentrant": checkpointed(use_reentrant=True),
    "selective": checkpointed(use_reentrant=False, selective=True),
    "to the end": checkpointed(use_reentrant=False, early_stop=False),
}


def make_model(way):
    """Three blocks with dropout, each called by ``way``."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 5)

        def forward(self, x):
            return x + self.b(nn.functional.dropout(torch.tanh(self.a(x)), 0.4))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(3)])

        def forward(self, x):
            for block in self.blocks:
                x = way(block, x)
            return x

    torch.manual_seed(0)
    return Model().double()


def gradients(shape, reshard, way, wrapped):
    """Gradients of two accumulated passes on every rank of a mesh (dp, tp); ``wrapped`` blocks recompute inside."""

    def rank():
        import torch
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        manual_seed(5)
        model = make_model(way)
        for number, block in enumerate(model.blocks):
            if shape[1] > 1:
                styles = {"a": ColwiseParallel(use_local_output=False), "b": RowwiseParallel()}
                parallelize_module(block, mesh["tp"], styles)
            if wrapped:
                model.blocks[number] = checkpoint_wrapper(block)
            fully_shard(model.blocks[number], mesh=mesh["dp"], reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh["dp"], reshard_after_forward=reshard)
        torch.manual_seed(11 + mesh.coordinate[0])
        x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
        for _ in range(2):
            model(x).square().sum().backward()
        return [parameter.grad.full_tensor() for parameter in model.parameters()] + [x.grad]

    return simulate(rank, shape[0] * shape[1], platform="torch")


@pytest.mark.parametrize("reshard", [None, False])
@pytest.mark.parametrize("shape", [(2, 1), (3, 1), (2, 2)])
def test_gradients_are_those_without_recomputation(shape, reshard):
    """Around fully sharded blocks and inside of them, with all kinds of checkpoints, beside tensor parallelism."""
    expected = gradients(shape, reshard, lambda block, x: block(x), wrapped=False)
    tried = [(way, False) for way in WAYS.values()]
    for way, wrapped in [*tried, (lambda block, x: block(x), True), (WAYS["not reentrant"], True)]:
        for rank, theirs in zip(gradients(shape, reshard, way, wrapped), expected, strict=True):
            for mine, other in zip(rank, theirs, strict=True):
                assert mine.shape == other.shape
                assert (mine - other).abs().max() < 1e-12
