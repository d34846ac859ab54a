"""Hooks that reduce gradients stay on parameters that a second wrapping has replaced. Reported in pytorch 104336.

The wrapper makes its own copy of the layer's parameters. Hooks belong to a tensor and are not copied with it.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"dp": 3}
DIFFERS = ("gradient", "head.layer.weight")
CAUSE = "missing-reduction"
SAMPLES, WIDTH, HIDDEN = 6, 5, 7


class Wrapper(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = copy.deepcopy(layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Wrapper(nn.Linear(WIDTH, HIDDEN)), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def average(parameter: Tensor) -> None:
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


def reduce_in_backward(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)


def train(bug: bool) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    random, model = torch.Generator().manual_seed(104336), Model().double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    if bug:
        reduce_in_backward(model)
    model.head = Wrapper(model.head)
    if not bug:
        reduce_in_backward(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(3):
        x, y = torch.randn(2, SAMPLES, WIDTH, dtype=torch.float64, generator=random).chunk(ranks, 1)[rank]
        (model(x) - y).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
