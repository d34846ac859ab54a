"""Every rank adds the bias of a row-parallel linear before the sum. Reported in text-generation-inference 1036."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"tp": 3}
DIFFERS = ("output", "down")
CAUSE = "repeated-reduction"
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


class ColumnParallel(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Pair.apply(x, Tensor.clone, summed))


class RowParallel(nn.Linear):
    bug = False

    def forward(self, x: Tensor) -> Tensor:
        if self.bug:
            return Pair.apply(super().forward(x), summed, Tensor.clone)
        return Pair.apply(nn.functional.linear(x, self.weight), summed, Tensor.clone) + self.bias


def train(bug: bool) -> None:
    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random = torch.Generator().manual_seed(1036)
    model = nn.Sequential()
    model.add_module("up", ColumnParallel(WIDTH, HIDDEN))
    model.add_module("tanh", nn.Tanh())
    model.add_module("down", RowParallel(HIDDEN, WIDTH))
    model.double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    up, _, down = model
    down.bug = bug
    up.weight, up.bias = (nn.Parameter(part(parameter.data).clone()) for parameter in (up.weight, up.bias))
    down.weight = nn.Parameter(part(down.weight.data, 1).clone())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        (model(x) - y).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
