"""The worlds in which training steps are measured are started as users start theirs."""

import json
import subprocess
from pathlib import Path

import pytest

from workshop.bench import training_speed


def test_ranks_are_started_by_torchrun(monkeypatch):
    """A world of as many ranks is started, and the rows are those that it wrote."""
    commands = []

    def run(command, **_):
        commands.append(command)
        row = {"name": "a", "plain": 2.0, "peer": None, "ours": 1.0, "budget": 0.5, "by_hand": True}
        Path(command[-1]).write_text(json.dumps([row]))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(training_speed.subprocess, "run", run)
    (row,) = training_speed.training_rows(3)
    assert (row.name, row.ratio) == ("a", 0.5)
    assert "torch.distributed.run" in commands[0][2]
    assert commands[0][3:-1] == [
        "--standalone", "--nproc-per-node=3", "-m", "workshop.bench.torch.training",
    ]  # fmt: skip


def test_failed_ranks_end_the_measurement(monkeypatch):
    """What the ranks printed last is in the error."""
    failed = subprocess.CompletedProcess([], 1, "", "rank 1: no memory\n")
    monkeypatch.setattr(training_speed.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError) as caught:
        list(training_speed.training_rows(2))
    assert str(caught.value) == "the benchmark failed on 2 ranks: rank 1: no memory"
