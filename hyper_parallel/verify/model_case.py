"""The results of SPEC and PLAN: a model with its data and loss, and the plan that parallelizes it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel._text import an_object
from hyper_parallel.core.dtensor.placements import Placement, Shard
from hyper_parallel.core.tensor_parallel.completion import complete_plan
from hyper_parallel.core.tensor_parallel.plan import flat_plan
from hyper_parallel.core.tensor_parallel.plan_names import resolve_plan
from hyper_parallel.errors import PlanError
from hyper_parallel.verify.frameworks.contract.training import OPTIMIZERS
from hyper_parallel.verify.input_error import InputError

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.verify.training_loop import Training

__all__ = ["ModelCase", "ParallelPlan", "array_of_numbers", "as_case", "as_plan"]


@dataclass(frozen=True)
class ModelCase:
    """A model to train, as single-device code.

    Attributes:
        build: function that returns a new model, called once per run; its initial weights may differ between calls,
            because every run starts with the weights of rank 0. Or a model, of which every run uses a deep copy.
        batches: one per step, repeated from the first when they are used up: tuples of NumPy arrays or plain tensors.
        loss: function ``loss(output, batch)`` that returns a tensor with one number; ``batch`` is a tuple of tensors.
        inputs: number of arrays of a batch, from the first, with which the model is called; by default all but the
            last.
        optimizer: ``sgd``, ``adamw``, or a function of the list of parameters that returns the framework's optimizer.
        learning_rate: learning rate of ``sgd`` and ``adamw``.
        scheduler: function of the optimizer that returns an object; its ``step()`` is called after each step.
        step: the training step as the user writes it, called with a
            :class:`~hyper_parallel.verify.training_loop.Training`; it runs forward, backward and optimizer, and returns
            the loss. By default, the harness does this.
        accumulate: number of batches per step; each loss is divided by this number.
        clip: maximum norm of the gradients, if they are clipped.
        hooks: function that registers hooks; called with each model, single-device and parallel, before training.
        context: function that returns a context manager around a training step of both models, such as autocast.

    Raises:
        InputError: (a ValueError) there are no batches, the optimizer is unknown, another option is of the wrong kind,
            or options contradict each other.
    """

    build: Callable[[], Any]
    batches: Sequence[tuple[Any, ...]]
    loss: Callable[[Any, tuple[Any, ...]], Any]
    inputs: int | None = None
    optimizer: str | Callable[[list[Any]], Any] = "sgd"
    learning_rate: float = 0.1
    scheduler: Callable[[Any], Any] | None = None
    step: Callable[[Training], Any] | None = None
    accumulate: int = 1
    clip: float | None = None
    hooks: Callable[[Any], None] | None = None
    context: Callable[[], Any] | None = None

    def __post_init__(self) -> None:
        """Raise an error for a case that cannot be trained."""
        _check_callable("ModelCase", "loss", self.loss, needed=True)
        object.__setattr__(self, "build", _builder(self.build))
        _check_batches(self.batches)
        inputs: Any = self.inputs
        if inputs is not None and not (type(inputs) is int and 0 <= inputs <= len(self.batches[0])):
            msg = (
                f"ModelCase: inputs is {inputs!r}; it must be the number of arrays of a batch that are passed to the "
                f"model, from 0 to {len(self.batches[0])}"
            )
            raise InputError(msg)
        _check_optimizer("ModelCase", self.optimizer)
        rate: Any = self.learning_rate
        if not (_is_number(rate) and 0 < rate < math.inf):
            msg = f"ModelCase: learning_rate is {rate!r}; it must be a number above 0"
            raise InputError(msg)
        for name in ("scheduler", "step", "hooks", "context"):
            _check_callable("ModelCase", name, getattr(self, name))
        accumulate: Any = self.accumulate
        if type(accumulate) is not int or accumulate < 1:
            msg = f"ModelCase: accumulate is {accumulate!r}; it must be the number of batches per step, at least 1"
            raise InputError(msg)
        clip: Any = self.clip
        if clip is not None and not (_is_number(clip) and clip > 0):
            msg = f"ModelCase: clip is {clip!r}; it must be the largest allowed norm of the gradients, a number above 0"
            raise InputError(msg)
        if self.step is not None and self.clip is not None:
            msg = "ModelCase: step= does its own clipping; leave out clip=, and call training.clip(max_norm) in step"
            raise InputError(msg)

    def micro_batches(self, step: int) -> list[tuple[Any, ...]]:
        """Return the batches of ``step`` (from 0); their number is ``accumulate``."""
        first = step * self.accumulate
        return [tuple(self.batches[(first + index) % len(self.batches)]) for index in range(self.accumulate)]

    def model_inputs(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the part of a batch with which the model is called."""
        return batch[: len(batch) - 1 if self.inputs is None else self.inputs]


