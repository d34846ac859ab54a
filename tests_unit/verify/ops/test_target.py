"""Somebody else's distributed tensors under the same samples."""

import json
from collections import Counter

import numpy as np
import pytest

from hyper_parallel.cli import main
from hyper_parallel.verify.ops import target
from hyper_parallel.verify.ops.target import Audited, summary


@pytest.mark.platforms("torch")
def test_pytorchs_own(capsys, tmp_path):
    """Relu is clean; a number added to summands is added by every rank after another sum, and a program shows it."""
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
    assert said.rstrip().endswith("16 lines of findings")
    # The program needs PyTorch alone; two new processes ran it over gloo, and it printed the wrong value.
    lines = add["program"].split("\n")
    assert len(lines) == 13
    assert "hyper_parallel" not in add["program"]
    assert lines[2] == 'dist.init_process_group("gloo")  # torchrun --nproc-per-node 2 THIS_FILE'
    assert lines[8] == "y1 = torch.add(x0, 1.5, alpha=1)"
    assert add["printed"].startswith("tensor([[7.")
    assert " should be tensor([[5.5000," in add["printed"]
    assert all(f"        {line}" in said for line in lines)


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


@pytest.mark.platforms("torch")
def test_a_wrong_gradient_as_a_program():
    """A gradient, several outputs, methods, properties and odd numbers are written down; what cannot be is not."""
    import torch

    from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
    from hyper_parallel.platform.torch.peer_program import Call, Finding, program

    x, empty = np.array([[1.0, np.inf], [np.nan, 2.0]]), np.zeros((0, 2))

    def run(operands):
        low, high = torch.chunk(operands[0].T, chunks=2, dim=-1)
        return [low.clamp(max=float("inf")), torch.nn.functional.pad(high, (0, 1), value=float("nan"))]

    call = Call(run, [x], [[x, x]], [Shard(0)], [True])
    text = program(Finding(call, [x[:, :1], None], gradient=True, which=0, right=x))
    seed = "distribute_tensor(torch.tensor([[1.0], [torch.nan]], dtype=torch.float64), mesh, [Replicate()])"
    assert text.split("\n")[5:10] == [
        "y1 = x0.T",
        "y2, y3 = torch.chunk(y1, chunks=2, dim=-1)",
        "y4 = y2.clamp(max=float('inf'))",
        "y5 = torch.nn.functional.pad(y3, (0, 1,), mode='constant', value=float('nan'))",
        f"torch.autograd.backward([y4], [{seed}])",
    ]
    assert "found = torch.tensor([]) if x0.grad is None else x0.grad.full_tensor()" in text
    summands = Call(lambda operands: [operands[0] @ operands[1].mT], [empty, x], [[empty] * 2, [x, x]],
                    [Partial("max"), Replicate()], [False, False])  # fmt: skip
    text = program(
        Finding(summands, [None], gradient=False, which=0, right=np.zeros((0, 2))),
        before=call._replace(run=lambda operands: [operands[0].mT]),
    )
    assert "Partial('max')" in text
    assert "torch.tensor([], dtype=torch.float64).reshape((0, 2))" in text
    strange = call._replace(run=lambda operands: [torch.add(operands[0], operands[0], out=np.float32)])
    with pytest.raises(TypeError):
        program(Finding(strange, [None], gradient=False, which=0, right=x))
    long = call._replace(run=lambda operands: [sum([operands[0]] * 12)])
    assert program(Finding(long, [None], gradient=False, which=0, right=x)) is None
    made = call._replace(run=lambda operands: [torch.from_numpy(x) for _ in operands])
    assert program(Finding(made, [None], gradient=False, which=0, right=x)) is None


@pytest.mark.platforms("torch")
def test_programs_that_show_nothing(monkeypatch):
    """A program that is right, one that fails otherwise and one that hangs are passed over; without any, none."""
    from hyper_parallel.platform.torch import peer_confirm

    right = "print('1 should be 1')"
    broken = "raise ValueError('1 should be 2')"
    wrong = "import os; print(os.environ['RANK'], 'should be 2'); assert False, 'no'"
    assert target.reproduced("torch-dtensor", [right, broken, wrong]) == (wrong, "0 should be 2")
    assert target.reproduced("torch-dtensor", [right, broken]) == (right, "")
    assert target.reproduced("torch-dtensor", []) == (None, "")
    monkeypatch.setattr(target, "_CONFIRM", {"torch-dtensor": "no.such.module"})
    assert target.reproduced("torch-dtensor", [right]) == (right, "")
    monkeypatch.setattr(peer_confirm, "_SECONDS", 0.2)
    assert peer_confirm._printed("import time; time.sleep(60)") is None


def test_the_worst_counts():
    """An operator is what the worst of its placements is; one without samples is not clean."""
    assert Audited("f", Counter(ok=3, plain=1, rejects=2)).outcome == "plain"
    assert Audited("f").outcome == "unexercised"
    lines = Audited("g", Counter(wrong=1), ["wrong: x"]).text().split("\n")
    assert lines == ["wrong       g: 1 wrong", "    wrong: x", "    no program of few lines shows it"]
    lines = Audited("g", Counter(wrong=1), ["wrong: x"], "a\nb").text().split("\n")
    assert lines[2:] == ["    reproducer, needs what the operators before it left behind", "        a", "        b"]
    text = summary("t", [Audited("f", Counter(ok=3)), Audited("g", Counter(wrong=1), ["wrong: x"])])
    assert text == "t: 2 operators (1 ok, 1 wrong); placements: 3 ok, 1 wrong; 3 lines of findings"
