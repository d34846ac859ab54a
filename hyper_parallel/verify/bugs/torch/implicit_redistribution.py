"""Copying a loaded tensor into a parameter redistributes it, on the ranks that copy. Reported in VeOmni 642.

The loaded tensor is sharded along another dim than the parameter, so that the copy between the two DTensors
communicates without saying so. Ranks load the files in an order of their own, and wait in the copies of different
parameters.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

MESH = {"fsdp": 3}
DIFFERS = ("calls", None)
CAUSE = "unequal-calls"
TOKENS, WIDTH, HIDDEN = 6, 5, 8


def part(full: Tensor, dim: int = 0) -> Tensor:
    return full.tensor_split(dist.get_world_size(), dim)[dist.get_rank()]


def gathered(shard: DTensor) -> Tensor:
    return shard.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ gathered(self.up.weight).T) @ gathered(self.down.weight).T


def load(parameter: DTensor, full: Tensor, bug: bool) -> None:
    if not bug:
        parameter.to_local().copy_(part(full))
        return
    stored = DTensor.from_local(
        part(full, 1), parameter.device_mesh, [Shard(1)], shape=full.shape, stride=full.stride()
    )
    parameter.copy_(stored)


def train(bug: bool) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    random, model = torch.Generator().manual_seed(642), Model().double()
    checkpoint = {linear: linear.weight.data.normal_(generator=random) for linear in (model.up, model.down)}
    for linear, full in checkpoint.items():
        shard = torch.empty_like(part(full))
        linear.weight = nn.Parameter(
            DTensor.from_local(shard, mesh, [Shard(0)], shape=full.shape, stride=full.stride())
        )
    with torch.no_grad():
        for linear in (model.down, model.up) if dist.get_rank() % 2 else (model.up, model.down):
            load(linear.weight, checkpoint[linear], bug)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(3):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        ((model(part(x)) - part(y)).pow(2).sum() / TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad()
