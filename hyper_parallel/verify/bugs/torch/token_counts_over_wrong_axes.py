"""Token counts are summed over the data axis only, although the sequence is sharded, too. Reported in verl 5983.

Gradients are averaged over both axes, so each rank divides its sum of losses by the tokens of all ranks. The count and
the factor that undoes the average both belong to both axes; here ranks divide by the tokens of their part of the
sequence.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"dp": 2, "cp": 3}
DIFFERS = ("loss", "loss")
CAUSE = "scaled-by-count"
ROWS, TOKENS, WIDTH = 5, 8, 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, 1)

    def forward(self, x: Tensor, y: Tensor, valid: Tensor) -> Tensor:
        return (self.down(torch.tanh(self.up(x))).squeeze(-1) - y).pow(2) * valid


def train(bug: bool) -> None:
    sizes = tuple(MESH.values()) if dist.get_world_size() > 1 else (1, 1)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "cp"))
    random, model = torch.Generator().manual_seed(5983), Model().double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)

    def part(full: Tensor) -> Tensor:
        rows = full.tensor_split(mesh.size(0))[mesh.get_local_rank("dp")]
        return rows.tensor_split(mesh.size(1), 1)[mesh.get_local_rank("cp")]

    group = mesh.get_group("dp") if bug else dist.group.WORLD
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for _ in range(3):
        x = torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        y = torch.randn(ROWS, TOKENS, dtype=torch.float64, generator=random)
        lengths = torch.randint(2, TOKENS + 1, (ROWS, 1), generator=random)
        valid = part((torch.arange(TOKENS) < lengths).double().roll(1, 0))
        tokens = valid.sum()
        dist.all_reduce(tokens, group=group)
        (model(part(x), part(y), valid).sum() / tokens * dist.get_world_size(group)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
