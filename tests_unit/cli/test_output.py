"""What a command writes: with --json only its answer on stdout, and no file over another one."""

import io
import json
import os
import subprocess
import sys
from importlib import metadata

import pytest

from hyper_parallel.cli import main
from hyper_parallel.cli.output import coloured, logs_to_stderr, print_result
from hyper_parallel.platform.tested import TESTED

CASE = """
import os
import torch

def case():
    print("printed")
    os.write(1, b"written")
    raise ValueError("as it must")
"""


def test_what_others_write_goes_to_stderr(capfd):
    """Inside the block, prints, writes to the descriptor and subprocesses reach stderr; the answer comes at its end."""
    with logs_to_stderr():
        print_result("the answer")
        sys.stdout.write("printed\n")
        os.write(1, b"written\n")
        subprocess.run(["/bin/echo", "of a subprocess"], check=True)
    print_result("after it")
    captured = capfd.readouterr()
    assert captured.out == "the answer\nafter it\n"
    assert sorted(captured.err.splitlines()) == ["of a subprocess", "printed", "written"]


def test_a_closed_stderr_changes_nothing(capsys, monkeypatch):
    """Where the process has no stderr, the answer is still printed."""
    monkeypatch.setattr("hyper_parallel.cli.output._STDERR", 9_999)
    with logs_to_stderr():
        print_result("the answer")
    assert capsys.readouterr().out == "the answer\n"


@pytest.mark.platforms("torch")
def test_a_case_that_prints_leaves_json_alone(tmp_path, capfd, monkeypatch):
    """A user's function that prints does not spoil the JSON of a command."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "case.py").write_text(CASE)
    command = ["verify", "model", "case.py:case", "--plan", "case.py:case", "--mesh", "2", "--platform", "torch"]
    assert main([*command, "--json"]) == 2
    captured = capfd.readouterr()
    assert json.loads(captured.out)["error"].startswith("SPEC raised ValueError: as it must")
    assert "written" in captured.err
    assert "printed" in captured.err


@pytest.mark.parametrize(
    "command, message",
    [
        ("verify model c.py:case --plan p.py:plan --mesh 2 --html c.py", "--html c.py would overwrite a file that"),
        ("explain c.py:case --plan a.b:plan --plan p.py:plan --mesh 2 --html ./p.py", "--html ./p.py would overwrite"),
        ("verify program c.py --world-size 2 --report c.py", "--report c.py would overwrite a file that"),
        ("compare a.json b.json --html b.json", "--html b.json would overwrite a file that this command reads"),
        ("verify ops --report x --html ./x", "--report and --html both name ./x; give each a file of its own"),
        ("trace folder --perfetto x --html x", "--html and --perfetto both name x; give each a file of its own"),
    ],
)
def test_no_output_overwrites_a_file_of_the_command(command, message, tmp_path, monkeypatch, capsys):
    """An output that is an input, or another output, is refused before anything runs, and the file is left alone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.py").write_text("x = 1")
    assert main(command.split()) == 2
    assert capsys.readouterr().err.startswith(f"hyper-parallel: error: {message}")
    assert (tmp_path / "c.py").read_text() == "x = 1"


class Terminal(io.StringIO):
    """A terminal that records what is written to it."""

    def isatty(self):
        """Return True."""
        return True


def show_on_terminal(monkeypatch):
    """Make a terminal with colours stdout and stderr."""
    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def test_the_first_verdict_of_a_line_has_a_colour(monkeypatch):
    """What is wrong is red, else what is right is green; other lines and words stay as they are."""
    show_on_terminal(monkeypatch)
    assert coloured("FAILED a: not equal\n1 of 2 equal, equal\nunequal") == (
        "\x1b[1;31mFAILED\x1b[0m a: not equal\n1 of 2 \x1b[32mequal\x1b[0m, equal\nunequal"
    )
    assert coloured("equal", io.StringIO()) == "equal"


@pytest.mark.parametrize("name, value", [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_colour_where_it_is_not_wanted(monkeypatch, name, value):
    """``NO_COLOR`` and terminals without colours are respected."""
    show_on_terminal(monkeypatch)
    monkeypatch.setenv(name, value)
    assert coloured("FAILED") == "FAILED"


def test_an_error_is_red_and_json_is_plain(monkeypatch, tmp_path):
    """On a terminal the word error is red; JSON has no colour there."""
    terminal = show_on_terminal(monkeypatch)
    assert main(["trace", str(tmp_path), "--json"]) == 2
    error, report = terminal.getvalue().splitlines()
    assert error.startswith("hyper-parallel: \x1b[1;31merror\x1b[0m: ")
    assert report.startswith('{"ok": false, "error": ')
    assert "\x1b" not in report


def test_a_pipe_gets_no_colour(capsys):
    """Text that is read by a program has no colour."""
    assert coloured("FAILED") == "FAILED"


def test_a_framework_newer_than_tested_is_named_once_on_stderr(platform_name, monkeypatch, capsys):
    """A check on a framework that is newer than all tested versions warns in one line; JSON has it in its header."""
    version = metadata.version(platform_name)
    for framework in TESTED:
        monkeypatch.setitem(TESTED, framework, ("0.1",) if framework == platform_name else ("99.0",))
    command = ["verify", "redistribute", "--mesh", "2", "--platform", platform_name]
    assert main(command) == 0
    text = f"{platform_name} {version} is newer than 0.1, the newest that this version of hyper_parallel was tested on"
    assert f"hyper-parallel: warning: {text}\n" in capsys.readouterr().err
    assert main([*command, "--json"]) == 0
    shown = capsys.readouterr()
    assert "warning" not in shown.err
    assert json.loads(shown.out)["header"]["untested"] == text
