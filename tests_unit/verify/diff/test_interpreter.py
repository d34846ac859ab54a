"""Runs by another interpreter: their records are compared, and what keeps them from running is said."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from hyper_parallel.errors import RankFailedError
from hyper_parallel.verify.diff import interpreter
from hyper_parallel.verify.diff.interpreter import Interpreter, main
from hyper_parallel.verify.diff.run import verify_diff
from hyper_parallel.verify.diff.side import DiffSide
from hyper_parallel.verify.engine.scratch import Scratch
from hyper_parallel.verify.engine.sinks import KeepSink
from hyper_parallel.verify.frameworks.contract.record_log import RecordLimits
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.program import find_program
from hyper_parallel.verify.program.worlds import World

pytestmark = pytest.mark.platforms("torch")

TRAIN = """
import sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if "fast" in sys.argv else 0.1)
data = torch.randn(6, 3)
if "sharded" in sys.argv:
    data = data.chunk(dist.get_world_size())[dist.get_rank()]
if "fail" in sys.argv:
    raise RuntimeError("on purpose")
if "exit" in sys.argv:
    sys.exit(4)
model(data).square().mean().backward()
if "sharded" in sys.argv:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
optimizer.step()
"""


@pytest.fixture
def script(tmp_path):
    """A script that trains for a step, fails or exits."""
    (tmp_path / "train.py").write_text(TRAIN)
    return str(tmp_path / "train.py")


def test_another_interpreter_runs_b(script):
    """Ranks of a process of that interpreter are compared; its versions are in the report. It imports PyTorch anew."""
    report = verify_diff(DiffSide(script, (), 1, "threads"), DiffSide(script, (), 2, "threads", python=sys.executable))
    assert report.status == 0, report.text()
    words = f"{script} on torch by {sys.executable} (Python {sys.version.split()[0]}, torch "
    assert report.names[1].startswith(words)
    assert report.names[1].endswith("), 2 ranks")


def asked(script, scratch, *arguments):
    """Write a question as an interpreter is asked it, and return the paths of question and answer."""
    world = World(2, "torch", "threads", (("world", 2),), RecordLimits(sink=KeepSink(scratch, "run B")))
    question, answer = scratch.path / "question", scratch.path / "answer"
    question.write_bytes(interpreter.pack_back((find_program(script, arguments, "B"), world, None, None)))
    return question, answer, world


@pytest.mark.parametrize(
    "argument, error, said",
    [("", None, ""), ("fail", RankFailedError, "on purpose"), ("exit", InputError, "sys.exit(4)")],
)
def test_what_came_of_the_run_is_answered(script, monkeypatch, argument, error, said):
    """A run, a rank that fails and a program that cannot be run come back as what they are."""

    def here(command, **_):
        main(*command[-2:])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(interpreter.subprocess, "run", here)
    with Scratch() as scratch:
        _, _, world = asked(script, scratch)
        program = find_program(script, (argument,), "B")
        if error is None:
            run = Interpreter(sys.executable, "--b-python").run(program, world, scratch)
            assert [rank.rank for rank in run.ranks] == [0, 1]
            assert {record.kind for record in run.ranks[1].records} >= {"weight", "output", "gradient", "loss"}
        else:
            with pytest.raises(error) as raised:
                Interpreter(sys.executable, "--b-python").run(program, world, scratch)
            assert said in str(raised.value)


def test_an_interpreter_that_does_not_answer_is_said(script, tmp_path):
    """The end of what it wrote is in the message, and a name of nothing is named."""
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such module >&2\nexit 3\n")
    broken.chmod(0o755)
    with Scratch() as scratch:
        _, _, world = asked(script, scratch)
        program = find_program(script, (), "B")
        with pytest.raises(InputError) as refused:
            Interpreter(str(broken), "--b-python").run(program, world, scratch)
    assert str(refused.value) == f"--b-python {broken} ends with status 3 and without an answer\nno such module"
    with pytest.raises(InputError) as refused:
        Interpreter("nosuchpython", "--b-python")
    assert str(refused.value) == "--b-python nosuchpython: there is no such program"


def test_an_interpreter_that_cannot_start_or_does_not_end_is_refused(script, tmp_path, monkeypatch):
    """The error of the system, or the time that passed, is said with the option; a second run uses the same folder."""
    broken = tmp_path / "python"
    broken.write_text("#!/no/such/shell\n")
    broken.chmod(0o755)
    with Scratch() as scratch:
        _, _, world = asked(script, scratch)
        program = find_program(script, (), "B")
        with pytest.raises(InputError) as refused:
            Interpreter(str(broken), "--b-python").run(program, world, scratch)
        assert str(refused.value) == f"--b-python {broken}: [Errno 2] No such file or directory: '{broken}'"
        broken.write_text("#!/bin/sh\nexec sleep 60\n")
        monkeypatch.setattr(interpreter, "_STARTED", 0.3 - world.timeout)
        with pytest.raises(InputError, match=r"^--b-python .*: Command .* timed out after 0\.\d+ seconds$"):
            Interpreter(str(broken), "--b-python").run(program, world, scratch)


def test_a_framework_that_is_not_installed_has_no_version():
    """The versions are the interpreter's alone then."""
    assert interpreter._versions("no-such-framework") == f"Python {platform.python_version()}"


def test_another_interpreter_runs_a_and_measures_its_rounding(script, monkeypatch):
    """The reference, its repeats and the ranks run there: another order of sums is equal, another rate is not."""
    asked_for = []

    def here(command, **_):
        asked_for.append(interpreter.unpack(Path(command[-2]).read_bytes())[2])
        main(*command[-2:])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(interpreter.subprocess, "run", here)
    first = DiffSide(script, ("sharded",), 2, "threads", python=sys.executable)
    report = verify_diff(first, DiffSide(script, ("sharded",), 3, "threads"))
    assert (report.status, report.own) == (0, []), report.text()
    assert report.verdict.power.count == 2
    words = f"{script} sharded on torch by {sys.executable} (Python {sys.version.split()[0]}, torch "
    assert report.names[0].startswith(words)
    assert [perturbation is None for perturbation in asked_for] == [True, False, False, True]
    report = verify_diff(first, DiffSide(script, ("sharded", "fast"), 2, "threads"))
    assert (report.status, report.kind_of_difference) == (1, "another computation"), report.text()


@pytest.mark.parametrize("sides", ["a", "b"])
def test_functions_are_not_run_by_another_interpreter(script, sides):
    """A function is no file that it could read."""
    function = DiffSide(test_functions_are_not_run_by_another_interpreter, python=sys.executable)
    with pytest.raises(InputError, match=rf"--{sides}-python runs a script; .* is a function"):
        verify_diff(*((function, DiffSide(script)) if sides == "a" else (DiffSide(script), function)))
