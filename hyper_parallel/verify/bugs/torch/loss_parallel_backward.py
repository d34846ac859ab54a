"""The backward of a sharded log_softmax is left to the loss, which may not do it. Reported in pytorch 190746.

Under loss parallelism the backward of log_softmax hands on the gradient as it is, because that of the cross-entropy has
done its part already. Any other consumer, a preference loss for example, gets the identity for a derivative.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

MESH = {"tp": 3}
DIFFERS = ("gradient", "head.weight")
CAUSE = "components"
TOKENS, WIDTH, VOCABULARY = 7, 5, 11


def summed(partial: Tensor) -> Tensor:
    total = partial.clone()
    dist.all_reduce(total)
    return total


class LogSoftmax(torch.autograd.Function):
    """Logarithm of the softmax over a sharded last dim."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, bug: bool) -> Tensor:
        logs = logits - summed(logits.exp().sum(-1, keepdim=True)).log()
        ctx.save_for_backward(logs)
        ctx.bug = bug
        return logs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (logs,) = ctx.saved_tensors
        return grad if ctx.bug else grad - logs.exp() * summed(grad.sum(-1, keepdim=True)), None


class Model(nn.Module):
    def __init__(self, bug: bool) -> None:
        super().__init__()
        self.bug, self.norm = bug, nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x.register_hook(summed)
        return LogSoftmax.apply(self.head(x), self.bug)


def train(bug: bool) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random, model = torch.Generator().manual_seed(190746), Model(bug).double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    own = torch.arange(VOCABULARY).tensor_split(mesh.size())[mesh.get_local_rank()]
    model.head.weight = nn.Parameter(model.head.weight.data[own])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(3):
        x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=random)
        weights = torch.randn(TOKENS, VOCABULARY, dtype=torch.float64, generator=random)
        ((model(x) * weights[:, own]).sum() / TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad()


def single() -> None:
    """Train without the bug, which one device has, too."""
    train(bug=False)
