"""The report of two compared runs, as text and JSON."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.verify.engine.causes import CAUSES
from hyper_parallel.verify.engine.power import UNJUDGED, percent
from hyper_parallel.verify.engine.verdict import Verdict
from hyper_parallel.verify.program.report import REFUSED
from hyper_parallel.verify.report import Report

__all__ = ["DiffReport"]

_START = ("other-weights", "other-samples")
_WORDS = (
    ("the single device's", "A's"), ("the single device", "A"), ("a single device", "A"), ("single device", "A"),
    ("the reference's", "A's"), ("the reference", "A"),
)  # fmt: skip
"""Phrases for the reference in the comparison's texts, each with its replacement by A."""


@dataclass
class DiffReport(Report):
    """The two runs, and the verdict.

    Attributes:
        names: descriptions of both runs: program, arguments, ranks.
        platforms: platforms of both runs.
        seed: seed of the perturbations.
        verdict: result of the comparison; None if a run failed.
        first_bits: description of the first value whose bits differ; empty if all are bitwise equal.
        own: notes on A: that A's ranks differ from A on one rank, and which values were not compared because the ranks'
            shards do not make up the complete tensor.
        failure: failure of a run, with every rank's traceback; empty if both runs completed.
        failed_run: the run that failed, ``A`` or ``B``.
        cause: the failure in one line.
        kind: key of ``CAUSES`` in ``verify/engine/causes.py`` if the failure determines the cause.
        uncompiled: the runs, ``A`` or ``B``, whose programs use the compiler, but ran uncompiled while they were
            recorded.
        steps: number of compared optimizer steps.
        rounding: the first value that A rounds differently in each run; empty if there is none.
        seconds: duration of the comparison.
    """

    names: tuple[str, str]
    platforms: tuple[str, str]
    seed: int
    verdict: Verdict | None = None
    first_bits: str = ""
    own: list[str] = field(default_factory=list)
    failure: str = ""
    failed_run: str = ""
    cause: str = ""
    kind: str = ""
    uncompiled: list[str] = field(default_factory=list)
    steps: int = 0
    rounding: str = ""
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether everything was compared, and the runs differ at most by the rounding of sums in a different order."""
        return self.verdict is not None and self.verdict.equal and not self.verdict.unplaced and not self.failure

    @property
    def inconclusive(self) -> str:
        """Why the result is inconclusive although the runs are equal; empty if enough was judged."""
        power = None if self.verdict is None else self.verdict.power
        if self.equal and self.uncompiled:
            return (
                f"{' and '.join(self.uncompiled)} asked for compiled functions, and recorded modules run uncompiled: "
                "nothing was found out about the compiler"
            )
        if not self.equal or power is None or not power.little:
            return ""
        return (
            f"{len(power.unjudged)} of {power.count} gradients might each be off by more than {percent(UNJUDGED)} "
            "without being noticed: rounding alone moves them that much in A; compare fewer steps (--steps), or runs "
            "in a wider dtype"
        )

    @property
    def ok(self) -> bool:
        """Whether everything was compared and equal, and enough was judged."""
        return self.equal and not self.inconclusive

    @property
    def status(self) -> int:
        """The exit status, 0 if the runs are equal, 3 if too few values could be judged, otherwise 1."""
        return 0 if self.ok else REFUSED if self.equal else 1

    @property
    def kind_of_difference(self) -> str:
        """``none``, ``order of sums``, ``another start``, ``another computation`` or ``failed``."""
        if self.verdict is None:
            return "failed"
        first = self.verdict.first
        if first is None:
            return "order of sums" if self.first_bits else "none"
        started = first.cause is not None and first.cause.kind in _START
        return "another start" if started else "another computation"

    def conclusion(self) -> str:
        """Return one sentence about the difference of the runs."""
        if self.kind_of_difference == "none":
            return "all bits are equal"
        if self.kind_of_difference == "order of sums":
            return (
                f"order of sums: {self.first_bits}, and all compared values are within the rounding error measured in A"
            )
        if self.kind_of_difference == "another start":
            return "another start: the runs begin with different weights or samples, so later differences mean nothing"
        assert self.verdict is not None
        first = self.verdict.first
        assert first is not None
        if not math.isfinite(first.error) or not first.bound:
            return "another computation: no rounding explains the first difference"
        times = first.error / first.bound
        return (
            f"another computation: the first value that differs is {times:.2g} times as far off as rounding in A may "
            "make it; all values before it are equal but for rounding"
        )

    def text(self) -> str:
        """Return the report as text."""
        steps = f"{self.steps} optimizer step{'' if self.steps == 1 else 's'}, " if self.verdict is not None else ""
        lines = [f"A: {self.names[0]}", f"B: {self.names[1]}", f"{steps}seed {self.seed}, {self.seconds:.1f} s"]
        if self.rounding:
            lines.append(f"A rounds differently in each run, first in {self.rounding}")
        if self.verdict is not None:
            lines += [_of_a(self.verdict.text()), f"  {self.conclusion()}"]
            lines += [f"  {line}" for line in self.own]
        if self.inconclusive:
            lines.append(f"INCONCLUSIVE: {self.inconclusive}")
        if self.failure:
            lines.append(f"FAILED in {self.failed_run}: {self.cause}")
            lines += [f"  cause: {self.kind}: {CAUSES[self.kind]}"] if self.kind else []
            lines.append(self.failure)
        return "\n".join(lines)

    def json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        verdict = None if self.verdict is None else json.loads(_of_a(json.dumps(self.verdict.to_json())))
        failed = f"FAILED in {self.failed_run}: {self.cause}" if self.failure else ""
        headline = "" if self.verdict is None else f"{_of_a(self.verdict.headline())}: {self.conclusion()}"
        return {
            "schema": "diff-1",
            "ok": self.ok,
            "headline": failed or self.inconclusive or headline,
            "a": self.names[0],
            "b": self.names[1],
            "platforms": list(self.platforms),
            "seed": self.seed,
            "steps": self.steps,
            "difference": self.kind_of_difference,
            "first_bits": self.first_bits,
            "notes_on_a": self.own,
            "rounding": self.rounding,
            "seconds": self.seconds,
            "failure": self.failure,
            "failed_run": self.failed_run,
            "failure_cause": self.kind,
            "uncompiled": self.uncompiled,
            "inconclusive": self.inconclusive,
            "verdict": verdict,
        }


def _of_a(text: str) -> str:
    """Return a text of the comparison in which the reference is called A."""
    for words, name in _WORDS:
        text = text.replace(words, name)
    return text
