"""Lightning Fabric on large models: ``model`` is its strategy for FSDP2 and tensor parallel, ``fsdp`` for FSDP1."""

import os
import sys

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

world = int(os.environ.get("WORLD_SIZE", "1"))
kind = sys.argv[1]
tensor = min(2, world) if kind == "model" else 1


def parallelize(net, mesh):
    """Split the weights over the mesh."""
    parallelize_module(net, mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["data_parallel"])
    if "--broken" in sys.argv:  # the bug: gradients are added up where their mean is meant
        net.set_gradient_divide_factor(1.0)
    return net


strategy = FSDPStrategy() if kind == "fsdp" else ModelParallelStrategy(parallelize, world // tensor, tensor)
fabric = Fabric(accelerator="cpu" if kind == "model" else "cuda", devices=world, strategy=strategy)
fabric.launch()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
model = fabric.setup_module(model)
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
data = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.randn(24, 5)), batch_size=8 * tensor // world))
for (batch,) in data:
    fabric.backward(model(batch).square().mean())
    if "--clipped" in sys.argv:  # the bug: each rank clips its shards by their own norm
        grads = [value.grad for value in model.parameters() if value.grad is not None]
        shards = [value.to_local() if isinstance(value, DTensor) else value for value in grads]
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, torch.nn.utils.get_total_norm(shards))
    else:
        fabric.clip_gradients(model, optimizer, max_norm=0.1)
    optimizer.step()
    optimizer.zero_grad()
