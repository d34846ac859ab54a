"""``hyper-parallel verify ops``: what it checks, says and refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hyper_parallel.cli import main, verify_ops
from hyper_parallel.cli.verify_ops import platforms

USER = Path(__file__).parent.parent / "verify" / "ops" / "user"


def ran(capsys, *arguments):
    """Exit status and the report of a command."""
    status = main(["verify", "ops", *map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_library_operators(platform_name, capsys, tmp_path):
    """Named operators on named meshes: every one is checked on both levels, and the report says how often."""
    path = tmp_path / "report.json"
    status, report = ran(
        capsys, "--op", "softmax", "add", "--mesh", "2,3", "--quick", "--platform", platform_name, "--report", path
    )
    assert status == 0, report
    assert {one["op"] for one in report["operators"]} == {"softmax", "add"}
    for one in report["operators"]:
        assert one["outcome"] == "ok"
        assert one["checks"] == one["ok"] > 10
        assert one["public"] > 0
        assert set(one["by_mesh"]) == {"2", "3"}
    assert report["checks"] == sum(one["checks"] for one in report["operators"])
    assert json.loads(path.read_text()) == report


def test_a_users_file(platform_name, capsys):
    """A user's operator is checked on all meshes with no other edit; placements it refuses are counted apart."""
    status, report = ran(capsys, USER / "good.py", "--platform", platform_name)
    assert status == 0, report
    (one,) = report["operators"]
    assert (one["op"], one["outcome"]) == ("axpy", "ok")
    assert one["backward"] == one["checks"] > 10
    assert sum(one["rejected"].values()) > 10
    assert set(one["by_mesh"]) >= {"1", "2", "3", "4"}


@pytest.mark.platforms("torch")
def test_a_users_wrong_rule(capsys):
    """It is caught, and shown by a program of at most 15 lines that fails when it is run."""
    status, report = ran(capsys, USER / "bad.py", "--platform", "torch", "--mesh", "2")
    assert status == 1
    (one,) = report["operators"]
    assert one["outcome"] == "wrong"
    program = one["wrong"][0]["reproducer"]
    assert len(program.splitlines()) <= 15
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert "AssertionError: wrong" in done.stderr


@pytest.mark.platforms("torch")
def test_a_death_costs_one_operator(capsys, monkeypatch):
    """A child that is killed, or is not done in time, is reported as such; what comes after it is checked."""
    from hyper_parallel.verify.ops import tasks

    own = tasks.task_of
    monkeypatch.setattr(tasks, "task_of", lambda *args, **kwargs: {**own(*args, **kwargs), "seconds": 8.0})
    status, report = ran(
        capsys, USER / "deadly.py", "--op", "segfault", "endless", "doubled", "--platform", "torch", "--mesh", "2"
    )
    assert status == 1
    found = {one["op"]: one for one in report["operators"]}
    assert found["segfault"]["outcome"] == "crash"
    assert found["segfault"]["crash"][0]["problem"].startswith("killed by SIGSEGV")
    assert found["endless"]["crash"][0]["problem"].startswith("did not finish within 8 s")
    assert found["doubled"]["outcome"] == "ok"


@pytest.mark.platforms("torch")
def test_nothing_checked_is_red(capsys):
    """A file that declares no sample has not been verified."""
    status, report = ran(capsys, USER / "silent.py", "--platform", "torch")
    assert status == 1
    assert not report["ok"]
    assert "declares nothing to check" in report["interrupted"]


