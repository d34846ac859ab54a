"""Types for training in the harness: configuration of the reference model, result of a step, optimizer interface."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "ADAMW_EPSILON",
    "OPTIMIZERS",
    "LanguageModelConfig",
    "StepResult",
    "TrainingOptimizer",
    "causal_mask",
    "check_names",
    "first_paths",
    "rotary_tables",
]

OPTIMIZERS = ("sgd", "adamw")
ADAMW_EPSILON = 1e-8
"""The ``eps`` of both frameworks' AdamW."""


@dataclass(frozen=True)
class LanguageModelConfig:
    """Sizes and choices of the reference transformer.

    Attributes:
        vocab: number of tokens: 256 bytes and a few special tokens.
        dim: width of the residual stream.
        layers: number of blocks.
        heads: query heads; a multiple of ``kv_heads``.
        kv_heads: key and value heads.
        head_dim: width of one head, even.
        ffn: inner width of the MLP.
        length: tokens per sequence.
        norm: ``rms`` or ``layer``.
        tied: whether the head uses the embedding's weight.
        bias: whether the linear layers of the blocks have a bias.
        dtype: ``float64`` or ``float32``.
        eps: epsilon of the norms.
        rotary_base: base of the rotary embedding's frequencies.
    """

    vocab: int = 259
    dim: int = 20
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 6
    ffn: int = 37
    length: int = 13
    norm: str = "rms"
    tied: bool = False
    bias: bool = True
    dtype: str = "float64"
    eps: float = 1e-6
    rotary_base: float = 10000.0

    def __post_init__(self) -> None:
        """Check the sizes."""
        if self.heads % self.kv_heads or self.head_dim % 2:
            msg = (
                f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}, "
                f"and head_dim={self.head_dim} must be even"
            )
            raise ValueError(msg)
        if self.norm not in ("rms", "layer"):
            msg = f"norm={self.norm!r} must be 'rms' or 'layer'"
            raise ValueError(msg)


@dataclass(frozen=True)
class StepResult:
    """The results of one forward and backward.

    Attributes:
        loss: the scalar, plain or a DTensor.
        gradients: plain tensors or DTensors by parameter path; a tied parameter appears under its first path. None for
            a parameter that the loss does not depend on.
    """

    loss: Any
    gradients: dict[str, Any]


class TrainingOptimizer(abc.ABC):
    """An optimizer of one model's parameters, with the interface that the verifier reads.

    Attributes:
        engine: object that a user's step function uses: the framework's optimizer, or, if gradients are values, a
            callable that takes the gradients in the order of the parameters.
    """

    engine: Any

    @abc.abstractmethod
    def __call__(self, result: StepResult) -> None:
        """Apply one step with the gradients of ``result``."""

    @abc.abstractmethod
    def watch(self, before: Callable[[dict[str, Any]], None]) -> None:
        """Call ``before`` with the gradients by path at the start of every step; missing gradients are None."""

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state: numbers, tensors and DTensors by ``<parameter path>.<name>``."""


def first_paths(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``parameters`` with each object once, under its first path."""
    seen: set[int] = set()
    unique = {}
    for path, value in parameters.items():
        if id(value) not in seen:
            seen.add(id(value))
            unique[path] = value
    return unique


def rotary_tables(config: LanguageModelConfig) -> tuple[Any, Any]:
    """Return NumPy cosines and sines (length, head_dim / 2) of the rotary embedding (Su et al., arXiv 2104.09864)."""
    import numpy as np

    half = config.head_dim // 2
    frequencies = config.rotary_base ** (-np.arange(half) / half)
    angles = np.arange(config.length)[:, None] * frequencies[None, :]
    return np.cos(angles).astype(config.dtype), np.sin(angles).astype(config.dtype)


def causal_mask(config: LanguageModelConfig) -> Any:
    """Return the NumPy causal attention bias (length, length): zero where a token may attend, else minus infinity."""
    import numpy as np

    ahead = np.triu(np.ones((config.length, config.length)), 1) > 0
    return np.where(ahead, -np.inf, 0.0).astype(config.dtype)


def check_names(names: Sequence[str], wanted: Mapping[str, Any], caller: str) -> None:
    """Check that every key of ``wanted`` is in ``names``; ``caller`` starts the message.

    Raises:
        ValueError: a key is not among ``names``.
    """
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        msg = f"{caller}: no parameter {', '.join(unknown)}; the model has {', '.join(names)}"
        raise ValueError(msg)
