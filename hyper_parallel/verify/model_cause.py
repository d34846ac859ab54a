"""Why a model under its plan differs from one device: trains both once more, as programs, and tells causes apart."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor import random
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.platform.select import current_platform
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.frameworks.contract.training import first_paths
from hyper_parallel.verify.model_case import as_case, as_plan
from hyper_parallel.verify.model_harden import Attempt, CaseLook
from hyper_parallel.verify.program.run import verify_program
from hyper_parallel.verify.training_runs import ParallelRun, TrainingRun, build_model

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.compare import TensorCheck
    from hyper_parallel.verify.engine.verdict import Verdict
    from hyper_parallel.verify.faults import Fault

__all__ = ["DivergingCase", "explain_divergence"]

_UNTOLD = ("unexplained", "components")
"""Classes that say no more than that values differ."""


@dataclass(frozen=True)
class DivergingCase:
    """A model and a plan under which it differs from one device; arguments as of ``run_rank``.

    Attributes:
        make_case: SPEC.
        make_plan: PLAN; called with the mesh.
        attempt: sizes of the axes, and what may be changed about the case.
        names: of the axes.
        fault: injected into the parallel run, if any.
        seed: of all random numbers.
    """

    make_case: Callable[[], Any]
    make_plan: Callable[[Any], Any]
    attempt: Attempt
    names: tuple[str, ...]
    fault: Fault | None
    seed: int

    def train(self, steps: int, *, parallel: bool) -> None:
        """Train on this rank, under the plan or in a world of one without it."""
        platform = current_platform()
        platform.seed(self.seed)
        shape = self.attempt.shape if parallel else (1,) * len(self.names)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=self.names)
        case = as_case(self.make_case())
        plan = as_plan(self.make_plan(mesh), mesh.names)
        axes = dict(zip(self.names, self.attempt.shape, strict=True))
        look = CaseLook(platform, self.attempt, axes, self.seed)
        case = look.case(case, plan)
        model = build_model(platform, case, self.seed)
        harness_of(platform).load_arrays(
            model, look.weights(_arrays(platform, model), list(harness_of(platform).trainable(model)))
        )
        random.manual_seed(self.seed)
        run = (
            ParallelRun(platform, case, model, mesh, plan, copy.copy(self.fault))
            if parallel
            else TrainingRun(platform, case, model)
        )
        for number in range(steps):
            run.step(number)


def explain_divergence(case: DivergingCase, first: TensorCheck, platform: str) -> list[str]:
    """Return in lines why a value differs: its cause and the numbers that show it.

    Trains the case as a program up to the step of the value, a dozen times on one device and once on simulated ranks.

    Args:
        case: model, plan and mesh.
        first: the first value that differs.
        platform: ``torch`` or ``mindspore``.

    Returns:
        nothing if no cause is known, or the case cannot be run as a program.
    """
    steps = first.step + 1
    try:
        report = verify_program(
            lambda: case.train(steps, parallel=True),
            math.prod(case.attempt.shape),
            single=lambda: case.train(steps, parallel=False),
            mesh=dict(zip(case.names, case.attempt.shape, strict=True)),
            steps=steps,
            platform=platform,
            seed=case.seed,
        )
    except (HyperParallelError, ValueError):  # the difference is reported in any case
        return []
    return [] if report.verdict is None else _lines(report.verdict, first)


def _lines(verdict: Verdict, first: TensorCheck) -> list[str]:
    """Return the cause of the value, or else of the first one that has a cause."""
    explained = [value for value in verdict.differences if value.cause is not None and value.cause.kind not in _UNTOLD]
    same = [
        value for value in explained if (value.kind, value.name, value.step) == (first.kind, first.name, first.step)
    ]
    if not explained:
        return []
    difference = (same or explained)[0]
    cause = difference.cause
    assert cause is not None
    lines = [] if same else [f"{difference.heading} differs, too"]
    return [*lines, f"cause: {cause}", f"evidence: {cause.evidence}"]


def _arrays(platform: Platform, model: Any) -> dict[str, Any]:
    """Return parameters and buffers by path."""
    values = {**first_paths(platform.parameters_dict(model)), **harness_of(platform).buffers(model)}
    return {path: np.array(platform.tensor_to_numpy(platform.detach(value))) for path, value in values.items()}
