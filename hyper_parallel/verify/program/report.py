"""The report of a program's verification, as text and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hyper_parallel.verify.engine.blind_spots import BlindSpot
from hyper_parallel.verify.engine.causes import CAUSES
from hyper_parallel.verify.engine.power import UNJUDGED, percent
from hyper_parallel.verify.engine.verdict import Verdict
from hyper_parallel.verify.report import Report

__all__ = ["REFUSED", "UNPLACED", "WIDE_BOUNDS", "HardenedCase", "ProgramReport"]

REFUSED = 3
"""Exit status of a program whose values are all equal, but whose case is inconclusive."""

WIDE_BOUNDS = "wide-bounds"
"""Value of --allow that accepts a program if most of its gradients could not be judged."""

UNPLACED = "NOT VERIFIED: declare the values whose placement is unknown (--declare)"
"""Headline if all values are equal except those whose placement is unknown."""


@dataclass(frozen=True)
class HardenedCase:
    """A run of the program with fewer blind spots.

    Attributes:
        words: sentences about the changes.
        verdict: result of the comparison; None if the parallel run failed.
        failure: failure of the parallel run, with every rank's traceback.
        cause: the failure in one line.
        title: prefix of the case's lines in the report: ``hardened``, or the option that requested the case.
        skipped: the reason why the case could not be run; it is then ignored. Empty if it was run.
        asked: whether the user requested the case.
    """

    words: list[str]
    verdict: Verdict | None = None
    failure: str = ""
    cause: str = ""
    title: str = "hardened"
    skipped: str = ""
    asked: bool = False

    @property
    def ok(self) -> bool:
        """Whether everything was compared and equal."""
        return bool(self.skipped) or (self.verdict is not None and self.verdict.equal and not self.verdict.unplaced)

    def failed(self) -> str:
        """Return the failure in one line."""
        return f"FAILED: {self.cause}"

    def lines(self) -> list[str]:
        """Return the changes and results, as lines of the report."""
        lines = [f"{self.title}: {line}" for line in self.words]
        if self.skipped:
            return [*lines, f"{self.title}: not run: {self.skipped}"]
        if self.verdict is None:
            return [*lines, f"{self.title}: {self.failed()}", self.failure]
        headline = self.verdict.headline() if self.ok else self.verdict.text()
        return [*lines, f"{self.title}: {headline}"]

    def json(self) -> dict[str, Any]:
        """Return the case as a JSON object."""
        verdict = None if self.verdict is None else self.verdict.to_json()
        return {
            "ok": self.ok,
            "title": self.title,
            "changes": self.words,
            "skipped": self.skipped,
            "verdict": verdict,
            "failure": self.failure,
        }


_RANKS = {
    "simulated": "{} simulated ranks",
    "threads": "{} simulated ranks in threads",
    "processes": "{} ranks in processes of their own",
    "torchrun": "{} ranks of torchrun",
}


@dataclass
class ProgramReport(Report):
    """The runs of a program, and the verdict.

    Attributes:
        name: name of the program.
        platform: ``torch`` or ``mindspore``.
        launch: ``simulated``, ``processes`` or ``torchrun``.
        world_size: number of ranks.
        seed: seed of the perturbations.
        mesh: sizes of the named axes.
        steps: number of compared optimizer steps.
        verdict: result of the comparison; None if the parallel run failed.
        calls: the ranks' calls that do not match, with their lines in the program.
        failure: failure of the parallel run, with every rank's traceback; empty if the run completed.
        cause: type and message of the error that made the run fail.
        advice: the fix for the failure, if known.
        kind: key of ``CAUSES`` in ``verify/engine/causes.py`` if the failure determines the cause: ``unequal-calls``.
        seconds: duration of the verification.
        hardened: further cases: those of ``--harden``, and of other options such as ``--accumulate``.
        allowed: kinds of blind spots that do not make the result inconclusive.
        rounding: the first value that the single device rounds differently in each run; empty if its runs are equal.
        device: device of the tensors, on the ranks and in the reference.
        pretended: calls by rank 0 of a device for which the CPU stood in, and packages that were replaced by stubs.
        defects: calls on rank 0 that the framework is known to compute wrongly.
        untested: sentences about checks that apply to the program but were not requested.
    """

    has_page: ClassVar[bool] = True

    name: str
    platform: str
    launch: str
    world_size: int
    seed: int
    mesh: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    verdict: Verdict | None = None
    failure: str = ""
    cause: str = ""
    advice: str = ""
    kind: str = ""
    calls: Sequence[str] = ()
    seconds: float = 0.0
    hardened: list[HardenedCase] = field(default_factory=list)
    allowed: Sequence[str] = ()
    rounding: str = ""
    device: str = "cpu"
    pretended: dict[str, Any] = field(default_factory=dict)
    defects: list[str] = field(default_factory=list)
    untested: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether everything was compared and equal, in every case."""
        own = self.verdict is not None and self.verdict.equal and not self.verdict.unplaced and not self.failure
        return own and all(case.ok for case in self.hardened)

    @property
    def refused(self) -> list[BlindSpot]:
        """Blind spots that make the result inconclusive."""
        spots = [] if self.verdict is None else self.verdict.spots
        return [spot for spot in spots if spot.refused and spot.kind not in self.allowed]

    @property
    def inconclusive(self) -> str:
        """Why a program that passes is inconclusive; empty if enough was judged, also in a wider dtype."""
        power = None if self.verdict is None else self.verdict.power
        lacking = next((case for case in self.hardened if case.asked and case.skipped), None)
        if self.equal and lacking is not None:
            if lacking.title != "upcast":
                return f"--{lacking.title} says nothing about this program: {lacking.skipped}"
            return f"it does not run in the wider dtype that --upcast asks for: {lacking.skipped}"
        wider = any(case.title == "upcast" and case.ok and not case.skipped for case in self.hardened)
        if not self.equal or power is None or not power.little or wider or WIDE_BOUNDS in self.allowed:
            return ""
        count = len(power.unjudged)
        verb = "gradient might" if power.count == 1 else "gradients might each"
        return (
            f"{count} of {power.count} {verb} be off by more than {percent(UNJUDGED)} without being noticed: rounding "
            "alone moves them that much in this program; verify it in a wider dtype (--upcast), with fewer steps "
            f"(--steps) or a smaller learning rate, or accept it with --allow {WIDE_BOUNDS}"
        )

    @property
    def ok(self) -> bool:
        """Whether everything was compared and equal, in a conclusive case."""
        return self.equal and not self.refused and not self.inconclusive

    @property
    def status(self) -> int:
        """The exit status, 0 if the program passes, 3 (``REFUSED``) if the result is inconclusive, otherwise 1."""
        if self.ok:
            return 0
        return REFUSED if self.equal else 1

    def heading(self) -> str:
        """Return one line about the run, with program, ranks, device, steps, seed and duration."""
        mesh = ", ".join(f"{name}={size}" for name, size in self.mesh.items())
        axes = f" ({mesh})" if mesh else ""
        ranks = _RANKS[self.launch].format(self.world_size)
        steps = f", {self.steps} optimizer step{'' if self.steps == 1 else 's'}" if self.verdict is not None else ""
        device = f" on {self.device}" if self.device != "cpu" else ""
        run = f"{self.name} on {self.platform}: {ranks}{axes}{device} against a single device"
        return f"{run}{steps}, seed {self.seed}, {self.seconds:.1f} s"

    def failed(self) -> str:
        """Return the failure in one line."""
        return f"FAILED on {self.world_size} ranks: {self.cause}"

    def headline(self) -> str:
        """Return the verdict in one line."""
        if self.failure or self.verdict is None:
            return self.failed()
        wrong = next((case for case in self.hardened if not case.ok), None)
        if self.verdict.equal and self.verdict.unplaced:
            return UNPLACED
        if wrong is not None:
            return f"{wrong.title}: {wrong.failed() if wrong.verdict is None else wrong.verdict.headline()}"
        return "; ".join(self.refusals()) or self.inconclusive or self.verdict.headline()

    def refusals(self) -> list[str]:
        """Return sentences about the blind spots that make the result inconclusive."""
        return [f"this case cannot expose {spot}" for spot in self.refused]

    def text(self) -> str:
        """Return the report as text."""
        lines = [self.heading()]
        if self.rounding:
            lines.append(
                f"the single device rounds differently in each run, first in {self.rounding}; all differences are "
                "within the measured rounding error"
            )
        lines += self._pretended()
        lines += [f"a known defect of {self.platform}: {words}" for words in self.defects]
        if self.verdict is not None:
            lines.append(self.verdict.text())
            if self.verdict.equal and self.verdict.unplaced:
                lines.append(UNPLACED)
        for case in self.hardened:
            lines += case.lines()
        lines += [f"not tested: {line}" for line in self.untested]
        for spot, sentence in zip(self.refused, self.refusals(), strict=True):
            harden = ", or run it with --harden" if spot.kind == "equal-data" and not self.hardened else ""
            lines += [f"INCONCLUSIVE: {sentence}{harden}, or accept it with --allow {spot.kind}"]
        if self.inconclusive:
            lines.append(f"INCONCLUSIVE: {self.inconclusive}")
        if self.failure:
            lines += [self.failed(), *([f"  {self.advice}"] if self.advice else []), *self.calls]
            lines += [f"  cause: {self.kind}: {CAUSES[self.kind]}"] if self.kind else []
            lines.append(self.failure)
        return "\n".join(lines)

    def _pretended(self) -> list[str]:
        """Return the calls of a device for which the CPU stood in."""
        if not self.pretended:
            return []
        counts = ", ".join(f"{what} {count}" for what, count in sorted(self.pretended["counts"].items()))
        lines = [f"the CPU stood in for {self.pretended['device']}: on rank 0, {counts or 'nothing was asked of it'}"]
        stubs = sorted(self.pretended["stubs"].items())
        return lines + [f"the CPU stood in for {package}, which {site} imports: a stub" for package, site in stubs]

    def json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {
            "schema": "program-1",
            "ok": self.ok,
            "headline": self.headline(),
            "program": self.name,
            "platform": self.platform,
            "launch": self.launch,
            "device": self.device,
            "pretended": self.pretended,
            "defects": self.defects,
            "untested": self.untested,
            "world_size": self.world_size,
            "mesh": self.mesh,
            "seed": self.seed,
            "steps": self.steps,
            "rounding": self.rounding,
            "seconds": self.seconds,
            "failure": self.failure,
            "failure_cause": self.kind,
            "hardened": [case.json() for case in self.hardened],
            "refused": [str(spot) for spot in self.refused],
            "inconclusive": self.inconclusive,
            "verdict": None if self.verdict is None else self.verdict.to_json(),
        }
