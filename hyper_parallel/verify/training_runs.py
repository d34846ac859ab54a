"""The two runs that are compared: the single-device model's training, and the parallel model's."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.events import module_scope
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.placements import Replicate
from hyper_parallel.platform.contract.training import first_paths
from hyper_parallel.verify.compare import magnitude
from hyper_parallel.verify.model_case import InputError, ModelCase, ParallelPlan
from hyper_parallel.verify.observers import CotangentObserver, OutputObserver, global_array
from hyper_parallel.verify.spec import blame_user, call_user_function

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.platform.contract.training import StepResult
    from hyper_parallel.verify.adamw_noise import NoiseReplacement
    from hyper_parallel.verify.faults import Fault

__all__ = ["ParallelRun", "ReferenceStep", "SingleDeviceRun", "build_model"]

_NO_GRADIENT = (
    "SPEC: the first step gives no parameter a gradient other than zero, so nothing would be verified; the loss must "
    "depend on the model's output, without detach() or no_grad() on the way"
)


def build_model(case: ModelCase) -> Any:
    """Return a fresh model.

    Raises:
        InputError: the function that builds it raises.
    """
    return call_user_function("SPEC: the function that builds the model", case.build)


class _Run:
    """A model in training.

    Attributes:
        outputs: the modules' own outputs in the last forward.
        style_outputs: what the modules' styles return; the same without a plan.
    """

    def __init__(self, platform: Platform, case: ModelCase, model: Any) -> None:
        self.platform, self.case, self.model = platform, case, model
        self.outputs = self.style_outputs = OutputObserver(platform, model)
        self._optimizer_step: Callable[[StepResult], None] | None = None

    def step(self, number: int) -> StepResult:
        """Run forward, backward and the optimizer on the batch of step ``number``."""
        self.outputs.clear()
        self.style_outputs.clear()
        batch = self._tensors(self.case.batch(number))
        with self._context():
            result = self.platform.training_step(self.model, lambda: self._loss(batch))
            if self._optimizer_step is None:
                self._optimizer_step = self.platform.optimizer(self.model, self.case.optimizer, self.case.learning_rate)
            self._optimizer_step(self._optimizer_input(result))
        return result

    def _loss(self, batch: tuple[Any, ...]) -> Any:
        output = self.model(*self.case.model_inputs(batch))
        with module_scope("(loss)"):
            loss = self.case.loss(output, batch)
        self._check_loss(loss)
        return loss

    def _tensors(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        platform = self.platform
        return tuple(item if platform.is_tensor(item) else platform.from_numpy(np.asarray(item)) for item in batch)

    def _context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of forward, backward and the optimizer."""
        return contextlib.nullcontext()

    def _check_loss(self, loss: Any) -> None:
        """Raise an InputError if the model cannot be trained with ``loss``."""

    def _optimizer_input(self, result: StepResult) -> StepResult:
        """Return the gradients that the optimizer sees."""
        return result


class _ReferenceRun(_Run):
    """The single-device model in training, on rank 0."""

    def __init__(self, platform: Platform, case: ModelCase) -> None:
        super().__init__(platform, case, build_model(case))
        self._random_module = platform.watch_random(self.model)
        self._cotangents = CotangentObserver(platform, self.model)

    def reference_step(self, number: int) -> ReferenceStep:
        """Train one step and return its values."""
        self._check_trainable()
        self._cotangents.clear()
        with blame_user("SPEC: the model on a single device"):
            result = self.step(number)
        random = self._random_module()
        if random is not None:
            msg = (
                f"SPEC: module {random or '(model)'} draws random numbers in forward, and a parallel run draws others; "
                "set its dropout to 0, or put it into evaluation mode"
            )
            raise InputError(msg)
        gradients = {
            path: None if gradient is None else self._array(gradient) for path, gradient in result.gradients.items()
        }
        if number == 0 and not any(gradient is not None and magnitude(gradient) for gradient in gradients.values()):
            raise InputError(_NO_GRADIENT)
        return ReferenceStep(
            [(output.module, name, self._array(output.value)) for name, output in self.outputs.outputs.items()],
            self._array(result.loss),
            gradients,
            dict(self._cotangents.largest),
            self.weights(),
            self.buffers(),
        )

    def weights(self) -> dict[str, Any]:
        """Return all parameters by path."""
        return self._arrays(first_paths(self.platform.parameters_dict(self.model)))

    def buffers(self) -> dict[str, Any]:
        """Return all buffers by path."""
        return self._arrays(self.platform.buffers(self.model))

    def _arrays(self, values: dict[str, Any]) -> dict[str, Any]:
        return {path: self._array(value) for path, value in values.items()}

    def _array(self, value: Any) -> Any:
        """Return a copy, because the optimizer writes into what it trains."""
        return np.array(global_array(self.platform, value))

    def _check_trainable(self) -> None:
        """Raise an InputError if no parameter requires grad."""
        trainable = self.platform.trainable(self.model)
        if not any(self.platform.is_floating(parameter) for parameter in trainable.values()):
            count = len(first_paths(self.platform.parameters_dict(self.model)))
            msg = (
                f"SPEC: none of the model's {count} parameters is floating and requires grad, so there is nothing to "
                "train; leave at least one unfrozen"
            )
            raise InputError(msg)

    def _check_loss(self, loss: Any) -> None:
        if not self.platform.is_tensor(loss):
            msg = f"SPEC: loss(output, batch) returned {type(loss).__name__}; it must return a tensor of one number"
            raise InputError(msg)
        if math.prod(loss.shape) != 1:
            msg = (
                f"SPEC: loss(output, batch) returned a tensor {list(loss.shape)}; only one number can be trained on: "
                "add .mean() or .sum()"
            )
            raise InputError(msg)
        if not self.platform.needs_grad(loss):
            raise InputError(_NO_GRADIENT)


