"""The verdict on a program: the compared values, the first difference and its cause, as text and JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hyper_parallel.verify.engine.blind_spots import BlindSpot
from hyper_parallel.verify.engine.causes import Cause
from hyper_parallel.verify.engine.checks import TensorCheck
from hyper_parallel.verify.engine.power import Power, percent
from hyper_parallel.verify.engine.wording import count_words, ranks_words, summary, value_words, when_words

__all__ = ["Difference", "UnequalReplicas", "Verdict", "finite"]

_FOLLOWING = 4
"""Number of differences after the first that have a line of their own."""

_LISTED = 12
"""Number of lines per title."""

_IN_FIRST_LINE = ("world size", "launch")
"""Settings that are in the first line of a program's report."""


@dataclass(frozen=True)
class Difference:
    """A value that differs from the reference's.

    Attributes:
        kind: one of ``KINDS`` in ``verify/frameworks/contract/records.py``.
        name: name of the value in the reference.
        module: path of its module.
        ranks: the ranks where it differs.
        step: number of optimizer steps completed before the value; -1 before training.
        call: number of earlier values of this kind and name in the step.
        error: largest difference, relative to the value's largest magnitude; infinity if it cannot be measured.
        bound: tolerance of the element with that error, relative to the same magnitude.
        why: description of the error, with numbers.
        placement: shard of the reference's value on the rank with the largest error.
        cause: cause of the difference, if the numbers determine it.
        site: ``file:line`` of the user's call; empty if none is known.
    """

    kind: str
    name: str
    module: str
    ranks: tuple[int, ...]
    step: int
    call: int
    error: float
    bound: float
    why: str
    placement: str = ""
    cause: Cause | None = None
    site: str = ""

    @property
    def heading(self) -> str:
        """The step, the value and its ranks, as in ``in step 1: the gradient of head.weight on ranks 0, 1``."""
        when = when_words(self.kind, self.step, self.call)
        return f"{when}: {value_words(self.kind, self.name)} on {ranks_words(self.ranks)}"

    def __str__(self) -> str:
        """Return one line."""
        return f"{self.heading}: {self.why}"

    def short(self) -> str:
        """Return one line without numbers except the error."""
        return f"{self.heading} (relative error {self.error:.1e})" if math.isfinite(self.error) else str(self)


@dataclass(frozen=True)
class UnequalReplicas:
    """A replicated value that is not equal on all ranks.

    Attributes:
        kind: one of ``KINDS`` in ``verify/frameworks/contract/records.py``.
        name: name of the value in the reference.
        step: number of optimizer steps completed before; -1 before training.
        ranks: the first rank with the value, and the ranks whose values differ from that rank's.
        placement: shard of the reference's value on these ranks.
    """

    kind: str
    name: str
    step: int
    ranks: tuple[int, ...]
    placement: str


