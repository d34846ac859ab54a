"""The model whose training steps are timed, parallelized by PyTorch or by this library with the same plan."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp as peer_sharding, tensor as peer_tensors
from torch.distributed.tensor import parallel as peer_styles

from hyper_parallel.core.data_parallel.sharding import fully_shard
from hyper_parallel.core.dtensor import placements
from hyper_parallel.core.tensor_parallel import styles
from hyper_parallel.core.tensor_parallel.parallelize import parallelize_module

__all__ = ["Decoder", "parallelized"]

_COLUMNS, _ROWS = ("query", "key", "value", "up", "gate"), ("out", "down")


class _Block(nn.Module):
    """Causal attention and a gated MLP, each added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.gate = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)
        self.head_width = width // 4

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, like ``x`` (batch, tokens, width)."""
        normed = self.norm_1(x)
        query, key, value = (
            project(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(-2))
        normed = self.norm_2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    """A decoder of tokens.

    Args:
        width: of the activations; a multiple of 4, the number of heads.
        layers: number of blocks.
    """

    VOCABULARY: ClassVar[int] = 64

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.VOCABULARY, width)
        self.layers = nn.ModuleList(_Block(width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, self.VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, tokens, VOCABULARY) of ``tokens`` (batch, tokens)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def parallelized(model: Decoder, mesh: Any, style: str, *, peer: bool) -> nn.Module:
    """Parallelize ``model`` in place.

    Args:
        model: what is parallelized.
        mesh: of one axis; PyTorch's own mesh, or this library's.
        style: ``"fully_shard"``, ``"tensor parallel"`` or ``"sequence parallel"``.
        peer: by PyTorch's own functions instead of this library's.
    """
    if style == "fully_shard":
        shard: Any = peer_sharding.fully_shard if peer else fully_shard
        for layer in model.layers:
            shard(layer, mesh=mesh)
        shard(model, mesh=mesh)
        return model
    names = (peer_styles, peer_tensors) if peer else (styles, placements)
    plan = _plan(len(model.layers), *names, style == "sequence parallel")
    parallelize: Any = peer_styles.parallelize_module if peer else parallelize_module
    module: nn.Module = parallelize(model, mesh, plan)
    return module


def _plan(layers: int, by: Any, to: Any, sequence: bool) -> dict[str, Any]:
    """The plan; with ``sequence``, activations are sharded along the sequence between the regions."""
    enter = {"input_layouts": to.Shard(1)} if sequence else {}
    leave = {"output_layouts": to.Shard(1)} if sequence else {}
    plan: dict[str, Any] = {}
    for number in range(layers):
        plan |= {f"layers.{number}.{name}": by.ColwiseParallel(**enter) for name in _COLUMNS}
        plan |= {f"layers.{number}.{name}": by.RowwiseParallel(**leave) for name in _ROWS}
        if sequence:
            plan |= {f"layers.{number}.norm_{which}": by.SequenceParallel() for which in (1, 2)}
    if sequence:
        plan |= {
            "embedding": by.RowwiseParallel(input_layouts=to.Replicate(), **leave),
            "norm": by.SequenceParallel(),
            "head": by.ColwiseParallel(output_layouts=to.Replicate(), **enter),
        }
    return plan
