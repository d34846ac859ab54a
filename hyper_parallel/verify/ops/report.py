"""What a sweep found: per operator, and over all."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["COLUMNS", "FailedCheck", "OperatorReport", "SweepReport"]

COLUMNS = ("forward", "backward", "uneven", "several axes", "partial")
"""What the coverage matrix tells of an operator on a framework."""

_SHOWN = 5


@dataclass(frozen=True)
class FailedCheck:
    """One check that did not hold.

    Attributes:
        where: ``rule`` for plain per-rank tensors, ``public`` for DTensors in the simulated cluster.
        sample: number of the sample, and its arguments.
        sizes: of the sample's letters.
        mesh: shape.
        places: placements of the operands.
        problem: what differs, or the error.
        reproducer: a program that shows it.
    """

    where: str
    sample: str
    sizes: dict[str, int]
    mesh: tuple[int, ...]
    places: str
    problem: str
    reproducer: str = ""

    def __str__(self) -> str:
        """One paragraph."""
        mesh = "x".join(map(str, self.mesh))
        text = f"{self.sample} {self.sizes or ''} on {mesh} ({self.where}), {self.places}: {self.problem}"
        if self.where == "process":
            text = self.problem
        return text if not self.reproducer else f"{text}\n{_indented(self.reproducer)}"


@dataclass
class OperatorReport:
    """One operator on one framework.

    Attributes:
        op: canonical name, or the name of a user's function.
        platform: the framework.
        checks: checks that were executed and compared: one operator, one sample with one choice of sizes, one tuple
            of placements, one mesh.
        backward: how many of them compared gradients.
        public: how many of them ran on DTensors.
        rows: rows that ran on DTensors, counted once per mesh.
        unshown: rows that no sample could show there, by mesh.
        by_mesh: checks per mesh.
        features: checks per property: uneven, empty, several axes, Partial.
        offers: columns of the coverage matrix that placements of this operator can have.
        ok: checks that held.
        rejected: refusals by message.
        wrong: checks whose values differ.
        crash: checks that raised what is no clear error, or killed the process.
        unexercised: claimed rows that no check reached, or why nothing was checked.
        missing: placements that would be true and are not claimed.
        skipped: samples that say nothing, by reason.
        absent: the framework has no implementation of the operator.
        exempt: why it can have no samples.
        seconds: spent.
    """

    op: str
    platform: str
    checks: int = 0
    backward: int = 0
    public: int = 0
    rows: int = 0
    unshown: list[str] = field(default_factory=list)
    by_mesh: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    offers: set[str] = field(default_factory=set)
    ok: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    wrong: list[FailedCheck] = field(default_factory=list)
    crash: list[FailedCheck] = field(default_factory=list)
    unexercised: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    absent: bool = False
    exempt: str = ""
    seconds: float = 0.0

    @property
    def outcome(self) -> str:
        """``wrong``, ``crash``, ``unexercised``, ``absent``, ``exempt`` or ``ok``: the worst that happened."""
        if self.wrong:
            return "wrong"
        if self.crash:
            return "crash"
        if self.absent and not self.checks:
            return "absent"
        if self.exempt:
            return "exempt"
        return "ok" if self.checks or self.public else "unexercised"

    @property
    def holds(self) -> bool:
        """True when something was checked and nothing was wrong."""
        return self.outcome in {"ok", "absent", "exempt"}

    def merge(self, other: OperatorReport) -> None:
        """Add what another process found for the same operator."""
        for name in ("checks", "backward", "public", "rows", "ok", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("by_mesh", "features", "rejected", "skipped"):
            getattr(self, name).update(getattr(other, name))
        for name in ("wrong", "crash", "unexercised", "unshown", "missing"):
            getattr(self, name).extend(one for one in getattr(other, name) if one not in getattr(self, name))
        self.offers |= other.offers
        self.absent = self.absent or other.absent
        self.exempt = self.exempt or other.exempt

    def coverage(self) -> dict[str, dict[str, Any]]:
        """Per column of the matrix how many checks there were, and what none means.

        ``checked``; ``not applicable``: no placement that could be checked has the property; ``not exercised``: some
        have, and none was checked.
        """
        counts = {"forward": self.checks, "backward": self.backward, **self.features}
        return {name: {"checked": counts.get(name, 0), "state": self._state(name, counts)} for name in COLUMNS}

    def _state(self, column: str, counts: dict[str, int]) -> str:
        if counts.get(column):
            return "checked"
        applies = column in self.offers and self.outcome not in {"absent", "exempt"}
        return "not exercised" if applies else "not applicable"

    def text(self) -> str:
        """What a person must see of it."""
        lines = [
            f"{self.outcome:<12}{self.op} on {self.platform}: {self.checks} checks, {self.backward} with gradients"
        ]
        for kind in ("wrong", "crash"):
            found = getattr(self, kind)
            lines.extend(_indented(str(one)) for one in found[:_SHOWN])
            if len(found) > _SHOWN:
                lines.append(f"    … {len(found) - _SHOWN} more")
        if self.outcome == "unexercised":
            lines.append(_indented("nothing checked: " + ("; ".join(self.unexercised) or _why(self))))
        return "\n".join(lines)

    def json(self) -> dict[str, Any]:
        """Everything, for programs."""
        plain = {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}
        findings = {name: [asdict(one) for one in plain[name]] for name in ("wrong", "crash")}
        derived = {"outcome": self.outcome, "coverage": self.coverage(), "offers": sorted(self.offers)}
        return {**plain, **findings, **derived, "seconds": round(self.seconds, 3)}

    @classmethod
    def lost(cls, op: str, platform: str, died: str) -> OperatorReport:
        """The operator whose process died."""
        return cls(op, platform, crash=[FailedCheck("process", "", {}, (), "", died)])

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> OperatorReport:
        """What :meth:`json` wrote."""
        data = {name: value for name, value in data.items() if name not in {"outcome", "coverage"}}
        data["offers"] = set(data["offers"])
        for name in ("by_mesh", "features", "rejected", "skipped"):
            data[name] = Counter(data[name])
        for name in ("wrong", "crash"):
            data[name] = [FailedCheck(**{**one, "mesh": tuple(one["mesh"])}) for one in data[name]]
        return cls(**data)


@dataclass
class SweepReport:
    """All operators of one sweep.

    Attributes:
        operators: what was found, in the order in which it was found.
        planned: how many operators were to be checked, counted per framework.
        mode: ``quick`` or ``full``.
        interrupted: what cut the sweep short, or empty.
        seconds: of wall time.
    """

    operators: list[OperatorReport] = field(default_factory=list)
    planned: int = 0
    mode: str = "full"
    interrupted: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """True when every operator was checked, something was, and nothing was wrong."""
        return (
            bool(self.operators)
            and not self.interrupted
            and len(self.operators) == self.planned
            and any(one.checks for one in self.operators)
            and all(one.holds for one in self.operators)
        )

    def outcomes(self) -> Counter[str]:
        """Operators by outcome."""
        return Counter(one.outcome for one in self.operators)

    def text(self) -> str:
        """The summary, after what must be seen of single operators."""
        lines = [self._platform_line(name) for name in dict.fromkeys(one.platform for one in self.operators)]
        missing = sum(len(one.missing) for one in self.operators)
        idle = sum(len(one.unexercised) for one in self.operators if one.checks)
        lines.append(f"{missing} rows are true and not claimed, {idle} claimed rows met no sample (--json lists them)")
        rows, unshown = sum(one.rows for one in self.operators), sum(len(one.unshown) for one in self.operators)
        lines.append(f"{rows} rows ran on DTensors, counted once per mesh; {unshown} claimed ones did not")
        if self.interrupted:
            finished = f"{len(self.operators)} of {self.planned}" if self.planned else f"{len(self.operators)}"
            lines.append(f"partial report: {finished} operators finished; {self.interrupted}")
        lines.extend(f"FAILED {one.op} on {one.platform}: {one.outcome}" for one in self.operators if not one.holds)
        return "\n".join(lines)

    def full_text(self) -> str:
        """What is wrong with single operators, and the summary."""
        return "\n\n".join([*(one.text() for one in self.operators if not one.holds), self.text()])

    def _platform_line(self, platform: str) -> str:
        mine = [one for one in self.operators if one.platform == platform]
        counts = Counter(one.outcome for one in mine)
        checks, backward = sum(one.checks for one in mine), sum(one.backward for one in mine)
        public, refused = sum(one.public for one in mine), sum(sum(one.rejected.values()) for one in mine)
        outcomes = ", ".join(f"{count} {name}" for name, count in counts.most_common())
        return (
            f"{platform}: {len(mine)} operators ({outcomes}); {checks} checks, {backward} with gradients, "
            f"{public} of them on DTensors; {refused} placements refused; "
            f"{sum(one.seconds for one in mine):.0f} s of work"
        )

    def json(self) -> dict[str, Any]:
        """Everything, for programs."""
        return {
            "ok": self.ok,
            "mode": self.mode,
            "columns": list(COLUMNS),
            "planned": self.planned,
            "finished": len(self.operators),
            "outcomes": dict(self.outcomes()),
            "checks": sum(one.checks for one in self.operators),
            "backward": sum(one.backward for one in self.operators),
            "seconds": round(self.seconds, 3),
            **({"interrupted": self.interrupted} if self.interrupted else {}),
            "operators": [one.json() for one in self.operators],
        }


def _why(report: OperatorReport) -> str:
    reasons = [*report.skipped, *report.rejected]
    return "; ".join(reasons[:_SHOWN]) or "it has no samples"


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())
