"""Report of a run: counts by outcome and findings, as text and JSON."""

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
    """A reduced program that shows a defect.

    Attributes:
        framework: name of the framework.
        kind: ``wrong``, ``internal error`` or ``hang``.
        text: the first difference, or the error.
        seed, number: seed and number of the original program.
        mesh: sizes of the axes of the reduced program.
        source: the reduced program as plain user code; empty if it fails only after the programs before it, or was not
            reduced.
        file: path of the file with the source.
        shown: whether the file reproduces the failure: run alone, it ends with a non-zero status.
        alike: number of programs whose findings have the same signature, including this one.
        calls: calls of the reduced program; findings with the same calls count as the same defect.
        mode: differentiation after the steps of the reduced program.
        look: signature that programs with the same defect likely share.
        rows: combinations of placements that the calls of the reduced program use, if its first rank can run without
            the others.
        left_whole: whether the program was not reduced, because a process died while its batch ran.
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
        """Whether another finding is likely the same defect: same signature, or same calls in the reduced program."""
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
    """Counts of a batch or of a run.

    Attributes:
        exact: programs that were compared bitwise.
        compared: number of compared results, over all ranks.
        gradients: number of gradients among them.
        steps: number of calls by name, over all programs.
        refusals: number of programs that the library rejected, by the beginning of the message.
        modes: number of programs by kind of differentiation.
        processor_seconds: processor time of the processes that generate and compare programs, without ranks that are
            processes.
    """

    exact: int = 0
    compared: int = 0
    gradients: int = 0
    steps: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    processor_seconds: float = 0.0

    def add_counts(self, other: Counts) -> None:
        """Add the counts of another batch."""
        for counted in fields(Counts):
            mine, theirs = getattr(self, counted.name), getattr(other, counted.name)
            setattr(self, counted.name, mine + theirs)


@dataclass
class FuzzReport(Counts, Report):
    """Counts and findings of a run.

    Attributes:
        seed: seed of the run.
        frameworks: frameworks of the run.
        outcomes: number of programs by framework and outcome.
        worlds: number of programs by world size.
        findings: one finding per signature.
        seconds: wall time.
        note: a remark, for example that the run was interrupted.
        dtypes: dtypes that each program mixed; empty if each program had one floating-point dtype.
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
        """Whether at least one program of every framework was compared, with the outcome equal or wrong."""
        return bool(self.frameworks) and all(
            any(self.outcomes.get(framework, Counter[str]())[kind] for kind in ("equal", "wrong"))
            for framework in self.frameworks
        ) and bool(self.compared or self.findings)  # fmt: skip

    @property
    def ok(self) -> bool:
        """Whether something was checked and nothing failed."""
        return self.checked and not self.findings and not self.note

    @property
    def looks(self) -> frozenset[str]:
        """The signatures of the findings that were reduced."""
        return frozenset(finding.look for finding in self.findings if finding.source)

    def add(self, finding: Finding) -> None:
        """Add a finding, or count it with a finding of the same defect."""
        for index, known in enumerate(self.findings):
            if known.is_like(finding):
                shown = known if known.source or not finding.source else finding
                self.findings[index] = replace(shown, alike=known.alike + 1)
                return
        self.findings.append(finding)

    def text(self) -> str:
        """Return the counts, and one paragraph per finding."""
        lines = []
        for framework in self.frameworks:
            counts = self.outcomes.get(framework, Counter())
            parts = ", ".join(f"{counts[kind]} {kind}" for kind in OUTCOMES)
            lines.append(f"{framework}: {counts.total()} programs: {parts}")
        lines.append(
            f"{self.compared} results compared on all ranks, {self.gradients} of them gradients; "
            f"{self.exact} programs compared bit for bit; {len(self.steps)} different calls"
        )
        rate = self.programs / self.processor_seconds if self.processor_seconds else 0.0
        mixed = f", dtypes {','.join(self.dtypes)}" if self.dtypes else ""
        lines.append(f"seed {self.seed}{mixed}; {self.seconds:.1f} s, {rate:.0f} programs per CPU second")
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
