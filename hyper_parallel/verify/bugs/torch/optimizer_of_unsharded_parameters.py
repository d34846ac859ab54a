"""The optimizer holds the parameters from before sharding, and the model never learns. Reported in accelerate 2665.

Sharding puts new parameters into the modules. An optimizer that was made before updates tensors that no module reads.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

MESH = {"dp": 3}
DIFFERS = ("weight", "0.weight")
CAUSE = "not-updated"
SAMPLES, WIDTH, HIDDEN = 6, 5, 7


def train(bug: bool) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(2665)
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH)).double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    if not bug:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(3):
        x, y = torch.randn(2, SAMPLES, WIDTH, dtype=torch.float64, generator=random).chunk(ranks, 1)[rank]
        (model(x) - y).pow(2).mean().backward()
        optimizer.step()
        model.zero_grad()
