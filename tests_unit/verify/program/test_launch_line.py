"""What people type to start training is read as a program: launchers, modules, files that are none."""

from __future__ import annotations

import shlex

import pytest

from hyper_parallel.cli import main
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.framework import imported_frameworks
from hyper_parallel.verify.program.launch_line import LaunchLine, module_file, read_launch_line, with_program
from hyper_parallel.verify.program.program import find_program

TRAINING = """
import sys
import torch
import torch.distributed as dist
from torch import nn

from .data import batches
from package import scale

assert __name__ == "__main__" and sys.argv[1:] == ["--lr", "0.5"], sys.argv
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(5, 3))
optimizer = torch.optim.SGD(model.parameters(), float(sys.argv[2]) * scale)
for batch in batches(3):
    model(batch.chunk(dist.get_world_size())[dist.get_rank()]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
DATA = """
import torch

def batches(count):
    return torch.randn(count, 6, 5, generator=torch.Generator().manual_seed(1))
"""


TO_ACCELERATE = "it reaches the script as a variable ACCELERATE_*: set that, or pass Accelerator a plugin"


@pytest.mark.parametrize(
    "command, expected",
    [
        ("torchrun --nproc-per-node 4 train.py --lr 1", LaunchLine("train.py", ("--lr", "1"), 4)),
        ("torchrun --standalone --nproc_per_node=2 -m pkg.train x.py", LaunchLine("-m pkg.train", ("x.py",), 2)),
        ("python -m torch.distributed.run --nnodes=1 --nproc-per-node=3 a/b.py", LaunchLine("a/b.py", (), 3)),
        ("/usr/bin/python3.11 train.py -m x", LaunchLine("train.py", ("-m", "x"))),
        ("python -m pkg.train --lr 1", LaunchLine("-m pkg.train", ("--lr", "1"))),
        ("accelerate launch --num_processes 2 --multi_gpu train.py", LaunchLine("train.py", (), 2)),
        ("accelerate launch train.py --fp16", LaunchLine("train.py", ("--fp16",))),
        ("deepspeed --num_gpus 2 train.py --deepspeed ds.json", LaunchLine("train.py", ("--deepspeed", "ds.json"), 2)),
        ("train.py", LaunchLine("train.py", ())),
        ("msrun --worker_num 3 --local_worker_num=3 --join True train.py 7", LaunchLine("train.py", ("7",), 3)),
    ],
)
def test_commands_are_read(command, expected):
    """The script or module, its arguments and the number of ranks, from each launcher."""
    assert read_launch_line(command.split()) == expected


@pytest.mark.parametrize(
    "command, expected",
    [
        ("torchrun --nproc-per-node 4 train.py 1", "torchrun --nproc-per-node 4 -m room one train.py 1"),
        ("python -m pkg.train 1", "python -m room one -m pkg.train 1"),
        ("msrun --worker_num 3 train.py 1", "msrun --worker_num 3 python -m room one train.py 1"),
        ("msrun --worker_num=3 python train.py", "msrun --worker_num=3 python -m room one train.py"),
        (
            "python -m mindspore.parallel.cluster.run --join True train.py",
            "python -m mindspore.parallel.cluster.run --join True python -m room one train.py",
        ),
    ],
)
def test_a_module_takes_the_place_of_a_program(command, expected):
    """Launchers keep their options; msrun is given the interpreter, since it starts what stands after its options."""
    assert with_program(command.split(), "room one") == expected.split()


@pytest.mark.parametrize(
    "command, message",
    [
        (
            "accelerate launch --use_fsdp train.py",
            "--use-fsdp of accelerate launch is not supported here: " + TO_ACCELERATE,
        ),
        (
            "torchrun --nnodes 2 train.py",
            "--nnodes 2: all ranks are started on this machine; leave out --nnodes, and give --world-size",
        ),
        (
            "torchrun --log-dir logs train.py",
            "--log-dir of torchrun is not supported here: the ranks are started here: leave it out",
        ),
        (
            "torchrun --nproc-per-node gpu train.py",
            "--nproc-per-node 'gpu' is not a number; leave out --nproc-per-node, and give --world-size",
        ),
        (
            "make train",
            (
                "'make train' starts no Python script and no module (-m): give FILE, or a command such as torchrun "
                "train.py"
            ),
        ),
        (
            "bash run.sh",
            ("run.sh is a shell script: write its command after --, as in `-- torchrun --nproc-per-node 2 train.py`"),
        ),
        (
            "nohup torchrun --nproc-per-node 2 train.py 7",
            (
                "'nohup' is not supported here; run `hyper-parallel verify program -- torchrun --nproc-per-node 2 "
                "train.py 7`"
            ),
        ),
        (
            "env -u B A=1 torchrun -m pkg",
            "'env' is not supported here; run `A=1 hyper-parallel verify program -- torchrun -m pkg`",
        ),
        (
            "mpirun -n 2 bin/python3 train.py",
            (
                "'mpirun' is not supported here; run `hyper-parallel verify program --world-size N -- bin/python3 "
                "train.py`"
            ),
        ),
        (
            "bash -c 'torchrun --nproc-per-node 2 train.py 7'",
            (
                "'bash -c' is not supported here: `hyper-parallel verify program -- torchrun --nproc-per-node 2 "
                "train.py 7`"
            ),
        ),
        (
            "uv run train.py 7",
            "'uv' is not supported here; run `hyper-parallel verify program --world-size N -- python train.py 7`",
        ),
    ],
)
def test_commands_that_cannot_be_followed_are_refused(command, message):
    """An option that would change the run is named, and what to do."""
    with pytest.raises(InputError) as caught:
        read_launch_line(shlex.split(command))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "name, what",
    [
        (
            "train.ipynb",
            "a notebook: save its cells as a script (jupyter nbconvert --to script), or call verify_program there",
        ),
        (
            "run.sh",
            "a shell script: write its command after --, as in `-- torchrun --nproc-per-node 2 train.py`",
        ),
    ],
)
def test_files_that_are_no_programs_are_refused(name, what, tmp_path):
    """A notebook and a launcher's file say in one line what to give instead."""
    (tmp_path / name).write_text("{}")
    with pytest.raises(InputError) as caught:
        find_program(str(tmp_path / name), [], "FILE")
    assert str(caught.value) == f"FILE: {tmp_path / name} is {what}"


