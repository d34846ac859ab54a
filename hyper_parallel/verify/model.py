"""Does a parallel plan train exactly like the single-device model? The front door of model verification."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.errors import PlanError, RankFailedError
from hyper_parallel.verify.faults import parse_fault
from hyper_parallel.verify.launch import launch as launch_processes
from hyper_parallel.verify.model_case import InputError
from hyper_parallel.verify.model_report import ModelReport, traffic
from hyper_parallel.verify.simulate import simulate
from hyper_parallel.verify.spec import error_summary, user_function
from hyper_parallel.verify.train_compare import RankResult, run_rank

if TYPE_CHECKING:
    from hyper_parallel.verify.faults import Fault
    from hyper_parallel.verify.scenarios import Scenario

__all__ = ["LAUNCHES", "InputError", "parse_mesh", "verify_model", "verify_scenario"]

LAUNCHES = ("simulated", "processes")
_TIMEOUT = 300.0
_NAMES = {1: ("tp",), 2: ("dp", "tp")}


def parse_mesh(mesh: str | None, world_size: int | None) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Sizes and names of the axes: ``3`` is ``tp``, ``2x2`` is ``dp`` by ``tp``, ``dp=2,tp=3`` names them.

    Raises:
        InputError: (a ValueError) it does not read as a mesh, or does not fit the world size.
    """
    if mesh is None and world_size is None:
        msg = "give --mesh, such as 2x2, or --world-size"
        raise InputError(msg)
    text = str(world_size) if mesh is None else mesh
    named = "=" in text
    parts = [part.partition("=") for part in text.split("," if named else "x")]
    sizes = [(size if named else name) for name, _, size in parts]
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        given = f"--world-size {text} must be at least 1" if mesh is None else ""
        msg = given or f"--mesh {text!r} must look like 3, 2x2 or dp=2,tp=3"
        raise InputError(msg)
    shape = tuple(int(size) for size in sizes)
    if not named and len(shape) not in _NAMES:
        msg = f"--mesh {text!r} has {len(shape)} axes; name them, such as pp=2,dp=2,tp=2"
        raise InputError(msg)
    names = tuple(name for name, _, _ in parts) if named else _NAMES[len(shape)]
    if world_size is not None and math.prod(shape) != world_size:
        msg = f"--mesh {text} has {math.prod(shape)} ranks, --world-size says {world_size}"
        raise InputError(msg)
    return shape, names


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
) -> ModelReport:
    """Train the single-device model and the parallel one side by side on every rank, and compare everything.

    Args:
        spec: ``module:function``, ``file.py:function`` or a function; it returns a
            :class:`~hyper_parallel.verify.model_case.ModelCase`, a mapping of its fields or ``(model, batches, loss)``.
        plan: the same, called with the mesh; returns the plan of ``parallelize_module``, or a
            :class:`~hyper_parallel.verify.model_case.ParallelPlan`.
        mesh_shape: sizes of the axes.
        mesh_names: their names.
        platform: ``torch`` or ``mindspore``.
        launch: ``simulated`` or ``processes``.
        steps: training steps.
        inject: a fault of ``hyper_parallel.verify.faults.FAULTS``, optionally ``name@module.path``.
        name: in the report.

    Raises:
        InputError: (a ValueError) something that was asked for does not exist or does not fit together.
    """
    if steps < 1:
        msg = f"--steps is {steps}; at least one step must be compared"
        raise InputError(msg)
    if launch not in LAUNCHES:
        msg = f"--launch {launch!r} must be {' or '.join(LAUNCHES)}"
        raise InputError(msg)
    mesh = " x ".join(f"{axis}={size}" for axis, size in zip(mesh_names, mesh_shape, strict=True))
    report = ModelReport(name or str(spec), platform, launch, mesh, steps)
    report.axes = dict(zip(mesh_names, mesh_shape, strict=True))
    if inject:
        report.settings["injected fault"] = inject
    started = time.perf_counter()
    arguments = (
        user_function(spec, "SPEC"),
        user_function(plan, "PLAN"),
        (tuple(mesh_shape), tuple(mesh_names)),
        steps,
    )
    fault = parse_fault(inject)
    try:
        world = simulate if launch == "simulated" else launch_processes
        ranks = world(_run, math.prod(mesh_shape), platform, (*arguments, fault), timeout=_TIMEOUT)
    except RankFailedError as error:
        _tell_input_error(error)
        report.error, report.cause = str(error), error_summary(error.__cause__ or error)
    else:
        _fill(report, ranks)
    report.seconds = time.perf_counter() - started
    return report


def verify_scenario(
    scenario: Scenario, *, platform: str, launch: str = "simulated", steps: int = 3, inject: str | None = None
) -> ModelReport:
    """Verify one of the embedded scenarios; see :func:`verify_model`."""
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
    )


def _run(  # simulated ranks share their arguments: each counts on a fault of its own
    make_case: Callable[[], Any],
    make_plan: Callable[[Any], Any],
    mesh: tuple[tuple[int, ...], tuple[str, ...]],
    steps: int,
    fault: Fault | None,
) -> RankResult:
    return run_rank(make_case, make_plan, *mesh, steps, copy.copy(fault))


def _fill(report: ModelReport, ranks: Sequence[RankResult]) -> None:
    report.checks = [check for rank in ranks for check in rank.checks]
    report.skipped = ranks[0].skipped
    report.losses = ranks[0].losses
    report.parallel_losses = ranks[0].parallel_losses
    report.parameter_layouts = ranks[0].parameter_layouts
    report.settings.update(ranks[0].settings)
    report.traffic = traffic([event for event in ranks[0].events if event.step == 0])
    report.bound = ranks[0].bound


def _tell_input_error(error: RankFailedError) -> None:
    """Raise what a rank said about its input as the caller's own mistake."""
    cause = error.__cause__
    if isinstance(cause, (PlanError, InputError)):
        raise InputError(str(cause)) from error
