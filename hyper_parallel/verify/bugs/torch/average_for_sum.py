"""A loss that counts all ranks' tokens is averaged over the ranks once more. Reported in NeMo Automodel 3822.

Each rank divides its sum of losses by the number of tokens of all ranks, so the ranks' gradients add up to the right
one; the data-parallel wrapper takes their average, as it does by default.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"dp": 3}
DIFFERS = ("gradient", "*")
CAUSE = "average-for-sum"
SAMPLES, LENGTH, WIDTH, CLASSES = 5, 4, 6, 7


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def train(bug: bool) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    random, model = torch.Generator().manual_seed(3822), Model().double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        x = torch.randn(SAMPLES, LENGTH, WIDTH, dtype=torch.float64, generator=random).tensor_split(ranks)[rank]
        labels = torch.randint(CLASSES, (SAMPLES, LENGTH), generator=random)
        labels[torch.rand(SAMPLES, LENGTH, generator=random) < 0.3] = -100
        count = (labels != -100).sum()  # every rank reads the whole batch's labels
        labels = labels.tensor_split(ranks)[rank]
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), labels.flatten(), reduction="sum") / count
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            if bug:
                parameter.grad /= ranks
        optimizer.step()
        optimizer.zero_grad()
