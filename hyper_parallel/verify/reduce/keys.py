"""The keys of configurations, by format: for example, the key of a model's hidden size, or of a mesh axis."""

from __future__ import annotations

import re
from typing import Final

__all__ = [
    "AXES",
    "AXIS_KEYS",
    "BATCHES",
    "FORMATS",
    "HEAD",
    "MICRO_BATCHES",
    "NEEDED",
    "PERIODS",
    "POSITIONS",
    "ROLES",
    "SPLIT_BY_HAND",
    "WIDTHS",
    "looks_like_a_size",
]

FORMATS: Final = {
    "huggingface": "a Hugging Face config",
    "torchtitan": "a TOML of torchtitan",
    "megatron": "arguments of Megatron",
    "mindformers": "a YAML of MindFormers",
}
"""Formats, and their names in messages."""

AXES: Final = ("tp", "pp", "cp", "ep", "dp", "dp_replicate", "dp_shard")
AXIS_KEYS: Final = {
    "tensor_parallel_degree": "tp", "tensor-model-parallel-size": "tp", "model_parallel": "tp",
    "pipeline_parallel_degree": "pp", "pipeline-model-parallel-size": "pp", "pipeline_stage": "pp",
    "context_parallel_degree": "cp", "context-parallel-size": "cp", "context_parallel": "cp",
    "expert_parallel_degree": "ep", "expert-model-parallel-size": "ep", "expert_parallel": "ep",
    "data_parallel_replicate_degree": "dp_replicate", "data_parallel_shard_degree": "dp_shard", "data_parallel": "dp",
}  # fmt: skip
"""Keys of the sizes of axes, in all formats."""
HEAD: Final = ("head_dim", "nope", "rope", "v_head", "linear_key_dim", "linear_value_dim", "index_dim")
"""Keys of widths of one head."""

WIDTHS: Final = (
    "hidden", "intermediate", "moe_intermediate", "shared_intermediate", "q_lora", "kv_lora", "dt_rank", "state",
    "vocab",
)  # fmt: skip
"""Keys of widths of the model."""

NEEDED: Final = {
    "huggingface": ("layers", "hidden", "heads", "vocab"),
    "torchtitan": (),
    "megatron": ("layers", "hidden", "heads"),
    "mindformers": ("layers", "hidden", "heads"),
}
"""Sizes that a file must have to be a configuration of the format."""

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
    "torchtitan": {},
    "megatron": {
        "hidden-size": "hidden", "num-attention-heads": "heads", "num-query-groups": "kv_heads",
        "kv-channels": "head_dim", "ffn-hidden-size": "intermediate", "num-layers": "layers", "vocab-size": "vocab",
        "num-experts": "experts", "moe-router-topk": "top_k", "moe-ffn-hidden-size": "moe_intermediate",
        "moe-shared-expert-intermediate-size": "shared_intermediate",
        "moe-router-num-groups": "groups", "moe-router-group-topk": "top_groups",
        "q-lora-rank": "q_lora", "kv-lora-rank": "kv_lora",
        "qk-head-dim": "nope", "qk-pos-emb-head-dim": "rope", "v-head-dim": "v_head",
        "num-virtual-stages-per-pipeline-rank": "virtual", "num-layers-per-virtual-pipeline-stage": "virtual_layers",
        "expert-tensor-parallel-size": "expert_tp",
    },
    "mindformers": {
        "hidden_size": "hidden", "num_heads": "heads", "num_attention_heads": "heads",
        "n_kv_heads": "kv_heads", "num_key_value_heads": "kv_heads", "head_dim": "head_dim",
        "intermediate_size": "intermediate", "num_layers": "layers", "num_hidden_layers": "layers",
        "vocab_size": "vocab",
        "expert_num": "experts", "n_routed_experts": "experts", "num_experts": "experts",
        "num_experts_chosen": "top_k", "num_experts_per_tok": "top_k",
        "shared_expert_num": "shared", "n_shared_experts": "shared", "moe_intermediate_size": "moe_intermediate",
        "n_group": "groups", "topk_group": "top_groups",
        "q_lora_rank": "q_lora", "kv_lora_rank": "kv_lora",
        "qk_nope_head_dim": "nope", "qk_rope_head_dim": "rope", "v_head_dim": "v_head",
        "first_k_dense_replace": "dense_layers", "pp_interleave_num": "virtual",
    },
}  # fmt: skip
"""By format: the last part of a key, and the role of its number."""

BATCHES: Final = ("local_batch_size", "micro-batch-size", "batch_size")
"""Keys of the number of samples per rank in a forward."""
MICRO_BATCHES: Final = ("micro_batch_num", "gradient_accumulation_steps")
"""Keys of the number of forwards per step."""
SPLIT_BY_HAND: Final = (
    "pipeline-model-parallel-layout", "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers",
    "pipeline_parallel_split_points", "module_fqns_per_model_part", "pipeline_parallel_layers_per_stage", "offset",
)  # fmt: skip
"""Keys that divide layers among the stages by number or name."""

POSITIONS: Final = (
    "max_position_embeddings", "n_positions", "n_ctx", "sliding_window", "original_max_position_embeddings",
    "attention_chunk_size", "max_position_embedding", "seq_length", "seq_len", "max-position-embeddings", "seq-length",
    "original-max-position-embeddings",
)  # fmt: skip
"""Keys that count tokens of a sequence; the small model keeps the ratios between their values."""

PERIODS: Final = (
    "attn_layer_period", "expert_layer_period", "full_attention_interval", "decoder_sparse_step", "moe_layer_freq",
    "interleave_moe_layer_step", "sliding_window_pattern", "no_rope_layer_interval", "moe-layer-freq",
)  # fmt: skip
"""Keys of the number of layers after which the pattern of layers repeats."""

_SIZE = re.compile(r"(^|[_-])(n|num|size|dim|rank|width|length|heads|layers|channels|experts|chunk|kernel)([_-]|$)")


def looks_like_a_size(key: str) -> bool:
    """Return whether the key of an integer names a size, according to the words in the key."""
    return _SIZE.search(key.rpartition(".")[2]) is not None
