"""``bench --baseline``: rows are held to an earlier run."""

import json

import pytest

from workshop.bench.turns import BenchmarkRow
from workshop.commands import main

pytestmark = pytest.mark.platforms("torch")

ROWS = [
    BenchmarkRow("add", 1.0, 11.0, 3.0, 0.6),
    BenchmarkRow("chain of 24", 10.0, 90.0, 25.0, 2.3, by_hand=True),
    BenchmarkRow("median operator: add", 1.0, 11.0, 3.0, 0.3),
]


@pytest.fixture
def bench(monkeypatch, tmp_path, capsys):
    """Run the command on given rows; return its status, its output and its errors."""
    monkeypatch.chdir(tmp_path)

    def run(rows, *options):
        monkeypatch.setattr("workshop.bench.torch.operators.run", lambda *_: iter(rows))
        status = main(["bench", *options])
        return status, *capsys.readouterr()

    return run


def test_ratios_are_held_to_those_of_an_earlier_run(bench):
    """A ratio up to 1.3 times the earlier one passes whatever its budget, a larger one fails; medians are compared."""
    assert bench(ROWS, "--report", "earlier.json")[0] == 1  # the chain is over its budget
    slower = [
        BenchmarkRow("add", 1.0, 11.0, 3.5, 0.6),
        BenchmarkRow("chain of 24", 10.0, 90.0, 32.0, 2.3, by_hand=True),
        BenchmarkRow("median operator: exp", 1.0, 11.0, 3.5, 0.3),
    ]
    status, out, _ = bench(slower, "--baseline", "earlier.json", "--json")
    assert status == 0
    rows = json.loads(out)["rows"]
    assert [row["budget"] for row in rows] == pytest.approx([0.2 * 1.3, 2.5 * 1.3, 0.2 * 1.3])
    assert [row["ok"] for row in rows] == [True] * 3
    much_slower = [BenchmarkRow("chain of 24", 10.0, 90.0, 33.0, 5.0, by_hand=True)]
    status, out, _ = bench(much_slower, "--baseline", "earlier.json")
    assert status == 1
    (line,) = (line.split() for line in out.splitlines() if line.startswith("chain of 24"))
    assert line[3:] == ["10.0", "90.0", "33.0", "3.30", "3.25"]


def test_wrong_baselines_are_told(bench, tmp_path):
    """A file that is not a report, one without ratios, and a row that it lacks are one line each, with what to do."""
    (tmp_path / "text.json").write_text("no")
    status, _, err = bench(ROWS, "--baseline", "text.json")
    assert status == 2
    assert err.startswith("python ci/workshop: error: text.json is not a report of `python ci/workshop bench`: ")
    (tmp_path / "seconds.json").write_text(json.dumps([{"name": "import", "seconds": 1.0, "budget": 2.0}]))
    assert bench(ROWS, "--baseline", "seconds.json") == (2, "", (
        "python ci/workshop: error: --baseline seconds.json has no ratios; write one with `python ci/workshop "
        "bench --report seconds.json`\n"
    ))  # fmt: skip
    (tmp_path / "wrong.json").write_text(json.dumps([{"name": "add", "ratio": [], "budget": 2.0}]))
    status, _, err = bench(ROWS, "--baseline", "wrong.json")
    assert (status, err.partition(":")[2].startswith(" error: wrong.json cannot be shown: it is damaged")) == (2, True)
    bench(ROWS[:1], "--report", "few.json")
    status, _, err = bench(ROWS, "--baseline", "few.json")
    assert status == 2
    assert err.endswith(
        "python ci/workshop: error: --baseline few.json has no ratio of 'chain of 24', 'median operator: add'; write "
        "it anew with `python ci/workshop bench --report few.json`\n"
    )


@pytest.mark.parametrize("options, name", [(["--harness"], "--harness"), (["--profile", "add"], "--profile")])
def test_what_has_no_ratios_takes_no_baseline(bench, options, name):
    """Seconds and profiles cannot be held to ratios."""
    status, _, err = bench(ROWS, "--baseline", "earlier.json", *options)
    assert (status, err) == (
        2, f"python ci/workshop: error: --baseline compares ratios, and {name} measures none; leave out one of them\n"
    )  # fmt: skip
