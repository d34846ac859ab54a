"""The verdict on a program: what was compared, what differs first and why, as text and JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hyper_parallel.verify.program.causes import CAUSES, Cause

__all__ = ["Difference", "Verdict"]

_LISTED = 12


@dataclass(frozen=True)
class Difference:
    """A value that differs from the reference's.

    Attributes:
        kind: of ``KINDS`` in ``verify/program/records.py``.
        name: of the value, as the reference calls it.
        module: path of its module.
        ranks: where it differs.
        step: optimizer steps that were complete before; -1 before training.
        call: number of the value within the step.
        error: largest difference, relative to the value's largest magnitude; infinity if it cannot be measured.
        bound: what was allowed to that element, relative to the same magnitude.
        why: what is wrong, with numbers.
        placement: what the value is on the first of the ranks.
        cause: why it differs, if the numbers show it.
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

    def __str__(self) -> str:
        """Return one line."""
        when = "before training" if self.step < 0 else f"step {self.step + 1}"
        call = f", call {self.call + 1}" if self.call else ""
        ranks = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {', '.join(map(str, self.ranks))}"
        site = f" ({self.site})" if self.site else ""
        return f"{when}{call}, {self.kind} of {self.name or '(model)'}, {ranks}: {self.why}{site}"


@dataclass
class Verdict:
    """The comparison of a parallel run with its reference.

    Attributes:
        world_size: ranks of the parallel run.
        differences: in the order of execution.
        counts: values compared, by kind; one value on three ranks counts three times.
        checked: elements compared.
        unplaced: values whose placement could not be told, each with the line that declares it.
        incomplete: what the program did not do that the reference does: steps, parameters. Such a run is not equal.
        skipped: what only one of the runs has, or cannot be compared, and why.
        replicas: values that should be equal on some ranks and are not, whatever the reference says.
        replica_checks: how many values were compared between ranks that hold the same part.
        notes: how losses were combined, names that were mapped, and the like.
        blind: what the case could not have shown; filled by ``verify/program/case.py``.
        largest: largest error relative to what was allowed; 1 and more differs.
        settings: what was run and how, in words.
    """

    world_size: int
    differences: list[Difference] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    checked: int = 0
    unplaced: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    replicas: list[str] = field(default_factory=list)
    replica_checks: int = 0
    notes: list[str] = field(default_factory=list)
    blind: list[str] = field(default_factory=list)
    largest: float = 0.0
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether values were compared, none differs, and nothing that must be compared was left out."""
        return self.checked > 0 and not self.differences and not self.incomplete and not self.replicas

    @property
    def first(self) -> Difference | None:
        """The first difference in the order of execution."""
        return self.differences[0] if self.differences else None

    def headline(self) -> str:
        """Return the verdict in one line."""
        if self.first is not None:
            return f"DIFFERS first at {self.first}"
        if not self.checked:
            return "NOT VERIFIED: nothing was compared"
        if self.incomplete:
            return f"NOT VERIFIED: {self.incomplete[0]}"
        if self.replicas:
            return f"REPLICAS DIFFER: {self.replicas[0]}"
        counted = ", ".join(f"{count} {_plural(kind, count)}" for kind, count in self.counts.items())
        return (
            f"equal on {self.world_size} ranks: {counted} ({self.checked} elements), "
            f"largest error {self.largest:.2g} of what rounding may do"
        )

    def text(self) -> str:
        """Return the whole report."""
        lines = [self.headline()]
        first = self.first
        if first is not None:
            lines.append(f"  module: {first.module or '(model)'}")
            lines += [f"  on the rank it is: {first.placement}"] if first.placement else []
            if first.cause is not None:
                axis = f" over {first.cause.axis}" if first.cause.axis else ""
                lines += [
                    f"  cause: {first.cause.kind}{axis}: {CAUSES[first.cause.kind]}",
                    f"  evidence: {first.cause.evidence}",
                ]
            rest = self.differences[1:]
            lines += _listed("then differs", [str(difference) for difference in rest])
        lines += _listed("incomplete", self.incomplete)
        lines += _listed("replicas differ", self.replicas)
        lines += _listed("placement cannot be told", self.unplaced)
        lines += _listed("not compared", self.skipped)
        lines += _listed("this case cannot show", self.blind)
        lines += [f"  {note}" for note in self.notes]
        lines += [f"  {name}: {words}" for name, words in self.settings.items()]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {
            "equal": self.equal,
            "headline": self.headline(),
            "world_size": self.world_size,
            "compared": dict(self.counts),
            "elements": self.checked,
            "largest_error_of_allowed": _finite(self.largest),
            "first": None if self.first is None else _plain(self.first),
            "differences": [_plain(difference) for difference in self.differences[:100]],
            "incomplete": self.incomplete,
            "unplaced": self.unplaced,
            "not_compared": self.skipped,
            "replicas": self.replicas,
            "replica_checks": self.replica_checks,
            "notes": self.notes,
            "blind": self.blind,
            "settings": dict(self.settings),
        }


def _listed(title: str, lines: list[str]) -> list[str]:
    shown = [f"  {title}: {line}" for line in lines[:_LISTED]]
    return [*shown, f"  {title}: {len(lines) - _LISTED} more"] if len(lines) > _LISTED else shown


def _plain(difference: Difference) -> dict[str, Any]:
    return {**asdict(difference), "error": _finite(difference.error), "bound": _finite(difference.bound)}


def _finite(number: float) -> float | None:
    """Return None for what JSON cannot write."""
    return number if math.isfinite(number) else None


def _plural(kind: str, count: int) -> str:
    if count == 1:
        return kind
    return {"loss": "losses", "state": "states"}.get(kind, f"{kind}s")
