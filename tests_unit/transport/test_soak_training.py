"""Short forms of ``soak_training.py``: training goes on from a checkpoint as if it had not been interrupted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.platforms("torch"), pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")]


@pytest.fixture(scope="module")
def training(load_file):
    """The module ``soak_training.py`` beside this file."""
    return load_file(Path(__file__).with_name("soak_training.py"))


@pytest.mark.untraced
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(4, 12))])
def test_simulated_ranks_go_on_as_if_not_interrupted(training, seed):
    """A restarted program has the losses and weights of one that ran through; in another world, within rounding."""
    assert training.check(training.draw(seed, real=False)) == ""


@pytest.mark.sweep
@pytest.mark.parametrize("plan", ["fully_shard", "DDP", "sequence parallel"])
def test_real_ranks_go_on_as_if_not_interrupted(training, plan):
    """Three processes, of which one is killed, go on with equal losses and weights in a new world."""
    drawn = training.draw(3, real=True)
    files = "torch.save"
    case = drawn._replace(plan=plan, size=3, later=3, files=files, dropout=0.3, steps=6, saved=2, lost=4, hidden=9)
    assert training.check(case) == ""


@pytest.mark.sweep
def test_a_minute_of_random_programs():
    """A minute of random programs ends without a difference, and the process does not grow."""
    script = Path(__file__).with_name("soak_training.py")
    command = [sys.executable, "-W", "ignore", str(script), "--minutes", "1", "--seed", "500"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "flat" in ended.stdout


def test_differences_are_named(training):
    """Ranks whose losses or weights differ are listed; a loss beyond rounding is reported with both values."""
    whole = [([1.0, 2.0], "a"), ([1.0, 2.0], "b")]
    assert training.unequal(whole, [([2.0], "a"), ([2.0], "b")], 1) == ""
    text = "ranks [0, 1] have other losses or weights after the restart"
    assert training.unequal(whole, [([2.5], "a"), ([2.0], "c")], 1) == text
    assert training.beyond([2.0], [2.0 + 2**-45], [[2.0], [2.0]], "float64") == ""
    assert training.beyond([2.0], [2.1], [[2.1], [2.1]], "float64") == "loss 0 is 2.1, not 2.0"
    assert "nan" in training.beyond([2.0], [float("nan")], [[2.1], [2.1]], "float64")
