"""``python ci/workshop cost``: its table, its options, and its script."""

from __future__ import annotations

import json

import pytest

from workshop.commands import main
from workshop.program_costs import command
from workshop.program_costs.measurement import Cost
from workshop.program_costs.stacks import STACKS

COSTS = {
    "torch.distributed.run": Cost(7.25, 20.0, 2_000_000_000, 0, ""),
    "hyper_parallel": Cost(9.5, 30.0, 1_500_000_000, 0, ""),
}


@pytest.fixture
def commands(monkeypatch):
    """The commands that were measured; their costs are stated."""
    done = []

    def cost_of(words, _folder):
        done.append(words)
        return COSTS[words[2]]

    monkeypatch.setattr(command, "cost_of", cost_of)
    return done


def test_rows_are_a_table_with_torchrun_beside(commands, capsys):
    """Each size, mode, number of ranks and of steps is a row: processor time, its ratio, memory, wall time."""
    assert main(["cost", "--size", "11M", "--mode", "fsdp", "--ranks", "2,4", "--steps", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "  size  mode  ranks  steps      CPU s  torchrun  ratio        GB torchrun   wall s torchrun",
        "   11M  fsdp      2      1       30.0      20.0    1.5      1.50     2.00      9.5     7.2",
        "   11M  fsdp      4      1       30.0      20.0    1.5      1.50     2.00      9.5     7.2",
    ]
    assert [words[words.index("--nproc-per-node") + 1] for words in commands[::2]] == ["2", "4"]
    assert [words[words.index("--world-size") + 1] for words in commands[1::2]] == ["2", "4"]
    assert all(words[-6:] == ["--size", "11M", "--mode", "fsdp", "--steps", "1"] for words in commands)


def test_programs_of_stacks(commands, capsys):
    """A row for each; where a program needs a device, the CPU stands in for it on both sides."""
    assert main(["cost", "--stacks", "nano_gpt,megatron_half"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["stack", "nano_gpt", "megatron_half"]
    nano, megatron = (str(STACKS[name].path(name)) for name in ("nano_gpt", "megatron_half"))
    assert commands[0][-1] == nano
    assert commands[1][3:] == ["verify", "program", "--world-size", "2", nano, "--"]
    assert commands[2][-4].endswith("pretended_script.py")
    assert commands[2][-3:] == ["cuda", megatron, "half"]
    assert commands[3][-5:] == [megatron, "--pretend", "cuda", "--", "half"]
    assert main(["cost", "--stacks", "all"]) == 0
    assert "nano_gpt" in capsys.readouterr().out


def test_a_command_that_fails_is_a_failure(commands, monkeypatch, capsys):
    """The row says which status and the last line of the output; the exit status is 1."""
    monkeypatch.setitem(COSTS, "hyper_parallel", Cost(1.0, 1.0, 1, 2, "trace\nno room on disk\n"))
    assert main(["cost", "--size", "0.1M", "--mode", "ddp", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"]
    assert found["rows"][0]["ours"]["output"] == "trace\nno room on disk\n"
    assert main(["cost", "--size", "0.1M", "--mode", "ddp"]) == 1
    assert capsys.readouterr().out.splitlines()[1].endswith("status 2: no room on disk")


@pytest.mark.parametrize(
    "options, message",
    [
        (["--size", "7M"], "--size '7M' is not one of 0.1M, 1M, 11M, 124M"),
        (["--mode", "tp"], "--mode 'tp' is not one of ddp, fsdp"),
        (["--ranks", "1"], "--ranks '1' is not a list of numbers of at least 2, such as 4,64"),
        (["--stacks", "keras"], "--stacks 'keras' is not one of hf_trainer, accelerate_ddp"),
        (["--steps", "two"], "--steps 'two' is not a list of numbers of at least 1, such as 4,64"),
    ],
)
def test_wrong_options_are_named(commands, capsys, options, message):
    """A wrong value is an error before anything runs."""
    assert main(["cost", *options]) == 2
    assert message in capsys.readouterr().err
    assert commands == []


@pytest.mark.platforms("torch")
@pytest.mark.untraced
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_the_script_is_equal_to_one_device(mode):
    """The script whose cost is measured is a right program, or its cost would be that of a failure."""
    from hyper_parallel.verify import verify_program

    report = verify_program(str(command.SCRIPT), world_size=2, args=["--size", "0.1M", "--mode", mode, "--steps", "1"])
    assert report.equal, report.text()
    assert report.verdict.checked > 100_000


@pytest.mark.platforms("torch")
def test_the_sizes_are_those_of_the_script():
    """The command's sizes are the script's."""
    from workshop.bench.torch import gpt

    assert tuple(gpt.SIZES) == command.SIZES
