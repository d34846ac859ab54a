"""Estimates of a configuration: parameters, memory and time on this machine."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from hyper_parallel.verify.reduce.document import Document
from hyper_parallel.verify.reduce.layers import Pattern
from hyper_parallel.verify.reduce.solver import Sizes

__all__ = ["Cost", "estimated_cost", "parameters"]

_UNGATED = ("gpt", "opt", "bloom", "falcon", "phi-msft")
"""Prefixes of the types of models whose feed-forward layers have two matrices."""
_ATTENTION_PERIODS = ("attn_layer_period", "full_attention_interval")
_EXPERT_PERIODS = ("expert_layer_period", "decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step")
_EXPERT_LISTS = ("moe-layer-freq", "mlp_layer_types")
_BYTES = 16
"""Bytes per parameter in float32, with its gradient and the two states of Adam."""
_REPEATS = 4
"""Number of runs on one rank: the reference, and its repeats that measure rounding."""
_STEPS = 3
_START_SECONDS = 12.0
_LAYER_SECONDS = 0.02
"""Seconds per layer, optimizer step and run, independent of sizes; the same again for every two experts."""
_MATRIX = 256


@dataclass(frozen=True)
class Cost:
    """An estimate.

    Attributes:
        parameters: number of the model's parameters.
        bytes: memory of all simulated ranks, with gradients and optimizer states.
        seconds: duration of a verification of three steps.
        rate: floating-point operations per second of this machine, measured.
    """

    parameters: int
    bytes: int
    seconds: float
    rate: float


def estimated_cost(document: Document, sizes: Sizes, pattern: Pattern, ranks: int, tokens: int) -> Cost:
    """Estimate the cost of verifying three training steps on simulated ranks.

    Args:
        document: configuration that determines which matrices exist.
        sizes: sizes of the model, by role.
        pattern: pattern of the model's layers.
        ranks: number of ranks of the mesh.
        tokens: number of tokens of a step.
    """
    count, rate = parameters(document, sizes, pattern), _measured_rate()
    runs = ranks + _REPEATS
    overhead = pattern.layers * _LAYER_SECONDS * (1 + sizes.get("experts", 0) / 2)
    seconds = _START_SECONDS + runs * _STEPS * (6 * count * tokens / rate + overhead)
    return Cost(count, count * _BYTES * (ranks + 1), seconds, rate)


def _measured_rate() -> float:
    """Return the floating-point operations per second of a matrix product here, on one core."""
    matrix = np.ones((_MATRIX, _MATRIX), dtype=np.float32)
    best = math.inf
    for _ in range(5):
        before = time.perf_counter()
        matrix @ matrix
        best = min(best, time.perf_counter() - before)
    return 2 * _MATRIX**3 / max(best, 1e-9)


def parameters(document: Document, sizes: Sizes, pattern: Pattern) -> int:
    """Return the approximate number of parameters of a model: matrices, without biases and norms.

    Args:
        document: configuration that determines which matrices exist.
        sizes: sizes by role.
        pattern: pattern of the layers.
    """
    hidden = sizes["hidden"]
    plain = {key.rpartition(".")[2]: value for key, value in document.values.items()}
    untied = bool(plain.get("untie-embeddings-and-output-weights")) or document.format == "mindformers"
    count = sizes.get("vocab", 0) * hidden * (1 if plain.get("tie_word_embeddings", not untied) else 2)
    attention = _attention_layers(pattern)
    count += attention * _attention(sizes)
    count += (pattern.layers - attention) * _recurrent(sizes, plain.get("mamba_expand") or 2)
    ungated = str(plain.get("model_type", "")).startswith(_UNGATED)
    matrices = 2 if ungated or (document.format == "megatron" and "swiglu" not in plain) else 3
    dense = matrices * hidden * (sizes.get("intermediate") or 4 * hidden)
    sparse = _expert_layers(pattern) if "experts" in sizes else 0
    count += (pattern.layers - sparse) * dense
    if sparse:
        width = sizes.get("moe_intermediate") or sizes["intermediate"]
        shared = sizes.get("shared", 0) * width + sizes.get("shared_intermediate", 0)
        count += sparse * (hidden * (matrices * (sizes["experts"] * width + shared) + sizes["experts"]))
    return count


def _attention(sizes: Sizes) -> int:
    """Return the parameters of the attention of a layer."""
    hidden, heads = sizes["hidden"], sizes["heads"]
    if "kv_lora" in sizes:
        query = heads * (sizes["nope"] + sizes["rope"])
        rank = sizes.get("q_lora", 0)
        count = (hidden + query) * rank if rank else hidden * query
        count += hidden * (sizes["kv_lora"] + sizes["rope"])
        return count + sizes["kv_lora"] * heads * (sizes["nope"] + sizes["v_head"]) + heads * sizes["v_head"] * hidden
    return 2 * hidden * sizes["head_dim"] * (heads + sizes["kv_heads"])


def _recurrent(sizes: Sizes, expand: int) -> int:
    """Return the parameters of linear attention, or of a layer of Mamba."""
    hidden = sizes["hidden"]
    if "linear_key_heads" in sizes:
        keys = sizes["linear_key_heads"] * sizes["linear_key_dim"]
        return hidden * (2 * keys + 3 * sizes["linear_value_heads"] * sizes["linear_value_dim"])
    inner = expand * hidden
    return 3 * inner * hidden + inner * (2 * sizes.get("dt_rank", 0) + 3 * sizes.get("state", 0))


def _attention_layers(pattern: Pattern) -> int:
    for kinds in pattern.lists.values():
        if any("attention" in str(kind) for kind in kinds):
            return sum("attention" in str(kind) and "linear" not in str(kind) for kind in kinds)
    return pattern.layers // _period(pattern, _ATTENTION_PERIODS)


def _expert_layers(pattern: Pattern) -> int:
    for key, kinds in pattern.lists.items():
        if key.rpartition(".")[2] in _EXPERT_LISTS:
            return sum(kind in {1, "sparse"} for kind in kinds)
    return (pattern.layers - pattern.dense) // _period(pattern, _EXPERT_PERIODS)


def _period(pattern: Pattern, names: tuple[str, ...]) -> int:
    return math.lcm(*(period for key, period in pattern.periods.items() if key.rpartition(".")[2] in names))
