"""One operator on another library's distributed tensors: each kind of error is reported."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from hyper_parallel.cli import main
from hyper_parallel.core.dtensor.placements import Replicate
from hyper_parallel.core.shard import rules
from hyper_parallel.platform.select import use_platform
from hyper_parallel.verify.ops import audit
from hyper_parallel.verify.ops.audit import _MOST, OperatorAudit, _RankAudit, _tuples, summary

pytestmark = pytest.mark.platforms("torch")

rules.load()


class Peer:
    """Distributed tensors that never communicate: right on replicated operands, wrong in the way of ``fault``.

    Args:
        fault: ``raises``, ``refuses``, ``unwraps``, ``forgets`` (gradients), ``bares`` (gradients), or nothing.
    """

    def __init__(self, fault=""):
        import torch

        peer = self

        class PeerTensor(torch.Tensor):
            placements = ("whole",)

            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                if func is torch.relu and peer.fault == "raises":
                    raise KeyError("relu")
                if func is torch.relu and peer.fault == "refuses":
                    raise RuntimeError("relu has no sharding strategy")
                result = super().__torch_function__(func, types, args, kwargs)
                return result.as_subclass(torch.Tensor) if func is torch.relu and peer.fault == "unwraps" else result

        self.fault, self.tensor_class, self.leaves = fault, PeerTensor, []

    def wrap(self, piece, *_, differentiated=False):
        """Return the shard as if it were the global tensor, which is right for replicated operands only."""
        import torch

        made = torch.from_numpy(piece.copy()).as_subclass(self.tensor_class)
        if differentiated:
            self.leaves.append(made.requires_grad_())
        return made

    def is_wrapped(self, value):
        """Return whether the value is one of these tensors."""
        return isinstance(value, self.tensor_class)

    def whole(self, tensor):
        """Return the local values as if they were the global ones."""
        return tensor.detach().numpy()

    def backward(self, outs, seeds):
        """Run backward, and falsify the gradients of the leaves."""
        import torch

        torch.autograd.backward(
            [out for out in outs if out.requires_grad], [seed for seed in seeds if seed is not None]
        )
        for leaf in self.leaves:
            if leaf.grad is not None and self.fault == "forgets":
                leaf.grad = None
            elif leaf.grad is not None and self.fault != "bares":
                leaf.grad = leaf.grad.as_subclass(self.tensor_class)

    def gathered(self, own):
        """Return what each rank reported."""
        return [own, ("ok", "", ("", 0))]

    def call(self, *arguments):
        """Return the placements, which stand for the call's text in a program."""
        return arguments[-1]

    def program(self, call, _seeds, gradient, index, _right, before):
        """Return which wrong value the program would show."""
        return f"{'gradient' if gradient else 'output'} {index} of {call} after {before}"


def audited(fault):
    """Return the counts, the findings shown first, and the programs that may reproduce them."""
    with use_platform("torch"):
        return _RankAudit("relu", Peer(fault), 0).run()


def test_a_shard_taken_for_the_global_tensor_is_wrong():
    """Replicated operands are right; a shard taken for the global tensor is wrong, with sample, sizes and place."""
    counts, (shown,), programs = audited("")
    assert counts["ok"] > 0
    assert set(counts) == {"ok", "wrong"}
    assert shown.startswith("wrong: sample 0 {")
    assert "[Shard(0)]: output 0 ['whole'] has shape [" in shown
    assert programs[:2] == ["output 0 of (Shard(0),) after None", "output 0 of (Shard(0),) after (Replicate(),)"]


@pytest.mark.parametrize(
    "fault, outcome, text",
    [
        ("raises", "crash", "KeyError: 'relu'"),
        ("unwraps", "plain", "a result is a plain tensor"),
        ("forgets", "wrong", "gradient of operand 0 is none"),
        ("bares", "plain", "gradient of operand 0 is a plain tensor"),
    ],
)
def test_each_kind_of_error_is_reported(fault, outcome, text):
    """An exception, a plain result, a missing gradient and a plain gradient are each reported as such."""
    counts, shown, _ = audited(fault)
    assert counts[outcome] > 0
    (line,) = [line for line in shown if line.startswith(f"{outcome}: ") and "[Replicate()]" in line]
    assert line.endswith(text)


def test_a_refusal_is_no_fault():
    """A refusal without a sharding strategy is counted, and not shown."""
    counts, shown, programs = audited("refuses")
    assert (set(counts), shown, programs) == ({"rejects"}, [], [])


def test_placements_are_sampled_where_there_are_too_many():
    """Three matrices have 64 tuples of placements: a limited number is sampled, in order, repeatably and distinct."""
    import numpy as np

    arrays = [np.ones((2, 3))] * 3
    drawn = list(_tuples(arrays, 7))
    assert len(set(drawn)) == len(drawn) == _MOST
    assert drawn == list(_tuples(arrays, 7))
    assert list(_tuples([np.ones((), np.int64)], 7)) == [(Replicate(),)]


