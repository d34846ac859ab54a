"""A check in its own process: its report, its error, its budget, and a process that ends otherwise."""

import sys
import time

import pytest

from hyper_parallel.transport.processes import process_state
from hyper_parallel.verify.suite import run
from hyper_parallel.verify.suite.run import run_check
from hyper_parallel.verify.suite.settings import SuiteCheck


def check(seconds=None):
    """A check of a program."""
    return SuiteCheck("a", "program", {"run": "train.py"}, {}, seconds)


def stub(monkeypatch, code):
    """Let Python code run in place of the command."""
    monkeypatch.setattr(run, "python_command", lambda *words: [sys.executable, "-c", code, *words])


def test_an_input_that_is_refused_is_the_error(tmp_path):
    """The command's message and its status 2 come back, and the command that repeats it."""
    result = run_check(check(), ["verify", "program", "--world-size=2", "--", "train.py"], tmp_path)
    assert (result.status, result.report, result.headline) == (
        2, None, f"FILE: there is no file {tmp_path / 'train.py'}"
    )  # fmt: skip
    assert result.command == "hyper-parallel verify program --world-size=2 -- train.py"


def test_a_check_is_stopped_when_its_budget_is_spent(tmp_path, monkeypatch):
    """So is what it has started: nothing of it runs on."""
    started = tmp_path / "pid"
    stub(monkeypatch, "import subprocess, sys; child = subprocess.Popen(['sleep', '60']); "
                      f"open({str(started)!r}, 'w').write(str(child.pid)); child.wait()")  # fmt: skip
    result = run_check(check(1.5), ["verify"], tmp_path)
    assert (result.status, result.headline, result.word) == (1, "stopped after 1.5 s, its budget", "FAILED")
    pid = int(started.read_text())
    for _ in range(100):
        if process_state(pid) in {"", "Z"}:
            break
        time.sleep(0.05)
    else:
        pytest.fail("what the check started runs on")


@pytest.mark.parametrize(
    "code, error",
    [
        ("import sys; sys.exit('no such module')", "ended with status 1\nno such module"),
        ("print('{\"ok\": true}'); import os; os.kill(os.getpid(), 9)", "ended with status -9"),
        ("print('hello')", "ended with status 0"),
    ],
)
def test_a_process_that_ends_without_a_report_fails(tmp_path, monkeypatch, code, error):
    """Its status and the end of what it wrote are the error; status 0 without a report is no success."""
    stub(monkeypatch, code)
    result = run_check(check(), ["verify"], tmp_path)
    assert (result.ok, result.status, result.error) == (False, 1, error)


def test_the_report_and_its_text_come_back_without_the_header(tmp_path, monkeypatch):
    """The options for reports stand before the arguments of the script."""
    stub(monkeypatch, "import json, sys; words = sys.argv[1:]; "
                      "open(words[words.index('--report') + 1], 'w').write('# date: now\\nDIFFERS\\n'); "
                      "print(json.dumps({'headline': ' '.join(words), 'ok': False})); sys.exit(1)")  # fmt: skip
    result = run_check(check(), ["verify", "program", "--", "a.py", "-x"], tmp_path, tmp_path / "a.html")
    assert result.headline.startswith("hyper_parallel verify program --json --report ")
    assert result.headline.endswith(f" --html {tmp_path / 'a.html'} -- a.py -x")
    assert (result.status, result.text) == (1, "DIFFERS")
