"""Training of a model: on a single device, and parallelized by a plan."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel._text import an_object, first_line
from hyper_parallel.core.data_parallel.sharding import groups_of
from hyper_parallel.core.dtensor import random
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.placements import Replicate
from hyper_parallel.errors import LayoutError, MixedTensorError, ShardMismatchError
from hyper_parallel.platform.select import framework_of, platform_of
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.frameworks.contract.record_log import active_log, unrecorded
from hyper_parallel.verify.frameworks.contract.training import first_paths
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.model_case import ModelCase, ParallelPlan, array_of_numbers
from hyper_parallel.verify.random_draws import ParallelDraws, SingleDeviceDraws
from hyper_parallel.verify.spec import blame_user, call_user_function, type_name, user_line
from hyper_parallel.verify.styled_outputs import StyledOutputs
from hyper_parallel.verify.training_loop import ModelTraining

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.faults import Fault

__all__ = ["ParallelRun", "SingleDeviceRun", "build_model", "plan_notes", "why_untrainable"]

_MODULES = {"torch": "torch.nn.Module", "mindspore": "mindspore.nn.Cell"}
_MISFITS = (MixedTensorError, ShardMismatchError, LayoutError)
"""Errors of the first step if the plan's layouts of values are not supported by the model."""

_NO_GRADIENT = (
    "SPEC: the first step gives no parameter a gradient other than zero, so nothing would be verified; the loss must "
    "depend on the model's output, without detach() or no_grad() on the way"
)


def build_model(platform: Platform, case: ModelCase, seed: int) -> Any:
    """Return a new model; the framework's generators are seeded with ``seed`` before.

    Lazily initialized parameters get their sizes from a forward of the first batch.

    Raises:
        InputError: the function that builds it raises an error, or does not return a module of the framework; or its
            first forward raises an error.
    """
    platform.seed(seed)
    model = call_user_function("SPEC: the function that builds the model", case.build)
    if not isinstance(model, platform.Module):
        other = framework_of(model)
        fix = f"give --platform {other}" if other else "build one, or name the model's framework with --platform"
        expected = _MODULES[platform.platform_type]
        msg = f"SPEC: the model is of type {type_name(type(model))}, which is not a {expected}; {fix}"
        raise InputError(msg)
    if harness_of(platform).infers_sizes(model):
        blamed = blame_user("SPEC: the first forward of the model, which infers sizes,")
        with blamed, unrecorded(), platform.no_grad():
            model(*plain_tensors(platform, case.model_inputs(case.micro_batches(0)[0])))
    return model


