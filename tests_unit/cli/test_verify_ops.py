"""``hyper-parallel verify ops``: its checks, reports and refusals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hyper_parallel.cli import main, verify_ops
from hyper_parallel.cli.verify_ops import meshes_of, platforms

USER = Path(__file__).parent.parent / "verify" / "ops" / "user"


def ran(capsys, *arguments):
    """Return the exit status and the report of a command."""
    status = main(["verify", "ops", *map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_library_operators(platform_name, capsys, tmp_path):
    """Named operators on named meshes are checked at both levels, and the report has the counts."""
    path = tmp_path / "report.json"
    operators = ["add", "softmax"][: 2 if platform_name == "torch" else 1]  # its rows take much longer on MindSpore
    status, report = ran(
        capsys, "--op", *operators, "--mesh", "2,3", "--quick", "--platform", platform_name, "--report", path
    )
    assert status == 0, report
    assert {operator["op"] for operator in report["operators"]} == set(operators)
    for operator in report["operators"]:
        assert operator["outcome"] == "ok"
        assert operator["checks"] == operator["ok"] > 10
        assert operator["public"] > 0
        assert set(operator["by_mesh"]) == {"2", "3"}
        assert operator["rule"].startswith(f"{operator['op']}(")
        assert sum(operator["by_sample"].values()) == operator["checks"]
        assert sum(operator["by_placement"].values()) == operator["checks"]
    assert report["checks"] == sum(operator["checks"] for operator in report["operators"])
    assert json.loads(path.read_text()) == report


def test_a_users_file(platform_name, capsys):
    """A user's operator is checked on all meshes without further edits; refused placements are counted separately."""
    status, report = ran(capsys, USER / "good.py", "--platform", platform_name)
    assert status == 0, report
    (operator,) = report["operators"]
    assert (operator["op"], operator["outcome"]) == ("axpy", "ok")
    assert operator["backward"] == operator["checks"] > 10
    assert sum(operator["rejected"].values()) > 10
    assert set(operator["by_mesh"]) >= {"1", "2", "3", "4"}


@pytest.mark.platforms("torch")
def test_a_users_wrong_rule(capsys):
    """A wrong rule is caught and shown by a program of at most 15 lines that fails when it runs."""
    status, report = ran(capsys, USER / "bad.py", "--platform", "torch", "--mesh", "2")
    assert status == 1
    (operator,) = report["operators"]
    assert operator["outcome"] == "wrong"
    program = operator["wrong"][0]["reproducer"]
    assert len(program.splitlines()) <= 15
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert "AssertionError: wrong" in done.stderr


@pytest.mark.platforms("torch")
def test_a_death_costs_one_operator(capsys, monkeypatch):
    """A process that is killed or exceeds its time is reported; later operators are still checked."""
    from hyper_parallel.verify.ops import tasks

    own = tasks.task_of
    monkeypatch.setattr(tasks, "task_of", lambda *args, **kwargs: {**own(*args, **kwargs), "seconds": 8.0})
    status, report = ran(
        capsys, USER / "deadly.py", "--op", "segfault", "endless", "doubled", "--platform", "torch", "--mesh", "2"
    )
    assert status == 1
    operators = {operator["op"]: operator for operator in report["operators"]}
    assert operators["segfault"]["outcome"] == "crash"
    assert operators["segfault"]["crash"][0]["problem"].startswith("killed by SIGSEGV")
    assert operators["endless"]["crash"][0]["problem"].startswith("did not finish within 8 s")
    assert operators["doubled"]["outcome"] == "ok"


@pytest.mark.platforms("torch")
def test_nothing_checked_is_red(capsys):
    """A file without samples fails: nothing was verified."""
    status, report = ran(capsys, USER / "silent.py", "--platform", "torch")
    assert status == 1
    assert not report["ok"]
    assert "declares nothing to check" in report["interrupted"]


