"""A mixture of experts: a router, experts sharded over an axis, and an expert that all tokens share.

hyper-parallel verify model examples/mixture_of_experts.py:case --plan examples/mixture_of_experts.py:plan --mesh ep=3
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from hyper_parallel import (
    DeviceMesh,
    Replicate,
    Shard,
    distribute_tensor,
    load_balancing_loss,
    routed_experts,
    router_z_loss,
)
from hyper_parallel.verify import ModelCase, ParallelPlan

TOKENS, WIDTH, HIDDEN, EXPERTS, CHOICES = 23, 6, 9, 5, 2


def expert(rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return what one expert computes of its rows."""
    return torch.tanh(rows @ up) @ down


class MixtureOfExperts(nn.Module):
    """Each token goes to the experts that its router chooses, and to the shared one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)
        self.shared = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output, like ``x`` (tokens, WIDTH), and the router's auxiliary losses."""
        x = torch.tanh(self.embed(x))
        logits = self.router(x)
        probabilities = torch.softmax(logits, -1)
        weights, chosen = torch.topk(probabilities, CHOICES)
        y = routed_experts(x, chosen, weights, (self.up, self.down), expert, capacity_factor=1.2)
        auxiliary = 0.01 * load_balancing_loss(probabilities, chosen) + 0.001 * router_z_loss(logits)
        return x + self.shared(x) + y, auxiliary


def shard_experts(model: MixtureOfExperts, mesh: DeviceMesh) -> MixtureOfExperts:
    """Shard the stacked weights of the experts over the axis ``ep``; ``verify`` replicates everything else."""
    placements = [Shard(0) if name == "ep" else Replicate() for name in mesh.names]
    model.up = nn.Parameter(distribute_tensor(model.up.detach(), mesh, placements))
    model.down = nn.Parameter(distribute_tensor(model.down.detach(), mesh, placements))
    return model


def case() -> ModelCase:
    """Return the model with its data and its loss, as for one device."""
    random = np.random.default_rng(0)
    batches = [tuple(random.standard_normal((2, TOKENS, WIDTH))) for _ in range(3)]

    def loss(output: tuple[Tensor, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        return (output[0] - batch[-1]).square().mean() + output[1]

    return ModelCase(lambda: MixtureOfExperts().double(), batches, loss, optimizer="adamw", learning_rate=0.01)


def plan(mesh: DeviceMesh) -> ParallelPlan:
    """Return the plan: tokens sharded over all axes, experts over ``ep``."""
    return ParallelPlan(shard_experts, {name: Shard(0) for name in mesh.names})