@dataclass(frozen=True)
class ParallelPlan:
    """The plan that parallelizes a model.

    Attributes:
        styles: the plan of ``parallelize_module``: maps a module path or pattern to a style or its name. Or a function
            ``parallelize(model, mesh)``, which changes the model in place or returns another.
        batch: per mesh axis, the placement of every array of a batch; axes left out are Replicate. With None, arrays
            stay plain tensors, complete on every rank, and the styles' input layouts determine their layouts. Otherwise
            all inputs are DTensors, and parameters and buffers that no style covers are replicated.
        context: function that returns a context manager around a training step, such as ``loss_parallel``.
        optimizer: optimizer of the parallel model, instead of the case's.
        scheduler: scheduler of the parallel model, instead of the case's.
        step: training step of the parallel model, instead of the case's.
        hooks: hooks of the parallel model, instead of the case's.

    Raises:
        InputError: (a ValueError) an option has the wrong kind of value.
    """

    styles: Mapping[str, Any] | Callable[[Any, DeviceMesh], Any]
    batch: Mapping[str, Placement] | None = None
    context: Callable[[], Any] | None = None
    optimizer: str | Callable[[list[Any]], Any] | None = None
    scheduler: Callable[[Any], Any] | None = None
    step: Callable[[Training], Any] | None = None
    hooks: Callable[[Any], None] | None = None

    def __post_init__(self) -> None:
        """Raise an error for a plan that cannot be run."""
        styles: Any = self.styles
        if not isinstance(styles, Mapping) and not callable(styles):
            msg = (
                f"ParallelPlan: styles is {an_object(styles)}; it must be a mapping of module patterns to "
                "styles, or a function of model and mesh"
            )
            raise InputError(msg)
        if isinstance(styles, Mapping):
            _check_styles(styles)
        if self.batch is not None:
            _check_batch_placements(self.batch)
        if self.optimizer is not None:
            _check_optimizer("ParallelPlan", self.optimizer)
        for name in ("context", "scheduler", "step", "hooks"):
            _check_callable("ParallelPlan", name, getattr(self, name))

    def complete(self, model: Any) -> ParallelPlan:
        """Return this plan with styles for the modules of ``model`` that it does not cover.

        See :func:`~hyper_parallel.core.tensor_parallel.complete_plan`. The output of ``model`` is plain if and only if
        batches are.

        Raises:
            InputError: (a ValueError) the styles are a function.
            PlanError: (a ValueError) the plan does not match ``model``, or the style of a module cannot be determined.
        """
        if not isinstance(self.styles, Mapping):
            msg = (
                "ParallelPlan.complete: styles is a function, so nothing is known about what it covers; give styles by "
                "path"
            )
            raise InputError(msg)
        return replace(self, styles=complete_plan(model, self.styles, plain_output=self.batch is None))

    def applied_to(self, case: ModelCase) -> ModelCase:
        """Return ``case`` with the options of this plan."""
        options = {name: getattr(self, name) for name in ("optimizer", "scheduler", "step", "hooks")}
        return replace(case, **{name: value for name, value in options.items() if value is not None})


_OPTIONS = tuple(name for name in ModelCase.__dataclass_fields__ if name not in ("build", "batches", "loss"))


def array_of_numbers(item: Any, index: int) -> Any:
    """Return entry ``index`` of a batch as a NumPy array.

    Raises:
        InputError: the entry is not an array of numbers.
    """
    try:
        array = np.asarray(item)
    except ValueError:  # rows of different lengths
        array = np.asarray(None)
    if array.dtype.kind in "OSU":
        msg = f"SPEC: array {index} of a batch is {an_object(item)}; it must be an array of numbers"
        raise InputError(msg)
    return array


def as_case(value: Any) -> ModelCase:
    """Return the case for the result of a SPEC function.

    Args:
        value: a ModelCase, a mapping of a ModelCase's fields (``model`` may be used instead of ``build``), or
            ``(model, batches, loss)``.

    Raises:
        InputError: ``value`` has none of these forms.
    """
    if isinstance(value, ModelCase):
        return value
    if isinstance(value, (tuple, list)) and len(value) == 3:
        model, batches, loss = value
        return ModelCase(model, batches, loss)
    if isinstance(value, Mapping):
        fields = dict(value)
        if "model" in fields:
            fields["build"] = fields.pop("model")
        if {"build", "batches", "loss"} <= set(fields) <= set(ModelCase.__dataclass_fields__):
            return ModelCase(**fields)
        msg = (
            f"SPEC returned a mapping with keys {', '.join(sorted(map(str, value)))}; it must have the keys build (or "
            f"model), batches and loss, and may have {', '.join(_OPTIONS)}"
        )
        raise InputError(msg)
    if isinstance(value, (tuple, list)):
        what = f"{type(value).__name__} of {len(value)} item{'s' * (len(value) != 1)}"
        msg = f"SPEC must return three items: model, batches, loss; it returned a {what}"
        raise InputError(msg)
    msg = (
        f"SPEC returned {an_object(value)}; it must return three items (model, batches, loss), a mapping with these "
        "keys, or a hyper_parallel.verify.ModelCase"
    )
    raise InputError(msg)


