"""Ranks route different tokens, and the router's gradient is not summed over them. Reported in Megatron-LM 599.

Under sequence parallelism the experts are sharded and gather the tokens; the replicated router reads the rank's own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"tp": 3}
DIFFERS = ("gradient", "router.weight")
CAUSE = "missing-reduction"
TOKENS, WIDTH, HIDDEN, EXPERTS = 8, 5, 7, 2


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
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.ups = nn.ModuleList(nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(EXPERTS))
        self.downs = nn.ModuleList(nn.Linear(HIDDEN, WIDTH, bias=False) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        probabilities = torch.softmax(self.router(x), -1)
        chosen = probabilities * nn.functional.one_hot(probabilities.argmax(-1), EXPERTS)
        tokens = Pair.apply(x, gather, reduce_scatter)
        experts = [down(torch.tanh(up(tokens))) for up, down in zip(self.ups, self.downs, strict=True)]
        return x + (chosen[..., None] * Pair.apply(torch.stack(experts, 1), reduce_scatter, gather)).sum(1)


def train(bug: bool) -> None:
    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random, model = torch.Generator().manual_seed(599), Model().double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    for linear, dim in (*((up, 0) for up in model.ups), *((down, 1) for down in model.downs)):
        linear.weight = nn.Parameter(part(linear.weight.data, dim).clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(3):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        ((model(part(x)) - part(y)).pow(2).sum() / TOKENS).backward()
        if not bug:
            dist.all_reduce(model.router.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
