"""Compares a recording with its program, whose repeats measure the effect of rounding on each element.

The program runs on one rank with its repeats, and on the recording's ranks, simulated. So each element of a value has a
tolerance. The tolerances of a fingerprint's numbers are derived from the tolerances of the elements
(:mod:`hyper_parallel.verify.frameworks.contract.fingerprint`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hyper_parallel.verify.diff.alignment import CLOSE
from hyper_parallel.verify.diff.placed import PlacedSide
from hyper_parallel.verify.diff.recorded import (
    BACKWARD_OF_DUMPS,
    Judged,
    Pair,
    of_steps,
    pairs_of_rank,
    steps_words,
    words_of,
)
from hyper_parallel.verify.diff.start import require_common_names
from hyper_parallel.verify.engine.bounds import Key
from hyper_parallel.verify.engine.distance import distance
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.scratch import Scratch
from hyper_parallel.verify.engine.sinks import KeepSink
from hyper_parallel.verify.frameworks.contract.fingerprint import SUM, fingerprint_of, tolerance
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Record, Run
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.reference import Reference, check_recorded, run_reference
from hyper_parallel.verify.recording.sink import RECORDED
from hyper_parallel.verify.recording.stored import Recording

__all__ = ["MeasuredProgram"]


class MeasuredProgram:
    """A program and the recording of one of its runs.

    Args:
        placed: the program, in a world with as many ranks as the recording.
        recording: the recording to compare with the program.
        seed: seed of the perturbations.
        declared: placements by pattern of names.
        scratch: folder of the arrays.
        progress: called with the name of each run before it starts.

    Attributes:
        rounding: description of the first value that the program rounds differently in each run.
    """

    def __init__(
        self,
        placed: PlacedSide,
        recording: Recording,
        seed: int,
        declared: Mapping[str, str] | None,
        scratch: Scratch,
        progress: Callable[[str], None],
    ) -> None:
        self.rounding = ""
        self._placed, self._recording, self._seed = placed, recording, seed
        self._declared, self._scratch, self._progress = declared, scratch, progress

    def compare(self) -> tuple[list[Judged], list[str], list[str]]:
        """Run the program; return the compared values, the values that are not compared, and notes.

        Raises:
            InputError: the program fails, or shares no name or step with the recording.
        """
        placed, size = self._placed, len(self._recording.ranks)
        runner = placed.runner(self._scratch)
        alone = placed.program if size == 1 else placed.alone()
        reference = run_reference(alone, placed.world, self._seed, self._progress, self._scratch, runner=runner)
        self.rounding = reference.rounding
        run = reference.run if size == 1 else self._ranks()
        runs = PairedRuns(reference.run, reference.bounds, run, None, self._declared)
        self._progress("comparison")
        pairs, left_out, notes = self._pairs(run)
        unplaced: list[Key] = []
        judged = self._judged(pairs, runs, unplaced)
        while any(each.differs for each in judged) and self._widen(reference, runs, judged):
            unplaced.clear()
            judged = self._judged(pairs, runs, unplaced)
        left_out += words_of(unplaced, "which part of the program on one rank a rank has is not known")
        return judged, list(dict.fromkeys(left_out)), list(dict.fromkeys(notes))

    def _ranks(self) -> Run:
        placed = self._placed
        self._progress(f"{placed.label}: {len(self._recording.ranks)} ranks")
        sink = KeepSink(self._scratch, f"run {placed.label}")
        run = placed.run(replace(placed.world, limits=replace(placed.world.limits, sink=sink)), self._scratch)
        check_recorded(placed.program, run)
        return run

    def _widen(self, reference: Reference, runs: PairedRuns, judged: Sequence[Judged]) -> bool:
        wrong = [[each.pair for each in judged if each.differs]]
        return reference.widen(lambda: not any(each.differs for each in self._judged(wrong, runs, [])))

    def _pairs(self, run: Run) -> tuple[list[list[Pair]], list[str], list[str]]:
        """Return the values of each rank that both the program and the recording have, what is left out, and notes."""
        recorded, label = self._recording.run, self._recording.label
        ran = [_fingerprints(rank) for rank in run.ranks]
        by_label = {
            self._placed.label: [record.key for rank in ran for record in rank.records],
            label: [record.key for rank in recorded.ranks for record in rank.records],
        }
        require_common_names(by_label["A"], by_label["B"])
        own = set.intersection(*({record.step for record in rank.records} for rank in ran)) - {-1}
        steps = own & self._recording.steps
        if not steps:
            msg = (
                f"the program and the recording share no step: {self._placed.label} has {steps_words(own)}, and "
                f"{label} {steps_words(self._recording.steps)}"
            )
            raise InputError(msg)
        pairs, notes = [], []
        left_out = [BACKWARD_OF_DUMPS] if self._recording.is_dump else []
        for number, (left, right) in enumerate(zip(ran, recorded.ranks, strict=True)):
            kept = [record for record in right.records if _has_counterpart(record, self._recording.is_dump)]
            theirs = replace(right, records=kept)
            found, missing, words = pairs_of_rank(
                of_steps(left, steps), of_steps(theirs, steps), number, self._placed.label + label
            )
            pairs.append(found)
            left_out += missing
            notes += words
        return pairs, left_out, notes

    def _judged(self, pairs: Sequence[Sequence[Pair]], runs: PairedRuns, unplaced: list[Key]) -> list[Judged]:
        """Return the compared values, in the order of steps and of execution in each step."""
        found: list[tuple[int, int, Judged]] = []
        for own in pairs:
            for place, pair in enumerate(own):
                allowed = self._allowed(pair, runs)
                if allowed is None:
                    unplaced.append(pair.record.key)
                else:
                    found.append((pair.record.step, place, self._judge(pair, allowed, runs)))
        return [each for _, _, each in sorted(found, key=lambda each: each[:2])]

    def _allowed(self, pair: Pair, runs: PairedRuns) -> Any | None:
        """Return the tolerance of each element of a value; None if the value's placement is not known."""
        key, rank = pair.record.key, pair.rank
        if key[0] == "input":
            return np.full(pair.one.shape, 0.0 if pair.one.is_exact else CLOSE * pair.one.extreme)
        if key not in runs.bounds.reference or key not in runs.ranks[rank]:
            return None
        placement = runs.placement(key, rank)
        if placement is None or not placement.compared or placement.pending:
            return None
        allowed = np.asarray(placement.take(runs.bounds.allowed(key)))
        return allowed if allowed.size == pair.one.size else None

    def _judge(self, pair: Pair, allowed: Any, runs: PairedRuns) -> Judged:
        """Return the comparison of a pair: by elements if all are recorded, otherwise by numbers of fingerprints."""
        judged = _judge(pair, allowed)
        one, other, key = pair.one, pair.other, pair.record.key
        if one.same(other) or not one.both_whole(other):
            return judged
        actual, expected = np.asarray(other.whole), np.asarray(one.whole)
        known = key in runs.bounds.reference
        allowed = allowed.reshape(one.shape)
        found = distance(actual, expected, allowed, runs.bounds.floor(key) if known else 0.0)
        found = runs.with_whole(key, found, actual, expected, allowed) if known else found
        if judged.differs and found.ratio <= 1:
            return judged
        bound = found.bound if found.ratio <= 1 or np.isinf(found.ratio) else found.error / found.ratio
        return replace(judged, off=found.error, allowed=bound, why=found.why)


