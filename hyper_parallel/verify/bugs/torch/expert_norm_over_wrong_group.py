"""The gradient norm leaves out experts, held for replicas over the dense weights' group. Reported in Megatron-LM 5916.

What is replicated counts on the first rank only. Every rank has experts of its own, but the test for replicas asks the
tensor-parallel group of the dense weights, and drops the experts of all other ranks. Gradients are clipped too little.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"ep": 3}
DIFFERS = ("norm", "gradient norm")
CAUSE = "norm-local"
TOKENS, WIDTH, EXPERTS = 7, 4, 5


class Pair(torch.autograd.Function):
    """One function of the value, another of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: Any, back: Any) -> Tensor:
        ctx.back = back
        return ahead(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.back(grad), None, None


def summed(partial: Tensor) -> Tensor:
    total = partial.clone()
    dist.all_reduce(total)
    return total


class Model(nn.Module):
    def __init__(self, own: list[int]) -> None:
        super().__init__()
        self.own, self.gate = own, nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleDict({str(expert): nn.Linear(WIDTH, WIDTH) for expert in range(EXPERTS)})

    def forward(self, x: Tensor) -> Tensor:
        weights = Pair.apply(torch.softmax(self.gate(x), -1), Tensor.clone, summed)
        outputs = [self.experts[str(expert)](x) * weights[:, expert, None] for expert in self.own]
        return Pair.apply(torch.stack(outputs).sum(0), summed, Tensor.clone)


def total_norm(model: Model, bug: bool) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for name, parameter in model.named_parameters():
        if dist.get_rank() == 0 or (name.startswith("experts") and not bug):
            total += parameter.grad.pow(2).sum()
    return summed(total).sqrt()


def train(bug: bool) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    own = torch.arange(EXPERTS).tensor_split(mesh.size())[mesh.get_local_rank()].tolist()
    random, model = torch.Generator().manual_seed(5916), Model(own).double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    model.experts = nn.ModuleDict({name: expert for name, expert in model.experts.items() if int(name) in own})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for _ in range(3):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        (model(x) - y).pow(2).mean().backward()
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, total_norm(model, bug))
        optimizer.step()
        optimizer.zero_grad()
