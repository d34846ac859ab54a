"""Verifies that a distributed program trains like a single device: the entry point of `verify program`."""

from __future__ import annotations

import fnmatch
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hyper_parallel._text import near_hint
from hyper_parallel.errors import CollectiveMismatchError, RankFailedError
from hyper_parallel.platform.select import require_framework
from hyper_parallel.transport.timeouts import positive_seconds
from hyper_parallel.verify.engine.blind_spots import BLIND
from hyper_parallel.verify.engine.declared import names_value, parse_declaration
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.repairs import STEPS
from hyper_parallel.verify.engine.samples import calls_of_first_step, other_batch
from hyper_parallel.verify.engine.scratch import Scratch
from hyper_parallel.verify.engine.sinks import KeepSink
from hyper_parallel.verify.engine.verdict import Verdict
from hyper_parallel.verify.frameworks.contract.record_log import RecordLimits
from hyper_parallel.verify.frameworks.contract.records import Run
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.accumulation import verify_accumulation, verify_sum
from hyper_parallel.verify.program.advice import advice_on_error, error_text, untested_relations
from hyper_parallel.verify.program.data import compare_data
from hyper_parallel.verify.program.dtypes import DeclaredDtype, compare_dtypes, parse_dtypes
from hyper_parallel.verify.program.framework import program_framework
from hyper_parallel.verify.program.hardening import Hardening
from hyper_parallel.verify.program.logged import compare_logged
from hyper_parallel.verify.program.one_batch import find_one_batch
from hyper_parallel.verify.program.program import Program, find_program
from hyper_parallel.verify.program.reference import (
    Reference,
    check_names,
    check_recorded,
    compare_with,
    replaying,
    run_reference,
)
from hyper_parallel.verify.program.report import WIDE_BOUNDS, HardenedCase, ProgramReport
from hyper_parallel.verify.program.resumption import Resumption, verify_resumption
from hyper_parallel.verify.program.torchrun import started_by_torchrun, verify_under_torchrun
from hyper_parallel.verify.program.worlds import World, run_world
from hyper_parallel.verify.run_arguments import LAUNCHES, parse_mesh, require_seed
from hyper_parallel.verify.simulate import require_device
from hyper_parallel.verify.spec import error_summary

__all__ = ["PRETENDED", "verify_program"]

_NEAR = 0.5
"""If an error in half precision is more than this fraction of its tolerance, it may be a bug, such as a small bias
added twice.
"""

Progress = Callable[[str], None]
_LAUNCHES = (*LAUNCHES, "threads")
PRETENDED = ("cuda", "npu")
"""Devices for which the CPU can stand in."""

AUTO = ("auto",)
"""Argument that requests a search for the arguments of one batch."""

