"""What is verified: a model with its data and loss, and the plan that makes it parallel."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.placements import Placement, Shard
from hyper_parallel.platform.contract.training import OPTIMIZERS

__all__ = ["InputError", "ModelCase", "ParallelPlan", "as_case", "as_plan"]


class InputError(ValueError):
    """What was asked for cannot be verified: a wrong SPEC, PLAN, mesh, world size or fault."""


@dataclass(frozen=True)
class ModelCase:
    """A model to train, as single-device code.

    Attributes:
        build: returns a fresh model; called once per run that is compared. Its initial weights need not repeat:
            rank 0's go to every run.
        batches: one per step, taken in turn: a tuple of NumPy arrays (or plain tensors).
        loss: ``loss(output, batch)``, a scalar tensor; ``batch`` holds tensors.
        inputs: how many arrays of a batch, from the first, the model is called with; by default all but the last.
        optimizer: ``sgd`` or ``adamw``.
        learning_rate: of the optimizer.
    """

    build: Callable[[], Any]
    batches: Sequence[tuple[Any, ...]]
    loss: Callable[[Any, tuple[Any, ...]], Any]
    inputs: int | None = None
    optimizer: str = "sgd"
    learning_rate: float = 0.1

    def __post_init__(self) -> None:
        """Refuse what cannot train."""
        if not self.batches:
            msg = "ModelCase: batches is empty; give at least one tuple of arrays"
            raise InputError(msg)
        if self.optimizer not in OPTIMIZERS:
            msg = f"ModelCase: optimizer {self.optimizer!r} is unknown; known: {', '.join(OPTIMIZERS)}"
            raise InputError(msg)

    def batch(self, step: int) -> tuple[Any, ...]:
        """The batch of ``step``."""
        return tuple(self.batches[step % len(self.batches)])

    def model_inputs(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the model is called with."""
        return batch[: len(batch) - 1 if self.inputs is None else self.inputs]


@dataclass(frozen=True)
class ParallelPlan:
    """How a model becomes parallel.

    Attributes:
        styles: the plan of ``parallelize_module``: module path or pattern to style.
        batch: per mesh axis, how every array of a batch is placed; axes left out are Replicate. With None arrays
            stay plain, whole on every rank, and the styles' input layouts say what they are. Otherwise everything
            that flows is a DTensor, and parameters and buffers that no style covers are replicated.
        context: entered around forward and loss, such as ``loss_parallel``.
    """

    styles: Mapping[str, Any]
    batch: Mapping[str, Placement] | None = None
    context: Callable[[], Any] | None = None


def as_case(value: Any) -> ModelCase:
    """Read what a SPEC function returned: a ModelCase, a mapping of its fields, or ``(model, batches, loss)``.

    Raises:
        ValueError: it is none of them, with what it is.
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
        known = ModelCase.__dataclass_fields__
        missing = {"build", "batches", "loss"} - set(fields)
        unknown = set(fields) - set(known)
        if not missing and not unknown:
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
    """Read what a PLAN function returned: a ParallelPlan, or a mapping of styles.

    With a bare mapping, the batch is split over axis ``dp`` of a mesh of several axes, and plain on a mesh of one.

    Raises:
        ValueError: it is neither.
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
    """A model's deep copies, or the function that builds it."""
    if not isinstance(model, type) and (hasattr(model, "forward") or hasattr(model, "construct")):
        return lambda: copy.deepcopy(model)
    if callable(model):
        built: Callable[[], Any] = model
        return built
    msg = f"SPEC: model is {type(model).__name__}; give a module or a function that builds one"
    raise InputError(msg)
