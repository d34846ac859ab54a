"""The training of a model as a program that ranks can run: inspection, single-device and parallel training."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel._caches import empty_layout_caches
from hyper_parallel.core.dtensor import random
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.shard.op_plan import observing_plans
from hyper_parallel.core.tensor_parallel.plan import flat_plan
from hyper_parallel.core.tensor_parallel.plan_names import resolve_plan
from hyper_parallel.platform.select import current_platform
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.frameworks.contract.record_log import active_log
from hyper_parallel.verify.frameworks.contract.training import first_paths
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.model.hardening import Attempt, CaseInspection, with_fewer_rows
from hyper_parallel.verify.model_case import ModelCase, ParallelPlan, as_case, as_plan
from hyper_parallel.verify.model_training import ParallelRun, SingleDeviceRun, build_model, plan_notes
from hyper_parallel.verify.parameter_layouts import ParameterLayout, parameter_layouts
from hyper_parallel.verify.prove.table import RowsOfCall, rows_of_call
from hyper_parallel.verify.step_timeline import StepCall, recorded_calls

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.events import Event
    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.faults import Fault
    from hyper_parallel.verify.random_draws import Draw

__all__ = ["CaseFacts", "ModelProgram", "Trained", "trained"]

_NOTE = "model"
"""Key of :class:`Trained` in the notes of a rank."""


@dataclass(frozen=True)
class CaseFacts:
    """Facts about a case before the training.

    Attributes:
        state: initial parameters and buffers of every run, by path.
        digests: digests of the batches of each step, until the batches repeat.
        dtype: the coarsest floating dtype of the model.
        settings: settings of the training, in words.
        rows_over: sizes of the axes for which rows were removed to make batches uneven; empty if none were removed.
        changes: changes of the case, in words.
        blind: blind spots of the case, in words.
    """

    state: dict[str, Any]
    digests: list[Any]
    dtype: str
    settings: dict[str, str]
    rows_over: tuple[int, ...]
    changes: list[str]
    blind: list[str]


@dataclass
class Trained:
    """Facts that a rank reports in addition to its recorded values.

    Attributes:
        losses: global loss per step.
        random_states: seed and number of draws of the DTensors' random generator, after each step.
        shapes: shapes of the plain tensors that the single device filled with random numbers, by the draw's number.
        draws: draws of random numbers for plain tensors on a rank, by step.
        events: collectives of the training steps.
        layouts: layouts of the parallel model's parameters.
        plan_notes: sentences about properties of the plan that are probably unintended.
        calls: distinct operator calls on DTensors in the training steps.
    """

    losses: list[float] = field(default_factory=list)
    random_states: list[tuple[int, int]] = field(default_factory=list)
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    draws: list[list[Draw]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    layouts: list[ParameterLayout] = field(default_factory=list)
    plan_notes: list[str] = field(default_factory=list)
    calls: dict[RowsOfCall, None] = field(default_factory=dict)


def trained(notes: Mapping[str, Any]) -> Trained:
    """Return the facts that a rank reported."""
    found: Trained = notes[_NOTE]
    return found


@dataclass(frozen=True)
class ModelProgram:
    """A model, its training and its plan.

    Attributes:
        make_case: the user's function SPEC.
        make_plan: the user's function PLAN; called with the mesh.
        attempt: sizes of the axes, and the changes of the case that are allowed.
        names: names of the axes.
        steps: number of training steps.
        fault: fault that is injected into the parallel run; None for none.
        seed: seed of all random numbers.
        device: device of both models: ``cpu``, ``cuda`` or ``npu``.
        facts: facts about the case; None until it has been inspected.
        shapes: shapes of the single device's random draws, as in :class:`Trained`.
    """

    make_case: Callable[[], Any]
    make_plan: Callable[[Any], Any]
    attempt: Attempt
    names: tuple[str, ...]
    steps: int
    fault: Fault | None
    seed: int
    device: str
    facts: CaseFacts | None = None
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def look(self) -> CaseFacts | None:
        """Inspect the case on every rank of the world; rank 0 returns the facts.

        Raises:
            InputError: SPEC or PLAN cannot be verified.
        """
        platform = current_platform()
        platform.seed(self.seed)
        case = as_case(self.make_case())
        mesh, plan = self._plan()
        _require_parallel(plan, self.names)
        look = CaseInspection(platform, self.attempt, dict(zip(self.names, self.attempt.shape, strict=True)), self.seed)
        case = look.case(case, plan)
        model = build_model(platform, case, self.seed)
        parameters = first_paths(platform.parameters_dict(model))
        plan_notes(model, mesh, plan)  # raises an error if the plan does not match the model
        _check_device(parameters, self.device)
        _require_values(parameters, platform.is_meta)
        _require_precision(parameters)
        state = look.weights(_arrays(platform, model), list(harness_of(platform).trainable(model)))
        digests = _digests(platform, case, self.steps)
        transport = platform.transport()
        everyone = transport.all_gather_object(digests, tuple(range(transport.world_size)))
        for rank, others in enumerate(everyone):
            _require_equal_batches(everyone[0], others, rank, self.steps)
        floating = [array.dtype for array in state.values() if array.dtype.kind == "f"]
        dtype = str(max(floating, key=lambda kind: float(np.finfo(kind).eps), default=""))
        if transport.rank:
            return None
        settings = _settings(plan.applied_to(case), plan)
        return CaseFacts(state, digests, dtype, settings, look.rows_over, look.changes, look.blind)

    def train_alone(self) -> None:
        """Train the single-device model on this rank, in a world of one."""
        platform, case = current_platform(), self._case()
        run = SingleDeviceRun(platform, case, self._model(platform, case))
        notes = _noted()
        for number in range(self.steps):
            notes.losses.append(float(platform.tensor_to_numpy(platform.detach(run.step(number)))))
            notes.random_states.append(random.get_rng_state())
        notes.shapes.update(run.draws.shapes)

    def train_parallel(self) -> list[StepCall]:
        """Train the parallel model on this rank; return the rank's calls into the transport in the last step."""
        platform, case = current_platform(), self._case()
        mesh, plan = self._plan()
        model = self._model(platform, case)
        run = ParallelRun(platform, case, model, mesh, plan, copy.copy(self.fault))  # a fault counts hits
        run.training.keeps_gradients, run.draws.shapes = False, self.shapes
        notes = _noted()
        notes.layouts, notes.plan_notes = parameter_layouts(run.parameters()), run.plan_notes
        calls = list[StepCall]()
        empty_layout_caches()  # calls with an op plan cached by an earlier run would not be recorded
        for number in range(self.steps):
            with (
                record_events() as log,
                recorded_calls(platform.transport()) as made,
                observing_plans(lambda plan: notes.calls.setdefault(rows_of_call(plan))),
            ):
                log.step = number
                loss = run.step(number)
            notes.events, calls = [*notes.events, *log], made
            notes.draws.append(list(run.draws.draws.values()))
            run.draws.draws.clear()
            notes.random_states.append(random.get_rng_state())
            notes.losses.append(_number(platform, loss))
        if run.fault is not None:
            run.fault.must_have_hit()
        return calls

    def notes_on_failure(self) -> list[str]:
        """Return possible reasons why the model fails under the plan."""
        platform = current_platform()
        mesh, plan = self._plan()
        return plan_notes(build_model(platform, as_case(self.make_case()), 0), mesh, plan, failed=True)

    def _case(self) -> ModelCase:
        """Return the case as it was inspected.

        Raises:
            InputError: the batches differ from those of the inspection.
        """
        assert self.facts is not None
        platform = current_platform()
        platform.seed(self.seed)
        case = with_fewer_rows(platform, as_case(self.make_case()), self.facts.rows_over)
        digests = _digests(platform, case, self.steps)
        _require_equal_batches(self.facts.digests, digests, platform.transport().rank, self.steps)
        return case

    def _model(self, platform: Platform, case: ModelCase) -> Any:
        """Return the model in its initial state."""
        assert self.facts is not None
        model = build_model(platform, case, self.seed)
        harness_of(platform).load_arrays(model, self.facts.state)
        random.manual_seed(self.seed)
        return model

    def _plan(self) -> tuple[DeviceMesh, ParallelPlan]:
        mesh = init_device_mesh(self.device, self.attempt.shape, mesh_dim_names=self.names)
        return mesh, as_plan(self.make_plan(mesh), mesh.names)


