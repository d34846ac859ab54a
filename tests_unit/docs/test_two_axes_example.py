"""The page "Two axes, from one file": its commands succeed in their order, and training goes on where it was saved."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hyper_parallel.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "two-axes.md"

pytestmark = [
    pytest.mark.platforms("torch"),
    pytest.mark.skipif(not PAGE.exists(), reason="[no-tool] the pages are not installed"),
]


def commands(program):
    """Return the page's commands that start with ``program``, without it."""
    return [shlex.split(line) for line in re.findall(rf"^{program} (.*)$", PAGE.read_text(), re.MULTILINE)]


@pytest.mark.parametrize("words", commands("hyper-parallel") if PAGE.exists() else [], ids=lambda words: words[0])
def test_commands_of_the_page_succeed(words, monkeypatch, capsys):
    """The script is equal on 4 ranks and on one, and its plan is explained on 512."""
    monkeypatch.chdir(ROOT)
    status, out = main(words), capsys.readouterr().out
    assert status == 0, out
    assert ("equal on 4 ranks" if words[0] == "verify" else "ranks 0 and 511 run the same") in out
    assert "us or 25 GB/s" not in out  # links of two axes that are equal are named once


def losses(words, tmp_path):
    """Return the lines that a command of torchrun prints; its checkpoint is in a temporary folder."""
    words = [word.replace("reports/", f"{tmp_path}/") for word in words]
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("step ")]


@pytest.mark.sweep  # ten processes of torchrun; a checkpoint on other ranks is tested in core/checkpoint every day
def test_training_goes_on_with_another_number_of_ranks(tmp_path):
    """Saved on 4 and loaded on 2 ranks, the losses are those of a run without a break."""
    save, load = commands("torchrun")
    printed = losses(save, tmp_path) + losses(load, tmp_path)
    straight = losses([*save[: save.index("--steps")], "--steps", "5"], tmp_path)
    assert [line.split(":")[0] for line in straight] == [f"step {number}" for number in range(5)]
    for mine, theirs in zip(printed, straight, strict=True):
        assert mine == theirs
