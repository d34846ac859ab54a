"""Counts of a run by outcome, its findings, and both as text and JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from hyper_parallel._text import first_line
from hyper_parallel.verify.fuzz.program import OUTCOMES
from hyper_parallel.verify.fuzz.reproduce import MOST_LINES
from hyper_parallel.verify.report import Report

if TYPE_CHECKING:
    from hyper_parallel.verify.prove.table import RowsOfCall

__all__ = ["Counts", "Finding", "FuzzReport"]

_SHOWN_REFUSALS = 10


@dataclass(frozen=True)
class Finding:
    """A program with which something is wrong, made small.

    Attributes:
        framework: name of the framework.
        kind: ``wrong``, ``internal error`` or ``hang``.
        text: the first difference, or the error.
        seed, number: of the program that was found.
        mesh: sizes of the axes of the small program.
        source: the small program as plain user code; empty where it fails only after the programs before it, or is
            left whole.
        file: where that was written.
        shown: whether the file, run by itself, ends with a non-zero status.
        alike: number of programs with findings that look alike, this one included.
        calls: of the small program; findings with the same ones look alike.
        mode: what follows the steps of the small program.
        look: what programs with the same defect likely have in common.
        rows: of rules that the calls of the small program use, if its first rank runs alone.
        left_whole: whether a process ended while its batch ran, which ran again without making findings smaller.
    """

    framework: str
    kind: str
    text: str
    seed: int
    number: int
    mesh: tuple[int, ...] = ()
    source: str = ""
    file: str = ""
    shown: bool = False
    alike: int = 1
    calls: str = ""
    mode: str = ""
    look: str = ""
    left_whole: bool = False
    rows: tuple[RowsOfCall, ...] = ()

    def is_like(self, other: Finding) -> bool:
        """Whether another finding is likely the same defect: it looks alike, or the same small program is left."""
        if (self.framework, self.kind) != (other.framework, other.kind):
            return False
        return self.look == other.look or bool(self.calls and (self.calls, self.mode) == (other.calls, other.mode))

    def lines(self) -> list[str]:
        """Return the finding as lines of text."""
        also = f" ({self.alike} programs alike)" if self.alike > 1 else ""
        first = f"{self.kind}: {first_line(self.text)[:300] if self.text else ''}{also}"
        where = f"{self.framework}, seed {self.seed}, program {self.number}"
        if not self.source:
            why = "fails only after the programs before it in its batch"
            why = "not made smaller: a process of the campaign ended meanwhile" if self.left_whole else why
            return [first, f"  {where}: {why}"]
        shown = "" if self.shown else "; by itself it does not fail"
        count = len(self.source.splitlines())
        length = f" ({count} lines)" if count > MOST_LINES else ""
        mesh = "x".join(map(str, self.mesh))
        return [first, f"  {where}, mesh {mesh}: {self.file or 'not written'}{length}{shown}"]


@dataclass(kw_only=True)
class Counts:
    """What is counted of a batch, and of a run.

    Attributes:
        exact: programs that were compared to the bit.
        compared: results that were compared, over all ranks.
        gradients: how many of them are gradients.
        steps: calls by name, of all programs.
        refusals: refused programs by the beginning of the message.
        modes: programs by what followed their steps.
        processor_seconds: time of the processes that make and judge programs; ranks that are processes have their own.
    """

    exact: int = 0
    compared: int = 0
    gradients: int = 0
    steps: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    processor_seconds: float = 0.0

    def add_counts(self, other: Counts) -> None:
        """Add what was counted elsewhere."""
        for counted in fields(Counts):
            mine, theirs = getattr(self, counted.name), getattr(other, counted.name)
            setattr(self, counted.name, mine + theirs)


@dataclass
class FuzzReport(Counts, Report):
    """Counts and findings of a run.

    Attributes:
        seed: of the run.
        frameworks: that it ran on.
        outcomes: programs by framework and outcome.
        worlds: programs by number of ranks.
        findings: one per kind of failure that looks alike.
        seconds: wall time.
        note: that the run was interrupted, for example.
        dtypes: that each program mixed; empty where each had one floating dtype.
    """

    has_page: ClassVar[bool] = True

    seed: int
    frameworks: tuple[str, ...] = ()
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    worlds: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    note: str = ""
    dtypes: tuple[str, ...] = ()

    @property
    def programs(self) -> int:
        """The number of programs that ran."""
        return sum(counts.total() for counts in self.outcomes.values())

    @property
    def checked(self) -> bool:
        """Whether some program of every framework was compared and equal, or wrong: not all were refused."""
        return bool(self.frameworks) and all(
            any(self.outcomes.get(framework, Counter[str]())[kind] for kind in ("equal", "wrong"))
            for framework in self.frameworks
        ) and bool(self.compared or self.findings)  # fmt: skip

    @property
    def ok(self) -> bool:
        """Whether something was checked, and nothing is wrong."""
        return self.checked and not self.findings and not self.note

    @property
    def looks(self) -> frozenset[str]:
        """The looks of the findings that were made small."""
        return frozenset(finding.look for finding in self.findings if finding.source)

    def add(self, finding: Finding) -> None:
        """Add a finding, or count it with one that looks alike."""
        for index, known in enumerate(self.findings):
            if known.is_like(finding):
                shown = known if known.source or not finding.source else finding
                self.findings[index] = replace(shown, alike=known.alike + 1)
                return
        self.findings.append(finding)

    def text(self) -> str:
        """Return the counts, and a paragraph per finding."""
        lines = []
        for framework in self.frameworks:
            counts = self.outcomes.get(framework, Counter())
            parts = ", ".join(f"{counts[kind]} {kind}" for kind in OUTCOMES)
            lines.append(f"{framework}: {counts.total()} programs: {parts}")
        lines.append(
            f"{self.compared} results compared on all ranks, {self.gradients} of them gradients; "
            f"{self.exact} programs to the bit; {len(self.steps)} different calls"
        )
        rate = self.programs / self.processor_seconds if self.processor_seconds else 0.0
        mixed = f", dtypes {','.join(self.dtypes)}" if self.dtypes else ""
        lines.append(f"seed {self.seed}{mixed}; {self.seconds:.1f} s, {rate:.0f} programs per second of one core")
        for finding in self.findings:
            lines.extend(finding.lines())
        if not self.checked:
            lines.append("nothing was checked: no program was compared with a single device")
        if self.note:
            lines.append(self.note)
        return "\n".join(lines)

    def json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        data = asdict(self)
        for name in ("steps", "worlds", "modes"):
            data[name] = dict(sorted(getattr(self, name).items()))
        data["refusals"] = dict(self.refusals.most_common(_SHOWN_REFUSALS))
        data["outcomes"] = {
            framework: {kind: counts[kind] for kind in OUTCOMES} for framework, counts in self.outcomes.items()
        }
        return {"ok": self.ok, "checked": self.checked, "programs": self.programs, **data}
