"""A transformer block whose sequence is sharded over an axis: causal ring attention, grouped heads.

hyper-parallel verify model examples/context_parallel.py:case --plan examples/context_parallel.py:plan --mesh cp=3
"""

from __future__ import annotations

import numpy as np
from torch import Tensor, nn

from hyper_parallel import DeviceMesh, Shard, context_parallel_attention
from hyper_parallel.verify import ModelCase, ParallelPlan

LENGTH, HEADS, KEY_HEADS, HEAD_WIDTH = 11, 4, 2, 3
WIDTH = HEADS * HEAD_WIDTH


class Block(nn.Module):
    """Attention and an MLP, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, KEY_HEADS * HEAD_WIDTH) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20), nn.GELU(), nn.Linear(20, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, like ``x`` (batch, sequence, WIDTH)."""
        normed = self.norm(x)
        heads = [
            project(normed).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        ]
        attended = context_parallel_attention(*heads, axis="cp", form="ring", is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(x)


def case() -> ModelCase:
    """Return the model with its data and its loss, as for one device."""
    random = np.random.default_rng(0)
    batches = [tuple(random.standard_normal((2, 4, LENGTH, WIDTH))) for _ in range(3)]

    def loss(output: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        return (output - batch[-1]).square().mean()

    return ModelCase(lambda: nn.Sequential(Block(), Block()).double(), batches, loss, optimizer="adamw")


def plan(mesh: DeviceMesh) -> ParallelPlan:
    """Return the plan: the sequence sharded over ``cp``, the batch over every other axis, weights replicated."""
    return ParallelPlan({}, {name: Shard(1) if name == "cp" else Shard(0) for name in mesh.names})
