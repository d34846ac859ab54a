#!/usr/bin/env python3
"""Write the table of docs/versions.md: what passed and failed on which version, and when.

    python ci/versions.py [folder of results, by default reports/versions]

The folder has one folder for each environment of tox (``py312-torch214``), with the results of its suites as pytest
writes them (``unit.xml``). Rows of environments without results stay as they are, with their dates.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "versions.md"
HEAD = ("environment", "suite", "passed", "failed", "skipped", "on")
_ROW = re.compile(r"\| (?P<environment>py\d+(?:-[a-z]+\d+)+) \| (?P<suite>[^|]+) \| .*\|")


def rows_of(folder: Path) -> Iterator[tuple[str, ...]]:
    """Yield a row for each suite of each environment that has results."""
    for file in sorted(folder.glob("py*/*.xml")):
        suites = ET.parse(file).getroot().iter("testsuite")  # noqa: S314 - written by pytest in this checkout
        for suite in suites:
            bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped = int(suite.get("skipped", 0))
            passed = int(suite.get("tests", 0)) - bad - skipped
            yield file.parent.name, file.stem, str(passed), str(bad), str(skipped), suite.get("timestamp", "")[:10]


def table(page: str, rows: list[tuple[str, ...]]) -> str:
    """Return the page with these rows in its table, in place of those of the same environment and suite."""
    before, table_lines, after = _parts(page)
    known: dict[tuple[str, ...], str] = {
        (match["environment"], match["suite"].strip()): line for line in table_lines if (match := _ROW.match(line))
    }
    known |= {row[:2]: f"| {' | '.join(row)} |" for row in rows}
    lines = [f"| {' | '.join(HEAD)} |", "|---|---|--:|--:|--:|---|", *(known[key] for key in sorted(known))]
    return "\n".join([*before, *lines, *after])


def _parts(page: str) -> tuple[list[str], list[str], list[str]]:
    """Split the page at its table.

    Raises:
        ValueError: it has no table.
    """
    lines = page.split("\n")
    inside = [number for number, line in enumerate(lines) if line.startswith("|")]
    if not inside:
        msg = f"{PAGE.name} has no table"
        raise ValueError(msg)
    return lines[: inside[0]], lines[inside[0] : inside[-1] + 1], lines[inside[-1] + 1 :]


def main(args: list[str]) -> int:
    """Write the page; 1 without results."""
    rows = list(rows_of(Path(args[0]) if args else ROOT / "reports" / "versions"))
    if not rows:
        print("no results: run `tox run -m edges` or `tox run -m matrix` first", file=sys.stderr)
        return 1
    PAGE.write_text(table(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
