"""Micro-steps with unequal numbers of valid tokens count alike. Reported in transformers 34191.

Each micro-step's loss is the mean over its own valid tokens, divided by the number of micro-steps. Tokens of short
micro-batches then weigh more than those of long ones; the divisor is the number of valid tokens of the whole step.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"dp": 3}
DIFFERS = ("loss", "loss")
CAUSE = "scaled-by-count"
ROWS, MICRO_STEPS, TOKENS, WIDTH = 4, 3, 9, 3


def part(full: Tensor, dim: int = 0) -> Tensor:
    return full.tensor_split(dist.get_world_size(), dim)[dist.get_rank()]


def summed(partial: Tensor) -> Tensor:
    total = partial.clone()
    dist.all_reduce(total)
    return total


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor, y: Tensor, valid: Tensor) -> Tensor:
        return (self.down(torch.tanh(self.up(x))).squeeze(-1) - y).pow(2) * valid


def train(bug: bool) -> None:
    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    random, model = torch.Generator().manual_seed(34191), Model().double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(3):
        x = torch.randn(MICRO_STEPS, ROWS, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        y = torch.randn(MICRO_STEPS, ROWS, TOKENS, dtype=torch.float64, generator=random)
        lengths = torch.randint(1, TOKENS + 1, (MICRO_STEPS, ROWS, 1), generator=random)
        valid = (torch.arange(TOKENS) < lengths).double()
        for micro_step in range(MICRO_STEPS):
            own = part(valid[micro_step])
            losses = model(part(x[micro_step]), part(y[micro_step]), own)
            tokens = summed(own.sum()) * MICRO_STEPS if bug else summed(part(valid, 1).sum())
            (losses.sum() / tokens).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


def single() -> None:
    """Train without the bug, which one device has, too."""
    train(bug=False)
