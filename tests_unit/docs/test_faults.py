"""The page of faults and the tests of faults name each other."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MARK = "pytest.mark." + "fault"
COLUMNS = ["fault", "promised", "what happens", "tried", "tests"]


def rows_of(text):
    """The cells of each row of the page's table, below its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert head == COLUMNS
    return rows


def covers(name, test):
    """Whether a name on the page stands for a test: itself, its parameters where it has none, or ``*`` for any."""
    function, _, parameters = name.partition("[")
    tested, _, of_test = test.partition("[")
    return function == tested and (not parameters or fnmatch.fnmatchcase(of_test[:-1], parameters[:-1]))


def problems(rows, tests):
    """What the rows and the tests do not say of each other."""
    lines = [f"{row[0]}: {COLUMNS[index]} is empty" for row in rows for index, cell in enumerate(row) if not cell]
    lines += [f"{row[0]}: it has {len(row)} cells" for row in rows if len(row) != len(COLUMNS)]
    shown = {row[0]: re.findall(r"`([^`]+)`", row[-1]) for row in rows}
    lines += [f"{fault}: no test is named" for fault, names in shown.items() if not names]
    every = [name for names in shown.values() for name in names]
    lines += [f"no test with the mark is {name}" for name in every if not any(covers(name, test) for test in tests)]
    return lines + [f"no row has {test}" for test in tests if not any(covers(name, test) for name in every)]


@pytest.fixture(scope="module")
def fault_tests():
    """The names of all tests with the mark, sweeps included, as pytest collects them."""
    files = [path for path in (ROOT / "tests_unit").rglob("test_*.py") if MARK in path.read_text(encoding="utf-8")]
    options = ["--collect-only", "-q", "-m", "fault", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *map(str, sorted(files))], cwd=ROOT, timeout=240, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.platforms("torch")
def test_the_page_and_the_tests_name_each_other(fault_tests):
    """Each row names tests that are collected, and each test with the mark is in a row; no cell is empty."""
    rows = rows_of((ROOT / "docs" / "faults.md").read_text(encoding="utf-8"))
    assert len(rows) >= 19
    assert len(fault_tests) >= 50
    assert problems(rows, fault_tests) == []


def test_what_is_missing_on_either_side_is_noticed():
    """An empty cell, a short row, a row without a test, a test that is gone, and one without a row are errors."""
    page = """text
| fault | promised | what happens | tried | tests |
|---|---|---|---|---|
| killed | ends | as promised | once | `a.py::test_killed[in-*]`, `a.py::test_gone` |
| cut | | as promised | once | nothing |
| short | `a.py::test_whole` |
"""
    tests = [
        "a.py::test_killed[in-forward]",
        "a.py::test_killed[after-backward]",
        "a.py::test_whole[2]",
        "b.py::test_new",
    ]
    assert problems(rows_of(page), tests) == [
        "cut: promised is empty",
        "short: it has 2 cells",
        "cut: no test is named",
        "no test with the mark is a.py::test_gone",
        "no row has a.py::test_killed[after-backward]",
        "no row has b.py::test_new",
    ]
