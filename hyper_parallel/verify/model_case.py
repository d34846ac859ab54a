"""What SPEC and PLAN return: a model with its data and loss, and the plan that makes it parallel."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.placements import Placement, Shard
from hyper_parallel.platform.contract.training import OPTIMIZERS

__all__ = ["InputError", "ModelCase", "ParallelPlan", "as_case", "as_plan"]


class InputError(ValueError):
    """The input cannot be verified: a wrong SPEC, PLAN, mesh, world size or fault."""


@dataclass(frozen=True)
class ModelCase:
    """A model to train, as single-device code.

    Attributes:
        build: returns a fresh model; called once per run. Its initial weights may differ between calls: every run
            starts with those of rank 0.
        batches: one per step, repeated from the first when they are used up: tuples of NumPy arrays or plain tensors.
        loss: ``loss(output, batch)`` returns a tensor of one number; ``batch`` is a tuple of tensors.
        inputs: how many arrays of a batch, from the first, the model is called with; by default all but the last.
        optimizer: ``sgd`` or ``adamw``.
        learning_rate: of the optimizer.

    Raises:
        InputError: (a ValueError) there are no batches, or the optimizer is unknown.
    """

    build: Callable[[], Any]
    batches: Sequence[tuple[Any, ...]]
    loss: Callable[[Any, tuple[Any, ...]], Any]
    inputs: int | None = None
    optimizer: str = "sgd"
    learning_rate: float = 0.1

    def __post_init__(self) -> None:
        """Refuse a case that cannot be trained."""
        if not self.batches:
            msg = "ModelCase: batches is empty; give at least one tuple of arrays"
            raise InputError(msg)
        if self.optimizer not in OPTIMIZERS:
            msg = f"ModelCase: optimizer {self.optimizer!r} is unknown; known: {', '.join(OPTIMIZERS)}"
            raise InputError(msg)

    def batch(self, step: int) -> tuple[Any, ...]:
        """Return the batch of ``step`` (from 0)."""
        return tuple(self.batches[step % len(self.batches)])

    def model_inputs(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the part of a batch that the model is called with."""
        return batch[: len(batch) - 1 if self.inputs is None else self.inputs]


@dataclass(frozen=True)
class ParallelPlan:
    """How a model becomes parallel.

    Attributes:
        styles: the plan of ``parallelize_module``: module path or pattern to style.
        batch: per mesh axis, the placement of every array of a batch; axes left out are Replicate. With None, arrays
            stay plain tensors, whole on every rank, and the styles' input layouts say what they are. Otherwise all
            inputs are DTensors, and parameters and buffers that no style covers are replicated.
        context: returns a context manager that is entered around a training step, such as ``loss_parallel``.
    """

    styles: Mapping[str, Any]
    batch: Mapping[str, Placement] | None = None
    context: Callable[[], Any] | None = None


def as_case(value: Any) -> ModelCase:
    """Return the case that a SPEC function's result describes.

    Args:
        value: a ModelCase, a mapping of its fields (``model`` in place of ``build`` if wanted), or
            ``(model, batches, loss)``.

    Raises:
        InputError: the value is none of them.
    """
    if isinstance(value, ModelCase):
        return value
    if isinstance(value, tuple) and len(value) == 3:
        model, batches, loss = value
        return ModelCase(_builder(model), batches, loss)
    if isinstance(value, Mapping):
        fields = dict(value)
        if "model" in fields:
            fields["build"] = _builder(fields.pop("model"))
        if {"build", "batches", "loss"} <= set(fields) <= set(ModelCase.__dataclass_fields__):
            return ModelCase(**fields)
        msg = (
            f"SPEC returned a mapping with keys {', '.join(sorted(map(str, value)))}; it needs build (or model), "
            f"batches, loss, and may have inputs, optimizer, learning_rate"
        )
        raise InputError(msg)
    msg = (
        f"SPEC returned {type(value).__name__}; it must return a hyper_parallel.verify.ModelCase, a mapping of its "
        "fields, or (model, batches, loss)"
    )
    raise InputError(msg)


def as_plan(value: Any, axes: Sequence[str]) -> ParallelPlan:
    """Return the plan that a PLAN function's result describes.

    Args:
        value: a ParallelPlan, or a mapping of styles. With a mapping, the batch is sharded over axis ``dp`` of a mesh
            of several axes, and plain on a mesh of one axis.
        axes: names of the mesh's axes.

    Raises:
        InputError: the value is neither.
    """
    if isinstance(value, ParallelPlan):
        return value
    if not isinstance(value, Mapping):
        msg = (
            f"PLAN returned {type(value).__name__}; it must return a mapping of module patterns to styles, "
            "or a hyper_parallel.verify.ParallelPlan"
        )
        raise InputError(msg)
    if len(axes) == 1:
        return ParallelPlan(value)
    return ParallelPlan(value, {"dp": Shard(0)} if "dp" in axes else {})


def _builder(model: Any) -> Callable[[], Any]:
    """Return a function that builds the model: deep copies of a module, or the function itself."""
    if not isinstance(model, type) and (hasattr(model, "forward") or hasattr(model, "construct")):
        return lambda: copy.deepcopy(model)
    if callable(model):
        built: Callable[[], Any] = model
        return built
    msg = f"SPEC: model is {type(model).__name__}; give a module or a function that builds one"
    raise InputError(msg)
