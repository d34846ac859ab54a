"""Verifies that a distributed program trains like one device: the entry point of `verify program`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.errors import CollectiveMismatchError, RankFailedError
from hyper_parallel.platform.contract.recording import RecordLimits
from hyper_parallel.platform.select import default_framework
from hyper_parallel.verify.model import LAUNCHES, parse_mesh
from hyper_parallel.verify.model_case import InputError
from hyper_parallel.verify.program.batches import other_batch
from hyper_parallel.verify.program.comparison import compare_runs
from hyper_parallel.verify.program.perturbations import displaced_gradients, moved_values
from hyper_parallel.verify.program.program import Program, find_program
from hyper_parallel.verify.program.records import Run
from hyper_parallel.verify.program.report import ProgramReport
from hyper_parallel.verify.program.torchrun import started_by_torchrun, verify_under_torchrun
from hyper_parallel.verify.program.worlds import World, run_world
from hyper_parallel.verify.spec import error_summary

__all__ = ["verify_program"]

Progress = Callable[[str], None]


def verify_program(
    parallel: str | Callable[..., Any],
    world_size: int | None = None,
    *,
    single: str | Callable[..., Any] | None = None,
    mesh: str | Mapping[str, int] | None = None,
    steps: int | None = None,
    platform: str | None = None,
    seed: int = 0,
    launch: str = "simulated",
    declared: Mapping[str, str] | None = None,
    args: Sequence[str] = (),
    single_args: Sequence[str] | None = None,
    only: Sequence[str] = (),
    timeout: float = 300.0,
    memory: int = 4 << 30,
    progress: Callable[[str], None] | None = None,
) -> ProgramReport:
    """Run a distributed program on one rank and on several, and compare everything that it computes.

    The program runs unchanged: hooks record outputs of modules, losses, gradients when the optimizer sees them,
    optimizer state, and weights after each step. The run on one rank is the reference; repeats of it with tiny
    perturbations show what rounding does to each value.

    Args:
        parallel: ``train.py``, run as torchrun would; ``train.py:function``; or a function that takes nothing or a
            mesh. It must train the same way on one rank.
        world_size: number of ranks; by default the size of ``mesh``, or torchrun's number of processes.
        single: another script or function for the reference, if ``parallel`` cannot run on one rank.
        mesh: ``dp=2,tp=2`` or sizes by name: axes for messages, and for functions that take a mesh.
        steps: optimizer steps after which the program is stopped; None lets it end by itself.
        platform: ``torch`` or ``mindspore``; None takes the default framework.
        seed: of the perturbations.
        launch: ``simulated`` or ``processes``; the reference is always simulated. Under torchrun its processes are
            the ranks, and every one of them gets the report.
        declared: what recorded values are, where it cannot be inferred, by pattern of their names:
            ``{"layers.*.wq.weight": "shard(0) over tp"}``.
        args: arguments of the script.
        single_args: arguments of the reference's script; ``args`` by default.
        only: patterns of the modules whose outputs are recorded; all by default.
        timeout: seconds for each run.
        memory: bytes that the records of a world may take.
        progress: called with the name of each run before it starts.

    Returns:
        the verdict with its first difference and cause. A rank that raises in the parallel run is in the report.

    Raises:
        InputError: (a ValueError) an argument is wrong, the reference fails or is not deterministic, or nothing was
            recorded that could be compared.
    """
    axes = _axes(mesh, _torchrun_size(world_size))
    size = int(np.prod([length for _, length in axes]))
    launch = "torchrun" if started_by_torchrun() else launch
    _check(size, steps, launch)
    program = find_program(parallel, args, "FILE")
    alone = program if single is None and single_args is None else find_program(
        parallel if single is None else single, args if single_args is None else single_args, "--single"
    )  # fmt: skip
    platform = platform or default_framework()
    limits = RecordLimits(steps, tuple(only), memory // size)
    world = World(size, platform, launch, axes, limits, timeout)
    report = ProgramReport(program.name, platform, launch, size, seed, dict(axes) if mesh is not None else {})
    verification = _Verification(program, alone, world, report, declared, progress or _nothing)
    if launch == "torchrun":
        return verify_under_torchrun(program, world, lambda run: verification.compare(lambda: run))
    return verification.compare(lambda: run_world(program, world))


@dataclass
class _Verification:
    """One call of :func:`verify_program`; its attributes are that function's arguments, and the report to fill."""

    program: Program
    alone: Program
    world: World
    report: ProgramReport
    declared: Mapping[str, str] | None
    progress: Progress

    def compare(self, run_ranks: Callable[[], Run]) -> ProgramReport:
        """Run the reference, then the ranks, and compare them."""
        started, report = time.perf_counter(), self.report
        reference, repeats = _reference(self.alone, self.world, report.seed, self.progress)
        self.progress(f"{self.world.size} ranks ({self.world.launch})")
        try:
            run = run_ranks()
        except RankFailedError as error:
            report.failure, report.cause = str(error), error_summary(error.__cause__ or error)
            report.kind = "unequal-calls" if isinstance(error.__cause__, CollectiveMismatchError) else ""
        else:
            self._compare_runs(reference, repeats, run)
        report.seconds = time.perf_counter() - started
        return report

    def _compare_runs(self, reference: Run, repeats: list[Run], run: Run) -> None:
        check_recorded(self.program, run)
        check_names(run)
        report = self.report
        report.steps = max(rank.notes.get("optimizer steps", 0) for rank in run.ranks)
        self.progress("comparison")
        report.verdict = compare_runs(reference, repeats, run, mesh=report.mesh or None, declared=self.declared)
        problem = None if report.verdict.equal else other_batch(reference, run, self.program.name)
        if problem is not None:
            raise InputError(problem)


