"""``hyper-parallel verify program``: arguments of the script, report files, exit statuses."""

import json

import pytest

from hyper_parallel.cli import main

pytestmark = pytest.mark.platforms("torch")

SCRIPT = """
import sys, torch, torch.distributed as dist
from torch import nn

torch.manual_seed(0)
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[2])):
    x = torch.randn(5, 3).tensor_split(dist.get_world_size())[dist.get_rank()]
    model(x).square().sum().backward()
    for parameter in list(model.parameters())[len(sys.argv) - 3 :]:
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
print("printed")
"""


@pytest.fixture
def script(tmp_path):
    """A data-parallel script, which leaves out the reduction of the first parameter if it has an argument too many."""
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


def test_arguments_after_the_dashes_are_the_scripts(script, tmp_path, capsys):
    """Options of the command come before ``--``; the report goes to stdout and to files, what is printed to stderr."""
    words = ["verify", "program", script, "--mesh", "dp=2", "--report"]
    assert main([*words, str(tmp_path / "r.txt"), "--", "--steps", "2"]) == 0
    out, err = capsys.readouterr()
    assert (tmp_path / "r.txt").read_text().endswith(f"\n{out}")  # under the header
    assert out.splitlines()[1].startswith("equal on 2 ranks: ")
    assert [line for line in err.splitlines() if " done" not in line] == [
        *(f"{script} on one rank prints:", "printed"),
        *(f"{script} on 2 ranks prints:", "printed", "printed"),
    ]  # progress tells the rest
    page = tmp_path / "r.html"
    assert main([*words, str(tmp_path / "r.json"), "--html", str(page), "--json", "--", "--steps", "1", "bug"]) == 1
    assert "<strong>DIFFERS first in step 1: the gradient of weight on ranks 0, 1</strong>" in page.read_text()
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((tmp_path / "r.json").read_text())
    assert (document["ok"], document["verdict"]["first"]["name"]) == (False, "weight")


def test_a_declared_placement_and_other_options(script, capsys):
    """Declarations, patterns, steps and limits reach the verification."""
    words = ["verify", "program", script, "--world-size", "2", "--only", "(model)", "--steps", "1", "--budget", "0.1"]
    assert main([*words, "--declare", "weight=replica", "--single-args", "--steps 3", "--", "--steps", "2"]) == 0
    assert "1 optimizer step, seed 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (["no.py", "--world-size", "2"], "hyper-parallel: error: FILE: there is no file "),
        (
            ["no.py"],
            "hyper-parallel: error: the number of ranks is missing; give --mesh, such as --mesh 2x2, or --world-size",
        ),
        (
            ["no.py", "--world-size", "2", "--declare", "weight"],
            "hyper-parallel: error: --declare 'weight' must look like NAME=PLACEMENT, such as 'layers.*.wq.weight=",
        ),
    ],
)
def test_what_makes_no_sense_is_status_2(words, message, capsys):
    """One line says what is wrong."""
    assert main(["verify", "program", *words]) == 2
    assert capsys.readouterr().err.startswith(message)


def test_other_commands_take_no_arguments_after_dashes(capsys):
    """They would be lost."""
    assert main(["doctor", "--", "now"]) == 2
    assert capsys.readouterr().err == (
        "hyper-parallel: error: this command takes no arguments after --, got now (see hyper-parallel --help)\n"
    )
