"""Label smoothing averages over the local part of the vocabulary. Reported in Megatron-LM 737.

The loss of the label is reduced over the ranks that share the vocabulary, the mean of all log-probabilities is not:
ranks get different losses, and smooth with different targets.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"tp": 3}
DIFFERS = ("output", "criterion")
CAUSE = "missing-reduction"
TOKENS, WIDTH, VOCABULARY, SMOOTHING = 7, 5, 13, 0.2


class Pair(torch.autograd.Function):
    """One function of the value, another of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: Any, back: Any) -> Tensor:
        ctx.back = back
        return ahead(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.back(grad), None, None


def summed(partial: Tensor) -> Tensor:
    total = partial.clone()
    dist.all_reduce(total)
    return total


class Criterion(nn.Module):
    def __init__(self, bug: bool) -> None:
        super().__init__()
        self.bug = bug

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        total = Pair.apply(logits.exp().sum(-1, keepdim=True), summed, summed)
        logs = logits - total.log()
        of_labels = Pair.apply((logs * labels).sum(-1), summed, Tensor.clone)
        mean = logs.mean(-1) if self.bug else Pair.apply(logs.sum(-1) / VOCABULARY, summed, Tensor.clone)
        return (SMOOTHING - 1) * of_labels - SMOOTHING * mean


class Model(nn.Module):
    def __init__(self, bug: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.criterion = Criterion(bug)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x))
        return self.criterion(self.head(Pair.apply(x, Tensor.clone, summed)), labels)


def train(bug: bool) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random, model = torch.Generator().manual_seed(737), Model(bug).double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    own = torch.arange(VOCABULARY).tensor_split(mesh.size())[mesh.get_local_rank()]
    model.head.weight = nn.Parameter(model.head.weight.data[own])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(3):
        x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=random)
        labels = torch.randint(VOCABULARY, (TOKENS, 1), generator=random) == own
        model(x, labels).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
