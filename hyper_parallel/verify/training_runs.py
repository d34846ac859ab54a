"""The runs that are compared: the single-device training, its perturbed repetitions, and the parallel training."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel._text import first_line
from hyper_parallel.core.dtensor import random
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.placements import Replicate
from hyper_parallel.errors import LayoutError, MixedTensorError, ShardMismatchError
from hyper_parallel.platform.select import framework_of, platform_of
from hyper_parallel.verify.compare import magnitude
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.frameworks.contract.training import first_paths
from hyper_parallel.verify.model_case import InputError, ModelCase, ParallelPlan, array_of_numbers
from hyper_parallel.verify.observers import OutputObserver, global_array
from hyper_parallel.verify.perturbation import (
    Key,
    Perturbation,
    allowed_errors,
    largest_changes,
    perturb_outputs,
    perturbations,
)
from hyper_parallel.verify.random_draws import ParallelDraws, SingleDeviceDraws
from hyper_parallel.verify.spec import blame_user, call_user_function, type_name, user_line
from hyper_parallel.verify.training_loop import ModelTraining

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.faults import Fault

__all__ = [
    "ParallelRun",
    "ReferenceStep",
    "SingleDeviceRun",
    "TrainingRun",
    "build_model",
    "plan_notes",
    "why_untrainable",
]

_MODULES = {"torch": "torch.nn.Module", "mindspore": "mindspore.nn.Cell"}
_MISFITS = (MixedTensorError, ShardMismatchError, LayoutError)
"""Errors of the first step under a plan that lays out values as the model does not take them."""

_NO_GRADIENT = (
    "SPEC: the first step gives no parameter a gradient other than zero, so nothing would be verified; the loss must "
    "depend on the model's output, without detach() or no_grad() on the way"
)
_NOISE_OF_A_REPETITION = 1e4
"""Units of rounding by which a repetition without any perturbation may differ."""


def build_model(platform: Platform, case: ModelCase, seed: int) -> Any:
    """Return a fresh model, with the framework's generators started from ``seed``.

    Sizes of parameters that a first forward infers are those for the first batch.

    Raises:
        InputError: the function that builds it raises, or returns no module of the framework; or its first forward
            raises.
    """
    platform.seed(seed)
    model = call_user_function("SPEC: the function that builds the model", case.build)
    if not isinstance(model, platform.Module):
        other = framework_of(model)
        fix = f"give --platform {other}" if other else "build one, or name the model's framework with --platform"
        expected = _MODULES[platform.platform_type]
        msg = f"SPEC: the model is of type {type_name(type(model))}, which is no {expected}; {fix}"
        raise InputError(msg)
    if harness_of(platform).infers_sizes(model):
        with blame_user("SPEC: the first forward of the model, which infers sizes,"), platform.no_grad():
            model(*plain_tensors(platform, case.model_inputs(case.micro_batches(0)[0])))
    return model


def plain_tensors(platform: Platform, batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arrays of a batch as tensors; tensors stay as they are."""
    return tuple(
        item if platform.is_tensor(item) else platform.from_numpy(array_of_numbers(item, index))
        for index, item in enumerate(batch)
    )


class TrainingRun:
    """A model in training.

    Attributes:
        outputs: the modules' own outputs in the last forward.
        style_outputs: what the modules' styles return; the same without a plan.
        training: the model's optimizer, gradients and norms.
    """

    def __init__(self, platform: Platform, case: ModelCase, model: Any) -> None:
        self.platform, self.case = platform, case
        self.outputs = self.style_outputs = OutputObserver(platform, model)
        self._set_model(model)

    def _set_model(self, model: Any) -> None:
        self.model = model
        self.training = ModelTraining(self.platform, self.case, model, self._check_loss)
        if self.case.hooks is not None:
            self.case.hooks(model)

    def step(self, number: int) -> Any:
        """Run forward, backward and the optimizer on the batches of step ``number``; return the loss."""
        self.outputs.clear()
        self.style_outputs.clear()
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