def plain_tensors(platform: Platform, batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arrays of a batch as tensors; tensors are returned unchanged."""
    return tuple(
        item if platform.is_tensor(item) else platform.from_numpy(array_of_numbers(item, index))
        for index, item in enumerate(batch)
    )


class _TrainingRun:
    """A training run of a model.

    Attributes:
        training: the model's optimizer and gradients.
    """

    def __init__(self, platform: Platform, case: ModelCase, model: Any) -> None:
        self.platform, self.case = platform, case
        self._set_model(model)

    def _set_model(self, model: Any) -> None:
        self.model = model
        self.training = ModelTraining(self.platform, self.case, model, self._check_loss)
        if self.case.hooks is not None:
            self.case.hooks(model)

    def step(self, number: int) -> Any:
        """Run forward, backward and the optimizer on the batches of step ``number``; return the loss."""
        batches = [self._tensors(batch) for batch in self.case.micro_batches(number)]
        with self._context():
            return self.training.step(number, batches)

    def _tensors(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        return plain_tensors(self.platform, batch)

    def _context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of forward, backward and the optimizer."""
        return contextlib.nullcontext() if self.case.context is None else self.case.context()

    def _check_loss(self, loss: Any) -> None:
        """Raise an InputError if the model cannot be trained with ``loss``."""


class SingleDeviceRun(_TrainingRun):
    """The single-device model in training.

    Attributes:
        draws: draws of random numbers for plain tensors.
    """

    def __init__(self, platform: Platform, case: ModelCase, model: Any) -> None:
        self.draws = SingleDeviceDraws(platform.transport().rank)
        super().__init__(platform, case, model)
        self._random_module = harness_of(platform).watch_random(model)

    def step(self, number: int) -> Any:
        """Run one step.

        Raises:
            InputError: the model cannot be trained, or its values cannot be compared.
        """
        self._check_trainable()
        self.training.keeps_gradients = number == 0
        gets = f" ({type(self.case.loss).__name__}, called with the output and the complete batch, a tuple)"
        gets = gets if isinstance(self.case.loss, self.platform.Module) else ""
        with blame_user(f"SPEC: the model or its loss{gets} on a single device"):
            loss = super().step(number)
        module = self._random_module()
        if module is not None:
            msg = (
                f"SPEC: module {module or '(model)'} draws random numbers in forward by a function that takes no "
                "tensor, so a parallel run draws others; draw them for a tensor, by dropout or torch.rand_like"
            )
            raise InputError(msg)
        if number == 0:
            gradients = [self._array(each) for each in self.training.gradients.values() if each is not None]
            _require_gradients(float(self._array(loss)), gradients)
        return loss

    def _context(self) -> contextlib.AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        stack.enter_context(harness_of(self.platform).indexed_draws(self.model, self.draws.place))
        stack.enter_context(super()._context())
        return stack

    def _array(self, value: Any) -> Any:
        return self.platform.tensor_to_numpy(self.platform.detach(value))

    def _check_trainable(self) -> None:
        """Raise an InputError if no parameter requires grad."""
        trainable = harness_of(self.platform).trainable(self.model)
        if not any(self.platform.is_floating(parameter) for parameter in trainable.values()):
            count = len(first_paths(self.platform.parameters_dict(self.model)))
            msg = (
                f"SPEC: none of the model's {count} parameters has a floating dtype and requires grad, so there is "
                "nothing to train; leave at least one unfrozen"
            )
            raise InputError(msg)

    def _check_loss(self, loss: Any) -> None:
        if not self.platform.is_tensor(loss):
            msg = f"SPEC: loss(output, batch) returned {an_object(loss)}; it must return a tensor of one number"
            raise InputError(msg)
        if math.prod(loss.shape) != 1:
            msg = (
                f"SPEC: loss(output, batch) returned a tensor {list(loss.shape)}; it must return one number: "
                "add .mean() or .sum()"
            )
            raise InputError(msg)
        if not self.platform.needs_grad(loss):
            raise InputError(_NO_GRADIENT)


def _require_gradients(loss: float, gradients: list[Any]) -> None:
    """Raise an InputError if all gradients of the first step are unsuitable for a comparison."""
    if any(gradient[np.isfinite(gradient)].any() for gradient in gradients):
        return
    if math.isfinite(loss) and all(np.isfinite(gradient).all() for gradient in gradients):
        raise InputError(_NO_GRADIENT)
    msg = (
        f"SPEC: in the first step the loss is {loss:g} and every gradient is zero, infinite or NaN, so nothing would "
        "be verified; look for an overflow or NaN in the batch, the weights and the loss"
    )
    raise InputError(msg)


def why_untrainable(platform: Platform, case: ModelCase, seed: int) -> str:
    """Return the first line of the error of a single-device training step, or an empty text."""
    try:
        random.manual_seed(seed)
        SingleDeviceRun(platform, case, build_model(platform, case, seed)).step(0)
    except InputError as error:
        return first_line(error)
    return ""


class ParallelRun(_TrainingRun):
    """A training run of the same model, parallelized by the plan.

    Attributes:
        plan_notes: descriptions of probably unintended properties of the plan.
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
        self.mesh, self.plan, self.fault = mesh, plan, fault
        if fault is not None:
            fault.before_parallel(platform, model)
        log = active_log()
        if log is not None:
            log.place = StyledOutputs(platform, model).place
        self.plan_notes = plan_notes(model, mesh, plan)
        parallel = _parallelize(model, mesh, plan)
        if fault is not None:
            fault.after_parallel(platform, parallel)
        self.draws = ParallelDraws(platform, mesh)
        super().__init__(platform, plan.applied_to(case), parallel)

    def step(self, number: int) -> Any:
        """Run one step; see :class:`SingleDeviceRun`.

        Raises:
            InputError: the model does not support values in the plan's layouts.
        """
        try:
            return super().step(number)
        except _MISFITS as error:
            if number or self.fault is not None:
                raise
            problem = _of_sharded_model(self.model, self.plan, error) or str(error)
            msg = f"the model under PLAN: {problem}{user_line(error)}"
            raise InputError(msg) from error

    def parameters(self) -> dict[str, Any]:
        """Return all parameters by path; a shared parameter has its first path."""
        return first_paths(self.platform.parameters_dict(self.model))

    def _context(self) -> contextlib.AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        if self.fault is not None:
            stack.enter_context(self.fault.running(self.platform))
        stack.enter_context(super()._context())
        if self.draws.shapes:
            stack.enter_context(harness_of(self.platform).indexed_draws(self.model, self.draws.place))
        if self.plan.context is not None:
            stack.enter_context(self.plan.context())
        return stack

    def _tensors(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        plain = super()._tensors(batch)
        if self.plan.batch is None:
            return plain
        from hyper_parallel.core.dtensor.module import distribute_tensor

        placements = [self.plan.batch.get(name, Replicate()) for name in self.mesh.names]
        return tuple(distribute_tensor(tensor, self.mesh, placements, src_data_rank=None) for tensor in plain)


def plan_notes(model: Any, mesh: DeviceMesh, plan: ParallelPlan, *, failed: bool = False) -> list[str]:
    """Return descriptions of probably unintended properties of a plan of styles.

    Args:
        model: the model before it is parallelized.
        mesh: mesh of the parallel model.
        plan: the plan; there are no notes on a function.
        failed: whether the model fails under the plan, so that possible reasons are added.
    """
    from hyper_parallel.core.tensor_parallel.plan import check_plan, uneven_outputs

    if callable(plan.styles):
        return []
    styles = dict(plan.styles)
    notes = list(check_plan(model, mesh, styles).notes)
    return [*notes, *uneven_outputs(model, mesh, styles)] if failed and styles else notes


def _parallelize(model: Any, mesh: DeviceMesh, plan: ParallelPlan) -> Any:
    """Return the parallel model."""
    from hyper_parallel.core.dtensor.module import distribute_module, is_distributed
    from hyper_parallel.core.tensor_parallel.parallelize import apply_plan, check_named
    from hyper_parallel.core.tensor_parallel.plan_names import resolve_plan

    if callable(plan.styles):
        returned = call_user_function("PLAN: the function that parallelizes", plan.styles, model, mesh)
        model = model if returned is None else returned
    else:
        platform, styles = platform_of(model), resolve_plan(model, dict(plan.styles))
        check_named(platform, model, mesh, styles)  # without warnings: the report has the notes
        apply_plan(platform, model, mesh, styles)
    if plan.batch is not None and not is_distributed(model):
        distribute_module(model, mesh)
    return model


def _of_sharded_model(model: Any, plan: ParallelPlan, error: Exception) -> str:
    """Explain an error that mixes DTensors of the batch with plain parameters that ``fully_shard`` gathers; else ""."""
    if plan.batch is None or not isinstance(error, MixedTensorError) or not any(groups_of(model)):
        return ""
    return (
        "fully_shard gathers plain parameters, but batch= of ParallelPlan makes the arrays of the batch DTensors; "
        "leave out batch=, and they stay plain"
    )
