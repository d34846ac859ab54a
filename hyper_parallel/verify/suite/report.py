"""The results of a team's checks: as text, as JSON, and as the data that CI systems read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyper_parallel._text import first_line
from hyper_parallel.verify.program.report import REFUSED
from hyper_parallel.verify.report import Report
from hyper_parallel.verify.suite.settings import SuiteCheck

__all__ = ["INVALID", "CheckResult", "SuiteReport"]

INVALID = 2
"""Exit status of a check whose input cannot be verified."""

_WORDS = {0: "passed", INVALID: "NOT RUN", REFUSED: "INCONCLUSIVE"}
_LINE = re.compile(r"(?P<file>[^\s\"'(]+\.py)(?:\", line |:)(?P<line>\d+)")


@dataclass(frozen=True)
class CheckResult:
    """The result of a check.

    Attributes:
        check: the check that ran.
        command: command that repeats it, in the folder of the settings.
        status: the command's exit status.
        seconds: duration of the check.
        report: report of the check as JSON; None without a report.
        text: report of the check as text.
        error: the reason why there is no report.
    """

    check: SuiteCheck
    command: str
    status: int
    seconds: float
    report: Mapping[str, Any] | None = None
    text: str = ""
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether everything was compared and equal."""
        return self.status == 0

    @property
    def word(self) -> str:
        """The verdict, in one word."""
        return _WORDS.get(self.status, "FAILED")

    @property
    def headline(self) -> str:
        """The verdict, in one line."""
        return first_line(self.error if self.report is None else self.report["headline"])

    @property
    def first(self) -> Mapping[str, Any] | None:
        """The first difference of the report, or of the first further case that has one."""
        report = self.report or {}
        cases = [case["verdict"] for case in report.get("hardened", ()) if isinstance(case, dict)]
        verdicts = [report.get("verdict"), *cases]
        return next((each["first"] for each in verdicts if isinstance(each, dict) and each["first"]), None)

    @property
    def rule(self) -> str:
        """The kind of the result, such as a cause of ``verify/engine/causes.py``, ``differs`` or ``inconclusive``."""
        if self.status in (INVALID, REFUSED):
            return "invalid-input" if self.status == INVALID else "inconclusive"
        report = self.report or {}
        cause = (self.first or {}).get("cause") or {}
        return str(cause.get("kind") or report.get("failure_cause") or ("differs" if self.first else "failed"))

    @property
    def following(self) -> str:
        """The next step, in one sentence."""
        if self.ok:
            return "nothing: everything that was compared is equal"
        if self.status == INVALID:
            return "change the settings or the script as the headline says: nothing was compared"
        if self.status == REFUSED:
            return "nothing differs, but the case shows too little: change it, or accept it, as the headline says"
        if self.first is not None:
            return "look at the line, where the first wrong value was computed or seen; the cause says what is missing"
        return "read the report: a run failed, took too long, or could not be compared"

    def place(self, root: Path) -> tuple[str, int]:
        """Return the file below ``root`` and the line of the result; line 1 if no line is known."""
        report = self.report or {}
        texts = [(self.first or {}).get("site", ""), report.get("failure", ""), self.error, self.text]
        for text in texts:
            found = [(path, line) for path, line in _lines(str(text)) if _below(path, root)]
            if found:
                path, line = found[-1]
                return _below(path, root), line
        script = _below(root / self.check.script, root) if self.check.script else ""
        return (script, 1) if script else self.check.place

    def json(self, root: Path) -> dict[str, Any]:
        """Return the result as a JSON object."""
        file, line = ("", 0) if self.ok else self.place(root)
        return {
            "name": self.check.name,
            "kind": self.check.kind,
            "ok": self.ok,
            "status": self.status,
            "verdict": self.word,
            "headline": self.headline,
            "rule": "" if self.ok else self.rule,
            "file": file,
            "line": line,
            "next": self.following,
            "command": self.command,
            "seconds": round(self.seconds, 3),
            "error": self.error,
            "report": self.report,
        }

    def line(self) -> str:
        """Return the result in a line."""
        return f"{self.check.name}: {self.word}: {self.headline} ({self.seconds:.1f} s)"


@dataclass
class SuiteReport(Report):
    """The results of the checks.

    Attributes:
        settings: the file that lists the checks.
        results: the results, in the order in which the checks ran.
        left: names of checks that did not run because the command was interrupted.
    """

    settings: Path
    results: list[CheckResult] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether there were checks, and all of them passed."""
        return bool(self.results) and not self.left and all(result.ok for result in self.results)

    @property
    def status(self) -> int:
        """1 if a check failed, else 2 if one could not run, else 3 if one is inconclusive, else 0."""
        found = {result.status for result in self.results}
        if self.left or found - {0, INVALID, REFUSED} or not found:
            return 1
        return next((status for status in (INVALID, REFUSED) if status in found), 0)

    def text(self) -> str:
        """Return a line for each check, and the number of passed checks."""
        lines = [result.line() for result in self.results]
        lines += [f"{name}: did not run" for name in self.left]
        passed = sum(result.ok for result in self.results)
        return "\n".join([*lines, f"{passed} of {len(self.results) + len(self.left)} checks passed"])

    def json(self) -> dict[str, Any]:
        """Return the report as a JSON object; its schema is ``verify/schemas/reports-1.schema.json``."""
        root = self.settings.parent
        return {
            "schema": "verify-1",
            "ok": self.ok,
            "status": self.status,
            "settings": str(self.settings),
            "checks": [result.json(root) for result in self.results],
            "left": self.left,
        }


def _lines(text: str) -> Iterator[tuple[Path, int]]:
    """Yield the files and lines in a text."""
    for match in _LINE.finditer(text):
        yield Path(match["file"]), int(match["line"])


def _below(path: Path, root: Path) -> str:
    """Return a file relative to the root, with slashes; empty if it is not below the root, or is not a file."""
    try:
        full = (root / path).resolve(strict=True)
        return full.relative_to(root.resolve()).as_posix()
    except (OSError, ValueError):
        return ""