def _require_parallel(plan: ParallelPlan, names: Sequence[str]) -> None:
    """Raise an InputError if the plan parallelizes neither the model nor the batch on a mesh of axes ``names``."""
    if callable(plan.styles) or plan.batch is not None:
        return
    if not any(flat_plan(resolve_plan(None, plan.styles))):
        msg = (
            "PLAN gives no module a style and splits no batch, so every rank would train like the single device and "
            "nothing would be verified; for data parallelism return hyper_parallel.verify.ParallelPlan({}, "
            f"batch={{{names[0]!r}: Shard(0)}}), or give a module a style by its path"
        )
        raise InputError(msg)


def _check_device(parameters: Mapping[str, Any], device: str) -> None:
    """Raise an InputError if the model is not on the device to verify; CPU is not checked."""
    if device == "cpu":
        return
    platform = current_platform()
    found = ((path, platform.differing_device(value, device)) for path, value in parameters.items())
    elsewhere = next(((path, kind) for path, kind in found if kind), None)
    if elsewhere is not None:
        path, kind = elsewhere
        msg = (
            f"SPEC: parameter {path} is on {kind}, and --device is {device}, so nothing would be verified "
            "there; make it without naming a device"
        )
        raise InputError(msg)


def _function_name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _style_name(style: Any) -> str:
    return style if isinstance(style, str) else type(style).__name__


