"""The gates: each takes numbers and returns a line per failure, with file, floor, actual value and missing lines.

Lines and branches count together. The gates read no file and start no program, so that every one is tested with reports
that must not pass. Changed lines are gated by diff-cover.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from workshop.coverage.settings import EnvironmentSettings, SharedSettings

__all__ = [
    "check_baseline",
    "check_exceptions",
    "check_floors",
    "check_ranks",
    "check_shared",
    "check_started",
    "exceptions_over",
    "percent",
]

Report = Mapping[str, Any]
"""The JSON report of coverage.py."""

_SHOWN = 20


def percent(summary: Mapping[str, Any]) -> float:
    """Return the percentage of a summary, lines and branches together; 100 if there is nothing to cover."""
    total = summary["num_statements"] + summary.get("num_branches", 0)
    covered = summary["covered_lines"] + summary.get("covered_branches", 0)
    return 100.0 * covered / total if total else 100.0


def check_floors(report: Report, settings: EnvironmentSettings, excepted: Container[str] = ()) -> list[str]:
    """Check the total and each file against their floors; an empty report, and a floor of no file, fail."""
    files = report["files"]
    if not files:
        return ["no file was measured"]
    failures = []
    total = percent(report["totals"])
    if total < settings.total:
        failures.append(f"total: {total:.2f} % is below the floor of {settings.total:g} %")
    for name, entry in files.items():
        floor, actual = settings.floor(name), percent(entry["summary"])
        if floor is not None and actual < floor and name not in excepted:
            failures.append(f"{name}: {actual:.2f} % is below the floor of {floor:g} %; {_missing(entry)}")
    for pattern, floor in settings.files.items():
        if not any(_matches(name, pattern) for name in files):
            failures.append(f"{pattern}: has a floor of {floor:g} % but matches no measured file")
    return failures


def check_exceptions(report: Report, settings: EnvironmentSettings, exceptions: Iterable[str]) -> list[str]:
    """Check that there are no more exceptions than the settings allow, each of a file with a floor.

    Args:
        report: of this run.
        settings: the floors, and the number of exceptions.
        exceptions: files that may be below their floor.
    """
    names, failures = sorted(exceptions), []
    if len(names) > settings.exceptions:
        most = settings.exceptions
        failures.append(f"{len(names)} files are excepted from their floor, at most {most} may be: add tests instead")
    for name in names:
        if settings.floor(name) is None or name not in report["files"]:
            problem = "has no floor" if settings.floor(name) is None else "was not measured"
            failures.append(f"{name}: is excepted from its floor, but {problem}: remove the exception")
    return failures


def exceptions_over(report: Report, settings: EnvironmentSettings, exceptions: Iterable[str]) -> list[str]:
    """Return excepted files that reach their floor: reported, and dropped with the next baseline.

    This is not a failure: which process runs an error path first may differ from run to run.
    """
    return [
        name
        for name in sorted(exceptions)
        if name in report["files"] and percent(report["files"][name]["summary"]) >= (settings.floor(name) or 0.0)
    ]


def check_baseline(report: Report, baseline: Mapping[str, float], slack: float, existing: Iterable[str]) -> list[str]:
    """Check that no file falls below its baseline (the ratchet).

    Args:
        report: of this run.
        baseline: file to its percentage when the baseline was written.
        slack: percentage points that a file may fall short.
        existing: files that still exist.
    """
    files, still_there, failures = report["files"], set(existing), []
    for name, before in baseline.items():
        if name in files:
            actual = percent(files[name]["summary"])
            if actual < before - slack:
                failures.append(f"{name}: fell from {before:.2f} % to {actual:.2f} %; {_missing(files[name])}")
        elif name in still_there:
            failures.append(f"{name}: had {before:.2f} % and was not measured this time")
    return failures


def check_shared(reports: Mapping[str, Report], settings: SharedSettings) -> list[str]:
    """Check that each environment reaches every shared file; an environment without a report fails as well."""
    failures = [f"shared code: there is no report of {name}" for name in settings.environments if name not in reports]
    names = sorted({name for report in reports.values() for name in report["files"] if settings.covers(name)})
    if not names and settings.files:
        failures.append(f"shared code: {', '.join(settings.files)} match no measured file")
    for environment in settings.environments:
        files = reports[environment]["files"] if environment in reports else {}
        for name in names if environment in reports else ():
            actual = percent(files[name]["summary"]) if name in files else 0.0
            if actual < settings.floor:
                reached = f"{environment} reaches {actual:.2f} %"
                failures.append(f"shared code: {name}: {reached}, below the floor of {settings.floor:g} %")
    return failures


def check_started(launched: Mapping[int, str] | None, least: int, ledger: str, environment: str) -> list[str]:
    """Check that enough ranks were started and recorded; without a record no lost rank could be noticed.

    Args:
        launched: process number to the name of the rank; None where there is no ledger.
        least: number of ranks that must have been started.
        ledger: the folder in which ranks are recorded.
        environment: of the ranks.
    """
    erase = f"run `python ci/workshop coverage erase {environment}` before the tests"
    how = f"{erase}, and the tests with HP_RANK_LEDGER={ledger}"
    if launched is None:
        return [f"ranks: there is no folder {ledger}, which names those that were started; {how}"]
    if len(launched) < least:
        counted = f"{ledger} names {len(launched)} that were started, fewer than the required {least}"
        fewer = f"where the environment starts fewer, set `ranks` of env.{environment} in pyproject.toml"
        return [f"ranks: {counted}; {how}; {fewer}"]
    return []


def check_ranks(launched: Mapping[int, str], measured: Iterable[int], broken: Sequence[str] = ()) -> list[str]:
    """Check that every rank that was started left data: a lost rank is a failure, not a lower number.

    Args:
        launched: process number to the name of the rank.
        measured: process numbers of the data files.
        broken: names of data files that cannot be read, of ranks or of other processes.
    """
    lost = sorted(set(launched) - set(measured))
    broken_files = [f"{len(broken)} data files are broken: {', '.join(broken[:_SHOWN])}"] if broken else []
    if not lost:
        return broken_files
    named = ", ".join(f"{launched[pid]} (process {pid})" for pid in lost[:_SHOWN])
    more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
    return [f"{len(lost)} of {len(launched)} started ranks left no coverage data: {named}{more}", *broken_files]


def _matches(name: str, pattern: str) -> bool:
    return EnvironmentSettings(files={pattern: 0.0}).floor(name) is not None


def _missing(entry: Mapping[str, Any]) -> str:
    lines, branches = entry.get("missing_lines", []), entry.get("missing_branches", [])
    parts = [f"missing lines: {_numbers(lines)}"] if lines else []
    if branches:
        shown = ", ".join(f"{start}->{'exit' if end < 0 else end}" for start, end in branches[:_SHOWN])
        parts.append(f"missing branches: {shown}")
    return "; ".join(parts) or "no line is missing"


def _numbers(lines: Iterable[int]) -> str:
    """``7, 9-12``."""
    spans: list[list[int]] = []
    for line in sorted(lines):
        if spans and line == spans[-1][1] + 1:
            spans[-1][1] = line
        else:
            spans.append([line, line])
    return ", ".join(str(start) if start == end else f"{start}-{end}" for start, end in spans)