@dataclass
class Verdict:
    """The comparison of a parallel run with its reference.

    Attributes:
        world_size: ranks of the parallel run.
        differences: the differences, in the order of execution.
        counts: values compared, by kind; one value on three ranks counts three times.
        checked: elements compared.
        unplaced: values whose placement could not be determined, each with a declaration to add.
        incomplete: steps and parameters of the reference that the parallel run lacks; such a run does not count as
            equal.
        skipped: values that only one of the runs has or that cannot be compared, and why.
        replicas: replicated values that are not equal on all ranks.
        replica_checks: number of values that were compared between ranks with the same shard.
        notes: how losses were combined, names that were mapped, and the like.
        spots: blind spots of the case; filled by ``verify/engine/blind_spots.py``.
        largest: largest error divided by its tolerance; values above 1 differ.
        settings: description of the runs.
        power: errors of gradients that would have been detected.
        checks: every compared tensor of every rank, differences first; empty unless requested.
    """

    world_size: int
    differences: list[Difference] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    checked: int = 0
    unplaced: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    replicas: list[UnequalReplicas] = field(default_factory=list)
    replica_checks: int = 0
    notes: list[str] = field(default_factory=list)
    spots: list[BlindSpot] = field(default_factory=list)
    largest: float = 0.0
    settings: Mapping[str, str] = field(default_factory=dict)
    power: Power = field(default_factory=Power)
    checks: list[TensorCheck] = field(default_factory=list, repr=False)

    @property
    def equal(self) -> bool:
        """Whether values were compared, none differs, and nothing required was left out."""
        return self.checked > 0 and not self.differences and not self.incomplete

    @property
    def blind(self) -> list[str]:
        """The blind spots of the case, in words."""
        return [str(spot) for spot in self.spots]

    @property
    def first(self) -> Difference | None:
        """The first difference in the order of execution."""
        return self.differences[0] if self.differences else None

    def headline(self) -> str:
        """Return the verdict in one line."""
        if self.first is not None:
            return f"DIFFERS first {self.first.heading}"
        if not self.checked:
            return "NOT VERIFIED: nothing was compared"
        if self.incomplete:
            return f"NOT VERIFIED: {self.incomplete[0]}"
        counted = ", ".join(count_words(kind, count) for kind, count in self.counts.items() if count)
        return (
            f"equal on {count_words('rank', self.world_size)}: {counted} ({self.checked} elements); "
            f"max error: {self.largest:.1%} of the rounding tolerance"
        )

    def text(self) -> str:
        """Return the complete report."""
        lines = [self.headline()]
        if self.first is not None:
            lines += [*_first_lines(self.first), *_following_lines(self.differences[1:])]
        if self.equal and self.power.weakest:
            lines.append(f"  power: {self.power.words()}")
            unjudged = self.power.unjudged
            lines += _listed(
                "could not be judged",
                [
                    f"the gradient of {name}: off by {percent(error)}, it might have passed"
                    for name, error in unjudged.items()
                ],
            )
        lines += _listed("incomplete", self.incomplete)
        lines += _replica_lines(self.replicas)
        lines += _listed("placement unknown", self.unplaced)
        lines += _listed("not compared", self.skipped)
        lines += _listed("blind spot", [str(spot) for spot in self.spots if not spot.refused])
        lines += [f"  {note}" for note in self.notes]
        lines += [f"  {name}: {words}" for name, words in self.settings.items() if name not in _IN_FIRST_LINE]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {
            "equal": self.equal,
            "headline": self.headline(),
            "world_size": self.world_size,
            "compared": dict(self.counts),
            "elements": self.checked,
            "largest_error_of_allowed": finite(self.largest),
            "power": {
                "median": finite(self.power.median),
                "weakest": self.power.weakest,
                "largest": finite(self.power.largest),
                "weak": {name: finite(error) for name, error in self.power.weak.items()},
                "unjudged": list(self.power.unjudged),
            },
            "first": None if self.first is None else _plain(self.first),
            "differences": [_plain(difference) for difference in self.differences[:100]],
            "incomplete": self.incomplete,
            "unplaced": self.unplaced,
            "not_compared": self.skipped,
            "replicas": [asdict(replicas) for replicas in self.replicas[:100]],
            "replica_checks": self.replica_checks,
            "notes": self.notes,
            "blind": self.blind,
            "settings": dict(self.settings),
        }


def _first_lines(first: Difference) -> list[str]:
    """Return the lines about the first difference: numbers, placement, cause, and line of the program."""
    lines = [f"  numbers: {first.why}"]
    if first.module and not first.name.startswith(first.module):
        lines.append(f"  module: {first.module}")
    lines += [f"  placement: {first.placement}"] if first.placement else []
    if first.cause is not None:
        lines += [f"  cause: {first.cause}", f"  evidence: {first.cause.evidence}"]
    return [*lines, f"  called at: {first.site}"] if first.site else lines


def _following_lines(differences: list[Difference]) -> list[str]:
    """Return the lines about the differences after the first: some in detail, the others in one line."""
    lines = [f"  then differs {difference.short()}" for difference in differences[:_FOLLOWING]]
    others = differences[_FOLLOWING:]
    if others:
        names = summary([(difference.kind, difference.name) for difference in others])
        steps = _steps_words({difference.step for difference in others})
        lines.append(f"  and {len(others)} more values {steps}: {names}")
    return lines


def _replica_lines(replicas: list[UnequalReplicas]) -> list[str]:
    """Return one line about the replicas that differ from each other."""
    if not replicas:
        return []
    names = summary([(value.kind, value.name) for value in replicas])
    ranks = ranks_words({rank for value in replicas for rank in value.ranks})
    return [f"  replicas differ on {ranks} {_steps_words({value.step for value in replicas})}: {names}"]


def _steps_words(steps: set[int]) -> str:
    first, last = min(steps), max(steps)
    if first == last:
        return "before training" if first < 0 else f"in step {first + 1}"
    return f"up to step {last + 1}" if first < 0 else f"in steps {first + 1} to {last + 1}"


def _listed(title: str, lines: list[str]) -> list[str]:
    shown = [f"  {title}: {line}" for line in lines[:_LISTED]]
    return [*shown, f"  {title}: {len(lines) - _LISTED} more"] if len(lines) > _LISTED else shown


def _plain(difference: Difference) -> dict[str, Any]:
    return {**asdict(difference), "error": finite(difference.error), "bound": finite(difference.bound)}


def finite(number: float) -> float | None:
    """Return None for numbers that JSON cannot represent."""
    return number if math.isfinite(number) else None
