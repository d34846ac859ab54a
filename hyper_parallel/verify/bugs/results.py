"""The harness's verdicts on the corpus, compared with the documented facts: detection, tensor and cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from hyper_parallel._text import first_line
from hyper_parallel.verify.bugs.registry import CALLS, Bug
from hyper_parallel.verify.engine.wording import value_words
from hyper_parallel.verify.report import Report

__all__ = ["CAUSE_SHARE", "TENSOR_SHARE", "BugResult", "CorpusReport", "FormResult"]

TENSOR_SHARE = 0.9
"""Minimum share of bugs whose first wrong tensor is named correctly, in a run of the complete corpus."""

CAUSE_SHARE = 0.8
"""Minimum share of bugs whose class of cause is named correctly, in a run of the complete corpus."""


@dataclass(frozen=True)
class FormResult:
    """The verdict on one form of a program.

    Attributes:
        equal: whether the program trains like a single device.
        checked: number of values that were compared.
        kind, name: kind and name of the first value that differs; empty if none differs.
        cause: class of the error that was found; empty if none.
        axis: group or mesh axis that the cause concerns.
        evidence: the numbers that show the cause.
        unplaced: values that could not be compared because their placement could not be determined.
        error: the error that ended the run without a verdict; empty if there was none.
    """

    equal: bool
    checked: int = 0
    kind: str = ""
    name: str = ""
    cause: str = ""
    axis: str = ""
    evidence: str = ""
    unplaced: tuple[str, ...] = ()
    error: str = ""

    def text(self) -> str:
        """Return the verdict in one line."""
        if self.error:
            return f"ended: {first_line(self.error)}"
        if self.equal:
            return f"equal, {self.checked} values" + (f", {len(self.unplaced)} not placed" if self.unplaced else "")
        name = value_words(self.kind, self.name) if self.kind != CALLS else "different collectives on the ranks"
        return f"{name}, {self.cause}" + (f" over {self.axis}" if self.axis else "")


@dataclass(frozen=True)
class BugResult:
    """The verdicts on both forms of a program.

    Attributes:
        bug: the program and its facts.
        broken: the verdict on the form with the bug.
        fixed: the verdict on the form without the bug.
        seconds: duration of both runs together.
    """

    bug: Bug
    broken: FormResult
    fixed: FormResult
    seconds: float = 0.0

    @property
    def caught(self) -> bool:
        """Whether the broken form was found to differ."""
        return not self.broken.equal and not self.broken.error

    @property
    def passed(self) -> bool:
        """Whether all values of the fixed form were compared and are equal."""
        return self.fixed.equal and self.fixed.checked > 0 and not self.fixed.unplaced and not self.fixed.error

    @property
    def tensor_right(self) -> bool:
        """Whether the first reported value is the first one that the bug changes."""
        return self.caught and self.broken.kind == self.bug.kind and fnmatchcase(self.broken.name, self.bug.tensor)

    @property
    def cause_right(self) -> bool:
        """Whether the reported cause is the documented one."""
        return self.caught and self.broken.cause == self.bug.cause

    def text(self) -> str:
        """Return the result in one or two lines."""
        named = "" if self.tensor_right else f"; documented is {self.bug.kind} {self.bug.tensor}"
        cause = "" if self.cause_right else f"; the documented cause is {self.bug.cause}"
        broken = f"caught: {self.broken.text()}{named}{cause}" if self.caught else f"MISSED: {self.broken.text()}"
        fixed = "" if self.passed else f"\n  FALSE ALARM in the fixed form: {self.fixed.text()}"
        return f"{self.bug.framework} {self.bug.name}: {broken}{fixed}"

    def json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        states = {name: getattr(self, name) for name in ("caught", "passed", "tensor_right", "cause_right")}
        return {**asdict(self), **states}


@dataclass
class CorpusReport(Report):
    """Results of several programs.

    Attributes:
        results: one per program.
        whole: whether these are all programs of their frameworks, so that the minimum shares apply.
        note: a remark, for example that the run was interrupted.
    """

    has_page: ClassVar[bool] = True

    results: list[BugResult] = field(default_factory=list)
    whole: bool = True
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether every bug was caught, every fixed form passed, and enough tensors and causes are right."""
        if not self.results or self.note or not all(result.caught and result.passed for result in self.results):
            return False
        if not self.whole:
            return True
        tensors, causes = (self.count(name) / len(self.results) for name in ("tensor_right", "cause_right"))
        return tensors >= TENSOR_SHARE and causes >= CAUSE_SHARE

    def count(self, state: str) -> int:
        """Return the number of results in a state: ``caught``, ``passed``, ``tensor_right`` or ``cause_right``."""
        return sum(getattr(result, state) for result in self.results)

    def text(self) -> str:
        """Return the counts in a line."""
        total = len(self.results)
        seconds = sum(result.seconds for result in self.results)
        line = (
            f"{self.count('caught')} of {total} bugs caught, {self.count('passed')} of {total} fixed forms pass; "
            f"the tensor is right in {self.count('tensor_right')}, the cause in {self.count('cause_right')} "
            f"({seconds:.1f} s)"
        )
        return f"{line}; {self.note}" if self.note else line

    def full_text(self) -> str:
        """Return every result, and the counts."""
        return "\n".join([*(result.text() for result in self.results), self.text()])

    def json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        counts = {name: self.count(name) for name in ("caught", "passed", "tensor_right", "cause_right")}
        bugs: Sequence[dict[str, Any]] = [result.json() for result in self.results]
        return {"ok": self.ok, "note": self.note, "whole": self.whole, **counts, "bugs": bugs}
