"""Sharded queries read one key-value head, whose gradients stay partial. Reported in bigcode Megatron-LM 11, 36, 37.

Every rank's queries add to the gradient of the shared head. The optimizer sums the weight's gradient over the ranks,
but not the bias's (11), and nothing sums the gradient of the head's input (36). The sum belongs behind the head (37).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"tp": 3}
DIFFERS = ("gradient", "kv.bias")
CAUSE = "missing-reduction"
TOKENS, WIDTH, HEADS, SIZE = 7, 5, 4, 3


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
    def __init__(self, bug: bool) -> None:
        super().__init__()
        self.bug = bug
        self.embed, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * SIZE)
        self.query = nn.Linear(WIDTH, HEADS * SIZE, bias=False)
        self.out = nn.Linear(HEADS * SIZE, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x))
        both = self.kv(x)
        both = torch.tanh(both if self.bug else Pair.apply(both, Tensor.clone, summed))
        key, value = both.chunk(2, 1)
        query = self.query(Pair.apply(x, Tensor.clone, summed)).view(TOKENS, -1, SIZE).transpose(0, 1)
        mixed = torch.softmax(query @ key.T, -1) @ value
        return Pair.apply(self.out(mixed.transpose(0, 1).flatten(1)), summed, Tensor.clone)


def train(bug: bool) -> None:
    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random, model = torch.Generator().manual_seed(37), Model(bug).double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    for linear, dim in ((model.query, 0), (model.out, 1)):
        heads = linear.weight.data.unflatten(dim, (HEADS, SIZE))
        linear.weight = nn.Parameter(part(heads, dim).flatten(dim, dim + 1).clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(3):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        (model(x) - y).pow(2).mean().backward()
        if bug:
            dist.all_reduce(model.kv.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
