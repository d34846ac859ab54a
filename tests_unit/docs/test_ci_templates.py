"""What the CI templates run is run here: it passes, fails with the command's status, and leaves the files they name."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import hyper_parallel
from hyper_parallel.verify.engine.causes import CAUSES

ROOT = Path(__file__).resolve().parents[2]
ACTION, GITLAB = ROOT / ".github" / "actions" / "verify" / "action.yml", ROOT / "examples" / "ci" / "gitlab.yml"
HOOK = ROOT / ".pre-commit-hooks.yaml"
SCRIPT = """\
import torch, torch.distributed as dist
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.randn(5, 3).tensor_split(dist.get_world_size())[dist.get_rank()]).square().sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
"""

pytestmark = [
    pytest.mark.platforms("torch"),
    pytest.mark.skipif(not ACTION.exists(), reason="[no-tool] the templates are not installed"),
    pytest.mark.skipif(shutil.which("bash") is None, reason="[no-tool] the templates need bash"),
]


@pytest.fixture
def project(tmp_path):
    """A project with one check, whose script is missing, and commands ``hyper-parallel`` and ``pip`` on the path."""
    (tmp_path / "pyproject.toml").write_text(
        '[tool.hyper_parallel.verify.programs.ddp]\nrun = "train.py"\nworld-size = 2\nsteps = 1\n'
    )
    path = os.pathsep.join([str(Path(hyper_parallel.__file__).parents[1]), *filter(None, sys.path)])
    commands = tmp_path / "bin"
    commands.mkdir()
    lines = {
        "hyper-parallel": f'PYTHONPATH="{path}" exec "{sys.executable}" -m hyper_parallel "$@"',
        "pip": f'echo "$@" >> "{tmp_path / "pip.txt"}"',
    }
    for name, line in lines.items():
        (commands / name).write_text(f"#!/bin/sh\n{line}\n")
        (commands / name).chmod(0o755)
    return tmp_path


def step(name):
    """Return what a step of the action runs."""
    text = ACTION.read_text(encoding="utf-8")
    block = re.search(rf"- name: {name}\n.*?run: \|\n((?:        [^\n]*\n)+)", text, re.DOTALL)
    return textwrap.dedent(block[1])


def bash(project, script, **variables):
    """Run a script as the hosts do: with bash, stopping at the first error, also of a pipe."""
    environment = {**os.environ, **variables, "PATH": f"{project / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [shutil.which("bash"), "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        cwd=project, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_the_action_installs_verifies_and_summarizes(project):
    """A right script: status 0, the reports that later steps upload, and the text of the summary."""
    (project / "train.py").write_text(SCRIPT)
    status, out = bash(project, step("install"), SOURCE="/source", FRAMEWORK="torch", INSTALL="pip install -r r.txt")
    assert (status, (project / "pip.txt").read_text()) == (0, "install /source[torch]\ninstall -r r.txt\n"), out
    status, out = bash(project, step("verify"), CONFIG="pyproject.toml", REPORTS="reports/verify")
    assert status == 0, out
    assert {"verify.json", "junit.xml", "verify.sarif", "ddp.html"} == {
        path.name for path in (project / "reports" / "verify").iterdir()
    }
    status, out = bash(project, step("summary"), GITHUB_STEP_SUMMARY=str(project / "summary.md"))
    assert (status, (project / "summary.md").read_text().splitlines()[-2:]) == (0, ["1 of 1 checks passed", "```"])


def test_the_action_fails_with_the_check(project):
    """The status is not that of what shows the text."""
    status, out = bash(project, step("verify"), CONFIG="pyproject.toml", REPORTS="out")
    assert (status, (project / "out" / "verify.sarif").exists()) == (2, True), out


def test_gitlab_runs_the_checks_and_keeps_their_reports(project):
    """Both lists of commands run; the JUnit file and the folder are those that the job names."""
    text = GITLAB.read_text(encoding="utf-8")
    before, script = (re.search(rf"\n  {name}:\n((?:    - .*\n)+)", text)[1] for name in ("before_script", "script"))
    lines = [line.removeprefix("    - ") for line in (before + script).splitlines()]
    status, out = bash(project, "\n".join(lines), HYPER_PARALLEL="hyper-parallel[torch]")
    assert status == 2, out
    assert (project / "pip.txt").read_text() == "install hyper-parallel[torch]\n"
    junit = re.search(r"junit: (\S+)", text)[1]
    assert "there is no file" in (project / junit).read_text()
    assert f"- {Path(junit).parent}\n" in text


def test_the_hook_runs_the_checks_of_the_project(project):
    """Its entry is the command without arguments, and no file names are passed."""
    text = HOOK.read_text(encoding="utf-8")
    status, out = bash(project, re.search(r"entry: (.*)", text)[1])
    assert status == 2, out
    assert out.splitlines()[0].startswith("ddp: NOT RUN: FILE: there is no file ")
    assert "pass_filenames: false" in text


def test_the_page_for_agents_lists_every_cause():
    """With its meaning, in the order of the program."""
    text = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| (.*) \|$", text.partition("| cause | meaning |")[2], re.MULTILINE)
    assert dict(rows) == CAUSES
