"""All ranks of a sharded sequence use the positions of the first part. Reported in SpecForge 563.

Each rank counts the positions of its tokens from zero, as a single device does. Only the first rank's are right.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"sp": 3}
DIFFERS = ("output", "positions")
CAUSE = "permuted"
TOKENS, WIDTH = 8, 5


def part(full: Tensor, dim: int = 0) -> Tensor:
    return full.tensor_split(dist.get_world_size(), dim)[dist.get_rank()]


class Model(nn.Module):
    def __init__(self, bug: bool) -> None:
        super().__init__()
        self.bug, self.embed, self.positions = bug, nn.Linear(WIDTH, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(len(x)) if self.bug else part(torch.arange(TOKENS))
        return self.out(torch.tanh(self.embed(x) + self.positions(ids)))


def train(bug: bool) -> None:
    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("sp",))
    random, model = torch.Generator().manual_seed(563), Model(bug).double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(3):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        ((model(part(x)) - part(y)).pow(2).sum() / TOKENS).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
