"""One rank's part of a model verification: the single-device model and the parallel one, step by step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.events import module_scope, record_events
from hyper_parallel.core.dtensor.mesh import DeviceMesh, init_device_mesh
from hyper_parallel.core.dtensor.placements import Replicate
from hyper_parallel.platform.select import current_platform
from hyper_parallel.verify.case import ModelCase, ParallelPlan, as_case, as_plan
from hyper_parallel.verify.compare import Bound, Check, Comparison
from hyper_parallel.verify.observe import Observer, gather, whole

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.events import Event
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.platform.contract.training import StepResult
    from hyper_parallel.verify.faults import Fault

__all__ = ["RankResult", "run_rank"]


@dataclass
class RankResult:
    """What one rank found.

    Attributes:
        checks: every comparison, in the order in which a divergence would show.
        skipped: outputs that could not be compared, and why.
        losses: of the single-device run, per step.
        events: collectives of the parallel run's training steps.
        bound: the allowed error, in words.
        seconds: time of the single-device and of the parallel steps on this rank.
    """

    checks: list[Check]
    skipped: list[str]
    losses: list[float]
    events: list[Event]
    bound: str
    seconds: tuple[float, float] = (0.0, 0.0)


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
    single = _Run(platform, case, case.build())
    parallel_model = case.build()
    weights = _agree(platform, single.model)
    for model in (single.model, parallel_model):
        platform.load_arrays(model, weights)
    plan = as_plan(make_plan(mesh), mesh.names)
    parallel = _Parallel(platform, case, parallel_model, mesh, plan, fault)
    return _SideBySide(platform, single, parallel, weights).train(steps)


def _agree(platform: Platform, model: Any) -> dict[str, Any]:
    """Rank 0's initial weights, on every rank."""
    transport = platform.transport()
    world = tuple(range(transport.world_size))
    own = {path: whole(platform, value) for path, value in platform.trainable(model).items()}
    agreed: dict[str, Any] = transport.all_gather_object(own if transport.rank == 0 else None, world)[0]
    return agreed


class _Run:
    """The single-device model in training."""

    def __init__(self, platform: Platform, case: ModelCase, model: Any) -> None:
        self.platform, self.case, self.model = platform, case, model
        self.inner = Observer(platform, model)
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
            self._step(result)
        return result

    def _loss(self, batch: tuple[Any, ...]) -> Any:
        output = self.model(*self.case.model_inputs(batch))
        with module_scope("(loss)"):
            return self.case.loss(output, batch)

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
        if fault is not None:
            fault.before_parallel(platform, model)
        _parallelize(model, mesh, plan)
        if fault is not None:
            fault.after_parallel(platform, model)
        self.outer = Observer(platform, model)

    def _around(self) -> Any:
        stack = contextlib.ExitStack()
        if self.fault is not None:
            stack.enter_context(self.fault.running(self.platform))
        if self.plan.context is not None:
            stack.enter_context(self.plan.context())
        return stack

    def _tensors(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        plain = super()._tensors(batch)
        if self.plan.batch is None:
            return plain
        from hyper_parallel.core.dtensor.module import distribute_tensor

        placements = [self.plan.batch.get(name, Replicate()) for name in self.mesh.names]
        return tuple(distribute_tensor(one, self.mesh, placements, src_data_rank=None) for one in plain)


def _parallelize(model: Any, mesh: DeviceMesh, plan: ParallelPlan) -> None:
    from hyper_parallel.core.dtensor.module import distribute_module
    from hyper_parallel.core.tensor_parallel import parallelize_module

    parallelize_module(model, mesh, dict(plan.styles))
    if plan.batch is not None:
        distribute_module(model, mesh)


class _SideBySide:
    """Both runs, compared after every step."""

    def __init__(self, platform: Platform, single: _Run, parallel: _Parallel, weights: Mapping[str, Any]) -> None:
        self.platform, self.single, self.parallel = platform, single, parallel
        self.weights = weights
        self.comparison: Comparison | None = None
        self.bound: Bound | None = None

    def train(self, steps: int) -> RankResult:
        """Run and compare ``steps`` steps."""
        losses: list[float] = []
        events: list[Event] = []
        spent = [0.0, 0.0]
        for number in range(steps):
            started = time.perf_counter()
            wanted = self.single.step(number)
            between = time.perf_counter()
            with record_events() as log:  # what comparing itself gathers is not recorded
                log.step = number
                found = self.parallel.step(number)
            spent = [spent[0] + between - started, spent[1] + time.perf_counter() - between]
            events.extend(log)
            losses.append(float(whole(self.platform, wanted.loss)))
            self._compare(number, found, wanted)
        if self.parallel.fault is not None:
            self.parallel.fault.must_have_hit()
        comparison = self.comparison
        checks, skipped = (comparison.checks, comparison.skipped) if comparison is not None else ([], [])
        return RankResult(checks, skipped, losses, events, str(self.bound), (spent[0], spent[1]))

    def _compare(self, step: int, found: StepResult, wanted: StepResult) -> None:
        if self.comparison is None:
            self.bound = self._derive_bound()
            self.comparison = Comparison(self.bound, self.platform.transport().rank)
        self._outputs(step, self.comparison)
        loss = whole(self.platform, found.loss)
        self.comparison.compare("loss", "(loss)", "loss", step, loss, whole(self.platform, wanted.loss))
        self._by_path("gradient", step, self.comparison, found.gradients, wanted.gradients, backwards=True)
        self._by_path(
            "weight", step, self.comparison,
            self.platform.trainable(self.parallel.model), self.platform.trainable(self.single.model),
        )  # fmt: skip

    def _derive_bound(self) -> Bound:
        arrays = list(self.weights.values())
        floating = [one.dtype for one in arrays if one.dtype.kind == "f"]
        coarsest = max(floating, key=lambda dtype: float(np.finfo(dtype).eps))
        tokens = max((int(np.prod(np.shape(one))) for one in self.single.case.batch(0)), default=1)
        longest = max([tokens, *(size for array in arrays for size in array.shape)])
        return Bound(str(coarsest), longest, 2 * max(1, len(self.single.outer.seen)))

    def _outputs(self, step: int, comparison: Comparison) -> None:
        outer, inner = self.parallel.outer.seen, self.parallel.inner.seen
        for name, seen in self.single.outer.seen.items():
            if name not in outer:
                comparison.missing("output", seen.module, name, step, "the parallel model has no such output")
                continue
            raw = inner[name].value if name in inner else None
            value, why = gather(self.platform, outer[name].value, raw, tuple(seen.value.shape))
            if why:
                comparison.skip(f"output of {name}", why)
            else:
                comparison.compare("output", seen.module, name, step, value, whole(self.platform, seen.value))

    def _by_path(
        self, kind: str, step: int, comparison: Comparison, found: Any, wanted: Any, *, backwards: bool = False
    ) -> None:
        arrays = {path: None if one is None else whole(self.platform, one) for path, one in wanted.items()}
        sizes = [float(np.abs(one).max()) for one in arrays.values() if one is not None and one.size]
        largest = max(sizes, default=0.0)
        for path in sorted(arrays, key=list(arrays).index, reverse=backwards):
            module = path.rpartition(".")[0]
            array = arrays[path]
            other = None if found.get(path) is None else whole(self.platform, found[path])
            if array is None and other is None:
                comparison.skip(f"{kind} of {path}", "neither run has one: the loss does not depend on it")
            elif array is None or other is None:
                who = "parallel" if other is None else "single-device"
                comparison.missing(kind, module, path, step, f"the {who} run has none")
            else:
                comparison.compare(kind, module, path, step, other, array, largest)
