"""One rank's part of a model verification: the single-device model and the parallel one, step by step."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import module_scope, record_events
from hyper_parallel.core.dtensor.mesh import DeviceMesh, init_device_mesh
from hyper_parallel.core.dtensor.placements import Replicate
from hyper_parallel.errors import HyperParallelError, short_dtype
from hyper_parallel.platform.contract.training import first_paths
from hyper_parallel.platform.select import current_platform
from hyper_parallel.verify.adamw_noise import Settlement
from hyper_parallel.verify.compare import Bound, Comparison, TensorCheck, magnitude, noise_floor
from hyper_parallel.verify.model_case import InputError, ModelCase, ParallelPlan, as_case, as_plan
from hyper_parallel.verify.observers import CotangentObserver, OutputObserver, gather, whole
from hyper_parallel.verify.parameter_layouts import ParameterLayout, parameter_layouts
from hyper_parallel.verify.spec import blame_user, call_user_function

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.events import Event
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.platform.contract.training import StepResult
    from hyper_parallel.verify.faults import Fault

__all__ = ["RankResult", "Rehearsed", "rehearse", "run_rank"]

_NO_GRADIENT = (
    "SPEC: the first step gives no parameter a gradient other than zero, so nothing would be verified; the loss must "
    "depend on the model's output, without detach() or no_grad() on the way"
)
_BUILD = "SPEC: the function that builds the model"
_ALONE = "SPEC: the model on a single device"
_PARALLEL = "SPEC: the model under PLAN"
_NOTHING: Mapping[str, float] = MappingProxyType({})


@dataclass
class RankResult:
    """What one rank found.

    Attributes:
        checks: every comparison, in the order in which a divergence would show.
        skipped: outputs that could not be compared, and why.
        losses: of the single-device run, per step.
        events: collectives of the parallel run's training steps.
        bound: the allowed error, in words.
        parallel_losses: of the parallel run, per step.
        placed: where the pieces of every parameter of the parallel model lie.
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
    """Train both models for ``steps`` steps on this rank and compare everything after each."""
    platform = current_platform()
    case = as_case(make_case())
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=mesh_names)
    reference = _Reference(platform, case)
    model = call_user_function(_BUILD, case.build)
    platform.load_arrays(model, reference.state)
    plan = as_plan(make_plan(mesh), mesh.names)
    return _SideBySide(platform, reference, _Parallel(platform, case, model, mesh, plan, fault)).train(steps)


@dataclass(frozen=True)
class Rehearsed:
    """One training step of the parallel model alone, on one rank.

    Attributes:
        placed: where the pieces of every parameter lie.
        dtypes: of the parameters, by path, in short.
        itemsizes: bytes of an element, by path.
        events: collectives.
    """

    parameter_layouts: list[ParameterLayout]
    dtypes: dict[str, str]
    itemsizes: dict[str, int]
    events: list[Event]


def rehearse(
    make_case: Callable[[], Any],
    make_plan: Callable[[Any], Any],
    mesh_shape: tuple[int, ...],
    mesh_names: tuple[str, ...],
) -> Rehearsed:
    """Run the parallel model on this rank for one step, and compare nothing."""
    platform = current_platform()
    case = as_case(make_case())
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=mesh_names)
    model = call_user_function(_BUILD, case.build)
    run = _Parallel(platform, case, model, mesh, as_plan(make_plan(mesh), mesh.names), None)
    held = first_paths(platform.parameters_dict(model))
    with record_events() as log, blame_user(_PARALLEL, HyperParallelError):
        run.step(0)
    dtypes = {path: short_dtype(one.dtype) for path, one in held.items()}
    sizes = {path: platform.itemsize(one.to_local() if isinstance(one, DTensor) else one) for path, one in held.items()}
    return Rehearsed(parameter_layouts(held), dtypes, sizes, list(log))


@dataclass(frozen=True)
class _Truth:
    """What one step of the single-device run gave, as NumPy arrays.

    Attributes:
        outputs: of every module in forward order: its path, the output's name, the value.
        loss: the scalar.
        gradients: by path; None where the loss does not depend on the parameter.
        summands: largest magnitude that was summed in a bias's gradient, by path.
        weights: by path, after the step; those that are not trained too.
        buffers: by path, after the step.
    """

    outputs: list[tuple[str, str, Any]]
    loss: Any
    gradients: dict[str, Any]
    summands: dict[str, float]
    weights: dict[str, Any]
    buffers: dict[str, Any]


