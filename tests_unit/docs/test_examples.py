"""The page "Verify your own training script": its commands succeed, and each broken line is found as it says."""

import re
import shlex
from pathlib import Path

import pytest

from hyper_parallel.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "verify-a-training-script.md"

pytestmark = [
    pytest.mark.platforms("torch"),
    pytest.mark.skipif(not PAGE.exists(), reason="[no-tool] the pages are not installed"),
]


def commands():
    """Return the commands of the page, by script."""
    lines = re.findall(r"^hyper-parallel (verify program examples/(\w+\.py).*)$", PAGE.read_text(), re.MULTILINE)
    return {script: shlex.split(words) for words, script in lines}


def broken_lines():
    """Return the rows of the page's table: script, line, what is in its place, first difference, cause.

    The first is tried in every run, the others are among the sweeps.
    """
    row = r"^\| `examples/(\w+\.py)` \| `(.+?)` \| `(.+?)` \| (.+?) \| ([\w-]+) \|$"
    rows = re.findall(row, PAGE.read_text(), re.MULTILINE) if PAGE.exists() else []
    return [pytest.param(*row, id=row[0], marks=[pytest.mark.sweep] if row != rows[0] else []) for row in rows]


@pytest.mark.parametrize(
    # One command every day, as of the broken lines.
    "script",
    [
        "data_parallel.py",
        *(pytest.param(f"{name}.py", marks=pytest.mark.sweep) for name in ("sharded", "tensor_parallel")),
    ],
)
def test_examples_are_verified_unmodified(script, pages, monkeypatch, capsys):
    """Each command of the page ends with status 0, and says which errors it would have noticed."""
    monkeypatch.chdir(ROOT)
    status, out = main(commands()[script]), capsys.readouterr().out
    assert status == 0, out
    assert "\n  power: a gradient that is off by " in out
    if script == "data_parallel.py":
        (shown,) = [block.code for block in pages.blocks(PAGE.name, PAGE.read_text()) if block.info == "not-run=output"]
        lines = shown.replace("factors,\n", "factors, ").splitlines()
        assert len(lines) == 3
        assert pages.not_printed(lines, out) == []


def test_every_example_has_a_broken_line():
    """No row of the table is overlooked."""
    assert [row.values[0] for row in broken_lines()] == list(commands())


@pytest.mark.parametrize("script, line, instead, first, cause", broken_lines())
def test_a_broken_line_is_found(script, line, instead, first, cause, tmp_path, capsys):
    """With the line replaced, the status is 1, and the first difference and its cause are the page's."""
    text = (ROOT / "examples" / script).read_text()
    assert text.count(line) == 1
    (tmp_path / script).write_text(text.replace(line, instead))
    words = commands()[script]
    words[2] = str(tmp_path / script)
    assert main(words) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[1].startswith(f"DIFFERS first in step 1: {first.replace('`', '')} on ranks 0")
    assert f"cause: {cause}" in out
