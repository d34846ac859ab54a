"""``hyper-parallel verify bugs``: its output, reports, exit status and refusals."""

import json

import pytest

from hyper_parallel.cli import INTERRUPTED, main
from hyper_parallel.verify.bugs import corpus
from hyper_parallel.verify.bugs.registry import bugs_named

pytestmark = pytest.mark.platforms("torch")

ONE = ["--platform", "torch", "--only", "average_for_sum"]


def ran(capsys, *arguments):
    """Return the exit status and the output."""
    status = main(["verify", "bugs", *map(str, arguments)])
    return status, *capsys.readouterr()


def test_a_bug_is_run_and_written(capsys, tmp_path):
    """A chosen bug is run in both forms; the result is printed, and written as text, JSON and a page."""
    status, out, _ = ran(capsys, *ONE, "--report", tmp_path / "bugs.txt", "--html", tmp_path / "bugs.html")
    assert status == 0, out
    first, last, seed = out.splitlines()
    assert first == "torch average_for_sum: caught: the gradient of head.weight, average-for-sum over dp"
    assert last.startswith("1 of 1 bugs caught, 1 of 1 fixed forms pass; the tensor is right in 1, the cause in 1 (")
    assert seed == "seed 0"
    assert (tmp_path / "bugs.txt").read_text().endswith(f"\n{out.removesuffix('seed 0' + chr(10))}")  # under the header
    assert "NeMo Automodel 3822" in (tmp_path / "bugs.html").read_text()
    status, out, _ = ran(capsys, *ONE, "--json", "--seed", 7, "--report", tmp_path / "bugs.json")
    assert json.loads(out)["bugs"][0]["cause_right"]
    assert json.loads(out)["header"]["seed"] == 7
    assert json.loads((tmp_path / "bugs.json").read_text())["ok"]


def test_a_bug_that_is_missed_fails_the_run(capsys, monkeypatch):
    """A broken form that the harness finds equal fails the command."""
    (bug,) = bugs_named(["torch"], ["average_for_sum"])
    train = getattr(bug.load(), bug.name)
    monkeypatch.setattr(bug.load(), bug.name, lambda _: train(bug=False))
    status, out, _ = ran(capsys, *ONE)
    assert status == 1
    assert out.startswith("torch average_for_sum: MISSED: equal, ")


def test_an_interruption_leaves_a_partial_report(capsys, monkeypatch, tmp_path):
    """After Ctrl-C the report says what was finished."""

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus, "run_bug", stop)
    status, _, err = ran(capsys, *ONE, "--report", tmp_path / "bugs.json")
    assert status == INTERRUPTED
    assert "partial report: 0 of 1 bugs finished" in err
    assert not json.loads((tmp_path / "bugs.json").read_text())["ok"]


def test_an_unknown_bug_is_refused(capsys):
    """An unknown name is an error with near ones, before anything is run."""
    status, out, err = ran(capsys, "--platform", "torch", "--only", "average_for_sums")
    assert (status, out) == (2, "")
    message = "hyper-parallel: error: no bug of torch is called 'average_for_sums'; did you mean average_for_sum"
    assert err.startswith(message)
