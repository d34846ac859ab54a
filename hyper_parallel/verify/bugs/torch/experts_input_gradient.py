"""The input's gradient of sharded experts is cut instead of reduce-scattered. Reported in torchtitan 1805.

The experts read the local tensor of a gathered DTensor. Without `grad_placements` its gradient, a part of a sum on
every rank, is taken for the whole one.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

MESH = {"tp": 3}
DIFFERS = ("gradient", "embed.weight")
CAUSE = "missing-reduction"
TOKENS, WIDTH, HIDDEN, EXPERTS = 9, 4, 7, 2


def part(full: Tensor, dim: int = 0) -> Tensor:
    return full.tensor_split(dist.get_world_size(), dim)[dist.get_rank()]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.empty(EXPERTS, HIDDEN, WIDTH))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        outputs = torch.tanh(x @ self.up) @ self.down
        return (weights.T[..., None] * outputs).sum(0)


class Model(nn.Module):
    def __init__(self, mesh: DeviceMesh, bug: bool) -> None:
        super().__init__()
        self.mesh, self.bug = mesh, bug
        self.embed, self.router = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()

    def gathered(self, shard: Tensor) -> DTensor:
        return DTensor.from_local(shard, self.mesh, [Shard(0)]).redistribute(placements=[Replicate()])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gathered(torch.softmax(self.router(x), -1)).to_local(grad_placements=[Partial()])
        x = self.embed(x)
        tokens = self.gathered(x).to_local(grad_placements=None if self.bug else [Partial()])
        outputs = self.experts(tokens, weights)
        return x + DTensor.from_local(outputs, self.mesh, [Partial()]).redistribute(placements=[Shard(0)]).to_local()


def train(bug: bool) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random, model = torch.Generator().manual_seed(1805), Model(mesh, bug).double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    model.experts.up = nn.Parameter(part(model.experts.up.data, 2).clone())
    model.experts.down = nn.Parameter(part(model.experts.down.data, 1).clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(3):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        ((model(part(x)) - part(y)).pow(2).sum() / TOKENS).backward()
        for parameter in (model.embed.weight, model.router.weight):
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
