"""The weight of a router's auxiliary loss depends on the number of ranks. Reported in Megatron-LM 5047.

All gradients are divided by the number of tokens in the end. The auxiliary loss is multiplied beforehand to make up for
that, but by the tokens of this rank, not by those of all ranks that share the sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"tp": 3}
DIFFERS = ("output", "router*")
CAUSE = "scaled-by-size"
TOKENS, WIDTH, EXPERTS = 15, 4, 5


class Attach(torch.autograd.Function):
    """The first argument; the gradient of the second is one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, torch.ones((), dtype=grad.dtype)


def summed(partial: Tensor) -> Tensor:
    total = partial.clone()
    dist.all_reduce(total)
    return total


class Router(nn.Module):
    def __init__(self, bug: bool) -> None:
        super().__init__()
        self.weight, self.bug = nn.Parameter(torch.empty(EXPERTS, WIDTH)), bug

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = torch.softmax(x @ self.weight.T, -1)
        chosen = summed(nn.functional.one_hot(probabilities.argmax(-1), EXPERTS).sum(0)) / TOKENS
        mean = probabilities.sum(0) / TOKENS
        mean = mean + summed(mean.detach()) - mean.detach()
        auxiliary = (chosen * mean).sum() * EXPERTS * (len(x) if self.bug else TOKENS)
        return Attach.apply(probabilities, auxiliary), auxiliary


class Model(nn.Module):
    def __init__(self, bug: bool) -> None:
        super().__init__()
        self.embed, self.router, self.experts = nn.Linear(WIDTH, WIDTH), Router(bug), nn.Linear(WIDTH, WIDTH * EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x))
        return (self.experts(x).unflatten(-1, (EXPERTS, WIDTH)) * self.router(x)[0][..., None]).sum(-2)


def train(bug: bool) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random, model = torch.Generator().manual_seed(5047), Model(bug).double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(3):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random).chunk(mesh.size(), 1)[
            mesh.get_rank()
        ]
        (model(x) - y).pow(2).sum().backward()
        for parameter in model.parameters():
            parameter.grad = summed(parameter.grad) / TOKENS
        optimizer.step()
        optimizer.zero_grad()
