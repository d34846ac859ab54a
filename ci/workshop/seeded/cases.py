"""Four configurations, each with its mesh, and the bugs that are seeded in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["CASES", "Case"]


@dataclass(frozen=True)
class Case:
    """A configuration with bugs.

    Attributes:
        config: its keys, as those of Hugging Face.
        mesh: its axes.
        bugs: names of the bugs.
    """

    config: Mapping[str, Any]
    mesh: Mapping[str, int]
    bugs: tuple[str, ...]


_BASE = {
    "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 336,
    "num_hidden_layers": 8, "vocab_size": 1000, "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip

CASES = {
    "dense": Case(
        _BASE
        | {
            "num_key_value_heads": 2, "tie_word_embeddings": True, "attention_bias": True, "qk_norm": True,
            "sequence_parallel": True,
        },
        {"pp": 2, "tp": 4},
        (
            "key-head-of-another-rank", "shared-key-gradient-not-reduced", "query-norm-gradient-not-reduced",
            "bias-gradient-not-reduced", "bias-added-on-every-rank", "norm-gradient-not-reduced",
            "final-norm-gradient-not-reduced", "tied-not-reduced", "norm-counts-tied-twice", "norm-counts-replicas",
            "norm-of-each-rank", "gradients-of-micro-batches-in-reverse", "first-layer-of-a-stage-skipped",
            "mean-of-each-micro-batch", "last-row-of-a-rank-left-out",
        ),
    ),
    "hybrid": Case(
        _BASE
        | {
            "hidden_size": 96, "head_dim": 16, "num_hidden_layers": 12, "vocab_size": 777, "sliding_window": 8,
            "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"] * 3,
            "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": True, "hidden_dropout": 0.1,
        },
        {"pp": 4, "dp": 2, "tp": 2},
        (
            "pattern-of-the-stage", "pattern-off-by-one-at-the-border", "scale-by-number-in-the-stage",
            "output-not-reduced-in-one-kind", "input-gradient-not-reduced-in-one-kind",
            "dropout-repeated-on-data-ranks", "dropout-differs-between-replicas", "targets-by-unpadded-rows",
            "padding-not-masked", "last-layer-not-reduced", "norm-of-the-ends", "fused-weight-split-as-blocks",
        ),
    ),
    "experts": Case(
        _BASE
        | {
            "num_hidden_layers": 5, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 80,
            "shared_expert_intermediate_size": 96, "first_k_dense_replace": 1, "expert_bias": True,
            "router_aux_loss_coef": 0.02, "sequence_parallel": True,
        },
        {"dp": 4, "ep": 2, "tp": 2},
        (
            "gates-normalized-over-local-experts", "tokens-choose-on-each-rank", "last-expert-of-a-rank-dropped",
            "gradient-divided-by-own-tokens", "gate-gradient-of-own-experts", "balance-of-local-tokens",
            "balance-counted-on-every-rank", "router-gradient-not-reduced", "expert-gradient-reduced-over-all-ranks",
            "expert-gradient-not-reduced-over-replicas", "expert-gradient-divided-by-ep", "expert-bias-by-local-load",
            "shared-expert-not-reduced", "norm-counts-experts-once",
        ),
    ),
    "context": Case(
        _BASE
        | {
            "num_hidden_layers": 6, "vocab_size": 1003, "sliding_window": 8, "attention_bias": True,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        },
        {"cp": 4, "dp": 2, "tp": 2},
        (
            "rotary-positions-of-one-part", "mask-of-the-last-part", "window-of-one-part", "key-gradient-not-gathered",
            "ring-in-the-wrong-direction", "gradient-reduced-over-dp-without-cp", "mean-of-local-tokens",
            "keys-repeated-as-blocks", "last-layer-gradient-not-reduced",
        ),
    ),
}  # fmt: skip
