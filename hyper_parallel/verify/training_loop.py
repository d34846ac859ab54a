"""The training step of the harness, and the object for a user's step function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel._text import an_object
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import module_scope
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.frameworks.contract.record_log import RecordLog, active_log
from hyper_parallel.verify.frameworks.contract.records import LocalValue
from hyper_parallel.verify.frameworks.contract.training import TrainingOptimizer
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.model_case import ModelCase

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["ModelTraining", "Training"]


class Training:
    """The argument of a user's step function.

    Attributes:
        model: the single-device model, or the parallel one.
        batches: the step's batches, tuples of tensors; their number is ``accumulate`` of the case.
        number: number of the step, from 0.
    """

    def __init__(self, owner: ModelTraining, number: int, batches: Sequence[tuple[Any, ...]]) -> None:
        self._owner = owner
        self.model, self.number, self.batches = owner.model, number, batches

    @property
    def optimizer(self) -> Any:
        """The optimizer; on MindSpore, a function of the gradients in the order of :attr:`parameters`."""
        return self._owner.optimizer().engine

    @property
    def scheduler(self) -> Any:
        """The result of the case's ``scheduler``, or None."""
        self._owner.optimizer()
        return self._owner.scheduler

    @property
    def parameters(self) -> list[Any]:
        """The trained parameters."""
        return list(harness_of(self._owner.platform).trainable(self.model).values())

    def loss(self, batch: tuple[Any, ...] | None = None) -> Any:
        """Return the case's loss of the model on ``batch``; the default is the step's first batch."""
        return self._owner.loss(self.batches[0] if batch is None else batch)

    def clip(self, max_norm: float, gradients: Sequence[Any] | None = None) -> Any:
        """Scale the gradients in place to a norm of at most ``max_norm``, and record the norm.

        Args:
            max_norm: upper limit of the 2-norm of all gradients.
            gradients: if gradients are values (MindSpore): those of :attr:`parameters`.

        Returns:
            the norm before clipping, a plain tensor.
        """
        return self._owner.clip(max_norm, dict(enumerate(gradients or ())))


class ModelTraining:
    """A model with its optimizer, loss and gradients.

    Args:
        platform: the framework.
        case: the case with the settings of training.
        model: the model.
        check_loss: called with every loss.

    Attributes:
        gradients: gradients that the optimizer read in the last step, by path; None for a parameter without a gradient.
        keeps_gradients: whether ``gradients`` are copies, which the step does not change later.
        scheduler: result of the case's ``scheduler``.
    """

    def __init__(self, platform: Platform, case: ModelCase, model: Any, check_loss: Callable[[Any], None]) -> None:
        self.platform, self.case, self.model, self._check_loss = platform, case, model, check_loss
        self.gradients: dict[str, Any] = {}
        self.keeps_gradients = True
        self.scheduler: Any = None
        self._optimizer: TrainingOptimizer | None = None
        self._updates = 0

    def step(self, number: int, batches: Sequence[tuple[Any, ...]]) -> Any:
        """Train on ``batches``; return the loss, a tensor.

        Raises:
            InputError: the user's step function did not step the optimizer exactly once, or did not return a loss.
        """
        self.gradients, self._updates = {}, 0
        self.optimizer()  # before the first forward, as in usual programs
        if self.case.step is None:
            return self._default_step(batches)
        loss = self.case.step(Training(self, number, batches))
        if self._updates != 1:
            msg = f"step= stepped its optimizer {self._updates} times; training.optimizer must step once"
            raise InputError(msg)
        if not self.platform.is_tensor(loss):
            msg = f"step= returned {an_object(loss)}; it must return the loss, a tensor of one number"
            raise InputError(msg)
        return self.platform.detach(loss)

    def optimizer(self) -> TrainingOptimizer:
        """Return the optimizer, which is created on first use."""
        if self._optimizer is None:
            case = self.case
            self._optimizer = harness_of(self.platform).optimizer(self.model, case.optimizer, case.learning_rate)
            self._optimizer.watch(self._record_gradients)
            if case.scheduler is not None:
                self.scheduler = case.scheduler(_scheduled(self._optimizer))
                if not callable(getattr(self.scheduler, "step", None)):
                    msg = f"scheduler= returned {an_object(self.scheduler)}; it must return an object with step()"
                    raise InputError(msg)
        return self._optimizer

    def loss(self, batch: tuple[Any, ...]) -> Any:
        """Return the loss of the model on ``batch``."""
        output = self.model(*self.case.model_inputs(batch))
        with module_scope("(loss)"):
            loss = self.case.loss(output, batch)
        self._check_loss(loss)
        return loss

    def clip(self, max_norm: float, gradients: Mapping[Any, Any]) -> Any:
        """Clip the gradients; record the gradients before clipping, their norm and the clip factor."""
        log = active_log()
        if log is not None:
            self._record_unclipped(log, gradients)
        norm = harness_of(self.platform).clip_gradients(self.model, gradients, max_norm)
        if log is not None:
            size = np.asarray(self.platform.tensor_to_numpy(self.platform.detach(norm)))  # in its own precision
            factor = np.asarray(min(1.0, max_norm / (float(size) + 1e-6)), size.dtype)
            log.add("norm", "gradient norm", LocalValue(np.array(size)))
            log.add("norm", "clip factor", LocalValue(factor))
        return norm

    def _record_unclipped(self, log: RecordLog, gradients: Mapping[Any, Any]) -> None:
        """Record gradients that will be clipped: those of the parameters, or values by path or position."""
        trained = harness_of(self.platform).trainable(self.model)
        named = {path: self.platform.gradient_of(value) for path, value in trained.items()}
        if gradients:
            paths = list(trained)
            named = {key if isinstance(key, str) else paths[key]: value for key, value in gradients.items()}
        for path, value in named.items():
            taken = None if log.take is None else log.take(value)
            if taken is not None:
                log.add("gradient", path, taken, module=path.rpartition(".")[0])

    def _default_step(self, batches: Sequence[tuple[Any, ...]]) -> Any:
        count = len(batches)

        def loss_of(batch: tuple[Any, ...]) -> Callable[[], Any]:
            return lambda: self.loss(batch) if count == 1 else self.loss(batch) / count

        result = harness_of(self.platform).training_step(self.model, *map(loss_of, batches))
        if self.case.clip is not None:
            self.clip(self.case.clip, {path: value for path, value in result.gradients.items() if value is not None})
        self.optimizer()(result)
        if self.scheduler is not None:
            self.scheduler.step()
        return result.loss

    def _record_gradients(self, gradients: dict[str, Any]) -> None:
        self._updates += 1
        if self.keeps_gradients:
            self.gradients = {path: None if value is None else self._copy(value) for path, value in gradients.items()}

    def _copy(self, value: Any) -> Any:
        """Return a copy of a gradient, because the step may write into it later."""
        if isinstance(value, DTensor):
            return self.platform.wrap(self.platform.copy(value.to_local()), value.layout)
        return self.platform.copy(value)


def _scheduled(optimizer: TrainingOptimizer) -> Any:
    """Return the framework's optimizer, whose learning rate a scheduler sets."""
    return getattr(optimizer, "optimizer", optimizer.engine)