class _Reference:
    """The single-device model: rank 0 trains it, every rank learns what came out.

    Attributes:
        state: initial parameters and buffers by path, the same on every rank.
    """

    def __init__(self, platform: Platform, case: ModelCase) -> None:
        self._platform = platform
        self._run = (
            _Run(platform, case, call_user_function(_BUILD, case.build)) if platform.transport().rank == 0 else None
        )
        self._random = None if self._run is None else platform.watch_random(self._run.model)
        self._cotangents = None if self._run is None else CotangentObserver(platform, self._run.model)
        self.state: dict[str, Any] = self._tell(lambda run: {**self._weights(run), **self._buffers(run)})

    def step(self, number: int) -> _Truth:
        """One step of training."""
        truth: _Truth = self._tell(lambda run: self._truth(run, number))
        return truth

    def _tell(self, make: Callable[[_Run], Any]) -> Any:
        """What rank 0 makes, on every rank."""
        transport = self._platform.transport()
        own = None if self._run is None else make(self._run)
        return transport.all_gather_object(own, tuple(range(transport.world_size)))[0]

    def _truth(self, run: _Run, number: int) -> _Truth:
        _must_train(self._platform, run.model)
        cotangents: CotangentObserver = self._cotangents  # type: ignore[assignment] # made with the run
        cotangents.clear()
        array = self._array
        with blame_user(_ALONE):
            result = run.step(number)
        random = None if self._random is None else self._random()
        if random is not None:
            msg = (
                f"SPEC: module {random or '(model)'} draws random numbers in forward, and a parallel run draws others; "
                "set its dropout to 0, or put it into evaluation mode"
            )
            raise InputError(msg)
        if number == 0 and not any(one is not None and magnitude(array(one)) for one in result.gradients.values()):
            raise InputError(_NO_GRADIENT)
        return _Truth(
            [(seen.module, name, array(seen.value)) for name, seen in run.outer.seen.items()],
            array(result.loss),
            {path: None if one is None else array(one) for path, one in result.gradients.items()},
            dict(cotangents.largest),
            self._weights(run),
            self._buffers(run),
        )

    def _weights(self, run: _Run) -> dict[str, Any]:
        return self._arrays(first_paths(self._platform.parameters_dict(run.model)))

    def _buffers(self, run: _Run) -> dict[str, Any]:
        return self._arrays(self._platform.buffers(run.model))

    def _arrays(self, values: dict[str, Any]) -> dict[str, Any]:
        return {path: self._array(value) for path, value in values.items()}

    def _array(self, value: Any) -> Any:
        """A copy: the optimizer writes into what it trains."""
        return np.array(whole(self._platform, value))


class _Run:
    """The single-device model in training."""

    def __init__(self, platform: Platform, case: ModelCase, model: Any) -> None:
        self.platform, self.case, self.model = platform, case, model
        self.inner = OutputObserver(platform, model)
        self.outer = self.inner
        self._step: Callable[[StepResult], None] | None = None

    def step(self, number: int) -> StepResult:
        """Forward, backward and the optimizer's step."""
        self.inner.clear()
        self.outer.clear()
        batch = self._tensors(self.case.batch(number))
        with self._around():
            result = self.platform.training_step(self.model, lambda: self._loss(batch))
            if self._step is None:
                self._step = self.platform.optimizer(self.model, self.case.optimizer, self.case.learning_rate)
            self._step(self._settled(result))
        return result

    def _settled(self, result: StepResult) -> StepResult:
        """What the optimizer sees."""
        return result

    def _loss(self, batch: tuple[Any, ...]) -> Any:
        output = self.model(*self.case.model_inputs(batch))
        with module_scope("(loss)"):
            loss = self.case.loss(output, batch)
        self._check_loss(loss)
        return loss

    def _check_loss(self, loss: Any) -> None:
        """Raise an InputError where nothing can be trained by ``loss``."""
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

    def _tensors(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            one if self.platform.is_tensor(one) else self.platform.from_numpy(np.asarray(one)) for one in batch
        )

    def _around(self) -> Any:
        return contextlib.nullcontext()


