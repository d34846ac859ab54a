"""Reports of a sweep (a check of many operators): one report per operator, and a summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from hyper_parallel.verify.report import Report

__all__ = ["COLUMNS", "FailedCheck", "OperatorReport", "SweepReport"]

COLUMNS = ("forward", "backward", "uneven", "several axes", "partial")
"""Columns of the coverage matrix, whose rows are operators."""

_SHOWN = 5


@dataclass(frozen=True)
class FailedCheck:
    """One failed check.

    Attributes:
        where: ``rule`` for local calls on plain tensors, ``public`` for DTensors on simulated ranks.
        sample: number of the sample, and its arguments.
        sizes: sizes of the letters in the sample's shapes.
        mesh: shape of the mesh.
        places: placements of the operands.
        problem: the difference, or the error.
        reproducer: a program that reproduces the failure.
    """

    where: str
    sample: str
    sizes: dict[str, int]
    mesh: tuple[int, ...]
    places: str
    problem: str
    reproducer: str = ""

    def __str__(self) -> str:
        """Return one paragraph."""
        mesh = "x".join(map(str, self.mesh))
        text = f"{self.sample} {self.sizes or ''} on {mesh} ({self.where}), {self.places}: {self.problem}"
        if self.where == "process":
            text = self.problem
        return text if not self.reproducer else f"{text}\n{_indented(self.reproducer)}"


@dataclass
class OperatorReport:
    """The checks of one operator on one framework.

    Attributes:
        op: canonical name, or the name of a user's function.
        platform: the framework.
        checks: number of checks that were executed and compared. One check has one sample with one choice of sizes, one
            tuple of placements and one mesh.
        backward: number of checks that compared gradients.
        public: number of checks that ran on DTensors.
        rows: number of rows that ran on DTensors, counted once per mesh.
        unshown: rows that did not run on DTensors because no sample meets their conditions, with the mesh.
        rule: signature and module of the rule; empty for a user's operator.
        by_mesh: number of checks per mesh.
        by_sample: number of checks per sample.
        by_placement: number of checks on meshes of one axis, per placements of inputs and outputs.
        features: number of checks per property: uneven shards, empty shards, several axes, Partial.
        offers: columns of the coverage matrix that checks of this operator can cover.
        ok: number of checks that passed.
        rejected: number of refusals by message.
        wrong: checks with wrong values.
        crash: checks that raised an error other than a refusal, or killed the process.
        unexercised: claimed rows that no check reached, or the reason why nothing was checked.
        missing: valid placements that are not claimed.
        skipped: number of samples that were not checked, by reason.
        absent: whether the framework has no implementation of the operator.
        exempt: the reason why the operator cannot have samples.
        seconds: time spent.
    """

    op: str
    platform: str
    checks: int = 0
    backward: int = 0
    public: int = 0
    rows: int = 0
    unshown: list[str] = field(default_factory=list)
    rule: str = ""
    by_mesh: Counter[str] = field(default_factory=Counter)
    by_sample: Counter[str] = field(default_factory=Counter)
    by_placement: Counter[str] = field(default_factory=Counter)
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
        """``wrong``, ``crash``, ``unexercised``, ``absent``, ``exempt`` or ``ok``: the most severe outcome."""
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
        """Whether something was checked and nothing failed."""
        return self.outcome in {"ok", "absent", "exempt"}

    def merge(self, other: OperatorReport) -> None:
        """Add the results of another report on the same operator, from a different process."""
        for name in ("checks", "backward", "public", "rows", "ok", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("by_mesh", "by_sample", "by_placement", "features", "rejected", "skipped"):
            getattr(self, name).update(getattr(other, name))
        for name in ("wrong", "crash", "unexercised", "unshown", "missing"):
            getattr(self, name).extend(item for item in getattr(other, name) if item not in getattr(self, name))
        self.rule = self.rule or other.rule
        self.offers |= other.offers
        self.absent = self.absent or other.absent
        self.exempt = self.exempt or other.exempt

    def coverage(self) -> dict[str, dict[str, Any]]:
        """Return the number of checks and the state of every column of the matrix.

        States: ``checked``; ``not applicable``: no possible placement has the property; ``not exercised``: some
        placements have it, but none was checked.
        """
        counts = {"forward": self.checks, "backward": self.backward, **self.features}
        return {name: {"checked": counts.get(name, 0), "state": self._state(name, counts)} for name in COLUMNS}

    def _state(self, column: str, counts: dict[str, int]) -> str:
        if counts.get(column):
            return "checked"
        applies = column in self.offers and self.outcome not in {"absent", "exempt"}
        return "not exercised" if applies else "not applicable"

    def text(self) -> str:
        """Return the report for a terminal."""
        lines = [
            f"{self.outcome:<12}{self.op} on {self.platform}: {self.checks} checks, {self.backward} with gradients"
        ]
        for kind in ("wrong", "crash"):
            failures = getattr(self, kind)
            lines.extend(_indented(str(failed)) for failed in failures[:_SHOWN])
            if len(failures) > _SHOWN:
                lines.append(f"    … {len(failures) - _SHOWN} more")
        if self.outcome == "unexercised":
            lines.append(_indented("nothing checked: " + ("; ".join(self.unexercised) or _why(self))))
        return "\n".join(lines)

    def json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        plain = {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}
        failures = {name: [asdict(failed) for failed in plain[name]] for name in ("wrong", "crash")}
        derived = {"outcome": self.outcome, "coverage": self.coverage(), "offers": sorted(self.offers)}
        return {**plain, **failures, **derived, "seconds": round(self.seconds, 3)}

    @classmethod
    def lost(cls, op: str, platform: str, died: str) -> OperatorReport:
        """Return the report of an operator whose process died."""
        return cls(op, platform, crash=[FailedCheck("process", "", {}, (), "", died)])

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> OperatorReport:
        """Rebuild the report from the object that :meth:`json` returned."""
        data = {name: value for name, value in data.items() if name not in {"outcome", "coverage"}}
        data["offers"] = set(data["offers"])
        for name in ("by_mesh", "by_sample", "by_placement", "features", "rejected", "skipped"):
            data[name] = Counter(data[name])
        for name in ("wrong", "crash"):
            data[name] = [FailedCheck(**{**failed, "mesh": tuple(failed["mesh"])}) for failed in data[name]]
        return cls(**data)


@dataclass
class SweepReport(Report):
    """Report of all operators of one sweep.

    Attributes:
        operators: reports in order of completion.
        planned: number of operators to check, counted per framework.
        mode: ``quick`` or ``full``.
        interrupted: the reason why the sweep ended early, or empty.
        seconds: wall time.
        device: device that references and ranks computed on.
    """

    has_page: ClassVar[bool] = True

    operators: list[OperatorReport] = field(default_factory=list)
    planned: int = 0
    mode: str = "full"
    interrupted: str = ""
    seconds: float = 0.0
    device: str = "cpu"

    @property
    def ok(self) -> bool:
        """Whether every planned operator was checked, at least one, and nothing failed."""
        return (
            bool(self.operators)
            and not self.interrupted
            and len(self.operators) == self.planned
            and any(report.checks for report in self.operators)
            and all(report.holds for report in self.operators)
        )

    def outcomes(self) -> Counter[str]:
        """Operators by outcome."""
        return Counter(report.outcome for report in self.operators)

    def text(self) -> str:
        """Return the summary."""
        lines = [self._platform_line(name) for name in dict.fromkeys(report.platform for report in self.operators)]
        missing = sum(len(report.missing) for report in self.operators)
        idle = sum(len(report.unexercised) for report in self.operators if report.checks)
        lines.append(
            f"{missing} rows (placements of inputs and outputs) hold and no rule claims them, {idle} claimed ones met "
            "no sample (--json lists them)"
        )
        rows, unshown = (
            sum(report.rows for report in self.operators),
            sum(len(report.unshown) for report in self.operators),
        )
        lines.append(f"{rows} claimed rows ran on DTensors, counted once per mesh; {unshown} did not")
        lines += self._gap_lines()
        if self.interrupted:
            finished = f"{len(self.operators)} of {self.planned}" if self.planned else f"{len(self.operators)}"
            lines.append(f"partial report: {finished} operators finished; {self.interrupted}")
        lines.extend(
            f"FAILED {report.op} on {report.platform}: {report.outcome}"
            for report in self.operators
            if not report.holds
        )
        return "\n".join(lines)

    def _gap_lines(self) -> list[str]:
        """Return a line per column of the coverage matrix with the operators that can cover it but did not."""
        several = len({report.platform for report in self.operators}) > 1
        gaps: dict[str, list[str]] = {column: [] for column in COLUMNS}
        for report in self.operators:
            name = f"{report.op} on {report.platform}" if several else report.op
            for column, cell in report.coverage().items():
                if cell["state"] == "not exercised":
                    gaps[column].append(name)
        total = len({name for names in gaps.values() for name in names})
        if not total:
            return []
        more = "; the full sweep checks more" if self.mode == "quick" else ""
        lines = [f"  {column} {len(names)}: {_first_names(names)}" for column, names in gaps.items() if names]
        return [f"{total} operators lack a check (--json and --html name all{more}):", *lines]

    def full_text(self) -> str:
        """Return the failures of single operators, and the summary."""
        return "\n\n".join([*(report.text() for report in self.operators if not report.holds), self.text()])

    def _platform_line(self, platform: str) -> str:
        reports = [report for report in self.operators if report.platform == platform]
        counts = Counter(report.outcome for report in reports)
        checks, backward = sum(report.checks for report in reports), sum(report.backward for report in reports)
        public, refused = (
            sum(report.public for report in reports),
            sum(sum(report.rejected.values()) for report in reports),
        )
        place = "" if self.device == "cpu" else f" on {self.device}"
        outcomes = ", ".join(f"{count} {name}" for name, count in counts.most_common())
        return (
            f"{platform}{place}: {len(reports)} operators ({outcomes}); {checks} checks, {backward} with gradients, "
            f"{public} of them on DTensors; {refused} placements refused; "
            f"{sum(report.seconds for report in reports):.0f} s of work"
        )

    def json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {
            "ok": self.ok,
            "mode": self.mode,
            "device": self.device,
            "columns": list(COLUMNS),
            "planned": self.planned,
            "finished": len(self.operators),
            "outcomes": dict(self.outcomes()),
            "checks": sum(report.checks for report in self.operators),
            "backward": sum(report.backward for report in self.operators),
            "seconds": round(self.seconds, 3),
            **({"interrupted": self.interrupted} if self.interrupted else {}),
            "operators": [report.json() for report in self.operators],
        }


def _why(report: OperatorReport) -> str:
    reasons = [*report.skipped, *report.rejected]
    return "; ".join(reasons[:_SHOWN]) or "it has no samples"


def _first_names(names: Sequence[str]) -> str:
    """Return the first names, and the number of the remaining ones."""
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())
