"""The reference of a program: its run on one rank, the same again, and the perturbed repeats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hyper_parallel.errors import RankFailedError
from hyper_parallel.verify.frameworks.contract.case_changes import CaseChanges
from hyper_parallel.verify.model_case import InputError
from hyper_parallel.verify.program.framework import other_framework
from hyper_parallel.verify.program.perturbations import displaced_gradients, moved_values, rounded_outputs
from hyper_parallel.verify.program.program import Program
from hyper_parallel.verify.program.records import Run
from hyper_parallel.verify.program.repetition import ROUNDING, check_deterministic, check_rounding
from hyper_parallel.verify.program.worlds import World, run_world
from hyper_parallel.verify.spec import error_summary

__all__ = ["check_names", "check_recorded", "run_reference"]


def run_reference(
    program: Program, world: World, seed: int, progress: Callable[[str], None], changes: CaseChanges | None = None
) -> tuple[Run, list[Run]]:
    """Return the reference, whose settings tell if it rounds otherwise in each run, and its perturbed repeats.

    Args:
        program: what to run.
        world: of the ranks; the reference runs in a world of one.
        seed: of the perturbations.
        progress: called with the name of each run before it starts.
        changes: of the case, the same in every run.

    Raises:
        InputError: it fails, records nothing, or a repeat without a perturbation gives values that rounding does not
            explain.
    """
    progress("one rank")
    case = None if changes is None else (changes,)
    try:
        reference = run_world(program, world.alone("stderr"), changes=case)
        check_recorded(program, reference)
        quiet = world.alone("nothing")
        progress("one rank again")
        again = run_world(program, quiet, changes=case)
        rounded = check_deterministic(program, reference, again)
        repeats = []
        for number, perturbation in enumerate(moved_values(seed), 1):
            progress(f"one rank, perturbed ({number} of 8)")
            repeats.append(run_world(program, quiet, perturbation, case))
        for number, perturbation in enumerate(rounded_outputs(seed, reference), 1):
            progress(f"one rank, half-precision outputs perturbed ({number} of 4)")
            repeats.append(run_world(program, quiet, perturbation, case))
        for number, perturbation in enumerate(displaced_gradients(seed, reference, repeats[:]), 5):
            progress(f"one rank, perturbed ({number} of 8)")
            repeats.append(run_world(program, quiet, perturbation, case))
        if rounded:
            check_rounding(program, reference, again, repeats)
            reference = replace(reference, settings={**reference.settings, ROUNDING: rounded})
    except RankFailedError as error:
        cause = error.__cause__ or error
        raise InputError(_failure(program, world.platform, error_summary(cause), str(error))) from error
    return reference, repeats


def _failure(program: Program, platform: str, summary: str, report: str) -> str:
    """Return what is wrong with a program whose run on one rank failed, and what to do."""
    other = other_framework(program, platform)
    if other:
        return f"{program.name} imports {other} and does not run on {platform} ({summary}); give --platform {other}"
    return (
        f"{program.name} fails on one rank, which is the reference: {summary}\n"
        "If it cannot run on one rank, change that, or name another reference (--single FILE, --single-args ARGS).\n"
        f"{report}"
    )


def check_recorded(program: Program, run: Run) -> None:
    """Check that a run left something to compare.

    Raises:
        InputError: a rank recorded nothing; or ``record()`` took no values, and no rank made an optimizer step, or the
            reference's optimizers saw no gradient.
    """
    steps = any(rank.notes.get("optimizer steps") for rank in run.ranks)
    for rank in run.ranks:
        where = f"{program.name} on rank {rank.rank} of {run.world_size}"
        if not rank.records:
            msg = (
                f"{where}: nothing was recorded; it calls no module, makes no optimizer step and records no value: "
                'call the training in the file itself, or record values by hyper_parallel.verify.record("name", value)'
            )
            raise InputError(msg)
        kinds = {record.kind for record in rank.records}
        if not steps and "value" not in kinds:
            msg = (
                f"{where}: no optimizer step happened, so no gradient and no update would be compared; let it train "
                'for at least one step, or record values by hyper_parallel.verify.record("name", value)'
            )
            raise InputError(msg)
        if run.world_size == 1 and kinds.isdisjoint({"gradient", "value"}):
            msg = (
                f"{where}: its optimizers saw no gradient of any parameter, so nothing is trained that could be "
                "compared; call backward before the optimizer's step, and let gradients be synchronized before it"
            )
            raise InputError(msg)


def check_names(run: Run) -> None:
    """Check that all ranks called ``record()`` with the same names.

    Raises:
        InputError: a rank recorded a name that another one did not.
    """
    names = [[record.key for record in rank.records if record.kind == "value"] for rank in run.ranks]
    for rank, own in enumerate(names):
        for key in own:
            missing = [other for other, theirs in enumerate(names) if key not in theirs]
            if missing:
                msg = (
                    f"record({key[1]!r}) of step {key[2]}, call {key[3]}, ran on rank {rank} and not on ranks "
                    f"{missing};"
                    " every rank must record the same names equally often"
                )
                raise InputError(msg)
