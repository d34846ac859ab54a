"""A GPT trained data-parallel with PyTorch alone, in the sizes that `verify program` is measured on."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

SIZES = {  # width, layers, heads, vocabulary, length of a sequence, sequences in a batch
    "0.1M": (64, 2, 4, 96, 16, 64),
    "1M": (128, 4, 4, 512, 32, 8),
    "11M": (384, 6, 4, 512, 32, 8),
    "124M": (768, 12, 12, 50257, 64, 4),
}


class Block(nn.Module):
    """Attention and a feed-forward network, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return float[batch, length, width]."""
        queries, keys, values = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.projections(self.attention_norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.feed(self.feed_norm(x))


class Model(nn.Module):
    """A decoder with learned positions."""

    def __init__(self, width: int, layers: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits, float[batch, length, vocabulary]."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train(size: str, mode: str, steps: int) -> None:
    """Train on random tokens, each rank on its part of the batch."""
    *architecture, batch = SIZES[size]
    vocabulary, length = architecture[3], architecture[4]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = Model(*architecture)
    if mode == "ddp":
        model = DistributedDataParallel(model)
    else:
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        batches = torch.randint(0, vocabulary, (batch, length + 1), generator=generator)
        ids = batches.tensor_split(dist.get_world_size())[dist.get_rank()]
        F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="0.1M")
    parser.add_argument("--mode", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--steps", type=int, default=3)
    train(**vars(parser.parse_args()))
