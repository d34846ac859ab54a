"""The reference of a program: its run on one rank, and the perturbed repeats that measure its rounding."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.errors import RankFailedError
from hyper_parallel.verify.engine.bounds import Bounds
from hyper_parallel.verify.engine.comparison import compare_paired
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.replay import Replay, plan_replay
from hyper_parallel.verify.engine.scratch import Scratch, ScratchError
from hyper_parallel.verify.engine.sinks import KeepSink, merge_notes
from hyper_parallel.verify.engine.store import StoredArray, same_values
from hyper_parallel.verify.engine.verdict import Verdict
from hyper_parallel.verify.frameworks.contract.case_changes import CaseChanges
from hyper_parallel.verify.frameworks.contract.record_log import ReplayTable
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Record, Run
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.advice import advice_on_error, advice_on_launches, error_text
from hyper_parallel.verify.program.framework import other_framework
from hyper_parallel.verify.program.perturbations import HALF_PRECISION, Repeat, first_repeats, further_repeats
from hyper_parallel.verify.program.printed import PRINTED, WRITTEN
from hyper_parallel.verify.program.program import Program
from hyper_parallel.verify.program.repetition import ROUNDING, check_deterministic, check_rounding
from hyper_parallel.verify.program.worlds import World, run_world
from hyper_parallel.verify.spec import error_summary

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Reference", "check_names", "check_recorded", "compare_with", "replaying", "run_reference"]

_REPLAYS = 12
"""Largest number of reruns of the ranks with the reference's draws and decisions. Each rerun may reveal later flips,
which an earlier flip had hidden.
"""

_LARGE = 64 << 20
"""If records take more bytes than this, the model of a finished run is freed at once, by the garbage collector."""


@dataclass
class Reference:
    """A reference, and the tolerances that its repeats have measured so far.

    Attributes:
        program: the program of the reference.
        world: world of one rank, in which the repeats run without output.
        seed: seed of the perturbations.
        progress: called with the name of each run before it starts.
        changes: changes of the case, the same in every run.
        run: the unperturbed run, whose arrays are on disk.
        bounds: tolerances from the repeats.
        complete: whether all repeats have run, not only the first repeats.
        printed: for each repeat, the lines that it printed and those that it wrote to text files.
        rounding: description of the first value that an unperturbed repetition rounded differently; empty if there is
            none.
        runner: function that makes the runs; :func:`run_world` makes them in this interpreter.
    """

    program: Program
    world: World
    seed: int
    progress: Callable[[str], None]
    changes: tuple[CaseChanges, ...] | None
    run: Run
    bounds: Bounds
    scratch: Scratch
    complete: bool = False
    rounding: str = ""
    sinks: list[KeepSink] = field(default_factory=list, repr=False)
    printed: list[Mapping[str, Any]] = field(default_factory=list, repr=False)
    runner: Callable[..., Run] = field(default=run_world, repr=False)
    _again: Run | None = field(default=None, repr=False)
    _further: Iterator[tuple[str, Repeat]] | None = field(default=None, repr=False)

    @property
    def half(self) -> bool:
        """Whether the program computes in half precision."""
        return HALF_PRECISION in self.run.ranks[0].notes

    def __enter__(self) -> Self:
        """Return the reference itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Delete the reference's arrays and measurements."""
        self.bounds.movements.close()
        for sink in self.sinks:
            sink.close()

    def measure(self) -> None:
        """Run the first repeats, or all repeats of a program that rounds differently in each run.

        Raises:
            InputError: a repeat fails, or the program is not deterministic.
        """
        repeats = first_repeats(self.seed, self.bounds, half=self.half)
        for number, repeat in enumerate(repeats):
            rank = self._repeat(repeat, f"reference, repeat {number + 1} of {len(repeats)}")
            if not number and _is_suspicious(self.run.ranks[0], rank, repeat):
                self._run_again()
        if self.rounding:
            self.complete_bounds()

    def complete_bounds(self) -> None:
        """Run all remaining repeats.

        Raises:
            InputError: as in :meth:`measure`.
        """
        self.widen(lambda: False)

    def widen(self, within: Callable[[], bool]) -> bool:
        """Run further repeats until all values are within their tolerances, or all repeats have run.

        Args:
            within: function that returns whether all values are within the tolerances; called after each repeat.

        Returns:
            Whether a repeat was run.

        Raises:
            InputError: as in :meth:`measure`.
        """
        if self.complete:
            return False
        if self._further is None:
            repeats = further_repeats(self.seed, self.bounds, half=self.half)
            self._further = iter([(f"{number} of {len(repeats)}", each) for number, each in enumerate(repeats, 1)])
        for place, repeat in self._further:
            self._repeat(repeat, f"reference, further repeat {place}")
            if within():
                return True
        self.complete = True
        if self._again is None:
            self._run_again()
        if self.rounding and self._again is not None:
            check_rounding(self.program, self.run, self._again, self.bounds)
        return True

    def _repeat(self, repeat: Repeat, title: str) -> RankRecords:
        self.progress(title)
        world = replace(self.world, limits=replace(self.world.limits, sink=repeat.sink))
        with _failures(self.program, self.world):
            rank = self.runner(self.program, world, repeat, self.changes).ranks[0]
        merge_notes(repeat.sink, rank)
        self.printed.append({note: rank.notes.get(note, ()) for note in (PRINTED, WRITTEN)})
        self.free()
        return rank

    def _run_again(self) -> None:
        """Run the program again unperturbed, and check that all values are the same except for rounding."""
        self.progress("reference, run again unchanged")
        sink = KeepSink(self.scratch, "the reference, run again")
        self.sinks.append(sink)
        world = replace(self.world, limits=replace(self.world.limits, sink=sink))
        with _failures(self.program, self.world):
            self._again = self.runner(self.program, world, None, self.changes)
        self.rounding = check_deterministic(self.program, self.run, self._again)
        self.run.settings = {**self.run.settings, ROUNDING: self.rounding}

    def free(self) -> None:
        """Free the model of a finished run if it is large, because its reference cycles would keep it alive."""
        if self.scratch.written > _LARGE:
            gc.collect()


