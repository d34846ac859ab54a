"""What does not run on cards is listed, and the night knows how many tests must have run there."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest

_FOLDER = Path(__file__).parent
_SECONDS = 240


@pytest.fixture(scope="module")
def ledger():
    """The module beside this file."""
    specification = importlib.util.spec_from_file_location("hp_tested_ledger", _FOLDER / "ledger.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_a_skip_without_a_line_is_red_and_so_is_an_old_line(ledger):
    """A listed skip and a test that ran are no problem; an unlisted skip is one, and a line whose test ran."""
    book = ledger.Ledger((("*::listed*", "the card cannot"),))
    for name, skipped in (("a.py::listed_skip", True), ("a.py::other", False)):
        book.pytest_runtest_logreport(SimpleNamespace(nodeid=name, skipped=skipped, when="call"))
    assert book.problems() == []
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    book.pytest_sessionfinish(session)
    assert session.exitstatus == pytest.ExitCode.OK
    for name, skipped in (("a.py::silent", True), ("a.py::listed_run", False)):
        book.pytest_runtest_logreport(SimpleNamespace(nodeid=name, skipped=skipped, when="call"))
    assert book.problems() == [
        "a.py::silent was skipped on the card, and ledger.py has no line for it",
        "a.py::listed_run ran on the card, and ledger.py says 'the card cannot': remove the line",
    ]
    book.pytest_sessionfinish(session)
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED


def test_the_night_requires_as_many_tests_as_there_are(platform_name, ledger):
    """The Jenkinsfile's number is that of the tests of one cell that use the device and are not in the ledger."""
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "--device", "npu", "--cards",
         "1", str(_FOLDER)],
        env={**os.environ, "HP_TEST_PLATFORMS": platform_name}, cwd=_FOLDER.parent, capture_output=True, text=True,
        timeout=_SECONDS, check=False,
    )  # fmt: skip
    names = [line for line in listed.stdout.splitlines() if "::" in line and "test_ledger.py" not in line]
    there = [name for name in names if not any(fnmatch(name, pattern) for pattern, _ in ledger.GAPS)]
    text = (_FOLDER.parent / "ci" / "Jenkinsfile").read_text(encoding="utf-8")
    required = re.search(rf"name: 'MIN_EXECUTED_{platform_name.upper()}', defaultValue: '(\d+)'", text)
    assert required is not None
    assert len(there) == int(required[1]), listed.stdout + listed.stderr