def test_modules_are_found_without_importing_them(tmp_path, monkeypatch):
    """A module, a package with __main__, and one in a folder without __init__; what is none is refused."""
    monkeypatch.chdir(tmp_path)
    for file in ("package/__init__.py", "package/__main__.py", "package/train.py", "spaces/deep/run.py"):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise RuntimeError\n")
    assert module_file("package.train", "FILE") == tmp_path / "package" / "train.py"
    assert module_file("package", "FILE") == tmp_path / "package" / "__main__.py"
    assert module_file("spaces.deep.run", "FILE") == tmp_path / "spaces" / "deep" / "run.py"
    for name in ("package.nosuch", "spaces", "nosuch.train"):
        with pytest.raises(
            InputError,
            match=f"FILE: python -m finds no module {name}, neither in this folder nor among those installed",
        ):
            module_file(name, "FILE")
    with pytest.raises(InputError) as caught:
        find_program("package.train", [], "FILE")
    assert str(caught.value) == (
        f"FILE: there is no file {tmp_path}/package.train; -m package.train runs the module of this name"
    )


@pytest.mark.parametrize(
    "line, expected", [("from transformers import Trainer", ["torch"]), ("import mindformers", ["mindspore"])]
)
def test_a_library_stands_for_its_framework(line, expected, tmp_path):
    """A script of the Trainer need not import torch itself."""
    path = tmp_path / "train.py"
    path.write_text(line)
    assert imported_frameworks(path) == expected


@pytest.mark.platforms("torch")
def test_a_module_is_verified_by_the_command_that_starts_it(tmp_path, monkeypatch, capsys):
    """`verify program -- torchrun -m package.train` runs it with its package and arguments, on torchrun's ranks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("scale = 0.5\n")
    (tmp_path / "package" / "data.py").write_text(DATA)
    (tmp_path / "package" / "train.py").write_text(TRAINING)
    words = ["verify", "program", "--", "torchrun", "--nproc-per-node", "3", "-m", "package.train", "--lr", "0.5"]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("-m package.train on torch: 3 simulated ranks against a single device")


def test_without_a_program_the_command_says_what_to_name(capsys):
    """No FILE, and two of them."""
    assert main(["verify", "program", "--world-size", "2"]) == 2
    assert (
        "no program is named; give FILE, -m MODULE, or the command that starts training, as in"
        in capsys.readouterr().err
    )
    assert main(["verify", "program", "a.py", "-m", "b", "--world-size", "2"]) == 2
    assert "FILE 'a.py' and -m 'b': both name a program; leave out one of them" in capsys.readouterr().err
