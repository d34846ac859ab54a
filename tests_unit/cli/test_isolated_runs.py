"""Verification leaves the user's files as they are, however it ends, and no run sees what another one has written."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from hyper_parallel.verify import verify_program
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.write_guard import kernel_denies

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(nn.Linear(5, 3))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
start = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    model.module.load_state_dict(saved["model"])
    start = saved["step"]
batches = torch.Generator().manual_seed(1)
for step in range(start, start + 2):
    model(torch.randn(12, 5, generator=batches).tensor_split(world)[rank]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
log = Path(__file__).with_name("log.txt")
with log.open("a") as file:
    file.write(f"{rank}\\n")
if rank == 0:
    torch.save({"model": model.module.state_dict(), "step": start + 2}, "last.pt")
dist.barrier()
assert torch.load("last.pt")["step"] == start + 2
assert sorted(log.read_text().split()[-world:]) == [str(other) for other in range(world)]
print("saved", os.path.abspath("last.pt"))
"""
ENDING = """
if len(sys.argv) > 1 and world == int(sys.argv[1]):
    os.write(1, b"reached\\n")  # ranks in processes of their own print to a file
    time.sleep(600)
"""
MINDSPORE = """
import os
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init

init()
rank, world = get_rank(), get_group_size()
random = np.random.default_rng(0)
model = nn.Dense(5, 3)
for parameter in model.get_parameters():
    parameter.set_data(Tensor(random.normal(size=parameter.shape).astype(np.float32)))
if os.path.exists("last.ckpt"):
    ms.load_checkpoint("last.ckpt", model)
optimizer = nn.SGD(model.trainable_params(), 0.1)
gradients = ms.value_and_grad(lambda x: (model(x) ** 2).mean(), None, model.trainable_params())
for _ in range(2):
    x = np.array_split(random.normal(size=(6, 5)).astype(np.float32), world)[rank]
    optimizer(tuple(ops.AllReduce()(g) / world for g in gradients(Tensor(x.copy()))[1]))
if rank == 0:
    ms.save_checkpoint(model, "last.ckpt")
    assert os.path.exists("last.ckpt")
"""


EVERYDAY = [
    ("simulated", signal.SIGINT, 2), ("simulated", signal.SIGKILL, 1), ("threads", signal.SIGKILL, 2),
    ("processes", signal.SIGINT, 2), ("processes", signal.SIGKILL, 2),
]  # fmt: skip


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A working folder with the script, and with nothing else."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "stops.py").write_text(SCRIPT + ENDING)
    monkeypatch.chdir(folder)
    return folder


def contents(folder):
    """What is in a folder, with the times of changes."""
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir() if path.is_file()}


@pytest.mark.platforms("torch")
# Real ranks write as forked ones do.
@pytest.mark.parametrize("launch", ["simulated", "threads", pytest.param("processes", marks=pytest.mark.sweep)])
def test_a_script_that_resumes_is_equal_and_its_checkpoint_stays(project, launch, capsys):
    """Nothing is there first, then a checkpoint of a training: neither is written, all runs start from the same."""
    fresh = contents(project)
    report = verify_program("train.py", 2, launch=launch)
    assert report.equal, report.text()
    assert contents(project) == fresh
    assert f"saved {project / 'last.pt'}" in capsys.readouterr().err
    kept = verify_program("train.py", 2, launch=launch, keep_files="../kept")
    assert kept.equal, kept.text()
    assert sorted(os.listdir("../kept")) == ["last.pt", "log.txt"]  # noqa: PTH208
    assert (project.parent / "kept" / "log.txt").read_text().split() in (["0", "1"], ["1", "0"])
    (project / "last.pt").write_bytes((project.parent / "kept" / "last.pt").read_bytes())
    resumed = contents(project)
    report = verify_program("train.py", 2, launch=launch)
    assert report.equal, report.text()
    assert contents(project) == resumed


@pytest.mark.platforms("mindspore")
def test_a_script_of_mindspore_that_resumes(tmp_path, monkeypatch):
    """The checkpoint that MindSpore writes is the run's."""
    (tmp_path / "train.py").write_text(MINDSPORE)
    monkeypatch.chdir(tmp_path)
    report = verify_program("train.py", 2, platform="mindspore")
    assert report.equal, report.text()
    assert sorted(contents(tmp_path)) == ["train.py"]


def marked(mark):
    """The command lines of the processes that have the mark in their environment."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # gone, or not ours
            if mark.encode() in path.read_bytes():
                commands.append(path.with_name("cmdline").read_bytes())
    return commands


@pytest.mark.platforms("torch")
# Every day each way to run ranks with both signals or both worlds; all combinations in the sweep.
@pytest.mark.parametrize(
    "launch, number, world",
    [
        pytest.param(*case, marks=[] if case in EVERYDAY else pytest.mark.sweep)
        for case in itertools.product(["simulated", "threads", "processes"], [signal.SIGINT, signal.SIGKILL], [1, 2])
    ],
)
def test_files_are_untouched_after_ctrl_c_and_a_crash(project, launch, number, world, interruptible):
    """A verification that is interrupted or killed, in the reference or on the ranks, leaves files and no process."""
    before, mark = contents(project), uuid.uuid4().hex
    command = [sys.executable, "-m", "hyper_parallel", "verify", "program", "stops.py", "--world-size", "2"]
    with subprocess.Popen(
        [*command, "--launch", launch, "--timeout", "100", "--", str(world)],
        env={**interruptible, "HP_TEST_MARK": mark}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        printed = []
        for line in process.stdout:
            printed.append(line)
            if "reached" in line:
                process.send_signal(number)
                break
        rest = process.communicate()[0]
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL), "".join(printed) + rest
    deadline = time.monotonic() + (0 if number == signal.SIGINT else 60)  # orphans look for their parent at times
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert marked(mark) == []
    assert contents(project) == before


@pytest.mark.platforms("torch")
@pytest.mark.skipif(not kernel_denies(), reason="the kernel has no Landlock")
def test_a_subprocess_that_writes_is_denied_and_the_message_says_why(project, monkeypatch, tmp_path):
    """A program whose subprocess writes a file of the user is refused, with the reason and what to do."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (project / "calls.py").write_text(
        "import subprocess\nended = subprocess.run(['touch', 'made'], capture_output=True, text=True)\n"
        "if ended.returncode:\n    raise RuntimeError(ended.stderr)\n"
    )
    with pytest.raises(InputError) as caught:
        verify_program("calls.py", 2, platform="torch", launch="threads")  # which take the folder set here
    assert str(caught.value).startswith(
        "calls.py in a world of 1: RuntimeError: touch: cannot touch 'made': Permission denied; a program's files are "
        "redirected to a private copy of each run, so that nothing of yours is overwritten, and what cannot be "
        "redirected is denied: files that native code (other than torch.save, safetensors and sqlite3) or a subprocess "
        "writes. Save by Python's open(), or in a temporary folder (tempfile.gettempdir())\n"
        "rank 0 of 1 failed\n"
    )
    assert not (project / "made").exists()
