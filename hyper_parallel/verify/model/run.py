"""Verifies that a parallel plan trains like the single-device model; the entry point of `verify model`."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hyper_parallel.errors import HyperParallelError, PlanError, RankFailedError
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.engine.scratch import Scratch
from hyper_parallel.verify.engine.sinks import KeepSink
from hyper_parallel.verify.faults import parse_fault
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.launch import launch as launch_processes
from hyper_parallel.verify.model.hardening import Attempt, attempts
from hyper_parallel.verify.model.program import CaseFacts, ModelProgram, Trained, trained
from hyper_parallel.verify.model_report import ModelReport, bound_words, traffic
from hyper_parallel.verify.program.program import Program
from hyper_parallel.verify.program.reference import compare_with, run_reference
from hyper_parallel.verify.program.worlds import World, run_world
from hyper_parallel.verify.prove.table import proven_calls
from hyper_parallel.verify.random_draws import draw_checks
from hyper_parallel.verify.run_arguments import LAUNCHES, require_seed
from hyper_parallel.verify.simulate import require_device, simulate
from hyper_parallel.verify.spec import error_summary, user_function
from hyper_parallel.verify.step_timeline import StepCall, replayed

if TYPE_CHECKING:
    from hyper_parallel.verify.engine.verdict import Verdict
    from hyper_parallel.verify.scenarios import Scenario, Tutorial

__all__ = ["verify_model", "verify_scenario"]

_TIMEOUT = 300.0


def verify_model(
    spec: str | Callable[[], Any],
    plan: str | Callable[[Any], Any],
    mesh_shape: Sequence[int],
    mesh_names: Sequence[str],
    *,
    platform: str,
    launch: str = "simulated",
    steps: int = 3,
    inject: str | None = None,
    name: str | None = None,
    seed: int = 0,
    harden: bool = False,
    device: str = "cpu",
    timeline: bool = False,
) -> ModelReport:
    """Train a single-device and a parallel model on the same data, and compare all their values on every rank.

    Args:
        spec: ``module:function``, ``file.py:function`` or a function; it returns a
            :class:`~hyper_parallel.verify.model_case.ModelCase`, a mapping of its fields or ``(model, batches, loss)``.
        plan: function, given like ``spec`` and called with the mesh; it returns the plan of ``parallelize_module``, or
            a :class:`~hyper_parallel.verify.model_case.ParallelPlan`.
        mesh_shape: sizes of the mesh's axes.
        mesh_names: names of the mesh's axes.
        platform: ``torch`` or ``mindspore``.
        launch: ``simulated`` or ``processes``.
        steps: number of training steps, at least one.
        inject: a fault of ``hyper_parallel.verify.faults.FAULTS`` to inject, optionally ``name@module.path``.
        name: name of the run in the report; by default ``spec``.
        seed: seed of the frameworks' generators, of DTensors' random numbers and of the perturbations; the same seed
            gives the same numbers.
        harden: change properties that hide errors: axes of equal sizes, evenly divisible rows, a single step, constant
            parameters. If ranks fail with a change, the run is repeated without it, and the change is listed. Without
            this option, these properties are only listed.
        device: device of both models: ``cpu``, ``cuda`` or ``npu``; see :func:`simulate` and :func:`launch`.
        timeline: run the ranks once more, unrecorded, to measure the times of their transport calls.

    Returns:
        every comparison, the first divergence and its cause, losses, and the collectives of each module. If a rank
        raises an error or dies, the report says so, and no exception is raised.

    Raises:
        InputError: (a ValueError) an argument is wrong, or SPEC and PLAN contradict each other or the mesh.
    """
    if steps < 1:
        msg = f"--steps is {steps}; at least one step must be compared"
        raise InputError(msg)
    if launch not in LAUNCHES:
        msg = f"--launch {launch!r} must be {' or '.join(LAUNCHES)}"
        raise InputError(msg)
    require_seed(seed)
    axes = dict(zip(mesh_names, mesh_shape, strict=True))
    tries, number = attempts(axes, steps) if harden else ([Attempt(tuple(mesh_shape))], steps)
    report = ModelReport(name or str(spec), platform, launch, "", number)
    report.settings["seed"] = str(seed)
    if device != "cpu":
        taken = "each rank needs a device" if platform == "mindspore" else "ranks share devices if there are fewer"
        shared = "simulated ranks share one device" if launch == "simulated" else taken
        report.settings["device"] = f"{device}; {shared}"
    if inject:
        report.settings["injected fault"] = inject
    started = time.perf_counter()
    functions = (user_function(spec, "SPEC"), user_function(plan, "PLAN"))
    fault = parse_fault(inject)
    require_device(device, platform, ranks=math.prod(mesh_shape) if launch == "processes" else None)
    failed: list[str] = []
    for attempt in tries:
        report.axes = dict(zip(mesh_names, attempt.shape, strict=True))
        report.mesh = " x ".join(f"{axis}={size}" for axis, size in report.axes.items())
        program = ModelProgram(*functions, attempt, tuple(mesh_names), number, fault, seed, device)
        world = World(math.prod(attempt.shape), platform, launch, timeout=_TIMEOUT, device=device)
        verification = _Verification(program, world, report, failed, timeline=timeline)
        with _operator_threads(platform), Scratch() as scratch:
            try:
                verification.run(scratch)
            except (RankFailedError, InputError) as error:
                summary = error_summary(error if isinstance(error, InputError) else error.__cause__ or error)
                if attempt is not tries[-1]:
                    failed.append(f"{attempt.blind} the run ended: {summary}")
                    continue
                if isinstance(error, InputError):
                    raise
                _reraise_input_error(error)
                report.error, report.cause = str(error), summary
                if fault is None:
                    report.plan_notes = _plan_notes(program, platform)
        break
    report.seconds = time.perf_counter() - started
    return report


def verify_scenario(
    scenario: Scenario | Tutorial,
    *,
    platform: str,
    launch: str = "simulated",
    steps: int = 3,
    inject: str | None = None,
    seed: int = 0,
    harden: bool = False,
    device: str = "cpu",
    timeline: bool = False,
) -> ModelReport:
    """Verify one of the bundled scenarios; arguments and result are those of :func:`verify_model`."""
    return verify_model(
        scenario.case,
        scenario.plan,
        scenario.mesh_shape,
        scenario.mesh_names,
        platform=platform,
        launch=launch,
        steps=steps,
        inject=inject,
        name=scenario.name,
        seed=seed,
        harden=harden,
        device=device,
        timeline=timeline,
    )


@dataclass(frozen=True)
class _Verification:
    """One verification: runs the single-device model, its repeats and the ranks, and compares them.

    Attributes:
        program: the model, its training and its plan.
        world: world of the ranks.
        report: report to fill.
        failed: earlier attempts that failed.
        timeline: whether the ranks run once more to measure times.
    """

    program: ModelProgram
    world: World
    report: ModelReport
    failed: Sequence[str]
    timeline: bool

    def run(self, scratch: Scratch) -> None:
        """Inspect the case, run the reference and the ranks, and fill the report.

        Raises:
            InputError: the case cannot be verified.
            RankFailedError: a rank raised or died.
        """
        world = self.world
        facts = simulate(ModelProgram.look, world.size, world.platform, (self.program,), timeout=world.timeout,
                         device=world.device)[0]  # fmt: skip
        program = replace(self.program, facts=facts)
        alone = Program("SPEC: the single-device model", function=program.train_alone)
        with _plain_input_errors():
            reference = run_reference(alone, world, program.seed, _nothing, scratch)
        noted = trained(reference.run.ranks[0].notes)
        program = replace(program, shapes=noted.shapes)
        sink = KeepSink(scratch, f"{world.size} ranks")
        stored = replace(world, limits=replace(world.limits, sink=sink))
        with _plain_input_errors():
            run = run_world(Program("the model under PLAN", function=program.train_parallel), stored)
        with _plain_input_errors():
            _, verdict = compare_with(reference, run, self.report.axes, None, listed=True)
        self._fill(facts, noted, [trained(rank.notes) for rank in run.ranks], verdict)
        if self.timeline:
            self.report.timeline = self._timeline(program)

    def _fill(self, facts: CaseFacts, alone: Trained, ranks: Sequence[Trained], verdict: Verdict) -> None:
        report, first = self.report, ranks[0]
        report.fill(verdict)
        report.checks += draw_checks(alone, ranks)
        report.losses, report.parallel_losses = alone.losses, first.losses
        report.plan_notes, report.parameter_layouts = first.plan_notes, first.layouts
        report.settings.update(facts.settings)
        report.traffic = traffic([event for event in first.events if event.step == 0])
        report.proofs = proven_calls(self.world.platform, [call for rank in ranks for call in rank.calls])
        report.bound = bound_words(facts.dtype)
        report.hardened = [*self.program.attempt.changes, *facts.changes]
        report.blind = [*verdict.blind, *facts.blind, *_without_work(first), *self.failed]

    def _timeline(self, program: ModelProgram) -> list[list[StepCall]]:
        """Return the ranks' transport calls in the last step of an unrecorded run."""
        world = self.world
        launched = simulate if world.launch == "simulated" else launch_processes
        calls = launched(ModelProgram.train_parallel, world.size, world.platform, (program,), timeout=world.timeout,
                         device=world.device)  # fmt: skip
        return replayed(calls) if world.launch == "simulated" else calls


