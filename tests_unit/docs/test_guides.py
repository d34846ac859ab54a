"""The guides are followed as a reader would: files are written, commands run in their order, and outputs compared."""

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import hyper_parallel
from hyper_parallel.cli import main

ROOT = Path(__file__).resolve().parents[2]
MODULES = {"pytest": ["pytest", "-p", "no:cacheprovider", "-p", "hyper_parallel.pytest_plugin"],
           "torchrun": ["torch.distributed.run"], "msrun": ["mindspore.parallel.cluster.run"]}  # fmt: skip

pytestmark = [
    pytest.mark.platforms("torch"),
    pytest.mark.skipif(not (ROOT / "docs" / "first-plan.md").exists(), reason="[no-tool] the pages are not installed"),
]


def run(words, capfd):
    """Run a command of a guide in the current folder and return its status and what it printed."""
    if words[0] == "hyper-parallel":
        try:
            status = main(words[1:])
        except SystemExit as end:
            status = end.code
        return status, "".join(capfd.readouterr())
    path = os.pathsep.join([str(Path(hyper_parallel.__file__).parents[1]), str(Path.cwd()), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", *MODULES[words[0]], *words[1:]], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def free_port():
    """Return a port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def follow(pages, blocks, capfd):
    """Write the files of a guide, run its commands, and return what each step did otherwise than the page says."""
    problems, printed, steps = [], "", 0
    for block in blocks:
        named = re.match(r"# (\w+\.py)\n", block.code)
        if block.language == "python" and named:
            Path(named[1]).write_text(block.code)
        elif block.language == "sh" and not block.info:
            printed = ""
            for line in block.code.replace("\\\n", " ").splitlines():
                expected = int((re.search(r"# status (\d+)$", line) or [0, 0])[1])
                status, text = run(shlex.split(line, comments=True), capfd)
                printed, steps = printed + text, steps + 1
                if status != expected:
                    problems.append(f"{block.page}:{block.line}: {line}: status {status}\n{text}")
        elif block.info == "not-run=output":
            absent = pages.not_printed(block.code.splitlines(), printed)
            problems += [f"{block.page}:{block.line}: nobody printed {line!r}:\n{printed}" for line in absent]
    return problems, steps


@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.sweep) for number in (1, 2, 3, 4))])
def test_a_guide_can_be_followed(number, pages, tmp_path, monkeypatch, capfd):
    """Every command of a guide ends with the status that the page says, and prints what it shows."""
    monkeypatch.chdir(tmp_path)
    page = pages.FOLLOWED[number]
    problems, steps = follow(pages, pages.blocks(page, (ROOT / page).read_text(encoding="utf-8")), capfd)
    assert not problems, "\n".join(problems)
    assert steps >= 1


@pytest.mark.platforms("torch", "mindspore", together=True)
def test_the_guide_of_mindspore_can_be_followed(pages, tmp_path, monkeypatch, capfd):
    """A MindSpore model is verified, broken, and trained by a script on simulated ranks and under msrun."""
    monkeypatch.chdir(tmp_path)
    (page,) = pages.FOLLOWED_TOGETHER
    text = (ROOT / page).read_text(encoding="utf-8").replace("msrun ", f"msrun --master_port={free_port()} ")
    problems, steps = follow(pages, pages.blocks(page, text), capfd)
    assert not problems, "\n".join(problems)
    assert steps == 4


def test_a_guide_that_is_wrong_is_noticed(pages, tmp_path, monkeypatch, capfd):
    """Another status than the page's, a line that nobody printed, and another digit are reported."""
    monkeypatch.chdir(tmp_path)
    text = "```sh\nhyper-parallel doctor --nothing\n```\n```text not-run=output\nhyper-parallel doctor\ngone\n```\n"
    problems, steps = follow(pages, pages.blocks("X.md", text), capfd)
    assert steps == 1
    assert [problem.splitlines()[0] for problem in problems] == [
        "X.md:1: hyper-parallel doctor --nothing: status 2",
        "X.md:4: nobody printed 'gone':",
    ]
    output = "step 0: loss 0.0669 in 0.5 s\n  up  0.5 bytes\n"
    assert pages.not_printed(["step 0: loss 0.0669 in … s", "up 0.5"], output) == []
    assert pages.not_printed(["step 0: loss 0.0668", "loss … s in"], output) == ["step 0: loss 0.0668", "loss … s in"]


def test_every_guide_is_listed(pages):
    """docs/README.md links every page of the folder, and every followed page is tested."""
    assert len(pages.FOLLOWED) == 5
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "README.md").read_text()))
    assert linked == {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
