"""One rank's part of a model verification: train the single-device and the parallel model, and compare every step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.errors import HyperParallelError, short_dtype
from hyper_parallel.platform.select import current_platform
from hyper_parallel.verify.adamw_noise import NoiseReplacement
from hyper_parallel.verify.compare import Bound, Comparison, TensorCheck, magnitude, noise_floor
from hyper_parallel.verify.model_case import InputError, ModelCase, as_case, as_plan
from hyper_parallel.verify.observers import gather_output, global_array
from hyper_parallel.verify.parameter_layouts import ParameterLayout, parameter_layouts
from hyper_parallel.verify.spec import blame_user
from hyper_parallel.verify.training_runs import ParallelRun, ReferenceStep, SingleDeviceRun, build_model

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.events import Event
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.platform.contract.training import StepResult
    from hyper_parallel.verify.faults import Fault

__all__ = ["ParallelStep", "RankResult", "run_parallel_step", "run_rank"]

_NO_TERMS: Mapping[str, float] = MappingProxyType({})


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
    """

    checks: list[TensorCheck]
    skipped: list[str]
    losses: list[float]
    events: list[Event]
    bound: str
    parallel_losses: list[float] = field(default_factory=list)
    parameter_layouts: list[ParameterLayout] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)


def run_rank(
    make_case: Callable[[], Any],
    make_plan: Callable[[Any], Any],
    mesh_shape: tuple[int, ...],
    mesh_names: tuple[str, ...],
    steps: int,
    fault: Fault | None,
) -> RankResult:
    """Train both models on this rank for ``steps`` steps, and compare everything after each.

    Args:
        make_case: SPEC.
        make_plan: PLAN; called with the mesh.
        mesh_shape: sizes of the axes.
        mesh_names: their names.
        steps: at least one.
        fault: injected into the parallel run, if any.

    Raises:
        InputError: SPEC, PLAN or the fault cannot be verified.
    """
    platform = current_platform()
    case = as_case(make_case())
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=mesh_names)
    reference = SingleDeviceRun(platform, case)
    model = build_model(case)
    platform.load_arrays(model, reference.state)
    plan = as_plan(make_plan(mesh), mesh.names)
    return _TrainCompare(platform, reference, ParallelRun(platform, case, model, mesh, plan, fault)).train(steps)


@dataclass(frozen=True)
class ParallelStep:
    """One training step of the parallel model alone, on one rank.

    Attributes:
        parameter_layouts: layouts of the parameters.
        dtypes: short dtypes of the parameters, by path.
        itemsizes: bytes of an element, by path.
        events: collectives.
    """

    parameter_layouts: list[ParameterLayout]
    dtypes: dict[str, str]
    itemsizes: dict[str, int]
    events: list[Event]


def run_parallel_step(
    make_case: Callable[[], Any],
    make_plan: Callable[[Any], Any],
    mesh_shape: tuple[int, ...],
    mesh_names: tuple[str, ...],
) -> ParallelStep:
    """Run the parallel model on this rank for one step, and compare nothing; arguments as for :func:`run_rank`."""
    platform = current_platform()
    case = as_case(make_case())
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=mesh_names)
    run = ParallelRun(platform, case, build_model(case), mesh, as_plan(make_plan(mesh), mesh.names), None)
    parameters = run.parameters()
    with record_events() as log, blame_user("SPEC: the model under PLAN", HyperParallelError):
        run.step(0)
    dtypes = {path: short_dtype(parameter.dtype) for path, parameter in parameters.items()}
    itemsizes = {
        path: platform.itemsize(parameter.to_local() if isinstance(parameter, DTensor) else parameter)
        for path, parameter in parameters.items()
    }
    return ParallelStep(parameter_layouts(parameters), dtypes, itemsizes, list(log))


