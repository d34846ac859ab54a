"""The report of a comparison with at least one recording."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hyper_parallel.verify.diff.recorded import Judged
from hyper_parallel.verify.diff.report import DiffReport
from hyper_parallel.verify.engine.causes import Cause
from hyper_parallel.verify.engine.verdict import Difference, Verdict
from hyper_parallel.verify.engine.wording import value_words, when_words
from hyper_parallel.verify.frameworks.contract.fingerprint import LARGEST, LEAST, NORM, SUM

__all__ = [
    "BLIND",
    "BLIND_DUMP",
    "BLIND_LOG",
    "BLIND_TENSORS",
    "RecordedReport",
    "element_words",
    "first_words",
    "verdict_of",
]

BLIND = (
    "fingerprints have the norm, the sum, the extremes, 8 projections and 4 elements of each tensor: they cannot "
    "expose an error that is within the tolerance of all of these, such as wrong values in a few elements of a large "
    "tensor, nor optimizer states and dropout masks, which are not recorded"
)
"""Blind spots of fingerprints, for the report."""

BLIND_DUMP = (
    "a dump of statistics has the norm, the mean and the extremes of each tensor, of integers the extremes: these "
    "cannot expose an error that leaves them as they are, such as elements in another order"
)
"""Blind spots of a dump of statistics, for the report."""

BLIND_TENSORS = "a dump has no optimizer states and no dropout masks: errors in these show in later values alone"
"""Blind spots of a dump if all values were compared by element, for the report."""

BLIND_LOG = (
    "a log of DebugMode has a hash of what each operator got and returned: the sum of magnitudes cannot expose "
    "elements in another order or of another sign; a hash of bits shows that values differ, not by how much; after the "
    "first update, values whose bits differ are not judged"
)
"""Blind spots of a log of DebugMode, for the report."""

_START = {
    "other-weights": "seed both runs alike, or load the same checkpoint in both",
    "other-samples": "seed the data of both runs alike, and give both the same global batch",
}

_UNTRAINED = (
    "no gradient and no updated parameter could be compared; record both runs on as many ranks with the same shards, "
    "or compare each with its program (verify diff FOLDER train.py)"
)


@dataclass
class RecordedReport(DiffReport):
    """The report of a comparison of fingerprints.

    Attributes:
        measured: whether tolerances were measured by repeats of a program.
        grown: description of the first value that was not judged, usually because rounding may explain half of it;
            empty if all values were judged.
        untrained: whether no gradient and no updated parameter was compared, although a recording has some.
        contradicted: description of values that contradict their declared placements; empty if there are none.
        blind: sentences about errors that the recorded numbers cannot expose.
    """

    measured: bool = False
    grown: str = ""
    untrained: bool = False
    contradicted: str = ""
    blind: str = BLIND

    @property
    def inconclusive(self) -> str:
        """Why the result is inconclusive although the recordings are equal; empty if enough was judged."""
        if self.equal and self.contradicted:
            return self.contradicted
        if self.equal and self.grown:
            return self.grown
        if self.equal and self.untrained:
            return _UNTRAINED
        return super().inconclusive

    def conclusion(self) -> str:
        """Return one sentence about the difference of the runs."""
        kind = self.kind_of_difference
        if kind == "none":
            assert self.verdict is not None
            return f"all fingerprints {'that were compared ' if self.verdict.skipped else ''}are equal"
        if kind == "order of sums":
            within = (
                "the rounding error measured in the program" if self.measured else "what rounding before it explains"
            )
            return f"order of sums: {self.first_bits}, and all compared values are within {within}"
        if kind == "another computation":
            assert self.verdict is not None
            first = self.verdict.first
            assert first is not None
            which = "in the program" if self.measured else "before it"
            return (
                f"another computation: the first value that differs is {first.error:.1e} of its size off, and rounding "
                f"{which} explains {first.bound:.1e}; all values before it are equal but for rounding, as far as "
                "fingerprints show"
            )
        return super().conclusion()

    def text(self) -> str:
        """Return the report as text."""
        return f"{super().text()}\n  {self.blind}"

    def json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {**super().json(), "fingerprints": True, "cannot_show": self.blind}


def first_words(judged: Sequence[Judged]) -> str:
    """Return a description of the first value whose fingerprints differ; empty if there is none."""
    for each in judged:
        if not each.pair.one.same(each.pair.other):
            key = each.pair.record.key
            where = f"{when_words(key[0], key[2], key[3])} in {value_words(key[0], key[1])}"
            known = each.off > np.finfo(np.float64).tiny
            return f"fingerprints differ first {where}{f', by {each.off:.1e} of its size' if known else ''}"
    return ""


def element_words(judged: Sequence[Judged]) -> list[str]:
    """Return a line with the number of values compared element by element; an empty list if there are none."""
    count = sum(each.pair.one.both_whole(each.pair.other) for each in judged)
    return (
        [f"{count} of {len(judged)} values were recorded with all elements, and compared by element"] if count else []
    )


def verdict_of(judged: Sequence[Judged], world_size: int, label: str = "A") -> Verdict:
    """Return the verdict on the judged values.

    Args:
        judged: judged values, in the order of execution.
        world_size: number of ranks of the compared run.
        label: label of the run that serves as the reference.
    """
    verdict = Verdict(world_size)
    start = [each for each in judged if each.differs and _start_of(each)]
    counted = start or [each for each in judged if not each.unjudged]
    verdict.checked = sum(max(each.pair.one.size, 1) for each in counted)
    verdict.counts = Counter(each.pair.record.kind for each in counted)
    ratios = [each.off / each.allowed for each in counted if each.allowed and np.isfinite(each.off)]
    verdict.largest = max(ratios, default=0.0)
    verdict.differences = _differences(start or [each for each in judged if each.differs], label)
    if start:
        kind = _start_of(start[0])
        values = "initial weights and buffers" if kind == "other-weights" else "inputs of the first step"
        number = sum(_is_start(each, kind) for each in judged)
        evidence = f"{len(start)} of {number} {values} are not {label}'s; {_START[kind]}"
        verdict.differences[0] = replace(verdict.differences[0], cause=Cause(kind, evidence=evidence))
        verdict.skipped.append("everything after the start: the runs do not start alike, so all of it may differ")
    return verdict


def _start_of(each: Judged) -> str:
    return next((kind for kind in _START if _is_start(each, kind)), "")


def _is_start(each: Judged, kind: str) -> bool:
    record = each.pair.record
    return record.step < 0 if kind == "other-weights" else record.kind == "input" and record.step == 0


def _differences(differing: Sequence[Judged], label: str) -> list[Difference]:
    """Return one difference per value, with all ranks on which it differs."""
    by_key: dict[tuple[str, str, int, int], list[Judged]] = {}
    for each in differing:
        by_key.setdefault(each.pair.record.key, []).append(each)
    return [_difference(found, label) for found in by_key.values()]


def _difference(found: Sequence[Judged], label: str) -> Difference:
    worst = max(found, key=lambda each: each.off)
    record, one, other = worst.pair.record, worst.pair.one, worst.pair.other
    ranks = tuple(sorted({max(each.pair.rank, 0) for each in found}))
    return Difference(
        record.kind, record.name, record.module, ranks, record.step, record.call, worst.off, worst.allowed,
        _why(worst, f"on rank {ranks[0]} " if worst.pair.rank >= 0 else "", one, other, label), site=record.site,
    )  # fmt: skip


def _why(worst: Judged, where: str, one: Any, other: Any, label: str) -> str:
    """Return a description of a difference, with numbers."""
    if worst.why:
        return f"{where}{worst.why.replace('the single device', label)}"
    if one.shape != other.shape:
        return f"{where}of the shape {list(other.shape)}, and {label}'s of {list(one.shape)}"
    if not one.finite_alike(other):
        missing = ["some" if each.not_finite is None else each.not_finite for each in (other, one)]
        return f"{where}{missing[0]} of {one.size} elements are not finite, and {missing[1]} of {label}'s"
    if worst.pair.one.is_exact:
        place, what = (SUM, "sum") if one.both_have(SUM, other) else (LARGEST, "largest")
        numbers = other.numbers[place], one.numbers[place]
        return f"{where}integers differ: their {what} is {numbers[0]:.9g}, and {label}'s {numbers[1]:.9g}"
    norms = f"norm {other.norm:.6g}, {label}'s {one.norm:.6g}"
    if not one.both_have(NORM, other):
        ends = [f"{each.numbers[LEAST]:.6g} to {each.numbers[LARGEST]:.6g}" for each in (other, one)]
        norms = f"numbers from {ends[0]}, {label}'s from {ends[1]}"
    elif one.known is not None and one.both_have(SUM, other):
        norms += f"; sum {other.numbers[SUM]:.6g}, {label}'s {one.numbers[SUM]:.6g}"
    return f"{where}off by {worst.off:.2e} of its size ({norms}); rounding explains {worst.allowed:.1e}"
