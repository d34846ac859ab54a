"""Two tensors with equal placements and different boundaries are multiplied in parts. Reported in physicsnemo 1943.

Both say "dim 0 is sharded", so nothing is redistributed. The ranks hold 0, 2 and 4 rows of one tensor and 1, 1 and 4
rows of the other: broadcasting makes the local products possible, and the first row meets the second one's factor.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"domain": 3}
DIFFERS = ("output", "scale")
CAUSE = "components"
POINTS, WIDTH = 6, 3
SHARDS, SCALE_SHARDS = [0, 2, 4], [1, 1, 4]


class Scale(nn.Module):
    def __init__(self, points: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(points, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Model(nn.Module):
    def __init__(self, points: int) -> None:
        super().__init__()
        self.scale, self.out = Scale(points), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.scale(x)))


def redistribute(x: Tensor, sizes: list[int], new_sizes: list[int]) -> Tensor:
    full = x.new_zeros(POINTS, WIDTH)
    full.split(sizes)[dist.get_rank()].copy_(x)
    dist.all_reduce(full)
    return full.split(new_sizes)[dist.get_rank()]


def train(bug: bool) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))
    sizes, scale_sizes = (SHARDS, SCALE_SHARDS) if mesh.size() > 1 else ([POINTS], [POINTS])
    random, model = torch.Generator().manual_seed(1943), Model(POINTS).double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    model.scale.weight = nn.Parameter(model.scale.weight.data.split(scale_sizes)[mesh.get_local_rank()].clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(3):
        x = torch.randn(POINTS, WIDTH, dtype=torch.float64, generator=random).split(sizes)[mesh.get_local_rank()]
        (model(x if bug else redistribute(x, sizes, scale_sizes)).pow(2).sum() / POINTS).backward()
        dist.all_reduce(model.out.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
