"""Some rows of a projection get a gradient that was summed before and is summed again. Reported in AReno 496.

A replicated projection makes a compressed part, which the sharded second projection reads, and a positional part, which
the heads read as it is. The boundary whose backward sums stands before the second projection, so the sum over the
parameters' gradients afterwards is a second one for the compressed rows. The boundary belongs before the first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"tp": 3}
DIFFERS = ("gradient", "kv_a.weight")
CAUSE = "components"
TOKENS, WIDTH, HEADS, SIZE, COMPRESSED = 6, 5, 4, 2, 3


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
        self.late, heads = bug, HEADS * SIZE
        self.embed, self.query = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, heads, bias=False)
        self.kv_b, self.kv_a = nn.Linear(COMPRESSED, heads, bias=False), nn.Linear(WIDTH, COMPRESSED + SIZE, bias=False)
        self.out = nn.Linear(heads, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        embedded = torch.tanh(self.embed(x))
        inner = Pair.apply(embedded, Tensor.clone, summed)
        compressed, position = self.kv_a(embedded if self.late else inner).split([COMPRESSED, SIZE], 1)
        value = self.kv_b(Pair.apply(compressed, Tensor.clone, summed) if self.late else compressed)
        query, value = (x.view(TOKENS, -1, SIZE).transpose(0, 1) for x in (self.query(inner), value))
        mixed = torch.softmax(query @ (value + position).mT, -1) @ value
        return Pair.apply(self.out(mixed.transpose(0, 1).flatten(1)), summed, Tensor.clone)


def train(bug: bool) -> None:
    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random, model = torch.Generator().manual_seed(496), Model(bug).double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    for linear, dim in ((model.query, 0), (model.kv_b, 0), (model.out, 1)):
        heads = linear.weight.data.unflatten(dim, (HEADS, SIZE))
        linear.weight = nn.Parameter(part(heads, dim).flatten(dim, dim + 1).clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(3):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        (model(x) - y).pow(2).mean().backward()
        dist.all_reduce(model.kv_a.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
