"""Compares any two runs: the entry point of `verify diff`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hyper_parallel.errors import CollectiveMismatchError, RankFailedError
from hyper_parallel.transport.timeouts import positive_seconds
from hyper_parallel.verify.diff.alignment import align_calls
from hyper_parallel.verify.diff.placed import PlacedSide, check_side
from hyper_parallel.verify.diff.recordings import check_no_mesh, diff_recordings
from hyper_parallel.verify.diff.report import DiffReport
from hyper_parallel.verify.diff.side import DiffSide
from hyper_parallel.verify.diff.start import require_common_records, start_differs
from hyper_parallel.verify.diff.whole import put_together
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.scratch import Scratch
from hyper_parallel.verify.engine.sinks import KeepSink
from hyper_parallel.verify.engine.store import largest, same_values
from hyper_parallel.verify.engine.verdict import Verdict
from hyper_parallel.verify.engine.wording import value_words, when_words
from hyper_parallel.verify.frameworks.contract.records import Run
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.reference import (
    Reference,
    check_names,
    check_recorded,
    compare_with,
    replaying,
    run_reference,
)
from hyper_parallel.verify.program.worlds import World
from hyper_parallel.verify.run_arguments import require_seed
from hyper_parallel.verify.spec import error_summary

__all__ = ["verify_diff"]


def verify_diff(
    first: DiffSide,
    second: DiffSide,
    *,
    steps: int | None = None,
    seed: int = 0,
    declared: Mapping[str, str] | None = None,
    timeout: float = 300.0,
    scratch: str | None = None,
    budget: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> DiffReport:
    """Run two programs, or the same program in two ways, and compare all values that they compute.

    The values of run A's ranks are joined, as if A had run on one rank, and repeats measure the effect of rounding on
    these values. The ranks of run B are compared with the joined run, as ``verify program`` compares ranks with a
    single device.

    Args:
        first: run A.
        second: run B.
        steps: number of optimizer steps after which both runs are stopped; with None, they run to their end.
        seed: seed of the perturbations.
        declared: placements that cannot be inferred, by pattern of names.
        timeout: seconds for each run.
        scratch: folder for the arrays during the comparison.
        budget: largest number of bytes that may be written to ``scratch``.
        progress: called with the name of each run before it starts.

    Raises:
        InputError: (a ValueError) an argument is wrong, A fails or is not deterministic, the runs share no record, or A
            runs on several ranks but cannot run on one rank.
    """
    require_seed(seed)
    positive_seconds(timeout, f"--timeout {timeout!r}")
    if steps is not None and steps < 1:
        msg = f"--steps is {steps}; at least one step must be compared"
        raise InputError(msg)
    if first.is_recording or second.is_recording:
        return diff_recordings(
            first, second, steps=steps, seed=seed, declared=declared, timeout=timeout, scratch=scratch, budget=budget,
            progress=progress or _nothing,
        )  # fmt: skip
    check_no_mesh((first, second))
    for label, side in (("a", first), ("b", second)):
        check_side(label, side)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(Scratch(scratch, budget))
        one, two = (
            PlacedSide(label, side, steps, timeout, stack) for label, side in (("A", first), ("B", second))
        )  # fmt: skip
        report = DiffReport((one.words, two.words), (one.world.platform, two.world.platform), seed)
        started = time.perf_counter()
        _Comparison(one, two, report, declared, progress or _nothing, folder).run()
        report.seconds = time.perf_counter() - started
    return report


@dataclass
class _PutTogether(Reference):
    """Run A, joined from its ranks.

    Attributes:
        map: A's program on one rank: its repeats measure rounding, and it has the positions of shards.
    """

    map: Reference | None = field(default=None, repr=False)

    def widen(self, within: Callable[[], bool]) -> bool:
        """Run further repeats of A's program on one rank."""
        return self.map is not None and self.map.widen(within)


