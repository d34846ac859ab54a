"""A rank without tokens for the experts leaves out their all-to-all. Reported in DeepSpeed 5794.

A part of the batches has nothing for the last layer of experts. The rank that holds such a batch skips the layer, and
with it two all-to-alls, while the others wait in theirs. Ranks without tokens must exchange nothing, but take part.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"ep": 3}
DIFFERS = ("calls", None)
CAUSE = "unequal-calls"
ROWS, TOKENS, WIDTH, EXPERTS = 3, 4, 3, 3


class Exchange(torch.autograd.Function):
    """Rows to other ranks; their gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], new_sizes: list[int]) -> Tensor:
        ctx.sizes, ctx.new_sizes = sizes, new_sizes
        received = x.new_empty(sum(new_sizes), WIDTH)
        dist.all_to_all_single(received, x.contiguous(), new_sizes, sizes)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Exchange.apply(grad, ctx.new_sizes, ctx.sizes), None, None


class Model(nn.Module):
    def __init__(self, bug: bool) -> None:
        super().__init__()
        self.bug, self.embed = bug, nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleDict({str(expert): nn.Linear(WIDTH, WIDTH) for expert in range(EXPERTS)})

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x))
        chosen = (experts >= 0).nonzero()[:, 0]
        if self.bug and not len(chosen):
            return x
        order = chosen[experts[chosen].argsort(stable=True)]
        world, count = dist.get_world_size(), EXPERTS // dist.get_world_size()
        counts = torch.bincount(experts[chosen], minlength=EXPERTS)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        sizes, new_sizes = counts.view(world, -1).sum(1).tolist(), received.view(world, count).sum(1).tolist()
        tokens = Exchange.apply(x[order], sizes, new_sizes).split(received.view(world, count).sum(0).tolist())
        outputs = [self.experts[str(dist.get_rank() * count + i)](rows) for i, rows in enumerate(tokens)]
        return x.index_add(0, order, Exchange.apply(torch.cat(outputs), new_sizes, sizes))


def train(bug: bool) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    random, model = torch.Generator().manual_seed(5794), Model(bug).double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    own = torch.arange(EXPERTS).tensor_split(mesh.size())[mesh.get_local_rank()].tolist()
    model.experts = nn.ModuleDict({name: expert for name, expert in model.experts.items() if int(name) in own})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(3):
        x, y = torch.randn(2, ROWS, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        experts = torch.randint(EXPERTS, (ROWS, TOKENS), generator=random)
        experts[step] = -1
        x, y, experts = (
            full.tensor_split(mesh.size())[mesh.get_local_rank()].flatten(0, 1) for full in (x, y, experts)
        )
        ((model(x, experts) - y).pow(2).sum() / (ROWS * TOKENS)).backward()
        for parameter in model.embed.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
