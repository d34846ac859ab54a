"""Training in one spelling: what a verifier must do to a model of either framework."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.platform.contract.modules import ModulesFacet

__all__ = [
    "ADAMW_EPSILON",
    "OPTIMIZERS",
    "LanguageModelConfig",
    "StepResult",
    "TrainingFacet",
    "causal_mask",
    "first_paths",
    "has_all",
    "rotary_tables",
]

OPTIMIZERS = ("sgd", "adamw")
ADAMW_EPSILON = 1e-8
"""What both frameworks' AdamW adds to the magnitude that it divides by."""


@dataclass(frozen=True)
class LanguageModelConfig:
    """Sizes and choices of the reference transformer.

    Attributes:
        vocab: number of tokens; 256 bytes and a few marks.
        dim: width of the residual stream.
        layers: number of blocks.
        heads: query heads; a multiple of ``kv_heads``.
        kv_heads: key and value heads.
        head_dim: width of one head, even.
        ffn: inner width of the MLP.
        length: tokens per sequence.
        norm: ``rms`` or ``layer``.
        tied: the head uses the embedding's weight.
        bias: linear layers of the blocks carry a bias.
        dtype: ``float64`` or ``float32``.
        eps: of the norms.
        rotary_base: of the rotary embedding's frequencies.
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
        """Refuse sizes that make no transformer."""
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
    """What one forward and backward gave.

    Attributes:
        loss: the scalar, plain or a DTensor.
        gradients: by parameter path, plain or DTensors; a parameter with several paths appears under its first.
            None where the loss does not depend on it.
    """

    loss: Any
    gradients: dict[str, Any]


class TrainingFacet(ModulesFacet):
    """Facet *training*: models, steps and optimizers, for plain models and for models of DTensors alike."""

    @abc.abstractmethod
    def reference_model(self, config: LanguageModelConfig) -> Any:
        """The small transformer, single-device code; parameter paths are equal on every framework."""

    @abc.abstractmethod
    def reference_loss(self, logits: Any, labels: Any) -> Any:
        """Mean cross-entropy of ``logits`` (batch, length, vocab) against ``labels`` (batch, length)."""

    @abc.abstractmethod
    def load_arrays(self, model: Any, arrays: Mapping[str, Any]) -> None:
        """Write NumPy values into the plain parameters and buffers of ``model``, by path."""

    @abc.abstractmethod
    def trainable(self, model: Any) -> dict[str, Any]:
        """Parameters that receive gradients, each once, under its first path."""

    def buffers(self, model: Any) -> dict[str, Any]:
        """What a model holds besides parameters, each once, under its first path."""
        held: dict[str, Any] = {}
        for path, cell in self.get_cells_and_names(model):
            start = f"{path}." if path else ""
            held.update({f"{start}{name}": value for name, value in self.direct_buffers(cell).items()})
        return first_paths(held)

    @abc.abstractmethod
    def training_step(self, model: Any, compute_loss: Callable[[], Any]) -> StepResult:
        """Run ``compute_loss`` (which calls ``model``) and differentiate its scalar, seeded with 1."""

    @abc.abstractmethod
    def optimizer(self, model: Any, name: str, learning_rate: float) -> Callable[[StepResult], None]:
        """The framework's own optimizer over the model's parameters; calling it applies one step.

        Args:
            model: plain or parallel.
            name: ``sgd`` (momentum 0.9) or ``adamw`` (weight decay 0.1).
            learning_rate: constant.

        Raises:
            ValueError: unknown name.
        """

    @abc.abstractmethod
    def overwritten(self, local: Any, array: Any) -> Any:
        """The plain gradient ``local`` with other values, where the optimizer finds it."""

    @abc.abstractmethod
    def watch_random(self, model: Any) -> Callable[[], str | None]:
        """Watch ``model`` from now on; the result tells the first module whose forward drew random numbers, or None."""

    @abc.abstractmethod
    def watch_gradient(self, tensor: Any, keep: Callable[[Any], None]) -> None:
        """Have ``keep`` called with the gradient of a plain ``tensor`` when backward computes it, if it does."""

    @abc.abstractmethod
    def linear_layer(self, inputs: int, outputs: int, *, dtype: Any) -> Any:
        """The framework's linear layer with a bias, initialised as the framework does it."""

    @abc.abstractmethod
    def parameter_with_gradient(self, gradient: Any) -> Any:
        """What ``gradient_of`` gives ``gradient`` for."""

    @abc.abstractmethod
    def kept_operators(self) -> list[Any]:
        """Operators of the reference model that selective checkpointing may keep: its matrix products."""

    def unknown_optimizer(self, name: str) -> ValueError:
        """The error for a name that is none of ``OPTIMIZERS``."""
        return ValueError(f"optimizer {name!r} is unknown; known: {', '.join(OPTIMIZERS)}")


def first_paths(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """``parameters`` with each object once, under the path that comes first."""
    seen: set[int] = set()
    found = {}
    for path, value in parameters.items():
        if id(value) not in seen:
            seen.add(id(value))
            found[path] = value
    return found


def rotary_tables(config: LanguageModelConfig) -> tuple[Any, Any]:
    """Cosines and sines (length, head_dim / 2) of the rotary embedding (Su et al., arXiv 2104.09864), in NumPy."""
    import numpy as np

    half = config.head_dim // 2
    frequencies = config.rotary_base ** (-np.arange(half) / half)
    angles = np.arange(config.length)[:, None] * frequencies[None, :]
    return np.cos(angles).astype(config.dtype), np.sin(angles).astype(config.dtype)


def causal_mask(config: LanguageModelConfig) -> Any:
    """What is added to attention scores (length, length): zero where a token may look, minus infinity elsewhere."""
    import numpy as np

    ahead = np.triu(np.ones((config.length, config.length)), 1) > 0
    return np.where(ahead, -np.inf, 0.0).astype(config.dtype)


def has_all(found: Sequence[str], wanted: Mapping[str, Any], what: str) -> None:
    """Raise a ValueError that names what is missing among ``found`` or unknown in ``wanted``."""
    unknown = sorted(set(wanted) - set(found))
    if unknown:
        msg = f"{what}: no parameter {', '.join(unknown)}; the model has {', '.join(found)}"
        raise ValueError(msg)