def run_reference(
    program: Program,
    world: World,
    seed: int,
    progress: Callable[[str], None],
    scratch: Scratch,
    changes: CaseChanges | None = None,
    runner: Callable[..., Run] = run_world,
) -> Reference:
    """Return the reference with the tolerances from its first repeats.

    Args:
        program: the program to run.
        world: world of the ranks; the reference runs in a world of one.
        seed: seed of the perturbations.
        progress: called with the name of each run before it starts.
        scratch: folder of the arrays.
        changes: changes of the case, the same in every run.
        runner: function that makes the runs, with the parameters of :func:`run_world`, which runs in this interpreter.

    Raises:
        InputError: the program fails, records nothing, or gives different values in a second run, by more than
            rounding.
    """
    progress("reference")
    case = None if changes is None else (changes,)
    alone = world.alone("stderr")
    sink = KeepSink(scratch, "the reference")
    alone = replace(alone, limits=replace(alone.limits, sink=sink))
    with _failures(program, world):
        run = runner(program, alone, None, case)
    check_recorded(program, run)
    _require_room(program, scratch, run)
    reference = Reference(
        program, world.alone("nothing"), seed, progress, case, run, Bounds(run, scratch=scratch), scratch,
        runner=runner,
    )  # fmt: skip
    reference.sinks.append(sink)
    reference.free()
    reference.measure()
    return reference


def _require_room(program: Program, scratch: Scratch, run: Run) -> None:
    """Check that the measurements of the repeats and the ranks' arrays will fit on the disk.

    Raises:
        InputError: they do not fit. A repeat takes one byte per element for each of two or three kinds; all ranks
            together have at least one copy of the reference's arrays.
    """
    records = run.ranks[0].records
    kinds = 3 if HALF_PRECISION in run.ranks[0].notes else 2
    arrays = (record.value for record in records)
    stored = {(array.path, array.offset): array.nbytes for array in arrays if isinstance(array, StoredArray)}
    codes = kinds * sum(int(np.size(record.value)) for record in records)
    try:
        scratch.require(codes + sum(stored.values()), "the bounds and the ranks' arrays")
    except ScratchError as error:
        msg = f"{program.name}: {error}"
        raise InputError(msg) from error


def compare_with(
    reference: Reference,
    run: Run,
    mesh: Mapping[str, int] | None,
    declared: Mapping[str, str] | None,
    *,
    listed: bool = False,
    again: Callable[[ReplayTable], Run | None] | None = None,
) -> tuple[PairedRuns, Verdict]:
    """Compare ranks with a reference; run further repeats while something differs.

    Ranks that draw dropout for their own samples, or decide near ties differently, first run again with the draws and
    decisions of the reference. Repeats are added only afterwards.

    A value may exceed the tolerance from a few repeats, but not that from more repeats, because some of millions of
    elements hardly move in a few repeats.

    Args:
        reference: the reference, with the tolerances from its first repeats.
        run: run of the ranks.
        mesh: sizes of the axes; with None, the groups that the ranks created are used.
        declared: placements by pattern of names.
        listed: whether the verdict also lists equal values.
        again: function that reruns the ranks with draws and decisions of the reference, and returns None if they fail;
            None if the ranks cannot run again.
    """
    runs = PairedRuns(reference.run, reference.bounds, run, mesh, declared)
    verdict = compare_paired(runs, listed=listed)
    applied: Replay | None = None
    rounds = 0
    while not verdict.equal:
        plan = plan_replay(runs) if again is not None and rounds < _REPLAYS else None
        plan = None if plan is None else plan.with_draws_of(applied)
        if again is not None and plan is not None and plan.adds_to(applied):
            other, rounds = again(plan.table), rounds + 1
            if other is None:
                again = None
                continue
            applied, run = plan, other
        elif not reference.widen(partial(_within_bounds, runs, verdict)):
            break
        reference.progress("comparison")
        runs = PairedRuns(reference.run, reference.bounds, run, mesh, declared, earlier=runs)
        verdict = compare_paired(runs, listed=listed)
    if applied is not None:
        verdict.notes += applied.words()
    return runs, verdict


