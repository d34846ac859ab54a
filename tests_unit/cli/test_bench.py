"""``hyper-parallel bench``: what it measures, not how long that takes."""

import json
import math

import pytest

from hyper_parallel.cli import main

pytestmark = pytest.mark.platforms("torch")


def test_every_row_is_measured(capsys):
    """Every operation is measured in all three implementations, and the rows come as JSON."""
    assert main(["bench", "--repeats", "3", "--json"]) in (0, 1)  # 1: a ratio is over its budget, which time decides
    rows = json.loads(capsys.readouterr().out)
    light = ["add", "multiply by a number", "linear", "view", "layer_norm"]
    assert [row["name"] for row in rows][: len(light)] == light
    assert rows[-1]["name"] == "block"
    for row in rows:
        assert set(row) == {"name", "plain", "peer", "ours", "budget", "ratio"}
        assert all(math.isfinite(row[name]) and row[name] > 0 for name in ("plain", "peer", "ours", "budget"))
        assert math.isfinite(row["ratio"])


def test_no_repeats(capsys):
    """Nothing measured is no result."""
    assert main(["bench", "--repeats", "0"]) == 2
    assert capsys.readouterr().err == "hyper-parallel: error: --repeats 0 must be at least 1\n"