@pytest.mark.platforms("torch")
def test_the_matrix_as_a_page(capsys, tmp_path):
    """--html writes the results as a page; a page that cannot be written is an error before anything runs."""
    path = tmp_path / "new" / "operators.html"
    assert ran(capsys, USER / "good.py", "--platform", "torch", "--html", str(path))[0] == 0
    page = path.read_text()
    assert "Checks per operator and framework" in page
    assert '<td class="good">held</td>' in page
    assert main(["verify", "ops", "--html", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"hyper-parallel: error: --html {tmp_path} cannot be written: it is a folder\n"


def _interrupted(operators):
    """Yield finished reports, then raise KeyboardInterrupt."""

    def run_tasks(*_, **__):
        yield from operators
        raise KeyboardInterrupt

    return run_tasks


@pytest.mark.platforms("torch")
def test_results_before_an_interrupt_are_reported(monkeypatch, capsys, tmp_path):
    """After an interrupt, finished results are printed and reported as partial; the status is 130."""
    from hyper_parallel.verify.ops import worker_pool
    from hyper_parallel.verify.ops.report import OperatorReport

    path = tmp_path / "report.json"
    monkeypatch.setattr(
        worker_pool, "run_tasks", _interrupted([OperatorReport.lost("add", "torch", "killed by SIGSEGV")])
    )
    assert main(["verify", "ops", "--platform", "torch", "--op", "add", "mul", "--report", str(path)]) == 130
    written = json.loads(path.read_text())
    assert [operator["op"] for operator in written["operators"]] == ["add"]
    assert (written["ok"], written["interrupted"]) == (False, "interrupted; the rest was not verified")
    message = capsys.readouterr()
    assert "killed by SIGSEGV" in message.out
    assert "interrupted; the rest was not verified" in message.err


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
    """A file is verified on the frameworks that it imports, or on all installed ones if it imports none."""
    path = tmp_path / "own.py"
    path.write_text(text)
    operators = verify_ops._imported(verify_ops._parsed(str(path)))
    assert operators == (platforms(None) if frameworks is None else frameworks)


@pytest.mark.parametrize(
    "name, data, problem",
    [
        ("own.py", b"def f(:\n", "is not Python: invalid syntax (own.py, line 1)"),
        ("own.py", b"x = 1\0", "is not Python: source code string cannot contain null bytes"),
        ("own.py", b"x = '\xff'\n", "is not Python: (unicode error) 'utf-8' codec can't decode byte 0xff"),
        ("own.txt", b"x = 1", "is not a Python file: its name does not end in .py"),
        ("", None, "is a folder; name a Python file"),
        ("nowhere.py", None, "does not exist"),
    ],
)
@pytest.mark.parametrize("platform", [[], ["--platform", "torch"]])
def test_a_file_that_cannot_be_checked(tmp_path, capsys, name, data, problem, platform):
    """An invalid file is named with its problem before anything runs; status 2."""
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    assert main(["verify", "ops", str(path), *platform]) == 2
    assert capsys.readouterr().err.startswith(f"hyper-parallel: error: FILE {str(path)!r} {problem}")


@pytest.mark.platforms("torch")
def test_a_file_that_raises(tmp_path, capsys):
    """An exception of the user's file is reported with the user's line; status 2."""
    path = tmp_path / "own.py"
    path.write_text("def table():\n    raise KeyError('axpy')\n\n\ntable()\n")
    assert main(["verify", "ops", str(path), "--platform", "torch"]) == 2
    message = f"FILE {str(path)!r} raised KeyError: 'axpy'\n  {path}:2, in table: raise KeyError('axpy')"
    assert capsys.readouterr().err == f"hyper-parallel: error: {message}\n"


@pytest.mark.platforms("torch")
def test_an_operator_that_the_file_does_not_have(capsys):
    """An unknown --op is an error with the file's operators and similar names; the library's own are accepted."""
    path = USER / "good.py"
    assert main(["verify", "ops", str(path), "--op", "softmax", "axpi", "--platform", "torch", "--mesh", "2"]) == 2
    message = f"--op: {path} on torch has no 'axpi'; it declares axpy; did you mean axpy?"
    assert capsys.readouterr().err == f"hyper-parallel: error: {message}\n"


BAD_INPUT = [
    (["--op", "sofmax"], "--op: there is no operator 'sofmax'; did you mean softmax"),
    (["--mesh", "2xx"], "--mesh '2xx' must look like 3 or 2x3, or like 3,2x3 for two meshes"),
    (["nowhere.py"], "FILE 'nowhere.py' does not exist"),
    (["--platform", "jax"], "--platform 'jax' is not one of torch, mindspore"),
    (
        ["own.py", "--target", "torch-dtensor", "--quick"],
        "--target cannot be combined with FILE, --quick, only with --op, --json and --report",
    ),
]


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("arguments, text", BAD_INPUT)
def test_bad_input(arguments, text, capsys):
    """Invalid input gives status 2, the mistake and the accepted values."""
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
def test_ctrl_c_leaves_a_partial_report(tmp_path, interruptible):
    """After Ctrl-C, finished parts are reported as partial, and no process is left."""
    (tmp_path / "user.py").write_text(ENDLESS)
    path = tmp_path / "report.txt"
    command = [sys.executable, "-m", "hyper_parallel", "verify", "ops", "user.py", "--platform", "torch",
               "--mesh", "2", "--report", str(path)]  # fmt: skip
    process = subprocess.Popen(command, cwd=tmp_path, env=interruptible, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (tmp_path / "started").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "partial report:" in text
    message = "partial report: 1 operators finished; interrupted; the rest was not verified"  # a file has no total
    assert message in path.read_text()


def test_a_mesh_is_checked_once():
    """A mesh that --mesh names twice is checked, and counted, once."""
    assert meshes_of("2, 2x3,2") == ((2,), (2, 3))


def test_the_list_names_what_a_framework_lacks(capsys):
    """--list prints every operator that has a rule once per framework, as one that it has or one that it lacks."""
    assert main(["verify", "ops", "--list", "--json"]) == 0
    frameworks = json.loads(capsys.readouterr().out)["frameworks"]
    assert frameworks
    for row in frameworks:
        assert "softmax" in row["operators"]
        assert not set(row["operators"]) & set(row["lacking"])
        assert (
            main(["verify", "ops", "--list", "--platform", row["platform"], "--op", "softmax", *row["lacking"][:1]])
            == 0
        )
        text = capsys.readouterr().out
        assert text.startswith(f"{row['platform']}: 1 operators\n  softmax\n")
        assert (f"{row['platform']} lacks 1 operators that have a rule\n" in text) == bool(row["lacking"])
    assert len({len(row["operators"]) + len(row["lacking"]) for row in frameworks}) == 1
