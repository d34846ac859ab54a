"""One norm weight serves all heads, each rank sums its own heads' gradient only. Reported in Megatron-LM 7452 (11).

Heads are sharded, the weight is replicated. Its gradient is summed over the ranks under sequence parallelism only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"tp": 3}
DIFFERS = ("gradient", "heads_norm.weight")
CAUSE = "missing-reduction"
TOKENS, WIDTH, HEADS, SIZE = 6, 5, 4, 3


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
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.value, self.gate = nn.Linear(WIDTH, HEADS * SIZE, bias=False), nn.Linear(WIDTH, HEADS * SIZE, bias=False)
        self.heads_norm = nn.RMSNorm(SIZE)
        self.out = nn.Linear(HEADS * SIZE, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = Pair.apply(torch.tanh(self.embed(x)), Tensor.clone, summed)
        normed = self.heads_norm(self.value(x).view(TOKENS, -1, SIZE)).flatten(1)
        return Pair.apply(self.out(normed * torch.sigmoid(self.gate(x))), summed, Tensor.clone)


def shard_heads(linear: nn.Linear, dim: int) -> None:
    heads = linear.weight.data.unflatten(dim, (HEADS, SIZE))
    linear.weight = nn.Parameter(part(heads, dim).flatten(dim, dim + 1).clone())


def train(bug: bool, *, sequence_parallel: bool = False) -> None:
    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random, model = torch.Generator().manual_seed(7452), Model().double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    for linear, dim in ((model.value, 0), (model.gate, 0), (model.out, 1)):
        shard_heads(linear, dim)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(3):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        loss = (model(x) - y).pow(2).mean()
        loss.backward()
        if sequence_parallel or not bug:
            dist.all_reduce(model.heads_norm.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
