"""The report of an audit, its programs, and the command."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from hyper_parallel.cli import main
from hyper_parallel.verify.ops import audit
from hyper_parallel.verify.ops.audit import AuditFinding, OperatorAudit, confirm, summary

pytestmark = pytest.mark.platforms("torch")


@pytest.mark.skipif(torch.__version__ >= (2, 14), reason="[no-tool] cumsum of PyTorch's DTensor is right from 2.14 on")
def test_pytorchs_own(capsys, tmp_path):
    """Relu is right; cumsum along a sharded dim starts anew on every rank, and a program shows the wrong value."""
    path = tmp_path / "audit.json"
    assert main(["verify", "ops", "--target", "torch-dtensor", "--op", "relu", "cumsum", "--report", str(path)]) == 1
    output = capsys.readouterr().out
    document = json.loads(path.read_text())
    relu, cumsum = document["operators"]
    assert (document["ok"], relu["outcome"], relu["counts"].keys()) == (False, "ok", {"ok"})
    assert relu["backward"] > 0
    assert cumsum["outcome"] == "wrong"
    # Its gradient calls flip, which PyTorch's DTensor has a rule for since 2.13; without, the rows are rejected.
    tables = vars(DTensor._op_dispatcher.sharding_propagator).values()
    has_flip = any(torch.ops.aten.flip.default in table for table in tables if isinstance(table, dict))
    assert cumsum["counts"]["ok" if has_flip else "rejects"] > 10
    (finding,) = cumsum["findings"]
    assert finding["text"].startswith("output of cumsum, sample ")
    assert " on 2 ranks [Shard(1)]: output 0 [Shard(dim=1)] is " in finding["text"]
    # The program needs PyTorch alone; new processes ran it over gloo, and it printed the wrong value.
    lines = finding["program"].split("\n")
    assert len(lines) <= 15
    assert "hyper_parallel" not in finding["program"]
    assert lines[2] == 'dist.init_process_group("gloo")  # torchrun --nproc-per-node 2 THIS_FILE'
    assert " should be tensor(" in finding["printed"]
    assert all(f"        {line}" in output for line in lines)
    assert "torch-dtensor: 2 operators (1 ok, 1 wrong)" in output


def test_a_decomposition_is_audited_in_its_public_spelling(capsys):
    """Cross entropy, a decomposition here, is called as PyTorch's function, and fill as one that writes."""
    status = main(["verify", "ops", "--target", "torch-dtensor", "--op", "cross_entropy", "fill", "--json"])
    document = json.loads(capsys.readouterr().out)
    reports = {report["op"]: report for report in document["operators"]}
    assert {op: set(report["spellings"]) for op, report in reports.items()} == {
        "cross_entropy": {"F.cross_entropy"},
        "fill": {"torch.fill_"},
    }
    assert sum(reports["cross_entropy"]["counts"].values()) > 30
    outcomes = {report["outcome"] for report in reports.values()}
    assert (status == 0) == document["ok"] == (outcomes <= {"ok", "rejects"})