def as_plan(value: Any, axes: Sequence[str]) -> ParallelPlan:
    """Return the plan for the result of a PLAN function.

    Args:
        value: a ParallelPlan, a mapping of styles, or a function ``parallelize(model, mesh)``. With a mapping, the
            batch is sharded over axis ``dp`` of a mesh of several axes; on a mesh of one axis, the arrays of the batch
            stay plain tensors. With a function they stay plain tensors too.
        axes: names of the mesh's axes.

    Raises:
        InputError: ``value`` has none of these forms.
    """
    if isinstance(value, ParallelPlan):
        if unknown := [axis for axis in value.batch or () if axis not in axes]:
            msg = f"PLAN: batch names axis {unknown[0]!r}, which the mesh does not have; its axes are {', '.join(axes)}"
            raise InputError(msg)
        return value
    if not isinstance(value, Mapping) and (not callable(value) or hasattr(value, "register_forward_pre_hook")):
        msg = (
            f"PLAN returned {an_object(value)}; it must return a mapping of module patterns to styles, "
            "a function of model and mesh, or a hyper_parallel.verify.ParallelPlan"
        )
        raise InputError(msg)
    if len(axes) == 1 or not isinstance(value, Mapping):
        return ParallelPlan(value)
    return ParallelPlan(value, {"dp": Shard(0)} if "dp" in axes else {})


def _check_styles(styles: Mapping[Any, Any]) -> None:
    """Raise an InputError if ``styles`` is not a plan of ``parallelize_module``."""
    try:
        list(flat_plan(resolve_plan(None, styles)))
    except (TypeError, PlanError) as error:
        msg = f"ParallelPlan: {error}"
        raise InputError(msg) from None


def _check_optimizer(owner: str, optimizer: Any) -> None:
    """Raise an InputError if ``optimizer`` is neither a known name nor a function."""
    if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
        msg = f"{owner}: optimizer {optimizer!r} is unknown; known optimizers: {', '.join(OPTIMIZERS)}"
        raise InputError(msg)
    if not isinstance(optimizer, str) and not callable(optimizer):
        msg = (
            f"{owner}: optimizer is {an_object(optimizer)}; it must be {' or '.join(map(repr, OPTIMIZERS))}, or a "
            "function of the list of parameters: each of the two models needs an optimizer of its own parameters"
        )
        raise InputError(msg)


def _check_batches(batches: Any) -> None:
    """Raise an InputError if ``batches`` is not a sequence of tuples of arrays."""
    if isinstance(batches, (str, bytes)) or not (hasattr(batches, "__len__") and hasattr(batches, "__getitem__")):
        msg = f"ModelCase: batches is {an_object(batches)}; it must be a list of tuples of arrays, one per step"
        raise InputError(msg)
    if not len(batches):
        msg = "ModelCase: batches is empty; give at least one tuple of arrays"
        raise InputError(msg)
    wrong = [batch for batch in batches if not isinstance(batch, (tuple, list)) or not batch]
    if wrong:
        what = "empty" if isinstance(wrong[0], (tuple, list)) else an_object(wrong[0])
        msg = f"ModelCase: a batch is {what}; each batch must be a tuple of arrays, such as (inputs, labels)"
        raise InputError(msg)


def _check_batch_placements(batch: Any) -> None:
    """Raise an InputError if ``batch`` does not map mesh axes to placements."""
    if not isinstance(batch, Mapping):
        what = an_object(batch)
    else:
        pairs = [f"{axis!r}: {value!r}" for axis, value in batch.items() if not _is_placed(axis, value)]
        if not pairs:
            return
        what = f"{{{pairs[0]}}}"
    msg = f"ParallelPlan: batch is {what}; it must map mesh axes to placements, such as {{'dp': Shard(0)}}"
    raise InputError(msg)


def _is_placed(axis: Any, value: Any) -> bool:
    return isinstance(axis, str) and isinstance(value, Placement)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_callable(owner: str, name: str, value: Any, *, needed: bool = False) -> None:
    """Raise an InputError if the option ``name`` is not a function, although it is set or ``needed``."""
    if (needed or value is not None) and not callable(value):
        msg = f"{owner}: {name} is {an_object(value)}; it must be a function"
        raise InputError(msg)


def _builder(model: Any) -> Callable[[], Any]:
    """Return a function that builds the model: deep copies of a module, or the function itself."""
    if not isinstance(model, type) and (hasattr(model, "forward") or hasattr(model, "construct")):
        return lambda: copy.deepcopy(model)
    if callable(model):
        built: Callable[[], Any] = model
        return built
    msg = f"ModelCase: build is {an_object(model)}; it must be a model, or a function that builds one"
    raise InputError(msg)
