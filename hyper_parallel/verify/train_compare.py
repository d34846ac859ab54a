"""One rank's part of a model verification: train the single-device and the parallel model, and compare every step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor import random
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.tensor_parallel.plan import flat_plan
from hyper_parallel.core.tensor_parallel.plan_names import resolve_plan
from hyper_parallel.core.tensor_parallel.styles.base import style_of
from hyper_parallel.platform.select import current_platform
from hyper_parallel.verify.compare import Comparison, TensorCheck
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.model_case import InputError, ModelCase, ParallelPlan, as_case, as_plan
from hyper_parallel.verify.model_harden import Attempt, CaseLook
from hyper_parallel.verify.observers import gather_output, global_array
from hyper_parallel.verify.parameter_layouts import ParameterLayout, parameter_layouts
from hyper_parallel.verify.perturbation import describe
from hyper_parallel.verify.random_draws import mask_errors
from hyper_parallel.verify.step_timeline import StepCall, recorded_calls
from hyper_parallel.verify.training_runs import (
    ParallelRun,
    ReferenceStep,
    SingleDeviceRun,
    build_model,
    numbered,
    plan_notes,
)

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.events import Event
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.faults import Fault
    from hyper_parallel.verify.perturbation import Key

__all__ = ["RankResult", "run_plan_notes", "run_rank"]


@dataclass
class RankResult:
    """The comparisons of one rank.

    Attributes:
        checks: every comparison, in the order in which a divergence would show.
        skipped: outputs that could not be compared, and why.
        losses: of the single-device run, per step.
        events: collectives of the parallel run's training steps.
        bound: the allowed error, in words.
        parallel_losses: of the parallel run, per step.
        parameter_layouts: layouts of the parallel model's parameters.
        settings: what was trained and how, in words.
        hardened: what was changed about the case, in words.
        blind: what the case cannot show, in words.
        calls: of this rank into its transport, in the parallel run's last step.
        plan_notes: what is probably unintended about the plan, in words.
    """

    checks: list[TensorCheck]
    skipped: list[str]
    losses: list[float]
    events: list[Event]
    bound: str
    parallel_losses: list[float] = field(default_factory=list)
    parameter_layouts: list[ParameterLayout] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    hardened: list[str] = field(default_factory=list)
    blind: list[str] = field(default_factory=list)
    calls: list[StepCall] = field(default_factory=list)
    plan_notes: list[str] = field(default_factory=list)


def run_rank(
    make_case: Callable[[], Any],
    make_plan: Callable[[Any], Any],
    attempt: Attempt,
    mesh_names: tuple[str, ...],
    steps: int,
    fault: Fault | None,
    seed: int = 0,
    device: str = "cpu",
) -> RankResult:
    """Train both models on this rank for ``steps`` steps, and compare everything after each.

    Args:
        make_case: SPEC.
        make_plan: PLAN; called with the mesh.
        attempt: sizes of the axes, and what may be changed about the case.
        mesh_names: names of the axes.
        steps: at least one.
        fault: injected into the parallel run, if any.
        seed: of all random numbers that the harness and the frameworks draw.
        device: ``cpu``, ``cuda`` or ``npu``; both models are on it.

    Raises:
        InputError: SPEC, PLAN or the fault cannot be verified.
    """
    platform = current_platform()
    platform.seed(seed)
    case = as_case(make_case())
    mesh = init_device_mesh(device, attempt.shape, mesh_dim_names=mesh_names)
    plan = as_plan(make_plan(mesh), mesh.names)
    _require_parallel(plan)
    look = CaseLook(platform, attempt, dict(zip(mesh_names, attempt.shape, strict=True)), seed)
    case = look.case(case, plan)
    reference = SingleDeviceRun(platform, case, seed, look.weights)
    model = build_model(platform, case, seed)
    _check_device(platform.parameters_dict(model), device)
    harness_of(platform).load_arrays(model, reference.state)
    random.manual_seed(seed)
    result = _TrainCompare(platform, reference, ParallelRun(platform, case, model, mesh, plan, fault)).train(steps)
    return replace(result, hardened=look.changes, blind=[*look.blind, *_without_work(result)])


def _require_parallel(plan: ParallelPlan) -> None:
    """Raise an InputError if the plan leaves the model and the batch as they are."""
    if callable(plan.styles) or plan.batch is not None:
        return
    if not any(flat_plan(resolve_plan(None, plan.styles))):
        msg = (
            "PLAN gives no module a style and splits no batch, so every rank would train like the single device and "
            "nothing would be verified"
        )
        raise InputError(msg)


def _without_work(result: RankResult) -> list[str]:
    """Return that the plan neither shards nor communicates, if it does not."""
    if result.events or any(any(layout.dim_axes) for layout in result.parameter_layouts):
        return []
    return ["mistakes in a plan: this one shards no parameter and needs no collective; shard a module"]


def run_plan_notes(
    make_case: Callable[[], Any],
    make_plan: Callable[[Any], Any],
    mesh_shape: tuple[int, ...],
    mesh_names: tuple[str, ...],
) -> list[str]:
    """Return what may be the reason why the model fails under the plan; arguments as for :func:`run_rank`."""
    platform = current_platform()
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=mesh_names)
    model = build_model(platform, as_case(make_case()), 0)
    return plan_notes(model, mesh, as_plan(make_plan(mesh), mesh.names), failed=True)


def _check_device(parameters: dict[str, Any], device: str) -> None:
    """Raise an InputError if the model is not on the device that the run is to verify; CPU is not checked."""
    if device == "cpu":
        return
    platform = current_platform()
    found = ((path, platform.device_beside(value, device)) for path, value in parameters.items())
    elsewhere = next(((path, kind) for path, kind in found if kind), None)
    if elsewhere is not None:
        path, kind = elsewhere
        msg = (
            f"SPEC: parameter {path} is on {kind}, and --device is {device}, so nothing would be verified "
            "there; make it without naming a device"
        )
        raise InputError(msg)


class _TrainCompare:
    """Both runs, compared after every step."""

    def __init__(self, platform: Platform, reference: SingleDeviceRun, parallel: ParallelRun) -> None:
        self.platform, self.reference, self.parallel = platform, reference, parallel
        self.comparison = Comparison(platform.transport().rank)

    def train(self, steps: int) -> RankResult:
        """Run and compare ``steps`` steps."""
        losses: list[float] = []
        parallel_losses: list[float] = []
        events: list[Event] = []
        layouts = parameter_layouts(self.parallel.parameters())
        for number in range(steps):
            _require_equal_batches(self.platform, self.parallel.case, number)
            expected = self.reference.step(number)
            self.parallel.draws.shapes = expected.draws
            self.parallel.draws.draws.clear()
            # The collectives of the comparison itself are not recorded.
            with record_events() as log, recorded_calls(self.platform.transport()) as calls:
                log.step = number
                loss = self.parallel.step(number)
            events.extend(log)
            losses.append(float(expected.loss))
            parallel_losses.append(self._compare(number, loss, expected))
        if self.parallel.fault is not None:
            self.parallel.fault.must_have_hit()
        return RankResult(
            self.comparison.checks, self.comparison.skipped, losses, events, describe(self._dtype()),
            parallel_losses, layouts, self._settings(), calls=calls, plan_notes=self.parallel.plan_notes,
        )  # fmt: skip

    def _settings(self) -> dict[str, str]:
        case, plan = self.parallel.case, self.parallel.plan
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

    def _dtype(self) -> str:
        """Return the name of the coarsest floating dtype of the model.

        Raises:
            InputError: a parameter is bfloat16.
        """
        for path, parameter in self.platform.parameters_dict(self.parallel.model).items():
            if str(parameter.dtype).lower().endswith("bfloat16"):
                msg = (
                    f"SPEC: parameter {path} is bfloat16, in which rounding hides what a wrong plan does; build the "
                    "model in float64 or float32, where the same plan does the same"
                )
                raise InputError(msg)
        floating = [array.dtype for array in self.reference.state.values() if array.dtype.kind == "f"]
        return str(max(floating, key=lambda dtype: float(np.finfo(dtype).eps)))

    def _compare(self, step: int, loss: Any, expected: ReferenceStep) -> float:
        """Compare everything of one step, and return the parallel run's loss."""
        training, allowed = self.parallel.training, expected.allowed or {}
        optimizer = training.optimizer()
        self._compare_draws(step, expected)
        self._compare_outputs(step, expected)
        loss = global_array(self.platform, loss)
        self.comparison.compare("loss", "(loss)", "loss", step, loss, expected.loss, allowed["loss", "loss"])
        self._compare_numbers("norm", step, training.norms, expected.norms, allowed)
        self._compare_numbers("factor", step, training.factors, expected.factors, allowed)
        gradients = dict(reversed(expected.gradients.items()))  # in the order of backward
        self._compare_by_path("gradient", step, training.gradients, gradients, allowed)
        self._compare_by_path("state", step, optimizer.state(), expected.state, allowed)
        self._compare_by_path("weight", step, self.parallel.parameters(), expected.weights, allowed)
        self._compare_by_path(
            "buffer", step, harness_of(self.platform).buffers(self.parallel.model), expected.buffers, allowed
        )
        self._compare_numbers("rate", step, optimizer.learning_rates(), expected.rates, allowed)
        return float(loss) if np.size(loss) == 1 else float("nan")  # the check above reports another shape

    def _compare_draws(self, step: int, expected: ReferenceStep) -> None:
        """Compare the random state after the step, and the masks that the ranks would draw by themselves."""
        if not expected.random_state[1]:
            return
        transport = self.platform.transport()
        everyone = transport.all_gather_object(
            list(self.parallel.draws.draws.values()), tuple(range(transport.world_size))
        )
        for draw, why in mask_errors(everyone, transport.rank):
            self.comparison.record("mask", draw.module, f"{draw.module}, draw {draw.call + 1}", step, why)
        own = random.get_rng_state()
        why = ""
        if own != expected.random_state:
            why = (
                f"seed {own[0]} and {own[1]} draws so far, single device seed {expected.random_state[0]} and "
                f"{expected.random_state[1]} draws"
            )
        self.comparison.record("random", "(random)", "random state", step, why)

    def _compare_outputs(self, step: int, expected: ReferenceStep) -> None:
        outer, inner = self.parallel.style_outputs.outputs, self.parallel.outputs.outputs
        modules = dict(self.platform.get_cells_and_names(self.parallel.model))
        for module, name, array in expected.outputs:
            if name not in outer:
                self.comparison.missing("output", module, name, step, "the parallel model has no such output")
                continue
            own = inner[name].value if name in inner else None
            styled = module in modules and style_of(modules[module]) is not None
            value, why = gather_output(self.platform, outer[name].value, own, array.shape, styled=styled)
            if why:
                self.comparison.skip(f"output of {name}", why)
            else:
                allowed = (expected.allowed or {}).get(("output", name), 0.0)
                self.comparison.compare("output", module, name, step, value, array, allowed)

    def _compare_numbers(
        self, kind: str, step: int, actual: list[Any], expected: list[Any], allowed: Mapping[Key, float]
    ) -> None:
        """Compare norms, factors or learning rates."""
        if len(actual) != len(expected):
            why = f"the parallel run has {len(actual)}, the single-device run {len(expected)}"
            self.comparison.missing(kind, "(optimizer)", numbered(kind, 0), step, why)
        for index, (own, value) in enumerate(zip(actual, expected, strict=False)):
            name = numbered(kind, index)
            arrays = (np.array(own), np.array(value))
            self.comparison.compare(kind, "(optimizer)", name, step, *arrays, allowed.get((kind, name), 0.0))

    def _compare_by_path(
        self, kind: str, step: int, actual: Mapping[str, Any], expected: Mapping[str, Any], allowed: Mapping[Key, float]
    ) -> None:
        """Compare the tensors of one kind, by path; None stands for a gradient that does not exist."""
        for path, array in expected.items():
            module = path.rpartition(".")[0] if kind != "state" else path.rpartition(".")[0].rpartition(".")[0]
            value = None if actual.get(path) is None else _any_array(self.platform, actual[path])
            if array is None and value is None:
                self.comparison.skip(f"{kind} of {path}", "neither run has one: the loss does not depend on it")
            elif array is None or value is None:
                run = "parallel" if value is None else "single-device"
                self.comparison.missing(kind, module, path, step, f"the {run} run has none")
            else:
                self.comparison.compare(kind, module, path, step, value, array, allowed.get((kind, path), 0.0))


