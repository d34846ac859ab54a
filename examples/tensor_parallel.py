"""Trains a feed-forward network with PyTorch's parallelize_module; one rank or several train the same.

torchrun --nproc-per-node 2 examples/tensor_parallel.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class FeedForward(nn.Module):
    """A gated feed-forward network behind a normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output (batch, 8) for ``x`` (batch, 8)."""
        x = self.norm(x)
        return self.down(torch.sigmoid(self.gate(x)) * self.up(x))


PLAN = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}


def main() -> None:
    """Train on random data, which is the same on all ranks."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = parallelize_module(FeedForward(), mesh, PLAN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        inputs, targets = torch.randn(6, 8), torch.randn(6, 8)
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