_CHOSEN = ("output", "mask", "value")
"""Kinds of records that --only selects by pattern."""


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
    scratch: str | None = None,
    budget: int | None = None,
    upcast: bool | None = None,
    harden: bool = False,
    allow: Sequence[str] = (),
    progress: Callable[[str], None] | None = None,
    device: str = "cpu",
    keep_files: str = "",
    pretend: str = "",
    accumulate: Sequence[str] | None = None,
    logged: bool | None = None,
    resume: Sequence[str] | None = None,
    resume_after: int | None = None,
    resume_world: int | None = None,
    dtypes: Sequence[str] = (),
    data: bool = False,
    all_relations: bool = False,
) -> ProgramReport:
    """Run a distributed program on one rank and on several, and compare all values that it computes.

    The program runs unchanged: hooks record outputs of modules, losses, gradients when the optimizer reads them,
    optimizer state, and weights after each step. The run on one rank is the reference. It is repeated with tiny
    perturbations, to measure the effect of rounding on each value.

    Args:
        parallel: ``train.py``, run as torchrun would; ``-m package.train``; ``train.py:function``; or a function with
            no parameter or with a mesh as its parameter. It must train the same way on one rank.
        world_size: number of ranks; by default the size of ``mesh``, or torchrun's number of processes.
        single: a different script or function for the reference, if ``parallel`` cannot run on one rank.
        mesh: ``dp=2,tp=2`` or sizes by name: the axes for messages and for functions that take a mesh.
        steps: number of optimizer steps after which the program is stopped; with None, it runs to its end.
        platform: ``torch`` or ``mindspore``; with None, the framework that the file, or the function's module, imports.
        seed: seed of the perturbations.
        launch: ``simulated``: ranks are forked processes for a script, and threads for a function, on a deterministic
            transport; ``threads``: all ranks are threads; ``processes``: ranks communicate over gloo, or over an engine
            such as NCCL. The reference is always simulated. Under torchrun, its processes are the ranks, and each of
            them receives the report.
        declared: placements of recorded values that cannot be inferred, by pattern of their names:
            ``{"layers.*.wq.weight": "shard(0) over tp"}``.
        args: arguments of the script.
        single_args: arguments of the reference's script; ``args`` by default.
        only: patterns of the modules whose outputs are recorded; all by default.
        timeout: seconds for each run.
        scratch: folder for the arrays of the runs during the comparison; by default the folder for temporary files. The
            arrays are deleted afterwards.
        budget: largest number of bytes that may be written to ``scratch``; by default the free space.
        upcast: whether a program that passes is verified once more in a wider dtype: float32 for half precision,
            float64 for float32. By default, this is done in half precision if a gradient error of 5 % might have been
            undetected, or if a value uses more than half of its tolerance.
        harden: whether a program that passes runs once more with fewer blind spots: for example, constant initial
            weights become random, and the losses of ranks with equal data are weighted. With ``steps=1``, every run
            makes three steps.
        allow: kinds of blind spots (``BLIND`` of ``verify/engine/blind_spots.py``) that do not make the result
            inconclusive. For example, ``equal-data`` accepts a program whose ranks along an axis all do the same work.
            ``wide-bounds`` accepts a program although most of its gradients could not be judged.
        progress: called with the name of each run before it starts.
        device: ``cpu``, ``cuda`` or ``npu``: the device of the program's tensors, in the reference and on the ranks.
            Simulated ranks share one device, processes have one each. Under torchrun, the program chooses its device
            itself.
        keep_files: folder to which the files that the ranks write in the working folder are copied. Every run has a
            private copy of the files that it writes, which is deleted afterwards.
        pretend: ``cuda`` or ``npu``: the CPU stands in for that device, so that a script that uses it runs unchanged.
        accumulate: arguments with which the script processes its batch at once: a program that passes must train on one
            rank with its micro-batches as with one batch. ``("auto",)`` searches for them: an option whose name
            contains ``accum`` becomes 1; if the samples then differ, an option with ``batch`` is multiplied.
        logged: whether numbers that rank 0 prints, or writes to text files, are compared with the single device's if
            the training is equal. By default, differences with a known cause, such as the norm of one rank's gradients,
            are errors, and all other differences are listed. With True, all differences are errors; with False, nothing
            is compared.
        resume: arguments with which the script continues from its checkpoint: a program that passes is stopped after
            some steps and restarted, and must continue like an uninterrupted program.
        resume_after: number of steps after which the program is stopped; by default half of the steps.
        resume_world: number of ranks of the restart; by default that of the program.
        dtypes: declared dtypes, ``KIND=DTYPE`` or ``KIND:PATTERN=DTYPE``: the dtypes of all ``parameters``,
            ``gradients``, ``reductions`` of gradients, optimizer ``states`` and ``masters`` (weights that an optimizer
            keeps in addition to the model's), or of parameters whose name matches the pattern. The last declaration
            that matches counts.
        data: whether the samples that data loaders of PyTorch draw are compared with the dataset: in each epoch, all
            ranks together must draw every sample once.
        all_relations: whether to request ``data``, and ``accumulate`` if the script has such an option. Checks that
            need your arguments or declarations (``resume``, ``dtypes``) are not requested.

    Returns:
        the verdict with its first difference and cause. An error of a rank in the parallel run and an inconclusive case
        are reported; in both cases the report is not ``ok``.

    Raises:
        InputError: (a ValueError) an argument is wrong, the reference fails or is not deterministic, or nothing was
            recorded that could be compared.
        UnsupportedOnBackend: the framework does not find the device, or MindSpore finds fewer devices than ranks.
    """
    axes = _axes(mesh, _torchrun_size(world_size))
    size = int(np.prod([length for _, length in axes]))
    launch = "torchrun" if started_by_torchrun() else launch
    _check(size, steps, launch, seed, timeout)
    _check_case(harden, allow, launch)
    _check_upcast(upcast, launch)
    for words in (declared or {}).values():
        parse_declaration(words, None)  # the axes are known after the program has run
    _check_device(device, launch)
    _check_pretended(pretend, device, launch)
    program = find_program(parallel, args, "FILE")
    alone = program if single is None and single_args is None else find_program(
        parallel if single is None else single, args if single_args is None else single_args, "--single"
    )  # fmt: skip
    platform = platform or program_framework(program)
    if upcast and platform != "torch":
        msg = f"--upcast is implemented for PyTorch; {program.name} uses {platform}"
        raise InputError(msg)
    if pretend and not (program.is_script and alone.is_script):
        msg = f"--pretend {pretend} is for scripts, which have processes of their own; this is a function"
        raise InputError(msg)
    if pretend == "cuda" and platform != "torch":
        msg = "--pretend cuda is for scripts of PyTorch; those of MindSpore take --pretend npu"
        raise InputError(msg)
    if data and platform != "torch":
        msg = f"--data is implemented for PyTorch; {program.name} uses {platform}, whose datasets show no indices"
        raise InputError(msg)
    require_framework(platform)
    require_device(device, platform, ranks=size if launch == "processes" else None)
    draws = data or (all_relations and platform == "torch")
    limits = RecordLimits(STEPS if harden and steps == 1 else steps, tuple(only), pretend=pretend, draws=draws)
    world = World(size, platform, launch, axes, limits, timeout, device=device, keep_files=keep_files)
    report = ProgramReport(program.name, platform, launch, size, seed, dict(axes) if mesh is not None else {})
    report.allowed, report.device = tuple(allow), device
    found = accumulate is not None and tuple(accumulate) == AUTO
    if found and not alone.is_script:
        msg = f"--accumulate auto reads the options of a script; {alone.name} is a function"
        raise InputError(msg)
    one_batch = None if accumulate is None or found else find_program(
        parallel if single is None else single, _own_arguments(accumulate, "--accumulate"), "--accumulate"
    )  # fmt: skip
    verification = _Verification(
        program, alone, world, report, declared, progress or _nothing, harden, scratch, budget, upcast, one_batch,
        logged, _resumption(program, parallel, resume, resume_after, resume_world, launch), parse_dtypes(dtypes),
        data, found, all_relations,
    )  # fmt: skip
    if launch == "torchrun":
        return verify_under_torchrun(program, world, lambda run: verification.compare(lambda _: run))
    return verification.compare(lambda stored: run_world(program, stored))


