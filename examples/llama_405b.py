"""Llama 3 405B, tensor, sequence, context and fully sharded data parallel, on 16,384 ranks of which none runs.

hyper-parallel prove plan examples/llama_405b.py:case --plan examples/llama_405b.py:plan --mesh dp=128,cp=16,tp=8
hyper-parallel explain examples/llama_405b.py:case --plan examples/llama_405b.py:plan --mesh dp=128,cp=16,tp=8
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hyper_parallel import (
    ColwiseParallel,
    DataParallelMeshDims,
    DeviceMesh,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    context_parallel_attention,
    fully_shard,
    loss_parallel,
    parallelize_module,
)
from hyper_parallel.verify import ModelCase, ParallelPlan

VOCABULARY, WIDTH, INNER, LAYERS, HEADS, KEY_HEADS = 128256, 16384, 53248, 126, 128, 8
LENGTH, BATCH, HEAD_WIDTH = 131072, 128, WIDTH // HEADS


class Attention(nn.Module):
    """Causal attention, with 16 heads of queries for each of keys, and rotated positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, KEY_HEADS * HEAD_WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Return the output, like ``x`` (batch, sequence, WIDTH); ``angles`` (batch, 1, sequence, HEAD_WIDTH)."""
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = rotated(q, angles), rotated(k, angles)
        y = context_parallel_attention(q, k, v, axis="cp", form="gather", is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Return heads (batch, heads, sequence, HEAD_WIDTH) rotated by their position's angles."""
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, like ``x``."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention, self.mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH), Attention(), MLP()

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Return the output, like ``x``."""
        x = x + self.attention(self.norm1(x), angles)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """Tokens, blocks, a norm and the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return logits (batch, sequence, VOCABULARY) for ``ids`` and ``positions`` (batch, sequence)."""
        x = self.tokens(ids)
        frequencies = torch.exp(torch.arange(0, HEAD_WIDTH, 2) * (-math.log(500000) / HEAD_WIDTH))
        angles = positions[:, None, :, None] * torch.cat((frequencies, frequencies))
        for block in self.blocks:
            x = block(x, angles)
        return self.head(self.norm(x))


def case() -> ModelCase:
    """Return the model with one batch and its loss, as for one device."""
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)

    def loss(logits: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), batch[-1].flatten())

    return ModelCase(Llama, [(ids, positions, ids)], loss, optimizer="adamw", clip=1.0)


def styles() -> dict[str, Any]:
    """Return the styles over ``tp``: between the layers, activations are split along the sequence."""
    kept = {"use_local_output": False}
    column, row = ColwiseParallel(**kept), RowwiseParallel(output_layouts=Shard(1), **kept)
    return {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), **kept),
        "blocks.*.norm[12]": SequenceParallel(**kept),
        "blocks.*.attention": PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        "blocks.*.attention.[qkv]": column,
        "blocks.*.attention.o": row,
        "blocks.*.mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "blocks.*.mlp.gate": column,
        "blocks.*.mlp.up": column,
        "blocks.*.mlp.down": row,
        "norm": SequenceParallel(**kept),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), **kept),
    }


def parallel(model: Llama, mesh: DeviceMesh) -> Llama:
    """Apply the styles, then shard each block and what is left of the model over the data axes."""
    parallelize_module(model, mesh, styles())
    axes = DataParallelMeshDims(shard=("dp", "cp"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, dp_mesh_dims=axes)
    return fully_shard(model, mesh=mesh, dp_mesh_dims=axes)


def plan(_: DeviceMesh) -> ParallelPlan:
    """Return the plan: sequences over ``dp``, their tokens over ``cp``, heads, widths and the loss over ``tp``."""
    return ParallelPlan(parallel, batch={"dp": Shard(0), "cp": Shard(1)}, context=loss_parallel)