@pytest.mark.platforms("torch")
def test_pytorchs_own(capsys, tmp_path):
    """Relu is clean; add with a number on partial values adds it on every rank, and a program shows the wrong value."""
    path = tmp_path / "audit.json"
    assert main(["verify", "ops", "--target", "torch-dtensor", "--op", "relu", "add", "--report", str(path)]) == 0
    output = capsys.readouterr().out
    relu, add = json.loads(path.read_text())["operators"]
    assert (relu["outcome"], relu["counts"].keys()) == ("ok", {"ok"})
    assert add["outcome"] == "wrong"
    assert add["counts"]["ok"] > 10
    assert "[Partial(sum)]: output 0 [Partial(sum)] is" in add["shown"][0]
    assert "relu" not in output
    assert "torch-dtensor: 2 operators (1 ok, 1 wrong)" in output
    assert output.rstrip().endswith("16 lines of findings")
    # The program needs PyTorch alone; two new processes ran it over gloo, and it printed the wrong value.
    lines = add["program"].split("\n")
    assert len(lines) == 13
    assert "hyper_parallel" not in add["program"]
    assert lines[2] == 'dist.init_process_group("gloo")  # torchrun --nproc-per-node 2 THIS_FILE'
    assert lines[8] == "y1 = torch.add(x0, 1.5, alpha=1)"
    assert add["printed"].startswith("tensor([[7.")
    assert " should be tensor([[5.5000," in add["printed"]
    assert all(f"        {line}" in output for line in lines)


def test_an_unknown_target(capsys):
    """An unknown target is refused, and the known ones are listed."""
    assert main(["verify", "ops", "--target", "jax"]) == 2
    assert "--target 'jax': one of torch-dtensor" in capsys.readouterr().err


def test_processes_that_die_cost_one_operator(monkeypatch):
    """The operator whose process died is a crash; a new process checks the operators after it."""
    runs = [
        [{"begin": "a"}, {"op": "a", "counts": {"ok": 2}, "shown": []}, {"begin": "b"}],
        [{"begin": "c"}, {"op": "c", "counts": {"rejects": 1}, "shown": []}],
    ]
    asked = []

    def lines(name, ops, store):
        asked.append(list(ops))
        return iter(runs[len(asked) - 1])

    monkeypatch.setattr(audit, "_lines", lines)
    reports = list(audit.audit("torch-dtensor", ["a", "b", "c"]))
    assert [(report.op, report.outcome) for report in reports] == [("a", "ok"), ("b", "crash"), ("c", "rejects")]
    assert asked == [["a", "b", "c"], ["c"]]


@pytest.mark.platforms("torch")
def test_a_wrong_gradient_as_a_program():
    """Gradients, several outputs, methods, properties and non-finite numbers are written; others give no program."""
    import torch

    from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
    from hyper_parallel.platform.torch.torch_dtensor_reproducer import Finding, RecordedCall, program

    x, empty = np.array([[1.0, np.inf], [np.nan, 2.0]]), np.zeros((0, 2))

    def run(operands):
        low, high = torch.chunk(operands[0].T, chunks=2, dim=-1)
        return [low.clamp(max=float("inf")), torch.nn.functional.pad(high, (0, 1), value=float("nan"))]

    call = RecordedCall(run, [x], [[x, x]], [Shard(0)], [True])
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
    partial_values = RecordedCall(lambda operands: [operands[0] @ operands[1].mT], [empty, x], [[empty] * 2, [x, x]],
                    [Partial("max"), Replicate()], [False, False])  # fmt: skip
    text = program(
        Finding(partial_values, [None], gradient=False, which=0, right=np.zeros((0, 2))),
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
    """Programs that pass, fail differently or hang are skipped; if none remains, there is no program."""
    from hyper_parallel.platform.torch import torch_dtensor_reproducer

    right = "print('1 should be 1')"
    broken = "raise ValueError('1 should be 2')"
    wrong = "import os; print(os.environ['RANK'], 'should be 2'); assert False, 'no'"
    assert audit.reproduced("torch-dtensor", [right, broken, wrong]) == (wrong, "0 should be 2")
    assert audit.reproduced("torch-dtensor", [right, broken]) == (right, "")
    assert audit.reproduced("torch-dtensor", []) == (None, "")
    monkeypatch.setattr(audit, "_CONFIRM", {"torch-dtensor": "no.such.module"})
    assert audit.reproduced("torch-dtensor", [right]) == (right, "")
    monkeypatch.setattr(torch_dtensor_reproducer, "_SECONDS", 0.2)
    assert torch_dtensor_reproducer._printed("import time; time.sleep(60)") is None


def test_the_worst_counts():
    """An operator's outcome is the worst of its placements; an operator without samples is not clean."""
    assert OperatorAudit("f", Counter(ok=3, plain=1, rejects=2)).outcome == "plain"
    assert OperatorAudit("f").outcome == "unexercised"
    lines = OperatorAudit("g", Counter(wrong=1), ["wrong: x"]).text().split("\n")
    assert lines == ["wrong       g: 1 wrong", "    wrong: x", "    no program of few lines shows it"]
    lines = OperatorAudit("g", Counter(wrong=1), ["wrong: x"], "a\nb").text().split("\n")
    assert lines[2:] == ["    reproducer, needs what the operators before it left behind", "        a", "        b"]
    text = summary("t", [OperatorAudit("f", Counter(ok=3)), OperatorAudit("g", Counter(wrong=1), ["wrong: x"])])
    assert text == "t: 2 operators (1 ok, 1 wrong); placements: 3 ok, 1 wrong; 3 lines of findings"
