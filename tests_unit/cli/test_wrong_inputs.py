"""Wrong input to every command: one line that says what is wrong, exit status 2, nothing on stdout, nothing run."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from hyper_parallel import cli
from workshop import commands as workshop

HERE = Path(__file__).parent
FILES = {
    "missing.py": b"import nosuchmodule\n",
    "syntax.py": b"def plan(mesh:\n",
    "raising.py": b'raise RuntimeError("at import")\n',
    "exiting.py": b"raise SystemExit(0)\n",
    "nulls.py": "x = 1".encode("utf-16"),
    "nothing.py": b"x = 1\n",
    "latin.py": b"import torch\n\nname = 'caf\xe9'\n",
    "empty.py": b"",
    "blank.json": b"",
    "shallow.json": b'{"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 0, "vocab_size": 320}',
    "train.py": b"import torch\n",
    "text.txt": b"hello",
    "empty.json": b"{}",
    "config.json": b'{"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 32000}',
    "notebook.ipynb": b'{"cells": []}',
    "run.sh": b"torchrun train.py",
    "foreign/data.json": b'{"a": 1}',
    "list.json": b"[1, 2]",
    "number.json": b"3",
    "half.json": b'{"columns": [',
    "ops.json": b'{"columns": [], "operators": []}',
    "gate.json": b'{"name": "a", "total": 1, "failures": [], "ranks": 2, "ok": true}',
    "empty/.keep": b"",
    "damaged/rank-0.json": b"{",
    "listed/rank-0.json": b"[]",
    "folders/rank-0.json/.keep": b"",
    "deep/rank-0.json": b"[" * 100_000,
    "recorded/rank-0.jsonl": b'{"recording": 7}\n',
    "bare/pyproject.toml": b"",
    "broken/pyproject.toml": b"[tool",
    "suite/pyproject.toml": b'[tool.hyper_parallel.verify.programs.x]\nrun = "train.py"\n',
    "odd/pyproject.toml": b"[tool.hyper_parallel]\ncoverage = 3\n",
    "project/pyproject.toml": b"[tool.hyper_parallel.coverage]\n",
    "bad_bench/pyproject.toml": b"[tool.hyper_parallel.coverage]\n",
    "bad_bench/reports/bench.json": b"[1]",
    "bad_power/pyproject.toml": b"[tool.hyper_parallel.coverage]\n",
    "bad_power/reports/mutation.json": b"{}",
    "bad_operators/pyproject.toml": b"[tool.hyper_parallel.coverage]\n",
    "bad_operators/reports/operators-torch.json": b"\xff",
}


def table(program, folder):
    """Return program, command line and what it says, of a text file of blocks."""
    blocks = (folder / "wrong_inputs.txt").read_text(encoding="utf-8").strip().split("\n\n")
    pairs = [block.partition("\n") for block in blocks if not block.startswith("#")]
    return [(program, command.removeprefix("$ "), said) for command, _, said in pairs]


CASES = [*table(cli, HERE), *table(workshop, HERE.parent / "ci" / "workshop")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a user's files."""
    folder = tmp_path_factory.mktemp("wrong")
    shutil.copy(HERE / "wrong_case.py", folder / "case.py")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "circle.py").symlink_to(folder / "circle.py")
    return folder


def said(program, folder, words, monkeypatch, capsys):
    """Run a command in the folder; return its status and its two outputs."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "torch")  # for files that tell no framework, where both are installed
    monkeypatch.setenv("HP_PROGRESS_LINES", "0")  # a slow machine would print one
    status = program.main(words)
    captured = capsys.readouterr()
    return status, captured.err.replace(str(folder), "FOLDER"), captured.out.replace(str(folder), "FOLDER")


def plain(text):
    """Return a message without the quotes in which some versions of argparse list choices."""
    return re.sub(r"choose from [^)]*", lambda match: match[0].replace("'", ""), text)


@pytest.mark.parametrize("program", [cli, workshop], ids=["hyper-parallel", "workshop"])
def test_the_table_covers_every_command(program):
    """At least 450 wrong inputs in all, and some of every command."""
    assert len(CASES) >= 450
    tried = [tuple(shlex.split(command)) for owner, command, _ in CASES if owner is program]
    assert len(set(tried)) == len(tried)
    leaves = set()

    def collect(command, words):
        nested = [action for action in command._actions if isinstance(getattr(action, "choices", None), dict)]
        for action in nested:
            for word, child in action.choices.items():
                collect(child, (*words, word))
        if not nested:
            leaves.add(words)

    collect(program.parser(), ())
    assert [leaf for leaf in sorted(leaves) if not any(words[: len(leaf)] == leaf for words in tried)] == []


@pytest.mark.platforms("torch")
@pytest.mark.filterwarnings("ignore:parallelize_module")
@pytest.mark.parametrize("program, command, message", CASES, ids=[command for _, command, _ in CASES])
def test_wrong_input_is_one_line(program, command, message, folder, monkeypatch, capsys):
    """A wrong input says what is wrong; with --json, stdout has nothing but an object that says the same."""
    status, err, out = said(program, folder, shlex.split(command), monkeypatch, capsys)
    assert (status, plain(err), out) == (2, plain(message) + "\n", "")
    lines = message.splitlines()
    assert lines[0].startswith(program.parser().prog)
    assert all(line.startswith("  ") for line in lines[1:])
    assert len(lines) < 4
    if "--" not in shlex.split(command):
        _, err, out = said(program, folder, [*shlex.split(command), "--json"], monkeypatch, capsys)
        assert json.loads(out) == {"ok": False, "error": err.partition(": error: ")[2].rstrip("\n")}