def _optimizer_text(case: ModelCase) -> str:
    if isinstance(case.optimizer, str):
        return f"{case.optimizer}, learning rate {case.learning_rate:g}"
    return _function_name(case.optimizer)


def _noted() -> Trained:
    """Return new, empty facts about this rank's training, which are stored in the rank's notes."""
    notes, log = Trained(), active_log()
    if log is not None:
        log.notes[_NOTE] = notes
    return notes


def _arrays(platform: Platform, model: Any) -> dict[str, Any]:
    """Return copies of parameters and buffers by path."""
    values = {**first_paths(platform.parameters_dict(model)), **harness_of(platform).buffers(model)}
    return {path: np.array(platform.tensor_to_numpy(platform.detach(value))) for path, value in values.items()}


def _number(platform: Platform, loss: Any) -> float:
    """Return the global value of a loss; NaN if it has more than one element."""
    loss = loss.detach().full_tensor() if isinstance(loss, DTensor) else loss
    array = np.asarray(platform.tensor_to_numpy(platform.detach(loss)))
    return float(array) if array.size == 1 else float("nan")


def _require_values(parameters: Mapping[str, Any], is_meta: Callable[[Any], bool]) -> None:
    """Raise an InputError if a parameter has a shape but no values."""
    empty = [path for path, value in parameters.items() if is_meta(value)]
    if empty:
        msg = (
            f"SPEC: parameter {empty[0]} is on the device meta, so it has no values to compare; build the model on a "
            "device that has values"
        )
        raise InputError(msg)


def _require_precision(parameters: Mapping[str, Any]) -> None:
    """Raise an InputError if a parameter is bfloat16."""
    for path, parameter in parameters.items():
        if str(parameter.dtype).lower().endswith("bfloat16"):
            msg = (
                f"SPEC: parameter {path} is bfloat16, in which rounding hides what a wrong plan does; build the model "
                "in float64 or float32, where the same plan does the same"
            )
            raise InputError(msg)


def _settings(case: ModelCase, plan: ParallelPlan) -> dict[str, str]:
    """Return the settings of the training, in words."""
    settings = {
        "optimizer": _optimizer_text(case),
        "plan": _function_name(plan.styles)
        if callable(plan.styles)
        else ", ".join(f"{path or '(model)'}: {_style_name(style)}" for path, style in plan.styles.items()),
        "batch": "plain, whole on every rank"
        if plan.batch is None
        else ", ".join(f"{axis}: {placement}" for axis, placement in plan.batch.items()) or "replicated",
    }
    if case.accumulate > 1:
        settings["accumulate"] = f"{case.accumulate} batches a step"
    if case.clip is not None:
        settings["clip"] = f"norm {case.clip:g}"
    for name in ("scheduler", "step", "hooks", "context"):
        if getattr(case, name) is not None:
            settings[name] = _function_name(getattr(case, name))
    return settings


def _digests(platform: Platform, case: ModelCase, steps: int) -> list[list[Any]]:
    """Return, for each step until the batches repeat, shape, dtype and digest of every array of its batches."""
    return [
        [_digest(platform, item) for batch in case.micro_batches(step) for item in batch]
        for step in range(min(steps, len(case.batches)))
    ]


def _digest(platform: Platform, item: Any) -> tuple[Any, ...]:
    array = platform.tensor_to_numpy(item) if platform.is_tensor(item) else np.asarray(item)
    return array.shape, str(array.dtype), hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()


def _require_equal_batches(first: list[Any], other: list[Any], rank: int, steps: int) -> None:
    """Reject batches that differ between ranks, because they would make a correct plan fail.

    Raises:
        InputError: rank ``rank`` has different batches.
    """
    for step in range(min(steps, math.lcm(len(first), len(other)))):
        if first[step % len(first)] != other[step % len(other)]:
            msg = (
                f"SPEC: the batch of step {step + 1} on rank {rank} is not that of rank 0; every rank calls SPEC, so "
                "draw batches from a generator with a fixed seed, such as numpy.random.default_rng(0)"
            )
            raise InputError(msg)
