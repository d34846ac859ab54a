"""MindSpore's commands with ``--device npu``, where processes seem to compute on Ascend (rehearsal/README.md)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hyper_parallel.pytest_plugin import SkipReason, skip_without
from hyper_parallel.transport.processes import ENGINE_VARIABLE

pytestmark = pytest.mark.platforms("mindspore")

_SECONDS = 240
_COMMANDS = """
import contextlib
import io

from hyper_parallel.cli import main
from workshop import commands


def said(*words, main=main):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = main([*words, "--device", "npu"])
    return status, printed.getvalue()


def line(text, part):
    return next((each for each in text.splitlines() if part in each), text)


common = ("--platform", "mindspore")
status, text = said("verify", "ops", "--op", "softmax", "--quick", *common)
print("ops", status, line(text, "operators (").partition(";")[0])
status, text = said("verify", "redistribute", "--mesh", "2", "--shape", "5x3", *common)
print("redistribute", status, line(text, "equal").partition(", 0 refused")[0])
status, text = said("verify", "program", PROGRAM, "--world-size", "2", "--steps", "2")
print("program", status, line(text, "equal on").partition(", 20 outputs")[0])
status, text = said("explain", CASE + ":case", "--plan", CASE + ":plan", "--world-size", "4", *common)
print("explain", status, line(text, "in use on").strip())
status, text = said("bench", "--repeats", "8", *common, main=commands.main)
print("bench", status in (0, 1), len(text.splitlines()))
"""
_RANKS = """
from hyper_parallel.verify import simulate
from hyper_parallel.verify.model.run import verify_scenario
from hyper_parallel.verify.scenarios import scenario_named


def received():
    import mindspore as ms
    from mindspore import Tensor, ops
    from mindspore.mint import distributed

    rank = distributed.get_rank()
    own, other = Tensor([1.0 + rank, 2.0]), Tensor([0.0, 0.0])
    total = ops.AllReduce()(own)
    distributed.all_reduce(own)
    work = distributed.irecv(other, 0) if rank else distributed.isend(own, 1)
    work.wait()
    return [str(x.device) for x in (total, own)], [x.asnumpy().tolist() for x in (total, own, other)]


for told in simulate(received, 2, "mindspore", device="npu"):
    print(*told)
report = verify_scenario(
    scenario_named("3-rms-untied"), platform="mindspore", launch="processes", steps=1, device="npu"
)
assert report.ok, report
print(sum(report.counts.values()), report.settings["device"])
"""


@pytest.fixture
def printed(request):
    """A function that runs a program in a process that has four devices, and returns the lines that it prints."""
    device = request.config.getoption("hp_device")
    if device != "cpu":
        skip_without(SkipReason.NO_TOOL, f"the stand-in for Ascend would take the place of {device}; run it on CPU")
    folder = Path(__file__).parent
    path = [
        str(folder / "rehearsal" / "ascend"),
        str(folder.parent / "ci"),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    variables = {"PYTHONPATH": os.pathsep.join(path), "HP_REHEARSAL_ASCEND_DEVICES": "4", ENGINE_VARIABLE: ""}
    files = {"PROGRAM": folder.parent / "examples" / "mindspore_training.py", "CASE": folder / "rehearsal" / "case.py"}
    names = "".join(f"{name} = {str(file)!r}\n" for name, file in files.items())

    def run(program):
        done = subprocess.run(
            [sys.executable, "-c", names + program], env={**os.environ, **variables}, cwd=folder.parent,
            capture_output=True, text=True, timeout=_SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    return run


@pytest.mark.sweep  # the next test trains on the device every day; this one repeats the commands there
def test_commands_compute_on_the_card(printed):
    """Operators, redistributions, a program and explain say that they ran on npu, and hold; bench measures its rows."""
    assert printed(_COMMANDS) == [
        "ops 0 mindspore on npu: 1 operators (1 ok)",
        "redistribute 0 mindspore on npu, mesh 2, tensor [5, 3]: equal, 49 changes of placement, 49 gradients",
        "program 0 equal on 2 ranks: 24 parameters",
        "explain 0 4096 bytes in use on npu at most, measured on rank 0 in this step",
        "bench True 26",
    ]


def test_simulated_and_real_ranks_compute_on_devices(printed):
    """Tensors are on the device, and have what MindSpore's own calls receive; a scenario trains like one device."""
    assert printed(_RANKS) == [
        "['Ascend:0', 'Ascend:0'] [[3.0, 4.0], [3.0, 4.0], [0.0, 0.0]]",
        "['Ascend:0', 'Ascend:0'] [[3.0, 4.0], [3.0, 4.0], [3.0, 4.0]]",
        "738 npu; each rank needs a device",
    ]
