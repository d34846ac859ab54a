"""Replicated weights count once per rank in the gradient norm. Reported in TransformerEngine 715 of ROCm.

Linear layers mark all of their weights as tensor-parallel, replicated ones among them. The norm sums the squares of
marked weights over the ranks, so that a replicated weight counts as often as there are ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"tp": 3}
DIFFERS = ("norm", "gradient norm")
CAUSE = "norm-counted-twice"
TOKENS, WIDTH, HIDDEN = 6, 5, 8


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
        self.compress, self.up = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = Pair.apply(torch.tanh(self.compress(x)), Tensor.clone, summed)
        return Pair.apply(self.down(torch.tanh(self.up(x))), summed, Tensor.clone)


def total_norm(model: Model, bug: bool) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for name, parameter in model.named_parameters():
        if dist.get_rank() == 0 or bug or not name.startswith("compress"):
            total += parameter.grad.pow(2).sum()
    return summed(total).sqrt()


def train(bug: bool) -> None:
    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random, model = torch.Generator().manual_seed(715), Model().double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    model.up.weight = nn.Parameter(part(model.up.weight.data).clone())
    model.down.weight = nn.Parameter(part(model.down.weight.data, 1).clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(3):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        (model(x) - y).pow(2).mean().backward()
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, total_norm(model, bug))
        optimizer.step()
        optimizer.zero_grad()