def test_nothing_exercised_is_no_success(capsys):
    """Operators that cannot be compared are listed as not exercised, and the status says so."""
    assert main(["verify", "ops", "--target", "torch-dtensor", "--op", "rand_like"]) == 1
    output = capsys.readouterr().out
    assert "unexercised rand_like: no check\n    not tried: random: another library draws other numbers (2)" in output
    assert "not exercised: rand_like" in output
    assert main(["verify", "ops", "--target", "torch-dtensor", "--op", "rand_like", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_an_unknown_target(capsys):
    """An unknown target is refused, and the known ones are listed."""
    assert main(["verify", "ops", "--target", "jax"]) == 2
    assert "--target 'jax' is not one of torch-dtensor" in capsys.readouterr().err


def test_a_process_that_dies_is_a_crash():
    """The operator whose process died has one crash, with the reason."""
    lost = OperatorAudit.lost("b", "torch", "was killed by SIGSEGV")
    assert (lost.outcome, lost.findings[0].text) == ("crash", "its process was killed by SIGSEGV")


def test_a_wrong_gradient_as_a_program():
    """Gradients, several outputs, methods, properties and non-finite numbers are written; others give no program."""
    from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
    from hyper_parallel.verify.frameworks.torch.torch_dtensor_reproducer import Finding, RecordedCall, program

    x, empty = np.array([[1.0, np.inf], [np.nan, 2.0]]), np.zeros((0, 2))

    def run(operands):
        low, high = torch.chunk(operands[0].T, chunks=2, dim=-1)
        return [low.clamp(max=float("inf")), torch.nn.functional.pad(high, (0, 1), value=float("nan"))]

    call = RecordedCall(run, [x], [[x, x]], [Shard(0)], [True])
    text = program(Finding(call, "wrong", True, 0, [x[:, :1], None], x))
    seed = "distribute_tensor(torch.tensor([[1.0], [torch.nan]], dtype=torch.float64), mesh, [Replicate()])"
    assert text.split("\n")[5:10] == [
        "y1 = x0.T",
        "y2, y3 = torch.chunk(y1, chunks=2, dim=-1)",
        "y4 = y2.clamp(max=float('inf'))",
        "y5 = torch.nn.functional.pad(y3, (0, 1,), mode='constant', value=float('nan'))",
        f"torch.autograd.backward([y4], [{seed}])",
    ]
    assert "actual = torch.tensor([]) if x0.grad is None else x0.grad.full_tensor()" in text
    partial_values = RecordedCall(lambda operands: [operands[0] @ operands[1].mT], [empty, x], [[empty] * 2, [x, x]],
                    [Partial("max"), Replicate()], [False, False])  # fmt: skip
    text = program(
        Finding(partial_values, "wrong", right=np.zeros((0, 2)), seeds=[None]),
        before=call._replace(run=lambda operands: [operands[0].mT]),
    )
    assert "Partial('max')" in text
    assert "torch.tensor([], dtype=torch.float64).reshape((0, 2))" in text
    strange = call._replace(run=lambda operands: [torch.add(operands[0], operands[0], out=np.float32)])
    with pytest.raises(TypeError):
        program(Finding(strange, "wrong", right=x, seeds=[None]))
    long = call._replace(run=lambda operands: [sum([operands[0]] * 12)])
    assert program(Finding(long, "wrong", right=x, seeds=[None])) is None
    made = call._replace(run=lambda operands: [torch.from_numpy(x) for _ in operands])
    assert program(Finding(made, "wrong", right=x, seeds=[None])) is None


@pytest.mark.parametrize("world, multiples", [(2, "[-1, 2]"), (3, "[-3, 2, 2]")])
def test_parts_of_a_long_sum_are_multiples(world, multiples):
    """Parts of a pending sum of many elements are multiples of the drawn sum, which add up to it; the line is short."""
    import torch

    from hyper_parallel.core.dtensor.placements import Partial
    from hyper_parallel.verify.frameworks.torch.torch_dtensor_reproducer import Draws, Finding, RecordedCall, program

    x = Draws(3).integers(-4, 5, (7, 3, 3, 5)).astype(np.float64)
    call = RecordedCall(lambda operands: [torch.relu(operands[0])], [x], [[x] * world], [Partial("sum")], [False])
    (line,) = [line for line in program(Finding(call, "crash")).split("\n") if line.startswith("x0 = ")]
    drawn = line.removeprefix("x0 = DTensor.from_local(").partition(" * ")[0]
    np.testing.assert_array_equal(eval(drawn, {"torch": torch}).numpy(), x)  # noqa: S307 - our own program
    assert line.endswith(f" * {multiples}[dist.get_rank()], mesh, [Partial()])")
    assert sum(json.loads(multiples)) == 1
    assert len(line) < 250


def test_a_crash_and_a_plain_result_as_programs():
    """A crash is shown by the call alone, on as many ranks as it needs; a plain result by an assertion on its type."""
    import torch

    from hyper_parallel.core.dtensor.placements import Shard
    from hyper_parallel.verify.frameworks.torch.torch_dtensor_reproducer import Finding, RecordedCall, program

    x = np.array([1.0, 2.0, 3.0])
    call = RecordedCall(lambda operands: [torch.relu(operands[0])], [x], [[x, x, x]], [Shard(0)], [True])
    lines = program(Finding(call, "crash")).split("\n")
    assert lines[2:] == [
        'dist.init_process_group("gloo")  # torchrun --nproc-per-node 3 THIS_FILE',
        'mesh = dist.init_device_mesh("cpu", (3,))',
        "x0 = distribute_tensor(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), mesh, [Shard(0)]).requires_grad_()",
        "y1 = torch.relu(x0)",
        "print(y1.full_tensor())",
    ]
    plain = program(Finding(call, "plain", True, 0, [x])).split("\n")
    assert plain[-1] == 'assert isinstance(x0.grad, DTensor), f"{type(x0.grad)} should be DTensor"'


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("bounds", [None, (-4, 5), (-3, 4)])
@pytest.mark.parametrize("shape", [(5, 7), (3, 3, 3)])
def test_long_values_are_drawn_again_by_a_short_expression(shape, bounds, dtype):
    """The expression has the values to the bit; values that differ in a zero's sign are listed, as short ones are."""
    import torch

    from hyper_parallel.verify.frameworks.torch.torch_dtensor_reproducer import Draws, _literal

    for seed in range(3):
        draws = Draws(seed, 1)
        drawn = draws.standard_normal(shape) if bounds is None else draws.integers(*bounds, shape)
        values = torch.from_numpy(drawn.astype(dtype))
        text = _literal(values)
        assert len(text) < 130
        again = eval(text, {"torch": torch})  # noqa: S307 - our own expression
        assert (again.dtype, again.numpy().tobytes()) == (values.dtype, values.numpy().tobytes())
        changed = values.clone()
        changed[changed == changed.min()] = -0.0
        assert _literal(changed).startswith("torch.tensor([[")
    short = Draws(0).standard_normal((4, 6))
    assert _literal(torch.from_numpy(short)).startswith("torch.tensor([[")


@pytest.mark.platforms("torch")
def test_a_long_expected_value_is_computed():
    """One call with a long result: the program calls it on gathered operands; it does so for a gradient, too."""
    import torch

    from hyper_parallel.core.dtensor.placements import Replicate, Shard
    from hyper_parallel.verify.frameworks.torch.torch_dtensor_reproducer import Draws, Finding, RecordedCall, program

    draws = Draws(3)
    x, y, seed = draws.standard_normal((5, 6)), draws.standard_normal((6, 7)), draws.standard_normal((5, 7))
    call = RecordedCall(
        lambda operands: [operands[0] @ operands[1]], [x, y], [[x, x], [y, y]], [Shard(0), Replicate()], [True, True]
    )
    lines = program(Finding(call, "wrong", right=x @ y, seeds=[seed])).split("\n")
    assert lines[-3] == "expected = x0.full_tensor().matmul(x1.full_tensor())"
    lines = program(Finding(call, "wrong", True, 1, [seed], x.T @ seed)).split("\n")
    assert lines[-5] == "plain = [x.detach().full_tensor().requires_grad_(x.requires_grad) for x in (x0, x1,)]"
    assert lines[-4].startswith("torch.autograd.backward(plain[0].matmul(plain[1]), torch.randn((5, 7), generator=")
    assert lines[-3] == "expected = plain[1].grad"
    operands = {"x0": torch.from_numpy(x).requires_grad_(), "x1": torch.from_numpy(y).requires_grad_(), "torch": torch}
    run = "\n".join(lines[-5:-2]).replace(".full_tensor()", "")
    exec(run, operands)  # noqa: S102 - our own program
    torch.testing.assert_close(operands["expected"], torch.from_numpy(x.T @ seed))
    twice = call._replace(run=lambda operands: [(operands[0] @ operands[1]).relu()])
    text = program(Finding(twice, "wrong", right=np.maximum(x @ y, 0), seeds=[seed]))
    assert "expected = torch.tensor([[" in text


def _finding(programs, error="AssertionError"):
    return AuditFinding("wrong", "x", 2, error, programs)


@pytest.mark.sweep
def test_programs_are_confirmed_on_real_processes(monkeypatch):
    """The first program that ends with the error is kept, with what it printed; others pass or fail differently."""
    right = "print('1 should be 1')"
    broken = "raise ValueError('1 should be 2')"
    wrong = "import os; print(os.environ['RANK'], 'should be 2'); assert os.environ['RANK'] == '1', 'no'"
    crash = "raise KeyError('relu')"
    left = "import os, time; assert os.environ['RANK'] == '0', 'gone'; time.sleep(600)"
    findings = [
        _finding([right, broken, wrong]),
        _finding([right, broken]),
        _finding([]),
        _finding([crash], "KeyError"),
        _finding([left]),
    ]
    confirm("torch-dtensor", [OperatorAudit("f", findings=findings)])
    assert [(finding.program, finding.printed) for finding in findings] == [
        (wrong, "0 should be 2"),
        (right, ""),
        (None, ""),
        (crash, "KeyError: 'relu'"),
        (left, "AssertionError: gone"),  # the rank that waits for the failed one is ended
    ]
    monkeypatch.setitem(audit.TARGETS, "torch-dtensor", audit.Target("torch", "", "no.such.module"))
    lost = _finding([right])
    confirm("torch-dtensor", [OperatorAudit("f", findings=[lost])])
    assert (lost.program, lost.printed) == (right, "")


def test_a_program_that_hangs_shows_nothing(monkeypatch):
    """Processes that wait for each other are ended."""
    from hyper_parallel.verify.frameworks.torch import torch_dtensor_reproducer

    monkeypatch.setattr(torch_dtensor_reproducer, "_SECONDS", 0.2)
    assert torch_dtensor_reproducer._printed("import time; time.sleep(60)", 2, "AssertionError") is None


def test_the_worst_counts():
    """An operator's outcome is the worst of its placements; an operator without samples is not clean."""
    assert OperatorAudit("f", counts=Counter(ok=3, plain=1, rejects=2)).outcome == "plain"
    assert OperatorAudit("f").outcome == "unexercised"
    assert OperatorAudit("f", exempt="internal").holds
    wrong = OperatorAudit("g", Counter({"torch.g": 1}), Counter(wrong=1), findings=[_finding([])])
    assert wrong.text().split("\n") == [
        "wrong       g (torch.g): 1 wrong",
        "    wrong: x",
        "    no program of 15 lines shows it",
    ]
    wrong.findings[0].program = "a\nb"
    assert wrong.text().split("\n")[2:] == [
        "    reproducer, did not fail on real processes by itself",
        "        a",
        "        b",
    ]
    audits = [OperatorAudit("f", counts=Counter(ok=3), backward=2), wrong, OperatorAudit("h", skipped=Counter(why=4))]
    assert summary("t", audits).split("\n") == [
        "t: 3 operators (1 ok, 1 wrong, 1 unexercised)",
        "4 placements on worlds of 2 and 3: 3 ok, 1 wrong; 2 with gradients",
        "not exercised: h",
        "not tried: 4 samples or placements, by reason in the report",
    ]


def test_an_audit_crosses_processes():
    """An audit with findings is the same after JSON."""
    sent = OperatorAudit("g", Counter({"torch.g": 1}), Counter(wrong=1), 0, [_finding(["a"])], Counter(why=1))
    assert OperatorAudit.from_json(json.loads(json.dumps(sent.json()))) == sent
