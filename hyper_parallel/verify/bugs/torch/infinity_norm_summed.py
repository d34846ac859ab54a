"""The maximum norm of shards is summed over the ranks, like powers of other norms. Reported in torchtitan 596.

A clipping function that knows the stages or shards of other ranks adds up their norms. For the maximum norm the ranks'
values have no sum: the norm of the whole model is the largest of them.
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
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return Pair.apply(self.down(torch.tanh(self.up(x))), summed, Tensor.clone)


def clip(model: Model, norm_type: float, bug: bool) -> None:
    gradients = [parameter.grad for parameter in model.parameters()]
    norm = torch.nn.utils.get_total_norm(gradients, norm_type)
    dist.all_reduce(norm, dist.ReduceOp.SUM if bug else dist.ReduceOp.MAX)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)


def train(bug: bool) -> None:
    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random, model = torch.Generator().manual_seed(596), Model().double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    model.up.weight = nn.Parameter(part(model.up.weight.data).clone())
    model.up.bias = nn.Parameter(part(model.up.bias.data).clone())
    model.down.weight = nn.Parameter(part(model.down.weight.data, 1).clone())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        (model(x) - y).pow(2).mean().backward()
        clip(model, float("inf"), bug)
        optimizer.step()
        optimizer.zero_grad()
