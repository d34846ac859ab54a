"""Runs the corpus: each program, broken and fixed, through `verify_program`, like a user's program."""

from __future__ import annotations

import time

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.verify.bugs.registry import CALLS, Bug
from hyper_parallel.verify.bugs.results import BugResult, FormResult
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.report import ProgramReport
from hyper_parallel.verify.program.run import verify_program

__all__ = ["run_bug"]


def run_bug(bug: Bug, seed: int = 0) -> BugResult:
    """Return the harness's verdicts on both forms of a program; ``seed`` is the seed of the perturbations."""
    started = time.perf_counter()
    broken, fixed = (_run_form(bug, seed, broken=form) for form in (True, False))
    return BugResult(bug, broken, fixed, time.perf_counter() - started)


def _run_form(bug: Bug, seed: int, *, broken: bool) -> FormResult:
    try:
        report = verify_program(
            bug.program(broken=broken),
            single=bug.reference(broken=broken),
            mesh=bug.mesh,
            platform=bug.framework,
            declared=bug.declared or None,
            seed=seed,
        )
    except InputError as error:  # the harness rejects the program
        return FormResult(equal=False, error=str(error))
    return form_result(report)


def form_result(report: ProgramReport) -> FormResult:
    """Return the verdict of a report, with kinds and causes as in :class:`.Facts`."""
    verdict = report.verdict
    if verdict is None:
        if _unequal_calls(report):
            return FormResult(False, kind=CALLS, cause="unequal-calls", evidence=report.cause)
        return FormResult(False, error=report.cause)
    left_out = (*verdict.unplaced, *verdict.incomplete)
    first = verdict.first
    if first is None:
        if not verdict.equal:
            return FormResult(False, verdict.checked, unplaced=left_out, error=verdict.headline())
        return FormResult(True, verdict.checked, unplaced=left_out)
    cause = first.cause
    return FormResult(
        equal=False,
        checked=verdict.checked,
        kind=first.kind,
        name=first.name,
        cause="" if cause is None else cause.kind,
        axis="" if cause is None else cause.axis,
        evidence="" if cause is None else cause.evidence,
        unplaced=left_out,
    )


def _unequal_calls(report: ProgramReport) -> bool:
    """Return whether the ranks called different collectives, or waited in a collective that others had not joined."""
    return report.cause.startswith(f"{CollectiveMismatchError.__name__}:")
