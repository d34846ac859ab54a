"""Facet *training*: reference model, training steps and optimizers for the verifier, the same on both frameworks."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.platform.contract.modules import ModulesFacet

__all__ = [
    "ADAMW_EPSILON",
    "OPTIMIZERS",
    "LanguageModelConfig",
    "StepResult",
    "TrainingFacet",
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
    """An optimizer of one model's parameters, and what the verifier reads of it.

    Attributes:
        engine: what a user's step function calls: the framework's optimizer, or where gradients are values a callable
            that takes them in the order of the parameters.
    """

    engine: Any

    @abc.abstractmethod
    def __call__(self, result: StepResult) -> None:
        """Apply one step, on the gradients of ``result``."""

    @abc.abstractmethod
    def watch(self, before: Callable[[dict[str, Any]], None]) -> None:
        """Call ``before`` with the gradients by path at the start of every step; None where there is none.

        ``before`` may write into them by :meth:`TrainingFacet.overwritten` and put the result back into the dict.
        """

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state: numbers, tensors and DTensors by ``<parameter path>.<name>``."""

    @abc.abstractmethod
    def learning_rates(self) -> list[float]:
        """Return the learning rate of every parameter group."""


class TrainingFacet(ModulesFacet):
    """Facet *training*: models, steps and optimizers, for plain models and for models of DTensors alike."""

    @abc.abstractmethod
    def reference_model(self, config: LanguageModelConfig) -> Any:
        """Return the small transformer, as single-device code; parameter paths are equal on every framework."""

    @abc.abstractmethod
    def reference_loss(self, logits: Any, labels: Any) -> Any:
        """Return the mean cross-entropy of ``logits`` (batch, length, vocab) against ``labels`` (batch, length)."""

    @abc.abstractmethod
    def tutorial_model(self, inputs: int, hidden: int, outputs: int, dtype: str) -> Any:
        """Return two layers, ``up`` and ``down``, written as the framework's tutorials do.

        Args:
            inputs: size of what ``up`` takes.
            hidden: size of what it returns.
            outputs: size of what ``down`` returns.
            dtype: ``float64`` or ``float32``.
        """

    @abc.abstractmethod
    def tutorial_step(self, training: Any) -> Any:
        """Train one step as the framework's tutorials do, with a checkpoint that is saved and loaded.

        Args:
            training: a :class:`~hyper_parallel.verify.training_loop.Training` of one batch: inputs and targets.

        Returns:
            the loss; on MindSpore plus that of a model that loaded the checkpoint.
        """

    @abc.abstractmethod
    def load_arrays(self, model: Any, arrays: Mapping[str, Any]) -> None:
        """Write NumPy arrays, by path, to the plain parameters and buffers of ``model``."""

    @abc.abstractmethod
    def trainable(self, model: Any) -> dict[str, Any]:
        """Return the parameters that receive gradients, each once, under its first path."""

    def buffers(self, model: Any) -> dict[str, Any]:
        """Return the buffers of a model, each once, under its first path."""
        buffers: dict[str, Any] = {}
        for path, cell in self.get_cells_and_names(model):
            start = f"{path}." if path else ""
            buffers.update({f"{start}{name}": value for name, value in self.direct_buffers(cell).items()})
        return first_paths(buffers)

    def infers_sizes(self, model: Any) -> bool:
        """Return whether ``model`` has parameters whose sizes its first forward infers."""
        del model
        return False

    @abc.abstractmethod
    def training_step(self, model: Any, *compute_losses: Callable[[], Any]) -> StepResult:
        """Run functions that call ``model``, and differentiate their scalar losses, seeded with 1.

        Returns:
            the sum of the losses, and of their gradients.
        """

    @abc.abstractmethod
    def optimizer(
        self, model: Any, optimizer: str | Callable[[list[Any]], Any], learning_rate: float
    ) -> TrainingOptimizer:
        """Return an optimizer of the framework for the model's parameters.

        Args:
            model: a model of plain tensors or DTensors.
            optimizer: ``sgd`` (momentum 0.9), ``adamw`` (weight decay 0.1), or a function of the list of parameters
                that returns an optimizer of the framework.
            learning_rate: of the optimizers with a name.

        Raises:
            ValueError: unknown name, or the function returns something else.
        """

    @abc.abstractmethod
    def clip_gradients(self, model: Any, gradients: Mapping[Any, Any], max_norm: float) -> Any:
        """Scale ``gradients`` in place by the library's ``clip_grad_norm_``; return the norm before, a plain tensor."""

    @abc.abstractmethod
    def seed(self, seed: int) -> None:
        """Start the framework's own generators of this rank from ``seed``."""

    @abc.abstractmethod
    def overwritten(self, local: Any, array: Any) -> Any:
        """Return the plain gradient ``local`` with the values ``array``, where the optimizer reads them."""

    @abc.abstractmethod
    def watch_random(self, model: Any) -> Callable[[], str | None]:
        """Watch ``model``; return a function that returns the first module whose forward sampled, or None."""

    @abc.abstractmethod
    def indexed_draws(self, model: Any, place: Callable[[Any], tuple[Any, Any, Any]]) -> AbstractContextManager[Any]:
        """Let random functions on plain tensors in ``model`` draw from the stream of DTensors inside a block.

        Args:
            model: whose dropout layers are meant, where functions cannot be intercepted.
            place: returns mesh, placements and global shape of a plain tensor; called before each draw.
        """

    def on_device(self, device_type: str) -> AbstractContextManager[Any]:
        """Inside this context, new tensors are on ``device_type``; backward passes stay on their thread.

        TF32 and HF32 are off.

        Args:
            device_type: ``cpu``, which changes nothing, or the type of the process's card.

        Raises:
            UnsupportedOnBackend: this process has no such card.
        """
        if device_type not in ("cpu", self.device_type()):
            msg = (
                f"--device {device_type}: {self.platform_type} sees no such card here, only {self.device_type()}; "
                f"{self.missing_card(device_type)}, or use --device cpu"
            )
            raise UnsupportedOnBackend(msg)
        return nullcontext()

    def missing_card(self, device_type: str) -> str:
        """Return why this process has no card of this type, and what to do."""
        return f"check the driver and the build of the framework for {device_type}"

    @abc.abstractmethod
    def peak_bytes(self, device_type: str) -> Callable[[], int]:
        """Begin to look for the most bytes in use on a card; return a function that returns them.

        Args:
            device_type: ``cuda`` or ``npu``.
        """

    def single_threaded(self) -> AbstractContextManager[Any]:
        """Run operators in one thread inside a block, so that sums do not depend on the number of threads."""
        return nullcontext()

    def saved_for_backward(self, model: Any) -> AbstractContextManager[Callable[[], int] | None]:
        """Count what forward keeps for backward inside a block.

        Args:
            model: whose parameters are not counted.

        Returns:
            a context with a function that returns the most bytes that were kept at one time, or with None where the
            framework does not tell.
        """
        del model
        return nullcontext()

    def collective_owners(self, model: Any) -> dict[str, str]:
        """Return, by the names that the groups of ``fully_shard`` have in collectives, the paths of their modules."""
        del model
        return {}

    @abc.abstractmethod
    def generator_state(self) -> bytes | None:
        """Return the state of the framework's own generator of this rank; None where it cannot be read."""

    @abc.abstractmethod
    def advance_generator(self, shape: Sequence[int]) -> None:
        """Draw as many numbers as a tensor of ``shape`` has from the framework's own generator."""

    @abc.abstractmethod
    def linear_layer(self, inputs: int, outputs: int, *, dtype: Any) -> Any:
        """Return the framework's linear layer with a bias, initialised by the framework."""

    @abc.abstractmethod
    def parameter_with_gradient(self, gradient: Any) -> Any:
        """Return a parameter, or where gradients are values an object, whose ``gradient_of`` is ``gradient``."""

    @abc.abstractmethod
    def kept_operators(self) -> list[Any]:
        """Return operators of the reference model for selective checkpointing to keep: its matrix products."""

    def unknown_optimizer(self, name: str) -> ValueError:
        """Return the error for a name that is not in ``OPTIMIZERS``."""
        return ValueError(f"optimizer {name!r} is unknown; known: {', '.join(OPTIMIZERS)}")

    def no_optimizer(self, engine: Any, classes: str) -> ValueError:
        """Return the error for a function that returns no optimizer of the framework's ``classes``."""
        return ValueError(
            f"optimizer= returned {type(engine).__name__}; it is called with the list of parameters and must return a "
            f"{classes}"
        )


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
        ValueError: a key is not.
    """
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        msg = f"{caller}: no parameter {', '.join(unknown)}; the model has {', '.join(names)}"
        raise ValueError(msg)