@dataclass
class _Verification:
    """One call of :func:`verify_program`; attributes are the arguments of the function, and the report to fill in."""

    program: Program
    alone: Program
    world: World
    report: ProgramReport
    declared: Mapping[str, str] | None
    progress: Progress
    harden: bool
    scratch: str | None
    budget: int | None
    upcast: bool | None
    one_batch: Program | None
    logged: bool | None
    resumption: Resumption | None
    dtypes: list[DeclaredDtype]
    data: bool
    find_accumulation: bool
    all_relations: bool

    def compare(self, run_ranks: Callable[[World], Run]) -> ProgramReport:
        """Run the reference, then the ranks, and compare them."""
        with Scratch(self.scratch, self.budget) as scratch:
            return self._compare_in(scratch, run_ranks)

    def _compare_in(self, scratch: Scratch, run_ranks: Callable[[World], Run]) -> ProgramReport:
        started, report = time.perf_counter(), self.report
        reference = run_reference(self.alone, self.world, report.seed, self.progress, scratch)
        _check_only(self.world.limits.only, reference.run)
        if not self.world.limits.only:  # --only omits values that a declaration may name
            _check_declared(self.declared or {}, reference.run)
        self.progress(f"{self.world.size} ranks ({self.world.launch})")
        try:
            sink = KeepSink(scratch, f"{self.world.size} ranks")
            run = run_ranks(replace(self.world, limits=replace(self.world.limits, sink=sink)))
        except RankFailedError as error:
            cause = error.__cause__ or error
            summary = error_summary(cause)
            report.failure, report.cause = str(error), error_text(summary)
            report.advice = advice_on_error(summary, self.world.limits.pretend)
            if isinstance(cause, CollectiveMismatchError):
                report.kind, report.calls = "unequal-calls", tuple(str(cause).splitlines()[1:])
        else:
            reference.free()
            self._compare_runs(reference, run, run_ranks)
        report.rounding = reference.rounding
        report.seconds = time.perf_counter() - started
        return report

    def _compare_runs(self, reference: Reference, run: Run, run_ranks: Callable[[World], Run]) -> None:
        check_recorded(self.program, run)
        check_names(run)
        report = self.report
        report.pretended = run.ranks[0].notes.get("pretended", {})
        report.defects = list(run.ranks[0].notes.get("defects of the framework", {}).values())
        report.steps = max(rank.notes.get("optimizer steps", 0) for rank in run.ranks)
        self.progress("comparison")
        again = replaying(self.world, reference.scratch, run_ranks, self.progress)
        runs, report.verdict = compare_with(reference, run, report.mesh or None, self.declared, again=again)
        problem = None if report.verdict.equal else other_batch(reference.run, run, self.program.name)
        if problem is not None:
            raise InputError(problem)
        if report.equal and (self.upcast or (self.upcast is None and reference.half)):
            self._upcast(reference, run_ranks)
        accumulation = self._accumulation(reference) if report.equal else None
        if report.equal:
            report.untested = untested_relations(
                self.program, reference.run, accumulates=accumulation is not None, resumes=self.resumption is not None
            )
        if self.logged is not False and report.equal:
            case = compare_logged(reference, run, report.verdict.notes, strict=bool(self.logged))
            report.hardened += [] if case is None else [case]
        if accumulation is not None:
            report.hardened.append(accumulation)
        if self.resumption is not None and report.equal:
            self._resume(self.resumption, reference)
        if self.harden and report.equal:
            self._harden(runs, report.verdict, reference)
        if self.dtypes:
            report.hardened.append(compare_dtypes(run, self.dtypes))
        if self.world.limits.draws:
            report.hardened.append(replace(compare_data(run), asked=self.data))

    def _accumulation(self, reference: Reference) -> HardenedCase | None:
        """Return the case that compares micro-batches with one batch, or with their sum; None if it is not requested.

        Raises:
            InputError: a search for the arguments was requested, but found none.
        """
        calls = calls_of_first_step(reference.run.ranks[0].notes)
        one_batch, alone = self.one_batch, self.alone
        if one_batch is None:
            if not alone.is_script or not (self.find_accumulation or (self.all_relations and calls > 1)):
                return None
            one_batch = find_one_batch(alone, self.world, reference, self.progress)
        if one_batch is not None:
            return verify_accumulation(alone, one_batch, self.world, reference, self.report.seed, self.progress)
        case = verify_sum(alone, self.world, reference, self.progress)
        if case is None and self.find_accumulation:
            msg = (
                f"--accumulate auto: no option of {alone.name} was found that makes it process the batch of a step at "
                "once; give the arguments that do, such as --accumulate '--accum 1'"
            )
            raise InputError(msg)
        return case

    def _upcast(self, reference: Reference, run_ranks: Callable[[World], Run]) -> None:
        """Verify a program once more in a wider dtype if a gradient error might not have been detected.

        If the program does not run in a wider dtype, the result in its own dtype stands.
        """
        report, world = self.report, self.world
        verdict = report.verdict
        near = reference.half and verdict is not None and verdict.largest > _NEAR
        doubtful = near or (verdict is not None and bool(verdict.power.weak))
        if (not doubtful and not self.upcast) or world.platform != "torch" or world.launch == "torchrun":
            return
        narrow, dtype = ("half precision", "float32") if reference.half else ("float32", "float64")
        case = HardenedCase([f"what the program computes in {narrow} is computed in {dtype}"], title="upcast")
        limits = replace(world.limits, upcast=dtype)
        try:
            wider = run_reference(
                self.alone, replace(world, limits=limits), report.seed, self.progress, reference.scratch
            )  # fmt: skip
            with wider, KeepSink(reference.scratch, f"{world.size} ranks in {dtype}") as sink:
                self.progress(f"{world.size} ranks in {dtype}")
                run = run_ranks(replace(world, limits=replace(limits, sink=sink)))
                check_recorded(self.program, run)
                again = replaying(replace(world, limits=limits), reference.scratch, run_ranks, self.progress)
                _, verdict = compare_with(wider, run, report.mesh or None, self.declared, again=again)
                case = replace(case, verdict=verdict)
        except (RankFailedError, InputError) as error:
            case = replace(case, skipped=error_summary(_root_of(error)), asked=bool(self.upcast))
        report.hardened.append(case)

    def _resume(self, resumption: Resumption, reference: Reference) -> None:
        """Stop and restart the program; if a rank fails in the restart, this failure is the result of the case."""
        try:
            case = verify_resumption(
                self.program, resumption, self.world, reference, self.progress, self.declared
            )  # fmt: skip
        except RankFailedError as error:
            words = f"stopped, and started again: {' '.join(resumption.again.arguments)}".rstrip(": ")
            case = HardenedCase([words], None, str(error), error_summary(_root_of(error)), "resume")
        self.report.hardened.append(case)

    def _harden(self, runs: PairedRuns, verdict: Verdict, reference: Reference) -> None:
        """Run the hardened cases, and keep the remaining blind spots in the verdict."""
        hardening = Hardening(
            self.program, self.alone, self.world, self.report.mesh or None, self.declared, self.report.seed,
            self.progress,
        )  # fmt: skip
        hardening.run(runs, verdict.spots, reference)
        verdict.spots = hardening.spots
        self.report.hardened += hardening.cases


