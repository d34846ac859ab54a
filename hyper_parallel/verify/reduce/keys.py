"""The keys of configurations, by format: which number is a model's hidden size, which is a mesh axis."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["AXES", "FORMATS", "HEAD", "NEEDED", "PERIODS", "POSITIONS", "ROLES", "WIDTHS", "looks_like_a_size"]

FORMATS: Final = {
    "huggingface": "Hugging Face config",
    "torchtitan": "torchtitan TOML",
    "megatron": "Megatron arguments",
    "mindformers": "MindFormers YAML",
}
"""Formats, and what they are called in messages."""

AXES: Final = ("tp", "pp", "cp", "ep", "dp")
HEAD: Final = ("head_dim", "nope", "rope", "v_head", "linear_key_dim", "linear_value_dim", "index_dim")
"""Widths of one head."""

WIDTHS: Final = (
    "hidden", "intermediate", "moe_intermediate", "shared_intermediate", "q_lora", "kv_lora", "dt_rank", "state",
    "vocab",
)  # fmt: skip
"""Widths of the model."""

NEEDED: Final = {
    "huggingface": ("layers", "hidden", "heads", "vocab"),
    "torchtitan": (),
    "megatron": ("layers", "hidden", "heads"),
    "mindformers": ("layers", "hidden", "heads"),
}
"""Sizes without which a file is not a configuration of the format."""

ROLES: Final[dict[str, dict[str, str]]] = {
    "huggingface": {
        "hidden_size": "hidden", "n_embd": "hidden", "d_model": "hidden",
        "num_attention_heads": "heads", "n_head": "heads",
        "num_key_value_heads": "kv_heads",
        "head_dim": "head_dim", "qk_head_dim": "qk_head",
        "intermediate_size": "intermediate", "n_inner": "intermediate", "ffn_hidden_size": "intermediate",
        "num_hidden_layers": "layers", "n_layer": "layers", "num_layers": "layers",
        "vocab_size": "vocab",
        "num_local_experts": "experts", "num_experts": "experts", "n_routed_experts": "experts",
        "num_experts_per_tok": "top_k",
        "n_shared_experts": "shared",
        "moe_intermediate_size": "moe_intermediate", "shared_expert_intermediate_size": "shared_intermediate",
        "n_group": "groups", "topk_group": "top_groups",
        "q_lora_rank": "q_lora", "kv_lora_rank": "kv_lora",
        "qk_nope_head_dim": "nope", "qk_rope_head_dim": "rope", "v_head_dim": "v_head",
        "first_k_dense_replace": "dense_layers", "max_window_layers": "layer_index",
        "linear_num_key_heads": "linear_key_heads", "linear_num_value_heads": "linear_value_heads",
        "linear_key_head_dim": "linear_key_dim", "linear_value_head_dim": "linear_value_dim",
        "mamba_dt_rank": "dt_rank", "mamba_d_state": "state",
        "query_pre_attn_scalar": "scalar",
    },
}  # fmt: skip
"""By format: the last word of a key, and the role of its number."""

POSITIONS: Final = (
    "max_position_embeddings", "n_positions", "n_ctx", "sliding_window", "original_max_position_embeddings",
    "attention_chunk_size", "max_position_embedding", "seq_length", "seq_len", "max-position-embeddings", "seq-length",
)  # fmt: skip
"""Keys that count tokens of a sequence, whose ratios are kept."""

PERIODS: Final = (
    "attn_layer_period", "expert_layer_period", "full_attention_interval", "decoder_sparse_step", "moe_layer_freq",
    "interleave_moe_layer_step", "sliding_window_pattern", "no_rope_layer_interval",
)  # fmt: skip
"""Keys that say after how many layers the pattern of layers repeats."""

_SIZE = re.compile(r"(^|[_-])(n|num|size|dim|rank|width|length|heads|layers|channels|experts|chunk|kernel)([_-]|$)")


def looks_like_a_size(key: str) -> bool:
    """Return whether a key of an integer names a size, as far as its words tell."""
    return _SIZE.search(key.rpartition(".")[2]) is not None
