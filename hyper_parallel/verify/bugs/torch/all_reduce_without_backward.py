"""A plain all-reduce in the forward drops the other ranks' gradients in the backward. Reported in ms-swift 9947.

A token's log-probability is its logit, which one rank has, less the logarithm of a sum over all ranks' vocabulary. What
the owner's loss asks of that sum concerns every rank's logits, but a plain all-reduce hands it back to the owner only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"tp": 3}
DIFFERS = ("gradient", "head.weight")
CAUSE = "missing-reduction"
TOKENS, WIDTH, VOCABULARY = 7, 5, 11


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
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(Pair.apply(torch.tanh(self.embed(x)), Tensor.clone, summed))
        total = logits.exp().sum(-1)
        if self.bug:
            dist.all_reduce(total)
        else:
            total = Pair.apply(total, summed, summed)
        mine = part(torch.arange(VOCABULARY))
        picked = torch.where(targets[:, None] == mine, logits - total.log()[:, None], 0.0).sum(-1)
        return Pair.apply(picked, summed, Tensor.clone)


def train(bug: bool) -> None:
    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random, model = torch.Generator().manual_seed(9947), Model(bug).double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    model.head.weight = nn.Parameter(part(model.head.weight.data).clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(3):
        x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=random)
        targets = torch.randint(VOCABULARY, (TOKENS,), generator=random)
        (-model(x, targets).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