def _nothing(part: str) -> None:
    del part


@contextlib.contextmanager
def _plain_input_errors() -> Iterator[None]:
    """Re-raise errors about SPEC and PLAN without text about the rank that raised them."""
    try:
        yield
    except InputError as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, RankFailedError):
                _reraise_input_error(cause)
            cause = cause.__cause__
        raise


def _without_work(rank: Trained) -> list[str]:
    """Return a remark if the plan neither shards nor communicates."""
    if rank.events or any(any(layout.dim_axes) for layout in rank.layouts):
        return []
    return ["mistakes in a plan: this one shards no parameter and needs no collective; shard a module"]


def _operator_threads(platform: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which PyTorch runs operators in one thread, as in processes of ranks."""
    return harness_of(platform_named(platform)).single_threaded() if platform == "torch" else contextlib.nullcontext()


def _plan_notes(program: ModelProgram, platform: str) -> list[str]:
    """Return sentences about probably unintended properties of a plan under which the model failed; empty on errors."""
    program = replace(program, device="cpu")
    try:
        notes: list[str] = simulate(
            ModelProgram.notes_on_failure, math.prod(program.attempt.shape), platform, (program,)
        )[0]
    except (HyperParallelError, ValueError):
        return []
    return notes


def _reraise_input_error(error: RankFailedError) -> None:
    """If a rank failed with an error about the input, raise it as an InputError; otherwise return."""
    cause = error.__cause__
    if isinstance(cause, (PlanError, InputError)):
        raise InputError(str(cause)) from error