def _torchrun_size(world_size: int | None) -> int | None:
    """Return the number of ranks: what is asked for, or the number of processes that torchrun has started."""
    return int(os.environ["WORLD_SIZE"]) if world_size is None and started_by_torchrun() else world_size


def _nothing(part: str) -> None:
    del part


def _axes(mesh: str | Mapping[str, int] | None, world_size: int | None) -> tuple[tuple[str, int], ...]:
    if isinstance(mesh, Mapping):
        mesh = ",".join(f"{name}={size}" for name, size in mesh.items())
    sizes, names = parse_mesh(mesh, world_size)
    return tuple(zip(names if mesh is not None else ("world",), sizes, strict=True))


def _check(size: int, steps: int | None, launch: str) -> None:
    if size < 2:
        msg = f"--world-size is {size}: the program on one rank is the reference; compare it with at least 2 ranks"
        raise InputError(msg)
    if steps is not None and steps < 1:
        msg = f"--steps is {steps}; at least one step must be compared"
        raise InputError(msg)
    if launch not in (*LAUNCHES, "torchrun"):
        msg = f"--launch {launch!r} must be {' or '.join(LAUNCHES)}"
        raise InputError(msg)


# -- the reference -----------------------------------------------------------------------------------------------------


def _reference(program: Program, world: World, seed: int, progress: Progress) -> tuple[Run, list[Run]]:
    """Return the reference and its perturbed repeats.

    Raises:
        InputError: it fails, records nothing, or a repeat without a perturbation gives other values.
    """
    progress("one rank")
    try:
        reference = run_world(program, world.alone("stderr"))
        check_recorded(program, reference)
        quiet = world.alone("nothing")
        progress("one rank again")
        check_deterministic(program, reference, run_world(program, quiet))
        repeats = []
        for number, perturbation in enumerate(moved_values(seed), 1):
            progress(f"one rank, perturbed ({number} of 8)")
            repeats.append(run_world(program, quiet, perturbation))
        for number, perturbation in enumerate(displaced_gradients(seed, reference, repeats[:]), 5):
            progress(f"one rank, perturbed ({number} of 8)")
            repeats.append(run_world(program, quiet, perturbation))
    except RankFailedError as error:
        cause = error.__cause__ or error
        msg = f"{program.name} fails on one rank, which is the reference: {error_summary(cause)}\n{error}"
        raise InputError(msg) from error
    return reference, repeats


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


def check_deterministic(program: Program, first: Run, second: Run) -> None:
    """Check that two runs of the reference left the same values, bit for bit.

    Raises:
        InputError: a value differs, or is missing in one.
    """
    own, other = first.ranks[0].records, second.ranks[0].records
    for mine, again in zip(own, other, strict=False):
        if mine.key != again.key or not np.array_equal(
            mine.value, again.value, equal_nan=mine.value.dtype.kind in "fc"
        ):
            what = f"{mine.kind} {mine.name!r} of step {mine.step}"
            break
    else:
        if len(own) == len(other):
            return
        what = f"the number of recorded values ({len(own)} and {len(other)})"
    msg = (
        f"{program.name} is not deterministic on one rank: run twice, {what} differs; seed every generator that it "
        "uses (torch.manual_seed, random.seed, numpy.random.seed), and keep time and object ids out of the training"
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