def _own_arguments(arguments: Sequence[str], option: str) -> Sequence[str]:
    """Return the arguments of an option, which must not be empty."""
    if not arguments:
        msg = f"{option} is empty; give the arguments with which the script makes the run to compare"
        raise InputError(msg)
    return arguments


def _resumption(
    program: Program,
    parallel: str | Callable[..., Any],
    arguments: Sequence[str] | None,
    after: int | None,
    size: int | None,
    launch: str,
) -> Resumption | None:
    """Return how the program is stopped and restarted; None if this was not requested."""
    if arguments is None:
        if after is not None or size is not None:
            option = "--resume-world" if after is None else "--resume-after"
            msg = f"{option} needs --resume, which gives the arguments of the script when it is started again"
            raise InputError(msg)
        return None
    if launch == "torchrun":
        msg = "--resume runs the ranks twice, which torchrun's processes cannot; leave out --resume or torchrun"
        raise InputError(msg)
    if not program.is_script:
        msg = f"--resume starts a script again; {program.name} is a function"
        raise InputError(msg)
    return Resumption(find_program(parallel, arguments, "--resume"), after, size)


def _root_of(error: BaseException) -> BaseException:
    """Return the original error of a rank, from an error that was raised because of it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _torchrun_size(world_size: int | None) -> int | None:
    """Return the requested number of ranks, or the number of processes that torchrun has started."""
    return int(os.environ["WORLD_SIZE"]) if world_size is None and started_by_torchrun() else world_size


def _nothing(part: str) -> None:
    del part


def _axes(mesh: str | Mapping[str, int] | None, world_size: int | None) -> tuple[tuple[str, int], ...]:
    if isinstance(mesh, Mapping):
        mesh = ",".join(f"{name}={size}" for name, size in mesh.items())
    sizes, names = parse_mesh(mesh, world_size)
    return tuple(zip(names if mesh is not None else ("world",), sizes, strict=True))


def _check_case(harden: bool, allow: Sequence[str], launch: str) -> None:
    unknown = [kind for kind in allow if kind not in (*BLIND, WIDE_BOUNDS)]
    if unknown:
        msg = f"--allow {unknown[0]!r} is not a kind of blind spot; kinds: {', '.join((*BLIND, WIDE_BOUNDS))}"
        raise InputError(msg)
    if harden and launch == "torchrun":
        msg = "--harden runs the ranks several times, which torchrun's processes cannot; leave out --harden or torchrun"
        raise InputError(msg)


def _check_upcast(upcast: bool | None, launch: str) -> None:
    if upcast and launch == "torchrun":
        msg = "--upcast runs the ranks twice, which torchrun's processes cannot; leave out --upcast or torchrun"
        raise InputError(msg)


def _check_only(only: Sequence[str], reference: Run) -> None:
    """Raise an InputError if a pattern matches no output, mask or value of the program."""
    records = [record for rank in reference.ranks for record in rank.records]
    names = {record.name for record in records if record.kind in _CHOSEN}
    unmatched = [pattern for pattern in only if not fnmatch.filter(names, pattern)]
    if unmatched:
        msg = (
            f"--only {unmatched[0]!r} matches no output, mask or value of the program; they have the path of their "
            "module, such as layers.0.up, and (model) is the whole"
        )
        raise InputError(msg)


def _check_declared(declared: Mapping[str, str], reference: Run) -> None:
    """Raise an InputError if a pattern matches no value of the program."""
    values = {(record.kind, record.name) for rank in reference.ranks for record in rank.records}
    for pattern in declared:
        if not any(names_value(pattern, kind, name) for kind, name in values):
            hint = near_hint(pattern, sorted({name for _, name in values}))
            msg = f"--declare {pattern!r} matches no value of the program{hint}"
            raise InputError(msg)


def _check_device(device: str, launch: str) -> None:
    if device != "cpu" and launch == "torchrun":
        msg = f"--device {device}: a program under torchrun chooses its device itself; leave out --device or torchrun"
        raise InputError(msg)


def _check_pretended(pretend: str, device: str, launch: str) -> None:
    if not pretend:
        return
    if pretend not in PRETENDED:
        msg = f"--pretend {pretend!r} must be {' or '.join(PRETENDED)}"
        raise InputError(msg)
    if device != "cpu":
        msg = f"--pretend {pretend} lets the CPU stand in, and --device {device} asks for a device; leave out one"
        raise InputError(msg)
    if launch not in LAUNCHES:
        msg = f"--pretend {pretend} needs ranks that are processes of their own: --launch simulated or processes"
        raise InputError(msg)


def _check(size: int, steps: int | None, launch: str, seed: int, timeout: float) -> None:
    require_seed(seed)
    positive_seconds(timeout, f"--timeout {timeout!r}")
    if size < 2:
        msg = f"--world-size is {size}: the program on one rank is the reference; compare it with at least 2 ranks"
        raise InputError(msg)
    if steps is not None and steps < 1:
        msg = f"--steps is {steps}; at least one step must be compared"
        raise InputError(msg)
    if launch not in (*_LAUNCHES, "torchrun"):
        msg = f"--launch {launch!r} must be {', '.join(_LAUNCHES[:-1])} or {_LAUNCHES[-1]}"
        raise InputError(msg)
