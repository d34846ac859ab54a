"""A rank picks its tokens by its rank in another group; equal group sizes hid it. Reported in torchtitan 2842.

Ranks that hold the same batch share out its tokens to the experts. Each should take the chunk of its rank in the tensor
group; it takes that of its rank in the expert group, so that some tokens are computed several times and others never.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

MESH = {"ep": 2, "tp": 3}
DIFFERS = ("output", "moe*")
CAUSE = "permuted"
SAMPLES, TOKENS, WIDTH, HIDDEN = 4, 9, 5, 7


class Pair(torch.autograd.Function):
    """One function of the value, another of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: Any, back: Any) -> Tensor:
        ctx.back = back
        return ahead(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.back(grad), None, None


class Experts(nn.Module):
    def __init__(self, mesh: DeviceMesh, bug: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.group, self.size, self.own = mesh.get_group("tp"), mesh["tp"].size(), mesh.get_local_rank("tp")
        self.chunk = mesh.get_local_rank("ep" if bug else "tp")

    def gather(self, rows: Tensor) -> Tensor:
        parts = [torch.empty_like(rows) for _ in range(self.size)]
        dist.all_gather(parts, rows.contiguous(), group=self.group)
        return torch.cat(parts, 1)

    def forward(self, x: Tensor) -> Tensor:
        mine = Pair.apply(x, lambda full: full.chunk(self.size, 1)[self.chunk].clone(), self.gather)
        outputs = self.down(torch.tanh(self.up(mine)))
        return Pair.apply(outputs, self.gather, lambda full: full.chunk(self.size, 1)[self.own].clone())


class Model(nn.Module):
    def __init__(self, mesh: DeviceMesh, bug: bool) -> None:
        super().__init__()
        self.embed, self.moe = nn.Linear(WIDTH, WIDTH), Experts(mesh, bug)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return x + self.moe(x)


def train(bug: bool) -> None:
    sizes = tuple(MESH.values()) if dist.get_world_size() > 1 else (1, 1)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(MESH))
    random, model = torch.Generator().manual_seed(2842), Model(mesh, bug).double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    batch, batches = mesh.get_local_rank("ep"), mesh["ep"].size()
    for _ in range(3):
        x, y = torch.randn(2, SAMPLES, TOKENS, WIDTH, dtype=torch.float64, generator=random).chunk(batches, 1)[batch]
        (model(x) - y).pow(2).mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group("ep"))
            parameter.grad /= batches
        for parameter in model.moe.parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group("tp"))
        optimizer.step()
        optimizer.zero_grad()
