"""Each part of a sequence divides its loss by its own number of valid tokens. Reported in Megatron-LM 7513.

The wrapper averages gradients over the parts. That equals the whole sequence's mean only if all parts have equally many
valid tokens; otherwise each must divide by the whole sequence's number, and undo the average.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"cp": 3}
DIFFERS = ("loss", "loss")
CAUSE = "scaled-by-count"
TOKENS, WIDTH, CLASSES = 9, 5, 7
VALID = torch.tensor([0, 0, 0, 1, 0, 1, 1, 1, 1])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def train(bug: bool) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    random, model = torch.Generator().manual_seed(7513), Model().double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(3):
        x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=random).chunk(ranks)[rank]
        labels = torch.randint(CLASSES, (TOKENS,), generator=random).chunk(ranks)[rank]
        valid = VALID.roll(step).chunk(ranks)[rank]
        losses = nn.functional.cross_entropy(model(x), labels, reduction="none") * valid
        count = valid.sum()
        if not bug:
            dist.all_reduce(count)
        loss = losses.sum() / count.clamp(min=1) * (1 if bug else ranks)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
        optimizer.step()
        optimizer.zero_grad()
