"""Somebody else's distributed tensors under the same samples."""

import json
from collections import Counter

import pytest

from hyper_parallel.cli import main
from hyper_parallel.verify.ops import target
from hyper_parallel.verify.ops.target import Audited, summary


@pytest.mark.platforms("torch")
def test_pytorchs_own(capsys, tmp_path):
    """Relu is clean; a number added to summands is added by every rank, and that is found, with where and what."""
    path = tmp_path / "audit.json"
    assert main(["verify", "ops", "--target", "torch-dtensor", "--op", "relu", "add", "--report", str(path)]) == 0
    said = capsys.readouterr().out
    relu, add = json.loads(path.read_text())["operators"]
    assert (relu["outcome"], relu["counts"].keys()) == ("ok", {"ok"})
    assert add["outcome"] == "wrong"
    assert add["counts"]["ok"] > 10
    assert "[Partial(sum)]: output 0 [Partial(sum)] is" in add["shown"][0]
    assert "relu" not in said
    assert "torch-dtensor: 2 operators (1 ok, 1 wrong)" in said
    assert said.rstrip().endswith("2 lines of findings")


def test_an_unknown_target(capsys):
    """It is refused, and the ones that there are are named."""
    assert main(["verify", "ops", "--target", "jax"]) == 2
    assert "--target 'jax': one of torch-dtensor" in capsys.readouterr().err


def test_processes_that_die_cost_one_operator(monkeypatch):
    """What they were at is a crash, and the rest is done by new ones."""
    runs = [
        [{"begin": "a"}, {"op": "a", "counts": {"ok": 2}, "shown": []}, {"begin": "b"}],
        [{"begin": "c"}, {"op": "c", "counts": {"rejects": 1}, "shown": []}],
    ]
    asked = []

    def lines(name, ops, store):
        asked.append(list(ops))
        return iter(runs[len(asked) - 1])

    monkeypatch.setattr(target, "_lines", lines)
    found = list(target.audit("torch-dtensor", ["a", "b", "c"]))
    assert [(one.op, one.outcome) for one in found] == [("a", "ok"), ("b", "crash"), ("c", "rejects")]
    assert asked == [["a", "b", "c"], ["c"]]


def test_the_worst_counts():
    """An operator is what the worst of its placements is; one without samples is not clean."""
    assert Audited("f", Counter(ok=3, plain=1, rejects=2)).outcome == "plain"
    assert Audited("f").outcome == "unexercised"
    text = summary("t", [Audited("f", Counter(ok=3)), Audited("g", Counter(wrong=1), ["wrong: x"])])
    assert text == "t: 2 operators (1 ok, 1 wrong); placements: 3 ok, 1 wrong; 2 lines of findings"