class _ReferenceRun(TrainingRun):
    """The single-device model in training; with a perturbation, a repetition that changes it in the last place."""

    def __init__(
        self, platform: Platform, case: ModelCase, seed: int, perturbation: Perturbation | None = None
    ) -> None:
        model = build_model(platform, case, seed)
        _require_values(platform.parameters_dict(model), platform.is_meta)
        self.perturbation = perturbation
        self._number = 0
        self._random_state = (seed, 0)
        self.draws = SingleDeviceDraws(platform.transport().rank)
        if perturbation is not None:
            perturb_outputs(platform, model, perturbation)
        super().__init__(platform, case, model)
        self._random_module = harness_of(platform).watch_random(model)
        if perturbation is not None:
            self.training.before_update = self._perturb_gradients

    def start_from(self, state: dict[str, Any]) -> None:
        """Set weights and buffers to ``state``, its weights changed in the last place."""
        perturbation = self.perturbation
        if perturbation is not None:
            weights = first_paths(self.platform.parameters_dict(self.model))
            state = {
                path: perturbation.changed(path, value) if path in weights else value for path, value in state.items()
            }
        harness_of(self.platform).load_arrays(self.model, state)

    def reference_step(self, number: int) -> ReferenceStep:
        """Train one step and return its values."""
        self._check_trainable()
        self._number = number
        with blame_user("SPEC: the model on a single device"), self._own_stream():
            loss = self.step(number)
        module = self._random_module()
        if module is not None:
            msg = (
                f"SPEC: module {module or '(model)'} draws random numbers in forward by a function that takes no "
                "tensor, so a parallel run draws others; draw them for a tensor, by dropout or torch.rand_like"
            )
            raise InputError(msg)
        training = self.training
        gradients = self._arrays(training.gradients)
        if number == 0:
            _require_gradients(float(self._array(loss)), [each for each in gradients.values() if each is not None])
        optimizer = training.optimizer()
        return ReferenceStep(
            [(output.module, name, self._array(output.value)) for name, output in self.outputs.outputs.items()],
            self._array(loss),
            list(training.norms),
            list(training.factors),
            gradients,
            self._arrays(optimizer.state()),
            self.weights(),
            self.buffers(),
            optimizer.learning_rates(),
            self._random_state,
            dict(self.draws.shapes),
        )

    def weights(self) -> dict[str, Any]:
        """Return all parameters by path."""
        return self._arrays(first_paths(self.platform.parameters_dict(self.model)))

    def buffers(self) -> dict[str, Any]:
        """Return all buffers by path."""
        return self._arrays(harness_of(self.platform).buffers(self.model))

    @contextlib.contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Draw the random numbers of DTensors from this run's own stream."""
        self.draws.shapes.clear()
        with random.preserve_state(), harness_of(self.platform).indexed_draws(self.model, self.draws.place):
            random.set_rng_state(self._random_state)
            yield
            self._random_state = random.get_rng_state()

    def _tensors(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        plain = super()._tensors(batch)
        perturbation = self.perturbation
        if perturbation is None:
            return plain
        return tuple(
            perturbation.changed_tensor(self.platform, f"array {index} of step {self._number}", tensor)
            for index, tensor in enumerate(plain)
        )

    def _perturb_gradients(self, gradients: dict[str, Any]) -> None:
        assert self.perturbation is not None
        for path, gradient in gradients.items():
            if gradient is not None:
                place = f"gradient of {path} in step {self._number}"
                array = self.perturbation.changed(place, self._array(gradient))
                gradients[path] = harness_of(self.platform).overwritten(gradient, array)

    def _arrays(self, values: dict[str, Any]) -> dict[str, Any]:
        return {path: None if value is None else self._array(value) for path, value in values.items()}

    def _array(self, value: Any) -> Any:
        """Return a copy, because the optimizer writes into what it trains."""
        return np.array(global_array(self.platform, value) if self.platform.is_tensor(value) else value)

    def _check_trainable(self) -> None:
        """Raise an InputError if no parameter requires grad."""
        trainable = harness_of(self.platform).trainable(self.model)
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


def _require_values(parameters: dict[str, Any], is_meta: Callable[[Any], bool]) -> None:
    """Raise an InputError if a parameter has a shape and no values."""
    empty = [path for path, value in parameters.items() if is_meta(value)]
    if empty:
        msg = (
            f"SPEC: parameter {empty[0]} is on the device meta, so it has no values to compare; build the model on a "
            "device that has values"
        )
        raise InputError(msg)


def _require_gradients(loss: float, gradients: list[Any]) -> None:
    """Raise an InputError if no gradient of the first step can show anything."""
    if any(magnitude(gradient) for gradient in gradients):
        return
    if math.isfinite(loss) and all(np.isfinite(gradient).all() for gradient in gradients):
        raise InputError(_NO_GRADIENT)
    msg = (
        f"SPEC: in the first step the loss is {loss:g} and every gradient zero, infinite or NaN, so nothing would be "
        "verified; look for an overflow or NaN in the batch, the weights and the loss"
    )
    raise InputError(msg)


def why_untrainable(platform: Platform, case: ModelCase, seed: int) -> str:
    """Return the first line of the error of a single-device training step, or nothing if there is none."""
    try:
        _ReferenceRun(platform, case, seed).reference_step(0)
    except InputError as error:
        return first_line(error)
    return ""


@dataclass(frozen=True)
class ReferenceStep:
    """The values of one step of the single-device run, as NumPy arrays.

    Attributes:
        outputs: of every module in forward order: its path, the output's name, the value.
        loss: the scalar.
        norms: of the gradients, of every clipping.
        factors: by which clipping scaled them.
        gradients: by path, when the optimizer saw them; None where the loss does not depend on the parameter.
        state: of the optimizer, by name, after the step.
        weights: by path, after the step, parameters that are not trained included.
        buffers: by path, after the step.
        rates: learning rates after the step.
        random_state: seed and number of draws of the stream of DTensors, after the step.
        draws: shapes of the tensors that were drawn for, by number of the draw.
        allowed: the largest allowed error of every floating value, by kind and name.
    """

    outputs: list[tuple[str, str, Any]]
    loss: Any
    norms: list[Any]
    factors: list[Any]
    gradients: dict[str, Any]
    state: dict[str, Any]
    weights: dict[str, Any]
    buffers: dict[str, Any]
    rates: list[float]
    random_state: tuple[int, int] = (0, 0)
    draws: dict[int, tuple[int, ...]] = field(default_factory=dict)
    allowed: dict[Key, float] | None = None

    def values(self) -> dict[Key, Any]:
        """Return all values by kind and name."""
        values: dict[Key, Any] = {("output", name): array for _, name, array in self.outputs}
        values["loss", "loss"] = self.loss
        for kind, numbers in (("norm", self.norms), ("factor", self.factors), ("rate", self.rates)):
            values.update({(kind, numbered(kind, index)): np.array(value) for index, value in enumerate(numbers)})
        by_path = (("gradient", self.gradients), ("state", self.state), ("weight", self.weights))
        for kind, arrays in (*by_path, ("buffer", self.buffers)):
            values.update({(kind, path): array for path, array in arrays.items()})
        return values


def numbered(kind: str, index: int) -> str:
    """Return the name of the norm, factor or learning rate number ``index`` (from 0) of a step."""
    names = {"norm": "gradient norm", "factor": "clip factor", "rate": "learning rate"}
    return names[kind] if index == 0 else f"{names[kind]} #{index + 1}"


class SingleDeviceRun:
    """The single-device model: rank 0 trains it, every rank gets the values, and ranks share the perturbed repetitions.

    Attributes:
        state: initial parameters and buffers by path, the same on every rank.
    """

    def __init__(
        self,
        platform: Platform,
        case: ModelCase,
        seed: int,
        initial: Callable[[dict[str, Any], list[str]], dict[str, Any]] | None = None,
    ) -> None:
        self._transport = platform.transport()
        self._run = _ReferenceRun(platform, case, seed) if self._transport.rank == 0 else None
        self.state: dict[str, Any] = self._from_rank_0(lambda run: {**run.weights(), **run.buffers()})
        if initial is not None:  # called with the state and the paths of trained parameters; returns another state
            self.state = initial(
                self.state, self._from_rank_0(lambda run: list(harness_of(platform).trainable(run.model)))
            )
            if self._run is not None:
                self._run.start_from(self.state)
        mine = [None, *perturbations(seed)][self._transport.rank :: self._transport.world_size]
        self._repetitions = [_ReferenceRun(platform, case, seed, perturbation) for perturbation in mine]
        for run in self._repetitions:
            run.start_from(self.state)

    def step(self, number: int) -> ReferenceStep:
        """Return the values of one step of training, and how far each may be off."""
        step: ReferenceStep = self._from_rank_0(lambda run: run.reference_step(number))
        values = step.values()
        changes = []
        for run in self._repetitions:
            changed = largest_changes(values, run.reference_step(number).values())
            if run.perturbation is None:
                _require_deterministic(values, changed, number)
            changes.append(changed)
        everyone = self._transport.all_gather_object(changes, tuple(range(self._transport.world_size)))
        return replace(step, allowed=allowed_errors(values, [each for ranks in everyone for each in ranks]))

    def _from_rank_0(self, compute: Callable[[_ReferenceRun], Any]) -> Any:
        """Return on every rank what rank 0 computes."""
        own = None if self._run is None else compute(self._run)
        return self._transport.all_gather_object(own, tuple(range(self._transport.world_size)))[0]


def _require_deterministic(values: dict[Key, Any], changes: dict[Key, float], step: int) -> None:
    """Raise an InputError if a repetition of the first step, without any change, gives other outputs or losses."""
    for (kind, name), change in changes.items():
        array = values[kind, name]
        unit = float(np.finfo(array.dtype).eps) * magnitude(array)
        if step == 0 and kind in ("output", "loss") and change > _NOISE_OF_A_REPETITION * unit:
            msg = (
                f"SPEC: the single-device model is not deterministic: in a second run from the same weights, {kind} "
                f"{name} differs by {change:.1e}; draw random numbers from generators that the model's build function "
                "seeds, keep no state between models, and do not write to the batch"
            )
            raise InputError(msg)


class ParallelRun(TrainingRun):
    """The same model, made parallel by the plan.

    Attributes:
        plan_notes: what is probably unintended about the plan.
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
        super().__init__(platform, replace(plan.applied_to(case), hooks=None), model)
        if fault is not None:
            fault.before_parallel(platform, model)
        self.plan_notes = plan_notes(model, mesh, plan)
        parallel = _parallelize(model, mesh, plan)
        if fault is not None:
            fault.after_parallel(platform, parallel)
        self.style_outputs = OutputObserver(platform, parallel)
        self.draws = ParallelDraws(platform, mesh, lambda: self.outputs.running)
        self.case = plan.applied_to(case)
        self._set_model(parallel)

    def step(self, number: int) -> Any:
        """Run one step; see :class:`TrainingRun`.

        Raises:
            InputError: the model does not take values as the plan lays them out.
        """
        try:
            return super().step(number)
        except _MISFITS as error:
            if number or self.fault is not None:
                raise
            msg = f"the model under PLAN: {error}{user_line(error)}"
            raise InputError(msg) from error

    def parameters(self) -> dict[str, Any]:
        """Return all parameters by path, a shared one by its first path."""
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
    """Return what is probably unintended about a plan of styles, in words.

    Args:
        model: before it is parallelized.
        mesh: its mesh.
        plan: what to parallelize by; of a function nothing is known.
        failed: whether the model fails under the plan, so that what may be the reason is added.
    """
    from hyper_parallel.core.tensor_parallel.plan import check_plan, uneven_outputs

    if callable(plan.styles):
        return []
    styles = dict(plan.styles)
    notes = list(check_plan(model, mesh, styles).notes)
    return [*notes, *uneven_outputs(model, mesh, styles)] if failed and styles else notes


def _parallelize(model: Any, mesh: DeviceMesh, plan: ParallelPlan) -> Any:
    """Return the parallel model."""
    from hyper_parallel.core.dtensor.module import distribute_module
    from hyper_parallel.core.tensor_parallel.parallelize import apply_plan, check_named
    from hyper_parallel.core.tensor_parallel.plan_names import resolve_plan

    if callable(plan.styles):
        returned = call_user_function("PLAN: the function that parallelizes", plan.styles, model, mesh)
        model = model if returned is None else returned
    else:
        platform, styles = platform_of(model), resolve_plan(model, dict(plan.styles))
        check_named(platform, model, mesh, styles)  # without warnings: the report has the notes
        apply_plan(platform, model, mesh, styles)
    if plan.batch is not None:
        distribute_module(model, mesh)
    return model
