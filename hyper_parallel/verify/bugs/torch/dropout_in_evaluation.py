"""Dropout stays active in evaluation. Reported in transformers 33844.

The attention passes its dropout rate to a function that knows no training mode, so that `eval()` has no effect on it.
The losses of the validation are noisy and too high; training itself is right.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"dp": 3}
DIFFERS = ("output", "attention.dropout*")
CAUSE = "random-differs"
ROWS, TOKENS, WIDTH = 4, 5, 3


def part(full: Tensor, dim: int = 0) -> Tensor:
    return full.tensor_split(dist.get_world_size(), dim)[dist.get_rank()]


class Dropout(nn.Dropout):
    def __init__(self, bug: bool) -> None:
        super().__init__(0.3)
        self.bug, self.random = bug, torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and not self.bug:
            return x
        kept = torch.rand(ROWS, *x.shape[1:], dtype=torch.float64, generator=self.random) >= self.p
        return x * part(kept) / (1 - self.p)


class Attention(nn.Module):
    def __init__(self, bug: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.dropout = Dropout(bug)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.softmax(self.query(x) @ self.key(x).mT, -1)) @ self.value(x)


class Model(nn.Module):
    def __init__(self, bug: bool) -> None:
        super().__init__()
        self.attention, self.out = Attention(bug), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attention(x))


def train(bug: bool) -> None:
    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    random, model = torch.Generator().manual_seed(33844), Model(bug).double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(3):
        x, y = torch.randn(2, ROWS, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        ((model.train()(part(x)) - part(y)).pow(2).sum() / ROWS).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.eval()(part(x.flip(0)))


def single() -> None:
    """Train without the bug, which one device has, too."""
    train(bug=False)
