"""A night's reports compared with the night before: which failures are new, and which suites have no report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hyper_parallel.verify.report_files import write_text
from hyper_parallel.verify.run_comparison import Change
from workshop.nights.history import History, Night
from workshop.nights.reports import CaseResult, NightReports, SuiteReport

__all__ = ["NightChanges", "write_logs"]

_EXECUTED = ("tests of ", ": executed")
_MOST_LOGS = 500


@dataclass(frozen=True)
class NightChanges:
    """The reports of the last night of a history.

    Attributes:
        reports: of that night.
        history: of which it is the last one.
    """

    reports: NightReports
    history: History

    @property
    def before(self) -> Night | None:
        """The night before, None in the first one."""
        return self.history.nights[-2] if len(self.history.nights) > 1 else None

    def is_new(self, suite: SuiteReport, case: CaseResult) -> bool:
        """Whether a failed test did not fail in the night before; in the first night every failure is new."""
        return self.before is None or case.name not in self.before.failed.get(suite.name, ())

    def since(self, suite: SuiteReport, case: CaseResult) -> str:
        """Return the day since which a failed test has failed whenever it ran."""
        return self.history.last.failed[suite.name][case.name]

    def failures(self) -> list[tuple[SuiteReport, CaseResult, bool]]:
        """Return suite, test, and whether it is new, of every failed test; new ones come first."""
        failures = [
            (suite, case, self.is_new(suite, case)) for suite in self.reports.suites for case in suite.failed
        ]  # fmt: skip
        return sorted(failures, key=lambda failure: not failure[2])

    def new_failures(self, suite: SuiteReport) -> int:
        """Return how many failures of a suite are new."""
        return sum(self.is_new(suite, case) for case in suite.failed)

    def new_skips(self, suite: SuiteReport, reason: str) -> int:
        """Return how many more tests of a suite were skipped for this reason than in the night before."""
        skipped = {} if self.before is None else self.before.skipped.get(suite.name, {})
        return max(0, suite.skipped[reason] - skipped.get(reason, 0))

    def fewer_tests(self, suite: SuiteReport) -> int:
        """Return how many tests fewer of a suite ran than in the night before."""
        ran = {} if self.before is None else _executed(self.before)
        return max(0, ran.get(suite.name, 0) - suite.executed)

    def absent(self) -> dict[str, int]:
        """Return suites of the night before that have no report now, with the number of tests that they ran."""
        here = {suite.name for suite in self.reports.suites}
        ran = {} if self.before is None else _executed(self.before)
        return {name: number for name, number in ran.items() if name not in here}

    def changes(self) -> dict[str, Change]:
        """Return what differs from the night before, by the name of the value."""
        return {change.what: change for change in self.history.changes}

    @property
    def ok(self) -> bool:
        """Whether no test failed, no suite has lost its report, and no proven row failed."""
        failed = any(suite.failed for suite in self.reports.suites)
        return not self.absent() and not failed and not self.contradictions()

    def contradictions(self) -> tuple[str, ...]:
        """Return the rows that failed although they are proven for every size, in words."""
        return tuple(line for report in self.reports.commands for line in report.contradictions)

    def summary(self) -> str:
        """Return numbers of tests in one line."""
        suites, failures = self.reports.suites, self.failures()
        new = sum(is_new for _, _, is_new in failures)
        skipped = sum(suite.number("skipped") for suite in suites)
        ran = f"{sum(suite.executed for suite in suites):,} tests ran in {len(suites)} suites"
        lost = f"; {len(self.absent())} suites have no report" if self.absent() else ""
        proven = "".join(f"; {line}" for line in self.contradictions())
        return f"{ran}: {len(failures)} failed ({new} new), {skipped} skipped{lost}{proven}"


def _executed(night: Night) -> dict[str, int]:
    """Return how many tests of each suite ran in a night, from the values that its history keeps."""
    start, end = _EXECUTED
    return {
        what.removeprefix(start).removesuffix(end): int(measured.value)
        for what, measured in night.values.items()
        if what.startswith(start) and what.endswith(end)
    }


def write_logs(night: NightChanges, folder: Path) -> Mapping[tuple[str, str], Path]:
    """Write the log of each failed test to a file: its traceback, what it printed, and the sections of its ranks.

    Args:
        night: the tests; of very many failures the first 500 get a file, new ones before old ones.
        folder: that gets the files.

    Returns:
        the files by suite and test.

    Raises:
        ValueError: a file cannot be written.
    """
    files: dict[tuple[str, str], Path] = {}
    for number, (suite, case, is_new) in enumerate(night.failures()[:_MOST_LOGS], 1):
        facts = [f"# {name}: {text}" for name, text in suite.facts.items() if text]
        lines = [f"# suite: {suite.name}", f"# test: {case.name}{' (new)' if is_new else ''}", *facts, "", case.log]
        files[suite.name, case.name] = write_text(folder / f"{number:03}.txt", "\n".join(lines) + "\n", "--night")
    return files
