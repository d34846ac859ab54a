"""A checkpoint does not keep empty shards, and their rank does not take part in loading. Reported in pytorch 108869.

Seven rows on four ranks are shards of 2, 2, 2 and 1 rows, six rows are 2, 2, 2 and 0. Saving lists the shards that have
rows. The rank without one finds no metadata for itself when it loads, while the others wait for it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"fsdp": 4}
DIFFERS = ("calls", None)
CAUSE = "unequal-calls"
TOKENS, WIDTH, HIDDEN = 5, 7, 6


class Gather(torch.autograd.Function):
    """All shards of dim 0; of their gradients, summed over the ranks, the own."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, rows: int) -> Tensor:
        full = shard.new_zeros(rows, *shard.shape[1:])
        chunks(full)[dist.get_rank()].copy_(shard)
        dist.all_reduce(full)
        return full

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        total = grad.clone()
        dist.all_reduce(total)
        return chunks(total)[dist.get_rank()].clone(), None


def chunks(full: Tensor) -> list[Tensor]:
    parts = list(full.chunk(dist.get_world_size()))
    return parts + [full[:0]] * (dist.get_world_size() - len(parts))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        up, down = Gather.apply(self.up.weight, HIDDEN), Gather.apply(self.down.weight, WIDTH)
        return torch.tanh(x @ up.T) @ down.T


def load(parameter: nn.Parameter, checkpoint: dict[int, Tensor]) -> None:
    rank = dist.get_rank()
    if rank in checkpoint:
        parameter.data.copy_(checkpoint[rank])
        dist.all_reduce(torch.tensor(parameter.numel()))


def train(bug: bool) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    random, model = torch.Generator().manual_seed(108869), Model().double()
    for linear in (model.up, model.down):
        full = linear.weight.data.normal_(generator=random)
        linear.weight = nn.Parameter(torch.empty_like(chunks(full)[mesh.get_local_rank()]))
        load(linear.weight, {rank: shard for rank, shard in enumerate(chunks(full)) if len(shard) or not bug})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(3):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        own = torch.arange(TOKENS).tensor_split(mesh.size())[mesh.get_local_rank()]
        ((model(x[own]) - y[own]).pow(2).sum() / TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad()