class _Parallel(_Run):
    """The same model, made parallel by the plan."""

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
        self.settlement: Settlement | None = None
        if fault is not None:
            fault.before_parallel(platform, model)
        _parallelize(model, mesh, plan)
        if fault is not None:
            fault.after_parallel(platform, model)
        self.outer = OutputObserver(platform, model)

    def _around(self) -> Any:
        stack = contextlib.ExitStack()
        if self.fault is not None:
            stack.enter_context(self.fault.running(self.platform))
        if self.plan.context is not None:
            stack.enter_context(self.plan.context())
        return stack

    def _check_loss(self, loss: Any) -> None:
        """Nothing: the single-device run has come first."""

    def _settled(self, result: StepResult) -> StepResult:
        return result if self.settlement is None else self.settlement(self.platform, result)

    def _tensors(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        plain = super()._tensors(batch)
        if self.plan.batch is None:
            return plain
        from hyper_parallel.core.dtensor.module import distribute_tensor

        placements = [self.plan.batch.get(name, Replicate()) for name in self.mesh.names]
        return tuple(distribute_tensor(one, self.mesh, placements, src_data_rank=None) for one in plain)


def _same_on_every_rank(platform: Platform, case: ModelCase, step: int) -> None:
    """A batch drawn anew by every rank would make a correct plan look wrong.

    Raises:
        InputError: ranks have different batches.
    """
    held = [platform.tensor_to_numpy(one) if platform.is_tensor(one) else np.asarray(one) for one in case.batch(step)]
    mine = [(one.shape, str(one.dtype), hashlib.sha256(np.ascontiguousarray(one).tobytes()).digest()) for one in held]
    transport = platform.transport()
    every = transport.all_gather_object(mine, tuple(range(transport.world_size)))
    for rank, other in enumerate(every):
        if other != every[0]:
            msg = (
                f"SPEC: the batch of step {step + 1} on rank {rank} is not that of rank 0; every rank calls SPEC, so "
                "draw batches from a generator with a fixed seed, such as numpy.random.default_rng(0)"
            )
            raise InputError(msg)


def _must_train(platform: Platform, model: Any) -> None:
    """Raise an InputError where no parameter requires grad."""
    held = platform.trainable(model)
    if not any(platform.is_floating(one) for one in held.values()):
        every = len(first_paths(platform.parameters_dict(model)))
        msg = (
            f"SPEC: none of the model's {every} parameters is floating and requires grad, so there is nothing to "
            "train; leave at least one unfrozen"
        )
        raise InputError(msg)


def _parallelize(model: Any, mesh: DeviceMesh, plan: ParallelPlan) -> None:
    from hyper_parallel.core.dtensor.module import distribute_module
    from hyper_parallel.core.tensor_parallel import parallelize_module

    parallelize_module(model, mesh, dict(plan.styles))
    if plan.batch is not None:
        distribute_module(model, mesh)


class _SideBySide:
    """Both runs, compared after every step."""

    def __init__(self, platform: Platform, reference: _Reference, parallel: _Parallel) -> None:
        self.platform, self.reference, self.parallel = platform, reference, parallel
        self.comparison: Comparison | None = None

    def train(self, steps: int) -> RankResult:
        """Run and compare ``steps`` steps."""
        losses: list[float] = []
        parallel_losses: list[float] = []
        events: list[Event] = []
        where = parameter_layouts(first_paths(self.platform.parameters_dict(self.parallel.model)))
        for number in range(steps):
            _same_on_every_rank(self.platform, self.parallel.case, number)
            wanted = self.reference.step(number)
            if self.comparison is None:
                self.comparison = Comparison(self._bound(wanted), self.platform.transport().rank)
            self.parallel.settlement = self._settlement(self.comparison, number, wanted)
            with record_events() as log:  # what comparing itself gathers is not recorded
                log.step = number
                found = self.parallel.step(number)
            events.extend(log)
            losses.append(float(wanted.loss))
            parallel_losses.append(self._compare(number, found, wanted))
        if self.parallel.fault is not None:
            self.parallel.fault.must_have_hit()
        if self.comparison is None:
            return RankResult([], [], losses, events, "")
        comparison = self.comparison
        return RankResult(
            comparison.checks, comparison.skipped, losses, events, str(comparison.bound),
            parallel_losses, where, self._settings(),
        )  # fmt: skip

    def _settings(self) -> dict[str, str]:
        case, plan = self.parallel.case, self.parallel.plan
        return {
            "optimizer": f"{case.optimizer}, learning rate {case.learning_rate:g}",
            "plan": ", ".join(f"{path or '(model)'}: {type(style).__name__}" for path, style in plan.styles.items()),
            "batch": "plain, whole on every rank"
            if plan.batch is None
            else ", ".join(f"{axis}: {one}" for axis, one in plan.batch.items()) or "replicated",
        }

    def _compare(self, step: int, found: StepResult, wanted: _Truth) -> float:
        """Compare everything of one step; the parallel run's loss."""
        comparison: Comparison = self.comparison  # type: ignore[assignment] # made before the first step
        settlement = self.parallel.settlement
        if settlement is not None and settlement.settled:
            comparison.skip(f"AdamW's step {step + 1}", str(settlement))
        self._outputs(step, comparison, wanted)
        loss = whole(self.platform, found.loss)
        comparison.compare("loss", "(loss)", "loss", step, loss, wanted.loss)
        backwards = dict(reversed(wanted.gradients.items()))
        self._by_path("gradient", step, comparison, found.gradients, backwards, wanted.summands)
        model = self.parallel.model
        self._by_path("weight", step, comparison, first_paths(self.platform.parameters_dict(model)), wanted.weights)
        self._by_path("buffer", step, comparison, self.platform.buffers(model), wanted.buffers)
        return float(loss) if np.size(loss) == 1 else float("nan")  # of another shape: the check above tells

    def _settlement(self, comparison: Comparison, step: int, wanted: _Truth) -> Settlement | None:
        case = self.parallel.case
        if case.optimizer != "adamw":
            return None
        given = (wanted.gradients, wanted.summands, wanted.weights)
        return Settlement(comparison.bound, step, case.learning_rate, *given)

    def _bound(self, wanted: _Truth) -> Bound:
        arrays = list(self.reference.state.values())
        floating = [one.dtype for one in arrays if one.dtype.kind == "f"]
        held = self.platform.parameters_dict(self.parallel.model)
        half = next((path for path, one in held.items() if str(one.dtype).lower().endswith("bfloat16")), None)
        if half is not None:
            msg = (
                f"SPEC: parameter {half} is bfloat16, in which rounding hides what a wrong plan does; build the model "
                "in float64 or float32, where the same plan does the same"
            )
            raise InputError(msg)
        coarsest = max(floating, key=lambda dtype: float(np.finfo(dtype).eps))
        tokens = max((int(np.prod(np.shape(one))) for one in self.parallel.case.batch(0)), default=1)
        longest = max([tokens, *(size for array in arrays for size in array.shape)])
        return Bound(str(coarsest), longest, 2 * max(1, len(wanted.outputs)))

    def _outputs(self, step: int, comparison: Comparison, wanted: _Truth) -> None:
        outer, inner = self.parallel.outer.seen, self.parallel.inner.seen
        for module, name, array in wanted.outputs:
            if name not in outer:
                comparison.missing("output", module, name, step, "the parallel model has no such output")
                continue
            raw = inner[name].value if name in inner else None
            value, why = gather(self.platform, outer[name].value, raw, array.shape)
            if why:
                comparison.skip(f"output of {name}", why)
            else:
                comparison.compare("output", module, name, step, value, array)

    def _by_path(
        self,
        kind: str,
        step: int,
        comparison: Comparison,
        found: Any,
        wanted: dict[str, Any],
        summands: Mapping[str, float] = _NOTHING,
    ) -> None:
        largest = max((magnitude(one) for one in wanted.values() if one is not None), default=0.0)
        for path, array in wanted.items():
            module = path.rpartition(".")[0]
            other = None if found.get(path) is None else whole(self.platform, found[path])
            if array is None and other is None:
                comparison.skip(f"{kind} of {path}", "neither run has one: the loss does not depend on it")
            elif array is None or other is None:
                who = "parallel" if other is None else "single-device"
                comparison.missing(kind, module, path, step, f"the {who} run has none")
            else:
                floor = noise_floor(largest, summands.get(path, 0.0))
                comparison.compare(kind, module, path, step, other, array, floor)
