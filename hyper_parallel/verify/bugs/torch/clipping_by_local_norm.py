"""Every rank clips by the norm of what it holds, so replicas drift from the second step. Reported in DeepSpeed 1801.

Linears are sharded, norms are replicated. The right norm counts all shards, and replicated gradients once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"tp": 3}
DIFFERS = ("norm", "gradient norm")
CAUSE = "norm-local"
TOKENS, WIDTH, HIDDEN, LIMIT = 6, 5, 8, 0.5


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
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(Pair.apply(self.norm(x), Tensor.clone, summed)))
        return x + Pair.apply(self.down(hidden), summed, Tensor.clone)


def clip(model: Model) -> None:
    squares = [p.grad.pow(2).sum() for p in (model.up.weight, model.down.weight)]
    once = torch.stack([p.grad.pow(2).sum() for p in model.norm.parameters()]).sum()
    nn.utils.clip_grads_with_norm_(model.parameters(), LIMIT, (summed(torch.stack(squares).sum()) + once).sqrt())


def train(bug: bool) -> None:
    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random, model = torch.Generator().manual_seed(1801), Model().double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    for linear, dim in ((model.up, 0), (model.down, 1)):
        linear.weight = nn.Parameter(part(linear.weight.data, dim).clone())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        (model(x) - y).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT) if bug else clip(model)
        optimizer.step()
        optimizer.zero_grad()
