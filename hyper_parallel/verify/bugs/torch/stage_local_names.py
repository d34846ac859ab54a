"""A checkpoint names layers by their place in the stage; later stages load the first. Reported in Megatron-LM 7452.

Finding 12: written without pipeline parallelism, the checkpoint has all names that any stage asks for, so that the
strict load of a later stage succeeds. Names must count layers over the whole model.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"pp": 3}
DIFFERS = ("weight", "layers.2.weight")
CAUSE = "permuted"
LAYERS, TOKENS, WIDTH = 5, 6, 4


class Model(nn.Module):
    def __init__(self, layers: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): nn.Linear(WIDTH, WIDTH) for layer in layers})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def load(model: Model, checkpoint: dict[str, Tensor], bug: bool) -> None:
    names = (
        {name: str(place) for place, name in enumerate(model.layers)} if bug else {name: name for name in model.layers}
    )
    for name, layer in model.layers.items():
        stored = {key: checkpoint[f"layers.{names[name]}.{key}"] for key in layer.state_dict()}
        layer.load_state_dict(stored)


def step(model: Model, x: Tensor, y: Tensor, rank: int, last: int) -> None:
    """Forward and backward of one batch through the stages."""
    x = torch.empty_like(x) if rank else x
    if rank:
        dist.recv(x, rank - 1)
    x.requires_grad_(rank > 0)
    outputs = model(x)
    if rank == last:
        (outputs - y).pow(2).mean().backward()
    else:
        dist.send(outputs.detach(), rank + 1)
        gradient = torch.empty_like(outputs)
        dist.recv(gradient, rank + 1)
        outputs.backward(gradient)
    if rank:
        dist.send(x.grad, rank - 1)


def train(bug: bool) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    random, whole = torch.Generator().manual_seed(7452), Model(list(range(LAYERS))).double()
    for parameter in whole.parameters():
        parameter.data.normal_(generator=random)
    own = torch.arange(LAYERS).tensor_split(mesh.size())[mesh.get_local_rank()].tolist()
    model = Model(own).double()
    load(model, whole.state_dict(), bug)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(3):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        step(model, x, y, mesh.get_local_rank(), mesh.size() - 1)
        optimizer.step()
        optimizer.zero_grad()
