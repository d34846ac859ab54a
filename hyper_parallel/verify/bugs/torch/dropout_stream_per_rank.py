"""Ranks that hold the same activations draw dropout masks of their own. Reported in Megatron-LM 4828.

Without sequence parallelism the activations between the sharded layers are replicated, and their dropout must draw from
the stream that the ranks share. A stream per rank makes replicas differ, and the sums behind them mix several masks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"tp": 3}
DIFFERS = ("mask", "dropout")
CAUSE = "random-differs"
TOKENS, WIDTH, HIDDEN = 5, 4, 8


class Pair(torch.autograd.Function):
    """One function of the value, another of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: Any, back: Any) -> Tensor:
        ctx.back = back
        return ahead(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.back(grad), None, None


def part(full: Tensor, dim: int = 0) -> Tensor:
    return full.tensor_split(dist.get_world_size(), dim)[dist.get_rank()]


def summed(partial: Tensor) -> Tensor:
    total = partial.clone()
    dist.all_reduce(total)
    return total


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(torch.tanh(self.embed(x)))
        hidden = torch.tanh(self.up(Pair.apply(x, Tensor.clone, summed)))
        return x + Pair.apply(self.down(hidden), summed, Tensor.clone)


def train(bug: bool) -> None:
    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random, model = torch.Generator().manual_seed(4828), Model().double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    model.up.weight = nn.Parameter(part(model.up.weight.data).clone())
    model.down.weight = nn.Parameter(part(model.down.weight.data, 1).clone())
    torch.manual_seed(dist.get_rank() if bug else 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(3):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        (model(x) - y).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
