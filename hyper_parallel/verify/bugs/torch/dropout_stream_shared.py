"""Ranks that hold different tokens draw the same dropout mask. Reported in Megatron-LM 4828.

The random stream is that of the data axis, where the sequence is not sharded. Ranks that share a sequence start it
alike and drop the same elements of their parts; each should draw the part of the mask that belongs to its own tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"cp": 3}
DIFFERS = ("output", "dropout")
CAUSE = "random-shared"
TOKENS, WIDTH, HIDDEN = 8, 4, 6


def part(full: Tensor, dim: int = 0) -> Tensor:
    return full.tensor_split(dist.get_world_size(), dim)[dist.get_rank()]


class Dropout(nn.Dropout):
    def __init__(self, bug: bool) -> None:
        super().__init__(0.3)
        self.bug, self.random = bug, torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape if self.bug else (TOKENS, HIDDEN)
        kept = torch.rand(shape, dtype=torch.float64, generator=self.random) >= self.p
        return x * (kept if self.bug else part(kept)) / (1 - self.p)


class Model(nn.Module):
    def __init__(self, bug: bool) -> None:
        super().__init__()
        self.up, self.dropout, self.down = nn.Linear(WIDTH, HIDDEN), Dropout(bug), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(torch.tanh(self.up(x))))


def train(bug: bool) -> None:
    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    random, model = torch.Generator().manual_seed(4828), Model(bug).double()
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
