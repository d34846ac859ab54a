#!/usr/bin/env python3
"""Write the tables of docs/versions.md: what passed and failed on which version and when, and since when a test fails.

    python ci/versions.py [folder of results, by default reports/versions]

The folder has one folder for each environment of tox (``py312-torch214``), with the results of its suites as pytest
writes them (``unit.xml``); a file that is anything else, or a run of less than half of the tests on the page, is named,
and the page stays as it was. Rows of suites without results stay as they are, with their dates. A test that is in the
page's table of failures and fails again keeps the day since which it fails; cases of one test are one row. The file
``unit-again.xml`` has tests of ``unit`` that failed and were run again on later code: a test that passes leaves the
table of failures.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "versions.md"
HEAD = ("environment", "suite", "passed", "failed", "skipped", "on")
FAILURES = ("environment", "suite", "test that fails", "cases", "since")
AGAIN = "-again"
_ENVIRONMENT = re.compile(r"py\d+(?:-[a-z]+\d+)+")

Row = tuple[str, ...]


def results(folder: Path) -> Iterator[tuple[Row, list[Row], set[str]]]:
    """Yield, for each suite of each environment with results: its row, rows of failed tests, names of its tests.

    Raises:
        ValueError: a file has no results of pytest.
    """
    for file in sorted(file for file in folder.glob("py*/*.xml") if _ENVIRONMENT.fullmatch(file.parent.name)):
        for suite in _suites(file):
            key, day = (file.parent.name, file.stem), suite.get("timestamp", "")[:10]
            bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped = int(suite.get("skipped", 0))
            passed = int(suite.get("tests", 0)) - bad - skipped
            cases = [(_name(case), case) for case in suite.iter("testcase")]
            failed = Counter(
                name for name, case in cases if case.find("failure") is not None or case.find("error") is not None
            )
            rows: list[Row] = [(*key, test, str(count), day) for test, count in sorted(failed.items())]
            yield (*key, str(passed), str(bad), str(skipped), day), rows, {name for name, _ in cases}


def _suites(file: Path) -> list[ET.Element]:
    """Return the suites of a file of results.

    Raises:
        ValueError: it was cut off, is not written by pytest, or no test was run.
    """
    try:
        suites = list(ET.parse(file).getroot().iter("testsuite"))  # noqa: S314 - written by pytest in this checkout
    except ET.ParseError as error:
        msg = f"{file} is not complete XML ({error}): run the suite again, or delete the file"
        raise ValueError(msg) from error
    if not suites or any(not suite.get("timestamp") or suite.get("tests", "0") == "0" for suite in suites):
        msg = f"{file} has no results of pytest: run the suite again, or delete the file"
        raise ValueError(msg)
    return suites


def _name(case: ET.Element) -> str:
    """Return the name of a test without its parameters."""
    return f"`{case.get('classname')}.{str(case.get('name')).partition('[')[0]}`"


def updated(page: str, new: list[tuple[Row, list[Row], set[str]]]) -> str:
    """Return the page with these results in its tables, in place of those of the same environment and suite.

    Raises:
        ValueError: it has no table of suites, or a run has less than half of the tests of the page's row.
    """
    before, known, after = _parts(page.split("\n"), HEAD)
    counts = {row[:2]: _tests(row) for row in known}
    for row, *_ in new:
        count = counts.get(row[:2], 0)
        if not row[1].endswith(AGAIN) and 2 * _tests(row) < count:
            msg = (
                f"{'/'.join(row[:2])}.xml has {_tests(row)} tests, less than half of the {count} on the page: "
                "run the whole suite, or delete its row from the page first"
            )
            raise ValueError(msg)
    between, failing, after = _parts(after, FAILURES) if _line(FAILURES) in after else ([""], [], after)
    suites = {row[:2]: row for row in known} | {row[:2]: row for row, *_ in new}
    since = {row[:3]: row[-1] for row in failing}
    whole = {row[:2] for row, *_ in new if not row[1].endswith(AGAIN)}
    failing = [row for row in failing if row[:2] not in whole]
    failing += [row for (_, suite, *_), rows, _ in new if not suite.endswith(AGAIN) for row in rows]
    for (environment, suite, *_), rows, tests in new:
        if suite.endswith(AGAIN):
            key = (environment, suite.removesuffix(AGAIN))
            failing = [row for row in failing if row[:2] != key or row[2] not in tests]
            failing += [(*key, *row[2:]) for row in rows]
    failing = [(*row[:-1], since.get(row[:3], row[-1])) for row in failing]
    second = [*between, *_table(FAILURES, failing, 1)] if failing else []
    return "\n".join([*before, *_table(HEAD, list(suites.values()), 3), *second, *after])


def _tests(row: Row) -> int:
    """Return how many tests a row of a suite counts."""
    return sum(map(int, row[2:5]))


def _table(head: Row, rows: list[Row], numbers: int) -> list[str]:
    """Return the lines of a table; columns before the last are numbers, as many as said."""
    sides = ["---"] * (len(head) - numbers - 1) + ["--:"] * numbers + ["---"]
    return [_line(head), f"|{'|'.join(sides)}|", *map(_line, sorted(rows))]


def _line(row: Row) -> str:
    return f"| {' | '.join(row)} |"


def _parts(lines: list[str], head: Row) -> tuple[list[str], list[Row], list[str]]:
    """Return the lines before the table with this head, its rows, and the lines after it.

    Raises:
        ValueError: there is none.
    """
    if _line(head) not in lines:
        msg = f"{PAGE.name} has no table with the head {_line(head)}"
        raise ValueError(msg)
    start = end = lines.index(_line(head))
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines[start:end]]
    return lines[:start], [row for row in cells if _ENVIRONMENT.fullmatch(row[0])], lines[end:]


def main(args: list[str]) -> int:
    """Write the page; 1 without results, 2 if a file has none."""
    folder = Path(args[0]) if args else ROOT / "reports" / "versions"
    try:
        new = list(results(folder))
        page = updated(PAGE.read_text(encoding="utf-8"), new)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if not new:
        print(f"no results in {folder}: run `tox run -m edges` or `tox run -m matrix` first", file=sys.stderr)
        return 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
