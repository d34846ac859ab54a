"""``python ci/workshop bench --training``: its measurements, not their values."""

import json

import pytest

from workshop.bench.turns import BenchmarkRow
from workshop.commands import main

pytestmark = pytest.mark.platforms("torch")


def test_steps_are_a_table(monkeypatch, capsys, tmp_path):
    """Milliseconds, ratio and budget stand in columns, and the rows are the report; a slow row fails the command."""
    slow = BenchmarkRow("wide model, fully_shard, 2 ranks", 2000.0, None, 3000.0, 1.0, by_hand=True)
    save = BenchmarkRow("save of 1 GiB, 4 ranks", 1e6, None, 1.2e6, 1.5, by_hand=True)
    worlds = {2: [slow], 4: [save]}
    monkeypatch.setattr("workshop.bench.command.training_rows", worlds.pop)
    report = tmp_path / "bench-training.json"
    assert main(["bench", "--training", "--report", str(report)]) == 1
    assert [line.split()[-4:] for line in capsys.readouterr().out.splitlines()[1:3]] == [
        ["2.0", "3.0", "1.50", "1.00"],
        ["1000.0", "1200.0", "1.20", "1.50"],
    ]
    rows = json.loads(report.read_text())["rows"]
    assert [(row["name"], row["ok"]) for row in rows] == [(slow.name, False), (save.name, True)]
    worlds.update({2: [save], 4: []})
    assert main(["bench", "--training", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == rows[1:]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--harness"], "--harness times commands, and --training training steps; leave out one of them"),
        (
            ["--profile", "add"],
            "--profile measures the call of one row, and --training times steps; leave out one of them",
        ),
        (["--device", "npu"], "--training times the steps on cpu; leave out --device, or --training"),
        (
            ["--platform", "mindspore"],
            "--training compares with PyTorch's own parallelism, and MindSpore has none; leave out --platform",
        ),
    ],
)
def test_options_that_contradict_are_refused(options, message, capsys):
    """What steps over real processes cannot be combined with is one line with status 2."""
    assert main(["bench", "--training", *options]) == 2
    assert capsys.readouterr().err == f"python ci/workshop: error: {message}\n"
