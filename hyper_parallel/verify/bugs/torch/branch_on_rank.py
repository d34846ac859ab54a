"""A branch leaves a parameter without gradient on some ranks, whose optimizers skip it. Reported in pytorch 174862.

Only ranks whose samples have a picture run the picture encoder. The others put zeros into the reduction, which keeps
the collectives equal, but have no gradient to copy the result to.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"dp": 3}
DIFFERS = ("gradient", "picture.weight")
CAUSE = "no-gradient"
SAMPLES, WIDTH, PIXELS = 6, 5, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.picture = nn.Linear(WIDTH, WIDTH), nn.Linear(PIXELS, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, text: Tensor, pictures: Tensor, has_picture: Tensor) -> Tensor:
        hidden = self.text(text)
        if has_picture.any():
            hidden = hidden.index_add(0, has_picture.nonzero()[:, 0], self.picture(pictures[has_picture]))
        return self.head(torch.tanh(hidden))


def reduce_gradients(model: nn.Module, bug: bool) -> None:
    for parameter in model.parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
        if not bug:
            parameter.grad = gradient


def train(bug: bool) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    random, model = torch.Generator().manual_seed(174862), Model().double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    has_picture = torch.tensor([True, False, False, False, True, True])
    for _ in range(3):
        x, y = torch.randn(2, SAMPLES, WIDTH, dtype=torch.float64, generator=random)
        pictures = torch.randn(SAMPLES, PIXELS, dtype=torch.float64, generator=random)
        x, y, pictures, mine = (values.chunk(ranks)[rank] for values in (x, y, pictures, has_picture))
        (model(x, pictures, mine) - y).pow(2).mean().backward()
        reduce_gradients(model, bug)
        optimizer.step()
        optimizer.zero_grad()