@dataclass(frozen=True)
class ReferenceStep:
    """The values of one step of the single-device run, as NumPy arrays.

    Attributes:
        outputs: of every module in forward order: its path, the output's name, the value.
        loss: the scalar.
        gradients: by path; None where the loss does not depend on the parameter.
        terms: largest magnitude that was summed in a bias's gradient, by path.
        weights: by path, after the step, parameters that are not trained included.
        buffers: by path, after the step.
    """

    outputs: list[tuple[str, str, Any]]
    loss: Any
    gradients: dict[str, Any]
    terms: dict[str, float]
    weights: dict[str, Any]
    buffers: dict[str, Any]


class SingleDeviceRun:
    """The single-device model: rank 0 trains it, and every rank gets the values.

    Attributes:
        state: initial parameters and buffers by path, the same on every rank.
    """

    def __init__(self, platform: Platform, case: ModelCase) -> None:
        self._transport = platform.transport()
        self._run = _ReferenceRun(platform, case) if self._transport.rank == 0 else None
        self.state: dict[str, Any] = self._from_rank_0(lambda run: {**run.weights(), **run.buffers()})

    def step(self, number: int) -> ReferenceStep:
        """Return the values of one step of training."""
        step: ReferenceStep = self._from_rank_0(lambda run: run.reference_step(number))
        return step

    def _from_rank_0(self, compute: Callable[[_ReferenceRun], Any]) -> Any:
        """Return on every rank what rank 0 computes."""
        own = None if self._run is None else compute(self._run)
        return self._transport.all_gather_object(own, tuple(range(self._transport.world_size)))[0]


class ParallelRun(_Run):
    """The same model, made parallel by the plan.

    Attributes:
        noise: replaces noise in the gradients that the optimizer sees, if set.
    """

    def __init__(
        self,
        platform: Platform,
        case: ModelCase,
        model: Any,
        mesh: DeviceMesh,
        plan: ParallelPlan,
        fault: Fault | None,
    ) -> None:
        super().__init__(platform, case, model)
        self.mesh, self.plan, self.fault = mesh, plan, fault
        self.noise: NoiseReplacement | None = None
        if fault is not None:
            fault.before_parallel(platform, model)
        _parallelize(model, mesh, plan)
        if fault is not None:
            fault.after_parallel(platform, model)
        self.style_outputs = OutputObserver(platform, model)

    def parameters(self) -> dict[str, Any]:
        """Return all parameters by path, a shared one by its first path."""
        return first_paths(self.platform.parameters_dict(self.model))

    def _context(self) -> contextlib.AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        if self.fault is not None:
            stack.enter_context(self.fault.running(self.platform))
        if self.plan.context is not None:
            stack.enter_context(self.plan.context())
        return stack

    def _optimizer_input(self, result: StepResult) -> StepResult:
        return result if self.noise is None else self.noise(self.platform, result)

    def _tensors(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        plain = super()._tensors(batch)
        if self.plan.batch is None:
            return plain
        from hyper_parallel.core.dtensor.module import distribute_tensor

        placements = [self.plan.batch.get(name, Replicate()) for name in self.mesh.names]
        return tuple(distribute_tensor(tensor, self.mesh, placements, src_data_rank=None) for tensor in plain)


def _parallelize(model: Any, mesh: DeviceMesh, plan: ParallelPlan) -> None:
    from hyper_parallel.core.dtensor.module import distribute_module
    from hyper_parallel.core.tensor_parallel import parallelize_module

    parallelize_module(model, mesh, dict(plan.styles))
    if plan.batch is not None:
        distribute_module(model, mesh)