def _any_array(platform: Platform, value: Any) -> Any:
    """Return a tensor's global value, or a number, as an array."""
    return global_array(platform, value) if platform.is_tensor(value) else np.array(value)


def _function_name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _style_name(style: Any) -> str:
    return style if isinstance(style, str) else type(style).__name__


def _optimizer_text(case: ModelCase) -> str:
    if isinstance(case.optimizer, str):
        return f"{case.optimizer}, learning rate {case.learning_rate:g}"
    return _function_name(case.optimizer)


def _require_equal_batches(platform: Platform, case: ModelCase, step: int) -> None:
    """Refuse batches that differ between ranks, because they would make a correct plan look wrong.

    Raises:
        InputError: ranks have different batches.
    """
    arrays = [
        platform.tensor_to_numpy(item) if platform.is_tensor(item) else np.asarray(item)
        for batch in case.micro_batches(step)
        for item in batch
    ]
    own = [
        (array.shape, str(array.dtype), hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest())
        for array in arrays
    ]
    transport = platform.transport()
    digests = transport.all_gather_object(own, tuple(range(transport.world_size)))
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            msg = (
                f"SPEC: the batch of step {step + 1} on rank {rank} is not that of rank 0; every rank calls SPEC, so "
                "draw batches from a generator with a fixed seed, such as numpy.random.default_rng(0)"
            )
            raise InputError(msg)
