"""Trains a small transformer with PyTorch's fully_shard, two micro-batches a step; 1, 2 or 4 ranks train the same.

torchrun --nproc-per-node 4 examples/sharded.py

Three do not: they get 3, 3 and 2 of 8 rows, and an average of their means is not the mean over all rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH, WORDS, LENGTH, BATCH, MICRO_BATCHES = 12, 17, 6, 8, 2


class Transformer(nn.Module):
    """An embedding, two blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 3, 21, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits (batch, length, words) of ``words`` (batch, length)."""
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main() -> None:
    """Train on random words; the batch is global, and each rank takes its part of each micro-batch."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = Transformer()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        for _ in range(MICRO_BATCHES):
            words = torch.randint(WORDS, (BATCH, LENGTH + 1)).chunk(ranks)[rank]
            logits = model(words[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
            (loss / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
