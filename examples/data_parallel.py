"""Trains a classifier with PyTorch's DistributedDataParallel; one rank or several train the same.

torchrun --nproc-per-node 4 examples/data_parallel.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Classifier(nn.Module):
    """Two layers with a normalization between them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(10, 16), nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (batch, 5) of ``x`` (batch, 10)."""
        return self.head(torch.relu(self.norm(self.body(x))))


def main() -> None:
    """Train on random data; the batch is global, and each rank takes its part."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--batch", type=int, default=24)
    arguments.add_argument("--steps", type=int, default=4)
    options = arguments.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Classifier())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    for step in range(options.steps):
        inputs, labels = torch.randn(options.batch, 10), torch.randint(5, (options.batch,))
        loss = nn.functional.cross_entropy(model(inputs.chunk(ranks)[rank]), labels.chunk(ranks)[rank])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
