"""The loss is multiplied by the size of an axis over which gradients are summed. Reported in Megatron-LM 673.

Parts of a sequence divide by the whole sequence's number of tokens, so their gradients add up. The factor undoes an
average over the parts, but the gradients' average is over the data axis alone.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"dp": 2, "cp": 3}
DIFFERS = ("gradient", "*")
CAUSE = "scaled-by-size"
SAMPLES, TOKENS, WIDTH, CLASSES = 4, 8, 5, 7


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def train(bug: bool) -> None:
    sizes = tuple(MESH.values()) if dist.get_world_size() > 1 else (1, 1)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(MESH))
    dp, cp = sizes
    random, model = torch.Generator().manual_seed(673), Model().double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

    def mine(batch: Tensor) -> Tensor:
        samples = batch.chunk(dp)[mesh.get_local_rank("dp")]
        return samples.tensor_split(cp, 1)[mesh.get_local_rank("cp")]

    for _ in range(3):
        x = mine(torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64, generator=random))
        labels = mine(torch.randint(CLASSES, (SAMPLES, TOKENS), generator=random))
        losses = nn.functional.cross_entropy(model(x).flatten(0, 1), labels.flatten(), reduction="none")
        loss = losses.sum() / (len(x) * TOKENS) * cp
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dp if bug else dp * cp
        optimizer.step()
        optimizer.zero_grad()
