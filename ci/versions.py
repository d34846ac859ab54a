#!/usr/bin/env python3
"""Write the tables of docs/versions.md: what passed and failed on which version and when, and since when a test fails.

    python ci/versions.py [folder of results, by default reports/versions]

The folder has one folder for each environment of tox (``py312-torch214``), with the results of its suites as pytest
writes them (``unit.xml``). Rows of suites without results stay as they are, with their dates. A test that is in the
page's table of failures and fails again keeps the day since which it fails; cases of one test are one row.
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
_ENVIRONMENT = re.compile(r"py\d+(?:-[a-z]+\d+)+")

Row = tuple[str, ...]


def results(folder: Path) -> Iterator[tuple[Row, list[Row]]]:
    """Yield, for each suite of each environment that has results, its row and the rows of its tests that failed."""
    for file in sorted(folder.glob("py*/*.xml")):
        for suite in ET.parse(file).getroot().iter("testsuite"):  # noqa: S314 - written by pytest in this checkout
            key, day = (file.parent.name, file.stem), suite.get("timestamp", "")[:10]
            bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped = int(suite.get("skipped", 0))
            passed = int(suite.get("tests", 0)) - bad - skipped
            failed = Counter(
                f"`{case.get('classname')}.{str(case.get('name')).partition('[')[0]}`"
                for case in suite.iter("testcase")
                if case.find("failure") is not None or case.find("error") is not None
            )
            rows: list[Row] = [(*key, test, str(cases), day) for test, cases in sorted(failed.items())]
            yield (*key, str(passed), str(bad), str(skipped), day), rows


def updated(page: str, new: list[tuple[Row, list[Row]]]) -> str:
    """Return the page with these results in its tables, in place of those of the same environment and suite.

    Raises:
        ValueError: it has no table of suites.
    """
    before, known, after = _parts(page.split("\n"), HEAD)
    between, failing, after = _parts(after, FAILURES) if _line(FAILURES) in after else ([""], [], after)
    suites = {row[:2]: row for row in known} | {row[:2]: row for row, _ in new}
    since = {row[:3]: row[-1] for row in failing}
    failing = [row for row in failing if row[:2] not in {row[:2] for row, _ in new}]
    failing += [(*row[:-1], since.get(row[:3], row[-1])) for _, rows in new for row in rows]
    second = [*between, *_table(FAILURES, failing, 1)] if failing else []
    return "\n".join([*before, *_table(HEAD, list(suites.values()), 3), *second, *after])


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
    """Write the page; 1 without results."""
    new = list(results(Path(args[0]) if args else ROOT / "reports" / "versions"))
    if not new:
        print("no results: run `tox run -m edges` or `tox run -m matrix` first", file=sys.stderr)
        return 1
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8"), new), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
