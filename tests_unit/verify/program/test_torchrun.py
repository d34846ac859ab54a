"""Verification by processes that torchrun has started."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from hyper_parallel.transport.processes import python_command

pytestmark = pytest.mark.platforms("torch")

_EXAMPLE = Path(__file__).parents[3] / "examples" / "data_parallel.py"


def under_torchrun(ranks, *arguments):
    """Start a command of ours as torchrun would on so many ranks; return status, output of rank 0, and all errors."""
    command = python_command("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--no-python")
    ended = subprocess.run(
        [*command, *python_command("hyper_parallel", "verify", "program", *arguments)],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    return ended.returncode, ended.stdout, ended.stderr


def test_torchruns_processes_are_the_ranks(tmp_path):
    """A script in its own world, which it leaves at its end, is compared on torchrun's ranks; rank 0 alone reports."""
    report = tmp_path / "report.json"
    status, output, errors = under_torchrun(3, str(_EXAMPLE), "--report", str(report), "--", "--batch", "18")
    assert status == 0, errors
    document = json.loads(report.read_text())
    assert (document["ok"], document["launch"], document["world_size"]) == (True, "torchrun", 3)
    assert output.count("equal on 3 ranks: ") == 1


@pytest.mark.sweep
def test_a_difference_is_every_ranks_status(tmp_path):
    """A broken line gives every process status 1, so torchrun fails, and the report names the tensor."""
    broken = tmp_path / "broken.py"
    source = _EXAMPLE.read_text()
    plain = source.replace("DistributedDataParallel(Classifier())", "Classifier()")
    assert plain != source
    broken.write_text(plain)
    status, output, _ = under_torchrun(2, str(broken))
    assert status != 0
    assert "DIFFERS first in step 1: " in output
    assert "cause: missing-reduction over world" in output


@pytest.mark.sweep
def test_another_world_size_is_refused_once():
    """A world size that is not torchrun's is an error that rank 0 alone prints."""
    status, _, errors = under_torchrun(2, str(_EXAMPLE), "--world-size", "3")
    assert status != 0
    message = "--world-size is 3, and torchrun has started 2 processes; leave it out"
    assert errors.count(message) == 1


def test_a_store_that_ends_with_the_program_is_refused(monkeypatch):
    """Where torchrun keeps no store, records could not be gathered once the program has left its world."""
    from hyper_parallel.errors import HyperParallelError
    from hyper_parallel.transport.real.c10d.torchrun import TorchrunProcesses, torchrun_world

    assert torchrun_world() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert torchrun_world() == (1, 4)
    with pytest.raises(HyperParallelError) as caught:
        TorchrunProcesses(1.0)
    assert str(caught.value) == (
        "torchrun keeps no store of its own here; start it with --standalone, or with --rdzv-backend c10d"
    )


def test_the_size_of_the_world_is_checked_before_the_program_runs(monkeypatch):
    """A process that torchrun has started refuses a world of another size; its store is there."""
    from torch.distributed import TCPStore

    from hyper_parallel.verify.input_error import InputError
    from hyper_parallel.verify.program.program import Program
    from hyper_parallel.verify.program.torchrun import verify_under_torchrun
    from hyper_parallel.verify.program.worlds import World

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    names = {"TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in {**names, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError) as caught:
        verify_under_torchrun(Program("train.py"), World(3, "torch", "torchrun"), lambda run: run)
    assert str(caught.value) == "--world-size is 3, and torchrun has started 2 processes; leave it out"


def test_a_refusal_by_the_comparison_reaches_every_process(monkeypatch, tmp_path):
    """What makes no sense to rank 0 when it compares is an error of the call, after the records were gathered."""
    from torch.distributed import TCPStore

    from hyper_parallel.verify.input_error import InputError
    from hyper_parallel.verify.program.program import Program
    from hyper_parallel.verify.program.torchrun import verify_under_torchrun
    from hyper_parallel.verify.program.worlds import World

    script = tmp_path / "train.py"
    script.write_text("import torch\ntorch.ones(3, requires_grad=True).sum().backward()\n")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    names = {"TORCHELASTIC_RUN_ID": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in {**names, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}.items():
        monkeypatch.setenv(name, value)

    def compare(run):
        assert run.world_size == 1
        msg = "no such axis"
        raise InputError(msg)

    with pytest.raises(InputError, match=r"^no such axis$"):
        verify_under_torchrun(Program("train.py", str(script)), World(1, "torch", "torchrun"), compare)
