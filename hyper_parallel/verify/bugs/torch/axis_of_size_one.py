"""Gradients are reduced over a shard axis of size one, so replicas never meet. Reported in verl 7493.

Hybrid sharding reduces over the shard axis, then over the replicas. With one shard it falls back to not sharding, and
the fallback reduces over the shard axis only: over the rank itself.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

MESH = {"replicate": 3, "shard": 1}
DIFFERS = ("gradient", "*")
CAUSE = "missing-reduction"
SAMPLES, WIDTH, HIDDEN = 6, 5, 7


def reduce_gradients(model: nn.Module, mesh: DeviceMesh, bug: bool) -> None:
    unsharded = mesh["shard"].size() == 1
    for axis in ("shard",) if bug and unsharded else ("shard", "replicate"):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group(axis))
            parameter.grad /= mesh[axis].size()


def train(bug: bool) -> None:
    sizes = tuple(MESH.values()) if dist.get_world_size() > 1 else (1, 1)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(MESH))
    random = torch.Generator().manual_seed(7493)
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH)).double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for _ in range(3):
        x, y = torch.randn(2, SAMPLES, WIDTH, dtype=torch.float64, generator=random).chunk(ranks, 1)[rank]
        (model(x) - y).pow(2).mean().backward()
        reduce_gradients(model, mesh, bug)
        optimizer.step()
        optimizer.zero_grad()