@pytest.mark.platforms("torch")
def test_the_matrix_as_a_page(capsys, tmp_path):
    """--html writes what was found as a page; one that will have no place is an error before anything runs."""
    path = tmp_path / "new" / "operators.html"
    assert ran(capsys, USER / "good.py", "--platform", "torch", "--html", str(path))[0] == 0
    page = path.read_text()
    assert "Checks per operator and framework" in page
    assert '<td class="good">held</td>' in page
    assert main(["verify", "ops", "--html", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"hyper-parallel: error: --html {tmp_path} cannot be written: is a folder\n"


def _interrupted(found):
    """Reports that were ready when Ctrl-C came."""

    def run_tasks(*_, **__):
        yield from found
        raise KeyboardInterrupt

    return run_tasks


@pytest.mark.platforms("torch")
def test_what_was_done_before_an_interrupt_is_reported(monkeypatch, capsys, tmp_path):
    """What was found is on the screen and in the report, which says that the rest was not verified; status 130."""
    from hyper_parallel.verify.ops import worker_pool
    from hyper_parallel.verify.ops.report import OperatorReport

    path = tmp_path / "report.json"
    monkeypatch.setattr(
        worker_pool, "run_tasks", _interrupted([OperatorReport.lost("add", "torch", "killed by SIGSEGV")])
    )
    assert main(["verify", "ops", "--platform", "torch", "--op", "add", "mul", "--report", str(path)]) == 130
    written = json.loads(path.read_text())
    assert [one["op"] for one in written["operators"]] == ["add"]
    assert (written["ok"], written["interrupted"]) == (False, "interrupted; the rest was not verified")
    said = capsys.readouterr()
    assert "killed by SIGSEGV" in said.out
    assert "interrupted; the rest was not verified" in said.err


@pytest.mark.parametrize(
    "text, frameworks",
    [
        ("import torch.nn as nn", ["torch"]),
        ("from torch import nn\nimport numpy", ["torch"]),
        ("from . import torch", None),
        ("import numpy", None),
    ],
)
@pytest.mark.platforms("torch")
def test_a_file_is_verified_on_the_frameworks_that_it_imports(tmp_path, text, frameworks):
    """Only those; a file that imports none is verified on all that are installed."""
    path = tmp_path / "own.py"
    path.write_text(text)
    found = verify_ops._imported(verify_ops._parsed(str(path)))
    assert found == (platforms(None) if frameworks is None else frameworks)


@pytest.mark.parametrize(
    "name, data, problem",
    [
        ("own.py", b"def f(:\n", "invalid syntax (own.py, line 1)"),
        ("own.py", b"x = 1\0", "source code string cannot contain null bytes"),
        ("own.py", b"x = '\xff'\n", "(unicode error) 'utf-8' codec can't decode byte 0xff"),
        ("own.txt", b"x = 1", "is no Python file: its name does not end in .py"),
        ("", None, "is a folder; name a Python file"),
        ("nowhere.py", None, "no such file"),
    ],
)
@pytest.mark.parametrize("platform", [[], ["--platform", "torch"]])
def test_a_file_that_cannot_be_checked(tmp_path, capsys, name, data, problem, platform):
    """It is named, with what is wrong with it, before anything runs; status 2."""
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    assert main(["verify", "ops", str(path), *platform]) == 2
    assert capsys.readouterr().err.startswith(f"hyper-parallel: error: FILE {str(path)!r}: {problem}")


@pytest.mark.platforms("torch")
def test_a_file_that_raises(tmp_path, capsys):
    """What it raises is told with the user's line, as any input that makes no sense; status 2."""
    path = tmp_path / "own.py"
    path.write_text("def table():\n    raise KeyError('axpy')\n\n\ntable()\n")
    assert main(["verify", "ops", str(path), "--platform", "torch"]) == 2
    said = f"FILE {str(path)!r} raised KeyError: 'axpy'\n  {path}:2, in table: raise KeyError('axpy')"
    assert capsys.readouterr().err == f"hyper-parallel: error: {said}\n"


@pytest.mark.platforms("torch")
def test_an_operator_that_the_file_does_not_have(capsys):
    """The message names the file, what it has and what is near; status 2. Rules of the library may be named too."""
    path = USER / "good.py"
    assert main(["verify", "ops", str(path), "--op", "softmax", "axpi", "--platform", "torch", "--mesh", "2"]) == 2
    said = f"--op: {path} on torch has no 'axpi'; it declares axpy; near: axpy"
    assert capsys.readouterr().err == f"hyper-parallel: error: {said}\n"


BAD_INPUT = [
    (["--op", "sofmax"], "--op: no rule is called 'sofmax'; near: softmax"),
    (["--mesh", "2xx"], "--mesh '2xx': write sizes like 3 or 2x3, several separated by commas"),
    (["nowhere.py"], "FILE 'nowhere.py': no such file"),
    (["--platform", "jax"], "--platform 'jax': 'jax' is none of torch, mindspore"),
    (
        ["own.py", "--target", "torch-dtensor", "--quick"],
        "--target does not go with FILE, --quick: it takes --op, --json and --report",
    ),
]


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("arguments, text", BAD_INPUT)
def test_bad_input(arguments, text, capsys):
    """The message says what is wrong and what there is; status 2."""
    assert main(["verify", "ops", *arguments]) == 2
    assert text in capsys.readouterr().err


ENDLESS = """
import pathlib, time
from hyper_parallel.verify import operator_sample, real

def doubled(x):
    return x * 2

def endless(x):
    pathlib.Path("started").touch()
    time.sleep(3600)

operator_sample(doubled, real("ab"))
operator_sample(endless, real("ab"))
"""


@pytest.mark.platforms("torch")
def test_ctrl_c_leaves_a_partial_report(tmp_path):
    """What was finished is reported, and that the rest was not; no process is left."""
    (tmp_path / "user.py").write_text(ENDLESS)
    path = tmp_path / "report.txt"
    command = [sys.executable, "-m", "hyper_parallel", "verify", "ops", "user.py", "--platform", "torch",
               "--mesh", "2", "--report", str(path)]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (tmp_path / "started").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "partial report:" in text
    told = "partial report: 1 operators finished; interrupted; the rest was not verified"  # a file says no total
    assert told in path.read_text()