def _has_counterpart(record: Record, is_dump: bool) -> bool:
    """Return whether a verified program has records of this kind and step; it has inputs in the first step only."""
    if is_dump and record.kind in ("gradient", "input"):
        return False  # a dump has the first module's input, not the model's
    return record.kind != "collective" and (record.kind != "input" or record.step == 0)


def _fingerprints(rank: RankRecords) -> RankRecords:
    """Return a rank's records of the kinds that recordings have, as fingerprints."""
    records = [
        replace(record, value=replace(fingerprint_of(record.value, record.dtype), whole=record.value))
        for record in rank.records
        if record.kind in RECORDED and record.name != "clip factor"
    ]
    calls: dict[str, int] = {}
    for _, name, array in rank.notes.get("inputs", ()):
        call = calls[name] = calls.get(name, -1) + 1
        records.insert(0, Record("input", name, "", 0, call, replace(fingerprint_of(array), whole=array)))
    return replace(rank, records=records)


def _judge(pair: Pair, allowed: Any) -> Judged:
    one, other = pair.one, pair.other
    if one.same(other) and pair.record.kind != "gradient":
        return Judged(pair, 0.0, 0.0, limit=np.inf)
    bounds = tolerance(allowed, one)
    if other.known is not None and np.isfinite(one.norm):
        bounds = bounds + other.rounding * one.norm * np.where(
            np.arange(len(bounds)) == SUM, np.sqrt(max(one.size, 1)), 1
        )
    size = max(one.norm, float(np.finfo(np.float64).tiny)) if np.isfinite(one.norm) else 1.0
    noticed = float(bounds[0]) / size
    if one.same(other):
        return Judged(pair, 0.0, 0.0, noticed, np.inf)
    if one.shape != other.shape or not one.finite_alike(other):
        return Judged(pair, np.inf, 0.0, noticed, np.inf)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        off = np.nan_to_num(np.abs(one.numbers - other.numbers), nan=0.0)
        worst = int(np.argmax(np.where(off > 0, off / np.maximum(bounds, np.finfo(np.float64).tiny), 0.0)))
    return Judged(pair, float(off[worst]) / size, float(bounds[worst]) / size, noticed, np.inf)
