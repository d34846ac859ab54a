"""What does not run on devices is listed, and the night knows how many tests must have run there."""

from __future__ import annotations

import ast
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
    book = ledger.Ledger((("*::listed*", "the device cannot"),))
    for name, skipped in (("a.py::listed_skip", True), ("a.py::other", False)):
        book.pytest_runtest_logreport(SimpleNamespace(nodeid=name, skipped=skipped, when="call", longrepr=""))
    assert book.problems() == []
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    book.pytest_sessionfinish(session)
    assert session.exitstatus == pytest.ExitCode.OK
    for name, skipped in (("a.py::silent", True), ("a.py::listed_run", False)):
        book.pytest_runtest_logreport(SimpleNamespace(nodeid=name, skipped=skipped, when="call", longrepr="why"))
    assert book.problems() == [
        "a.py::silent was skipped on the device, and ledger.py has no line for it",
        "a.py::listed_run ran on the device, and ledger.py says 'the device cannot': remove the line",
    ]
    book.pytest_sessionfinish(session)
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED


def test_too_few_devices_are_no_gap_where_a_device_takes_one_rank(ledger):
    """A test of MindSpore may be skipped where there are fewer devices than ranks; one of PyTorch may not."""
    skipped = ("f", 1, "Skipped: [too-few-devices] 3 ranks of MindSpore need a device each, but 2 are available")
    book = ledger.Ledger(())
    for name in ("test_faults.py::test_it[mindspore]", "test_x.py::test_it[torch]"):
        book.pytest_runtest_logreport(SimpleNamespace(nodeid=name, skipped=True, when="setup", longrepr=skipped))
    assert book.problems() == ["test_x.py::test_it[torch] was skipped on the device, and ledger.py has no line for it"]


def test_what_is_for_one_framework_alone_is_listed(ledger):
    """A file or test that is marked for one framework has a line that says why, and no line is left over."""
    marked = set()
    for path in _FOLDER.glob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            where = [node.value] if isinstance(node, ast.Assign) else getattr(node, "decorator_list", [])
            text = " ".join(map(ast.unparse, where))
            if re.search(r"mark\.platforms\('\w+'\)", text):
                marked.add(path.name if isinstance(node, ast.Assign) else f"{path.name}::{node.name}")
    assert marked == set(ledger.ONE_FRAMEWORK)


def test_the_night_requires_as_many_tests_as_there_are(platform_name, ledger):
    """The Jenkinsfile's numbers are the tests of one cell, and of one with 1 or 2 devices, without the gaps."""
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "--device", "npu",
         "--devices", "1", str(_FOLDER)],
        env={**os.environ, "HP_TEST_PLATFORMS": platform_name}, cwd=_FOLDER.parent, capture_output=True, text=True,
        timeout=_SECONDS, check=False,
    )  # fmt: skip
    names = [line for line in listed.stdout.splitlines() if "::" in line and "test_ledger.py" not in line]
    there = [name for name in names if not any(fnmatch(name, pattern) for pattern, _ in ledger.GAPS)]
    single = [name for name in there if ledger.devices_needed(name) == 1]
    text = (_FOLDER.parent / "ci" / "Jenkinsfile").read_text(encoding="utf-8")
    required = dict(re.findall(r"name: 'MIN_EXECUTED_(\w+)', defaultValue: '(\d+)'", text))
    framework = platform_name.upper()
    counts = (int(required[framework]), int(required.get(f"{framework}_FEW", required[framework])))
    assert (len(there), len(single)) == counts, listed.stdout + listed.stderr