def replaying(
    world: World,
    scratch: Scratch,
    run_ranks: Callable[[World], Run],
    progress: Callable[[str], None],
) -> Callable[[ReplayTable], Run | None] | None:
    """Return a function that reruns ranks with the reference's draws and decisions, or returns None if one fails.

    Args:
        world: world of the ranks.
        scratch: folder for the arrays of the ranks.
        run_ranks: function that runs the ranks.
        progress: called with the name of the run before it starts.

    Returns:
        None if replays are not possible, because MindSpore's recorder does not support them and processes of torchrun
            run once.
    """
    if world.platform != "torch" or world.launch == "torchrun":
        return None
    earlier: list[KeepSink] = []

    def run_again(table: ReplayTable) -> Run | None:
        progress(f"{world.size} ranks, replaying what the reference drew and decided")
        sink = KeepSink(scratch, f"{world.size} ranks, replaying")
        try:
            run = run_ranks(replace(world, limits=replace(world.limits, sink=sink, replay=table)))
        except RankFailedError:
            sink.close()
            return None
        while earlier:  # arrays of earlier reruns are not read any more
            earlier.pop().close()
        earlier.append(sink)
        return run

    return run_again


def _within_bounds(runs: PairedRuns, verdict: Verdict) -> bool:
    """Return whether all values that differed are within the tolerances, which have become larger."""
    for difference in verdict.differences:
        key = (difference.kind, difference.name, difference.step, difference.call)
        if key not in runs.bounds.reference:
            return False
        for rank in difference.ranks:
            distance = runs.distance(key, rank) if key in runs.ranks[rank] else None
            if distance is None or distance.ratio > 1:
                return False
    return bool(verdict.differences) and not verdict.replicas


def half_of_the_digits(record: Record) -> float:
    """Return the relative difference at which half of the digits of a value's dtype differ."""
    return {"bfloat16": 2.0**-4, "float16": 2.0**-5}.get(
        record.dtype, math.sqrt(float(np.finfo(record.value.dtype).eps))
    )


def _is_suspicious(reference: RankRecords, perturbed: RankRecords, repeat: Repeat) -> bool:
    """Return whether a repeat differs more than its perturbation explains, so that a plain repetition is needed.

    Such a repeat has different records, data, masks, initial weights or integers, or outputs that agree in less than
    half of their digits.
    """
    if [record.key for record in reference.records] != repeat.sink.keys:
        return True
    own, other = ([array for _, _, array in rank.notes.get("inputs", ())] for rank in (reference, perturbed))
    if len(own) != len(other) or not all(same_values(*pair) for pair in zip(own, other, strict=True)):
        return True
    for record in reference.records:
        value, whole = record.value, repeat.bounds.movements.whole("moved", record.key)
        if value.dtype.kind not in "fc":
            codes = repeat.bounds.movements.codes("moved", record.key)
            if codes is not None and codes.any():
                return True
        elif (record.step < 0 or record.kind in ("output", "loss", "value")) and not whole.norm <= half_of_the_digits(
            record
        ):
            return True
    return False


@contextmanager
def _failures(program: Program, world: World) -> Iterator[None]:
    """Raise the failure of a run on one rank as an error that includes the fix."""
    try:
        yield
    except RankFailedError as error:
        cause = error.__cause__ or error
        raise InputError(_failure(program, world, error_summary(cause), str(error))) from error


def _failure(program: Program, world: World, summary: str, report: str) -> str:
    """Return the error of a program whose run on one rank failed, and the fix."""
    other, platform = other_framework(program, world.platform), world.platform
    if other:
        return f"{program.name} imports {other} and does not run on {platform} ({summary}); give --platform {other}"
    known = advice_on_error(summary, world.limits.pretend)
    return (
        f"{program.name} fails on one rank, which is the reference: {error_text(summary)}\n{known and known + chr(10)}"
        "If it cannot run on one rank, change that, or name another reference (--single FILE, --single-args ARGS).\n"
        f"{report}"
    )


def check_recorded(program: Program, run: Run) -> None:
    """Check that a run recorded values to compare.

    Raises:
        InputError: a rank recorded nothing. Or ``record()`` was not called, and either no rank made an optimizer step,
            or the reference's optimizers read no gradient.
    """
    steps = any(rank.notes.get("optimizer steps") for rank in run.ranks)
    for rank in run.ranks:
        where = f"{program.name} on rank {rank.rank} of {run.world_size}"
        if not rank.records:
            msg = f"{where}: nothing was recorded; " + (
                advice_on_launches(program)
                or "it calls no module, makes no optimizer step and records no value: "
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
        InputError: a rank recorded a name that a different rank did not record.
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
