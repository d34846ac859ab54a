"""The gradient of the final norm is not summed over the ranks of the sequence. Reported in Megatron-LM 1446.

Norms inside the layers carry the mark by which their gradients are summed; the norm after the last layer lacks it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"tp": 3}
DIFFERS = ("gradient", "final_norm.*")
CAUSE = "missing-reduction"
TOKENS, WIDTH, HIDDEN = 7, 5, 8


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


def gather(shard: Tensor) -> Tensor:
    full = shard.new_zeros(TOKENS, *shard.shape[1:])
    part(full).copy_(shard)  # the ranks' parts differ in size: a sum of parts between zeros
    dist.all_reduce(full)
    return full


def reduce_scatter(partial: Tensor) -> Tensor:
    total = partial.clone()
    dist.all_reduce(total)
    return part(total).clone()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.final_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(Pair.apply(self.norm(x), gather, reduce_scatter)))
        return self.final_norm(x + Pair.apply(self.down(hidden), reduce_scatter, gather))


def train(bug: bool) -> None:
    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random, model = torch.Generator().manual_seed(1446), Model().double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    for linear, dim in ((model.up, 0), (model.down, 1)):
        linear.weight = nn.Parameter(part(linear.weight.data, dim).clone())
    marked = [*model.norm.parameters(), *([] if bug else model.final_norm.parameters())]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(3):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        loss = (model(part(x)) - part(y)).pow(2).sum() / TOKENS
        loss.backward()
        for parameter in marked:
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