class _TrainCompare:
    """Both runs, compared after every step."""

    def __init__(self, platform: Platform, reference: SingleDeviceRun, parallel: ParallelRun) -> None:
        self.platform, self.reference, self.parallel = platform, reference, parallel
        self.comparison: Comparison | None = None

    def train(self, steps: int) -> RankResult:
        """Run and compare ``steps`` steps."""
        losses: list[float] = []
        parallel_losses: list[float] = []
        events: list[Event] = []
        layouts = parameter_layouts(self.parallel.parameters())
        for number in range(steps):
            _require_equal_batches(self.platform, self.parallel.case, number)
            expected = self.reference.step(number)
            if self.comparison is None:
                self.comparison = Comparison(self._bound(expected), self.platform.transport().rank)
            self.parallel.noise = self._noise_replacement(self.comparison, number, expected)
            with record_events() as log:  # the collectives of the comparison itself are not recorded
                log.step = number
                result = self.parallel.step(number)
            events.extend(log)
            losses.append(float(expected.loss))
            parallel_losses.append(self._compare(self.comparison, number, result, expected))
        if self.parallel.fault is not None:
            self.parallel.fault.must_have_hit()
        if self.comparison is None:
            return RankResult([], [], losses, events, "")
        comparison = self.comparison
        return RankResult(
            comparison.checks, comparison.skipped, losses, events, str(comparison.bound),
            parallel_losses, layouts, self._settings(),
        )  # fmt: skip

    def _settings(self) -> dict[str, str]:
        case, plan = self.parallel.case, self.parallel.plan
        return {
            "optimizer": f"{case.optimizer}, learning rate {case.learning_rate:g}",
            "plan": ", ".join(f"{path or '(model)'}: {type(style).__name__}" for path, style in plan.styles.items()),
            "batch": "plain, whole on every rank"
            if plan.batch is None
            else ", ".join(f"{axis}: {placement}" for axis, placement in plan.batch.items()) or "replicated",
        }

    def _noise_replacement(self, comparison: Comparison, step: int, expected: ReferenceStep) -> NoiseReplacement | None:
        case = self.parallel.case
        if case.optimizer != "adamw":
            return None
        reference = (expected.gradients, expected.terms, expected.weights)
        return NoiseReplacement(comparison.bound, step, case.learning_rate, *reference)

    def _bound(self, expected: ReferenceStep) -> Bound:
        """Return the bound of a run with the first step ``expected``.

        Raises:
            InputError: a parameter is bfloat16.
        """
        parameters = self.platform.parameters_dict(self.parallel.model)
        for path, parameter in parameters.items():
            if str(parameter.dtype).lower().endswith("bfloat16"):
                msg = (
                    f"SPEC: parameter {path} is bfloat16, in which rounding hides what a wrong plan does; build the "
                    "model in float64 or float32, where the same plan does the same"
                )
                raise InputError(msg)
        arrays = list(self.reference.state.values())
        floating = [array.dtype for array in arrays if array.dtype.kind == "f"]
        coarsest = max(floating, key=lambda dtype: float(np.finfo(dtype).eps))
        tokens = max((int(np.prod(np.shape(item))) for item in self.parallel.case.batch(0)), default=1)
        longest = max([tokens, *(size for array in arrays for size in array.shape)])
        return Bound(str(coarsest), longest, 2 * max(1, len(expected.outputs)))

    def _compare(self, comparison: Comparison, step: int, result: StepResult, expected: ReferenceStep) -> float:
        """Compare everything of one step, and return the parallel run's loss."""
        noise = self.parallel.noise
        if noise is not None and noise.replaced:
            comparison.skip(f"AdamW's step {step + 1}", str(noise))
        self._compare_outputs(comparison, step, expected)
        loss = global_array(self.platform, result.loss)
        comparison.compare("loss", "(loss)", "loss", step, loss, expected.loss)
        gradients = dict(reversed(expected.gradients.items()))  # in the order of backward
        self._compare_by_path(comparison, "gradient", step, result.gradients, gradients, expected.terms)
        self._compare_by_path(comparison, "weight", step, self.parallel.parameters(), expected.weights)
        buffers = self.platform.buffers(self.parallel.model)
        self._compare_by_path(comparison, "buffer", step, buffers, expected.buffers)
        return float(loss) if np.size(loss) == 1 else float("nan")  # the check above reports another shape

    def _compare_outputs(self, comparison: Comparison, step: int, expected: ReferenceStep) -> None:
        outer, inner = self.parallel.style_outputs.outputs, self.parallel.outputs.outputs
        for module, name, array in expected.outputs:
            if name not in outer:
                comparison.missing("output", module, name, step, "the parallel model has no such output")
                continue
            own = inner[name].value if name in inner else None
            value, why = gather_output(self.platform, outer[name].value, own, array.shape)
            if why:
                comparison.skip(f"output of {name}", why)
            else:
                comparison.compare("output", module, name, step, value, array)

    def _compare_by_path(
        self,
        comparison: Comparison,
        kind: str,
        step: int,
        actual: Mapping[str, Any],
        expected: Mapping[str, Any],
        terms: Mapping[str, float] = _NO_TERMS,
    ) -> None:
        """Compare the tensors of one kind, by path; None stands for a gradient that does not exist."""
        largest = max((magnitude(array) for array in expected.values() if array is not None), default=0.0)
        for path, array in expected.items():
            module = path.rpartition(".")[0]
            value = None if actual.get(path) is None else global_array(self.platform, actual[path])
            if array is None and value is None:
                comparison.skip(f"{kind} of {path}", "neither run has one: the loss does not depend on it")
            elif array is None or value is None:
                run = "parallel" if value is None else "single-device"
                comparison.missing(kind, module, path, step, f"the {run} run has none")
            else:
                floor = noise_floor(largest, terms.get(path, 0.0))
                comparison.compare(kind, module, path, step, value, array, floor)


def _require_equal_batches(platform: Platform, case: ModelCase, step: int) -> None:
    """Refuse batches that differ between ranks, because they would make a correct plan look wrong.

    Raises:
        InputError: ranks have different batches.
    """
    arrays = [
        platform.tensor_to_numpy(item) if platform.is_tensor(item) else np.asarray(item) for item in case.batch(step)
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
