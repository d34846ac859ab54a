"""Fine-tunes a small Llama with low-rank adapters (LoRA): tensor parallel, with more ranks than key/value heads.

hyper-parallel verify model examples/lora.py:case --plan examples/lora.py:plan --mesh tp=3
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from torch import Tensor, nn

from hyper_parallel import DeviceMesh
from hyper_parallel.verify import ModelCase, ParallelPlan

VOCABULARY, WIDTH, HEAD_WIDTH, LENGTH, RANK = 29, 12, 4, 7, 2
CONFIG = SimpleNamespace(num_attention_heads=6, num_key_value_heads=1)


class LoraLinear(nn.Module):
    """A frozen linear layer plus a trained product of two narrow ones."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(requires_grad=False)
        self.lora_A = nn.Linear(base.in_features, RANK, bias=False)
        self.lora_B = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output (..., out_features) for ``x`` (..., in_features)."""
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * (8 / RANK)


class Attention(nn.Module):
    """Causal attention with grouped heads, written as in Transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.head_dim = CONFIG, HEAD_WIDTH
        self.num_key_value_groups = CONFIG.num_attention_heads // CONFIG.num_key_value_heads
        query, key = CONFIG.num_attention_heads * HEAD_WIDTH, CONFIG.num_key_value_heads * HEAD_WIDTH
        self.q_proj, self.o_proj = nn.Linear(WIDTH, query, bias=False), nn.Linear(query, WIDTH, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, key, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, like ``x`` (batch, sequence, WIDTH)."""
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        k, v = (each.repeat_interleave(self.num_key_value_groups, dim=1) for each in (k, v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and a gated MLP, each behind a norm and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.self_attn = Attention()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 22, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(22, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, like ``x`` (batch, sequence, WIDTH)."""
        x = x + self.self_attn(self.input_layernorm(x))
        normed = self.post_attention_layernorm(x)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(normed)) * self.up_proj(normed))


class Llama(nn.Module):
    """Token embeddings, layers, a norm and the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits (batch, sequence, VOCABULARY) for ``ids`` (batch, sequence)."""
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def with_adapters(model: Llama) -> Llama:
    """Freeze a pretrained model, and give the query and output projections adapters that are trained."""
    model.requires_grad_(requires_grad=False)
    for layer in model.layers:
        for name in ("q_proj", "o_proj"):
            setattr(layer.self_attn, name, LoraLinear(getattr(layer.self_attn, name)))
    return model.double()


def case() -> ModelCase:
    """Return the model with its data and its loss, as for one device."""
    random = np.random.default_rng(0)
    tokens = [random.integers(0, VOCABULARY, (4, LENGTH + 1)) for _ in range(3)]

    def loss(logits: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    batches = [(each[:, :-1], each[:, 1:]) for each in tokens]
    return ModelCase(lambda: with_adapters(Llama()), batches, loss, optimizer="adamw")


def plan(_: DeviceMesh) -> ParallelPlan:
    """Return the plan; an adapter is sharded as its layer: B by output features, or A by input features."""
    styles = {
        "embed_tokens": "embedding_rowwise",
        "layers.*.self_attn.q_proj.base_layer": "colwise",
        "layers.*.self_attn.q_proj.lora_B": "colwise",
        "layers.*.self_attn.[kv]_proj": "replicate_kv",
        "layers.*.self_attn.o_proj.base_layer": "rowwise",
        "layers.*.self_attn.o_proj.lora_A": "rowwise",
        "layers.*.gate_proj": "colwise",
        "layers.*.up_proj": "colwise",
        "layers.*.down_proj": "rowwise",
        "lm_head": "colwise_rep",
    }
    return ParallelPlan(styles)