@dataclass
class _Comparison:
    """One call of :func:`verify_diff`; attributes are the arguments of the function, and the report to fill in."""

    first: PlacedSide
    second: PlacedSide
    report: DiffReport
    declared: Mapping[str, str] | None
    progress: Callable[[str], None]
    scratch: Scratch

    def run(self) -> None:
        """Run A, then B, and compare them."""
        reference = self._reference()
        if reference is None:
            return
        run = self._ranks(self.second)
        self.report.names = (self.first.words, self.second.words)
        if run is None:
            return
        check_recorded(self.second.program, run)
        check_names(run)
        for side, each in ((self.first, reference.run), (self.second, run)):
            self.report.uncompiled += [side.label] if each.ranks[0].notes.get("uncompiled") else []
        self.report.steps = max(rank.notes.get("optimizer steps", 0) for rank in run.ranks)
        self.progress("comparison")
        run, aligned = align_calls(reference.run, run)
        runs = PairedRuns(reference.run, reference.bounds, run, None, self.declared)
        require_common_records(runs)
        verdict = start_differs(reference.run, runs)
        if verdict is None:
            again = replaying(self.second.world, self.scratch, self._aligned_again(reference.run), self.progress)
            runs, verdict = compare_with(reference, run, None, self.declared, again=again)
            verdict.spots = []
            self.report.first_bits = _first_bits(runs)
        verdict.notes += aligned
        self.report.verdict = verdict
        self.report.rounding = reference.rounding

    def _aligned_again(self, reference: Run) -> Callable[[World], Run]:
        return lambda world: align_calls(reference, self.second.run(world, self.scratch))[0]

    def _reference(self) -> Reference | None:
        """Return run A as a run on one rank; None if a rank of A failed."""
        own = self.first
        alone = own.program if own.world.size == 1 else own.alone()
        try:
            reference = run_reference(
                alone, own.world, self.report.seed, self._of_a, self.scratch, runner=own.runner(self.scratch)
            )
        except InputError as error:
            raise InputError(self._advice(str(error))) from error
        if own.world.size == 1:
            return reference
        run = self._ranks(own)
        if run is None:
            return None
        check_recorded(own.program, run)
        check_names(run)
        self.progress("A put together")
        again = replaying(own.world, self.scratch, lambda world: own.run(world, self.scratch), self._of_a)
        runs, verdict = compare_with(reference, run, None, self.declared, again=again)
        whole, left_out = put_together(runs, reference.run, KeepSink(self.scratch, "A, put together"))
        self._note_own(verdict, left_out)
        same = ("program", "world", "seed", "progress", "changes", "scratch", "rounding", "runner")
        values = {each: getattr(reference, each) for each in same}
        bounds = reference.bounds.with_values_of(whole)
        return _PutTogether(**values, run=whole, bounds=bounds, map=reference)

    def _note_own(self, verdict: Verdict, left_out: list[Any]) -> None:
        """Note whether A's ranks differ from A on one rank, and the values that could not be joined."""
        if verdict.first is not None:
            heading = verdict.first.heading
            self.report.own.append(
                f"A's own ranks are not equal to A on one rank, first {heading}: B is compared with A's ranks as they "
                "are; hyper-parallel verify program says why"
            )
        if left_out:
            names = dict.fromkeys(value_words(key[0], key[1]) for key in left_out)
            shown = ", ".join(list(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            self.report.own.append(f"not compared, since A's ranks have no parts of it that make a whole: {shown}")

    def _of_a(self, title: str) -> None:
        self.progress(f"A: {title}")

    def _advice(self, message: str) -> str:
        """Return the error of A on one rank, with the fix for ``verify diff``."""
        if self.first.world.size == 1:
            return message
        own, _, rest = message.partition("\nIf it cannot run on one rank")
        more = rest.partition("\n")[2]
        return (
            f"{own}\nA runs on one rank, too: this says where its ranks' parts lie, and what rounding does. If it "
            f"needs other arguments there, give them with --a-single-args ARGS.\n{more}"
        )

    def _ranks(self, side: PlacedSide) -> Run | None:
        """Run a side on its ranks; if a rank fails, put the failure into the report and return None."""
        self.progress(f"{side.label}: {side.words.rpartition(', ')[2]}")
        sink = KeepSink(self.scratch, f"run {side.label}")
        try:
            return side.run(replace(side.world, limits=replace(side.world.limits, sink=sink)), self.scratch)
        except RankFailedError as error:
            cause = error.__cause__ or error
            self.report.failure, self.report.cause = str(error), error_summary(cause)
            self.report.failed_run = side.label
            if isinstance(cause, CollectiveMismatchError):
                self.report.kind = "unequal-calls"
            return None


def _first_bits(runs: PairedRuns) -> str:
    """Return a description of the first value whose bits differ from A's; empty if there is none."""
    for key in runs.bounds.reference:
        if key[0] == "loss" and len(runs.ranks) > 1:
            continue  # each rank has the loss of its own samples
        for rank in runs.holders(key):
            placement = runs.placement(key, rank)
            actual = None if placement is None or not placement.compared else runs.actual(key, rank, placement)
            if placement is None or actual is None:
                continue
            expected = placement.take(runs.bounds.reference[key].value)
            if actual.shape != expected.shape or same_values(actual, expected):
                continue
            words = f"bits differ first {when_words(key[0], key[2], key[3])} in {value_words(key[0], key[1])}"
            if actual.dtype.kind not in "fc" or not largest(expected):
                return words
            with np.errstate(invalid="ignore"):
                off = float(np.abs(actual.astype(np.complex128) - expected).max()) / largest(expected)
            return f"{words}, by {off:.1e} of its largest number"
    return ""


def _nothing(part: str) -> None:
    del part
