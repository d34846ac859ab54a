"""Verifies that a parallel plan trains exactly like the single-device model; the entry point of `verify model`."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.errors import HyperParallelError, PlanError, RankFailedError
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.faults import parse_fault
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.launch import launch as launch_processes
from hyper_parallel.verify.model_case import InputError
from hyper_parallel.verify.model_cause import DivergingCase, explain_divergence
from hyper_parallel.verify.model_harden import Attempt, attempts, run_spots
from hyper_parallel.verify.model_report import ModelReport, traffic
from hyper_parallel.verify.run_arguments import LAUNCHES, require_seed
from hyper_parallel.verify.simulate import simulate
from hyper_parallel.verify.spec import error_summary, user_function
from hyper_parallel.verify.step_timeline import replayed
from hyper_parallel.verify.train_compare import RankResult, run_plan_notes, run_rank

if TYPE_CHECKING:
    from hyper_parallel.verify.faults import Fault
    from hyper_parallel.verify.scenarios import Scenario, Tutorial

__all__ = ["InputError", "verify_model", "verify_scenario"]

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
    explain: bool = False,
) -> ModelReport:
    """Train the single-device model and the parallel one on the same data, and compare all their values on every rank.

    Args:
        spec: ``module:function``, ``file.py:function`` or a function; it returns a
            :class:`~hyper_parallel.verify.model_case.ModelCase`, a mapping of its fields or ``(model, batches, loss)``.
        plan: likewise, called with the mesh; it returns the plan of ``parallelize_module``, or a
            :class:`~hyper_parallel.verify.model_case.ParallelPlan`.
        mesh_shape: sizes of the axes.
        mesh_names: their names.
        platform: ``torch`` or ``mindspore``.
        launch: ``simulated`` or ``processes``.
        steps: training steps, at least one.
        inject: a fault of ``hyper_parallel.verify.faults.FAULTS`` to inject, optionally ``name@module.path``.
        name: of the run in the report; SPEC by default.
        seed: of the frameworks' generators, of DTensors' random numbers and of the perturbations; the same seed gives
            the same numbers.
        harden: change what hides errors: axes of equal sizes, rows that divide evenly, one step, constant parameters.
            A change under which ranks fail is taken back, and listed. Without it, what hides errors is listed only.
        device: ``cpu``, ``cuda`` or ``npu``: where both models are; see :func:`simulate` and :func:`launch`.
        explain: look for the cause of the first divergence, which takes about as long again (on MindSpore a minute),
            on CPU and in models that draw no random numbers.

    Returns:
        every comparison, the first divergence, losses, and the collectives of each module. A rank that raises or dies
        is in the report, not an exception.

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
        taken = "a rank takes a device" if platform == "mindspore" else "ranks share devices if there are fewer"
        shared = "simulated ranks share one device" if launch == "simulated" else taken
        report.settings["device"] = f"{device}; {shared}"
    if inject:
        report.settings["injected fault"] = inject
    started = time.perf_counter()
    functions = (user_function(spec, "SPEC"), user_function(plan, "PLAN"))
    fault = parse_fault(inject)
    world = simulate if launch == "simulated" else launch_processes
    failed: list[str] = []
    for attempt in tries:
        report.axes = dict(zip(mesh_names, attempt.shape, strict=True))
        report.mesh = " x ".join(f"{axis}={size}" for axis, size in report.axes.items())
        arguments = (*functions, attempt, tuple(mesh_names), number, fault, seed, device)
        try:
            with _operator_threads(platform, launch):
                ranks = world(_run, math.prod(attempt.shape), platform, arguments, timeout=_TIMEOUT, device=device)
        except RankFailedError as error:
            summary = error_summary(error.__cause__ or error)
            if attempt is not tries[-1]:
                failed.append(f"{attempt.blind} the run ended: {summary}")
                continue
            _reraise_input_error(error)
            report.error, report.cause = str(error), summary
        else:
            _fill(report, ranks)
            report.hardened = [*attempt.changes, *ranks[0].hardened]
            report.blind = [*map(str, run_spots(report.axes, number)), *ranks[0].blind, *failed]
        _explain(report, DivergingCase(*functions, attempt, tuple(mesh_names), fault, seed), causes=explain)
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
    explain: bool = False,
) -> ModelReport:
    """Verify one of the embedded scenarios; arguments and result are those of :func:`verify_model`."""
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
        explain=explain,
    )


def _run(  # simulated ranks share their arguments: each gets a fault of its own, which counts its hits
    make_case: Callable[[], Any],
    make_plan: Callable[[Any], Any],
    attempt: Attempt,
    names: tuple[str, ...],
    steps: int,
    fault: Fault | None,
    seed: int,
    device: str,
) -> RankResult:
    return run_rank(make_case, make_plan, attempt, names, steps, copy.copy(fault), seed, device)


def _operator_threads(platform: str, launch: str) -> contextlib.AbstractContextManager[Any]:
    """Run operators of PyTorch ranks that are threads of this process in one thread, as those of processes do."""
    if platform != "torch" or launch != "simulated":
        return contextlib.nullcontext()
    return harness_of(platform_named(platform)).single_threaded()


def _fill(report: ModelReport, ranks: Sequence[RankResult]) -> None:
    report.checks = [check for rank in ranks for check in rank.checks]
    report.skipped = ranks[0].skipped
    report.losses = ranks[0].losses
    report.plan_notes = ranks[0].plan_notes
    report.parallel_losses = ranks[0].parallel_losses
    report.parameter_layouts = ranks[0].parameter_layouts
    report.settings.update(ranks[0].settings)
    report.traffic = traffic([event for event in ranks[0].events if event.step == 0])
    report.bound = ranks[0].bound
    calls = [rank.calls for rank in ranks]
    report.timeline = replayed(calls) if report.launch == "simulated" else calls


def _explain(report: ModelReport, case: DivergingCase, *, causes: bool) -> None:
    """Add what may be the reason of a failure, and with ``causes`` that of the first divergence.

    Where a model draws random numbers a repetition would draw others, and devices are left alone.
    """
    if report.error and case.fault is None:
        report.plan_notes = _plan_notes(case, report.platform)
    if causes and report.first is not None and "device" not in report.settings and not report.counts.get("random"):
        report.explanation = explain_divergence(case, report.first, report.platform)


def _plan_notes(case: DivergingCase, platform: str) -> list[str]:
    """Return what is probably unintended about a plan under which the model failed; nothing if that fails, too."""
    arguments = (case.make_case, case.make_plan, case.attempt.shape, case.names)
    try:
        notes: list[str] = simulate(run_plan_notes, math.prod(case.attempt.shape), platform, arguments)[0]
    except (HyperParallelError, ValueError):
        return []
    return notes


def _reraise_input_error(error: RankFailedError) -> None:
    """Raise an error about the input that a rank reported as the caller's own."""
    cause = error.__cause__
    if isinstance(cause, (PlanError, InputError)):
        raise InputError(str(cause)) from error
