"""A padding mask is cut for the ranks of another group of the same size. Reported in Megatron-LM 5563.

The model got its tensor-parallel groups explicitly, ranks 0, 2, 4 and 1, 3, 5. The mask is cut by the place of the rank
in the groups that are made by default, 0 to 2 and 3 to 5: it has the right length, and belongs to other tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"tp": 3, "dp": 2}
DIFFERS = ("output", "router")
CAUSE = "components"
ROWS, TOKENS, WIDTH, EXPERTS = 3, 9, 4, 5


class Router(nn.Linear):
    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        return torch.softmax(super().forward(x), -1) * valid


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router, self.experts = (
            nn.Linear(WIDTH, WIDTH),
            Router(WIDTH, EXPERTS),
            nn.Linear(EXPERTS, WIDTH),
        )

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x))
        return x * self.experts(self.router(x, valid))


def train(bug: bool) -> None:
    alone = dist.get_world_size() == 1
    mesh = init_device_mesh("cpu", (1, 1) if alone else (3, 2), mesh_dim_names=("tp", "dp"))
    random, model = torch.Generator().manual_seed(5563), Model().double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)

    def part(full: Tensor, rank: int) -> Tensor:
        return full.tensor_split(mesh.size(1), 1)[mesh.get_local_rank("dp")].tensor_split(mesh.size(0))[rank]

    rank = mesh.get_local_rank("tp")
    rank_for_mask = dist.get_rank() % mesh.size(0) if bug else rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(3):
        x, y = torch.randn(2, TOKENS, ROWS, WIDTH, dtype=torch.float64, generator=random)
        lengths = torch.randint(2, TOKENS, (ROWS, 1), generator=random)
        valid = torch.arange(TOKENS)[:, None, None] < lengths
        ((model(part(x, rank), part(valid, rank_for_mask)) - part(y, rank)).pow(2).sum() / TOKENS).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
