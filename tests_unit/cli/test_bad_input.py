"""Invalid input and Ctrl-C: one clear error, the documented exit status, nothing left behind."""

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from hyper_parallel.cli import main, parser

USER = Path(__file__).parent.parent / "verify" / "user"
ROOT = Path(__file__).parents[2]


def leaves(command, name="hyper-parallel"):
    """Return every command that runs something, with its parser."""
    nested = [action for action in command._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield name, command
    for action in nested:
        for word, child in action.choices.items():
            yield from leaves(child, f"{name} {word}")


@pytest.mark.parametrize(
    "name, command", list(leaves(parser())), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_command_answers_in_json(name, command):
    """Every command has --json."""
    assert "--json" in command._option_string_actions


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["verify", "model", "--bogus"], "hyper-parallel verify model: error: unknown option --bogus"),
        (["verify", "ops", "--op"], "hyper-parallel verify ops: error: argument --op: expected at least one argument"),
        (["doctor", "now"], "hyper-parallel doctor: error: unexpected argument now"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_unknown_options_are_status_2(arguments, message, as_json, capsys):
    """An unknown option, or one without its value, is one line with status 2, and an object with --json."""
    assert main([*arguments, *["--json"] * as_json]) == 2
    captured = capsys.readouterr()
    command, _, text = message.partition(": error: ")
    assert captured.err == f"{message} (see {command} --help)\n"
    assert captured.out == (json.dumps({"ok": False, "error": f"{text} (see {command} --help)"}) + "\n") * as_json


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("as_json", [False, True])
def test_a_plan_that_does_not_parse_is_status_2(as_json, tmp_path, capsys):
    """A syntax error is reported with the file, the line and the mistake, as text and as JSON."""
    path = tmp_path / "bad_plan.py"
    path.write_text("def plan(mesh):\n    return {,}\n")
    spec = f"{USER / 'torch_case.py'}:case"
    arguments = ["verify", "model", spec, "--plan", f"{path}:plan", "--mesh", "2", *["--json"] * as_json]
    assert main(arguments) == 2
    message = f"PLAN: cannot import {path}: SyntaxError: invalid syntax (bad_plan.py, line 2)"
    captured = capsys.readouterr()
    assert captured.err == f"hyper-parallel: error: {message}\n"
    assert captured.out == ("" if not as_json else json.dumps({"ok": False, "error": message}) + "\n")


PORT = """
import os, socket
server = socket.create_server(("127.0.0.1", 0))
port = server.getsockname()[1]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
from hyper_parallel.platform.select import platform_named
try:
    platform_named("torch").init_process_group("gloo")
except Exception as error:
    print(type(error).__name__, str(error).replace(str(port), "PORT"))
"""


@pytest.mark.platforms("torch")
def test_a_port_in_use_is_reported():
    """If the port of the ranks' rendezvous is in use, the error names the port and the fix."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", PORT], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == (
        "RendezvousError init_process_group: the rendezvous port PORT is in use; stop the process that listens on it, "
        "set MASTER_PORT to a free port, or let `torchrun --standalone` choose one\n"
    )


@pytest.mark.platforms("torch")
def test_our_own_ranks_meet_whatever_port_is_taken(monkeypatch):
    """Real ranks choose a free port, so that a MASTER_PORT in use does not matter."""
    from hyper_parallel.verify.launch import launch

    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        assert launch(_rank, 2, "torch", timeout=60) == [0, 1]


def _rank():
    from hyper_parallel.platform.select import current_platform

    return current_platform().transport().rank


ENDLESS = """
import multiprocessing
import socket
import time
from torch_case import *

begun = []

def endless():
    def counted(output, batch):
        if (multiprocessing.parent_process() is not None or {alone}) and not begun:
            begun.append(True)
            socket.create_connection(("127.0.0.1", {port})).close()
            while True:
                time.sleep(0.01)
        return loss(output, batch)
    return Net, batches(), counted
"""


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("launch", ["simulated", "processes"])
def test_ctrl_c_leaves_no_process(launch, tmp_path, interruptible):
    """SIGINT in the middle of training ends every process that the command started, with status 130.

    Of a world of processes, it comes while the ranks train, after the single device.
    """
    (tmp_path / "torch_case.py").write_text((USER / "torch_case.py").read_text())
    alone = launch == "simulated"
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "hyper_parallel", "verify", "model", "endless_case:endless",
               "--plan", "endless_case:plan", "--mesh", "2", "--platform", "torch",
               "--steps", "1", "--launch", launch, "--html", "page.html"]  # fmt: skip
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as started:
        text = ENDLESS.format(alone=alone, port=started.getsockname()[1])
        (tmp_path / "endless_case.py").write_text(text)
        process = subprocess.Popen(
            command, cwd=tmp_path, env={**interruptible, "HP_TEST_MARK": mark}, stderr=subprocess.PIPE, text=True
        )
        started.settimeout(90)
        started.accept()[0].close()
    assert len(_marked(mark)) > (launch == "processes")
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=240)
    assert process.returncode == 130, message
    assert _marked(mark) == []
    assert "partial report: 0 of 1 runs finished" in (tmp_path / "page.html").read_text()


def _marked(mark):
    """Return the command lines of the processes that have the mark in their environment."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # gone, or not ours
            if mark.encode() in path.read_bytes():
                commands.append(path.with_name("cmdline").read_bytes())
    return commands


@pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="[no-tool] the README is not installed")
def test_the_table_of_exit_statuses_is_complete():
    """The README's table has every exit status of the command, and no other."""
    from hyper_parallel import cli
    from hyper_parallel.verify.program.report import REFUSED

    text = (ROOT / "README.md").read_text()
    table = text[text.index("| exit status |") :].partition("\n\n")[0]
    statuses = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    assert statuses == {0, 1, cli._BAD_INPUT, REFUSED, cli.INTERRUPTED}


@pytest.mark.parametrize(
    "command",
    [
        ["verify", "model", "--scenario", "3-tutorial"],
        ["verify", "ops", "--op", "add"],
        ["verify", "redistribute", "--mesh", "2"],
        ["fuzz", "--count", "1"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("framework", ["torch", "mindspore"])
def test_a_framework_that_cannot_be_imported_is_one_line(tmp_path, command, framework):
    """A half-installed framework is invalid input: one line with the reason of the import, and status 2."""
    (tmp_path / framework).mkdir()
    reason = f"lib{framework}.so: cannot open shared object file"
    (tmp_path / framework / "__init__.py").write_text(f"raise ImportError({reason!r})\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    program = [sys.executable, "-m", "hyper_parallel", *command, "--platform", framework]
    done = subprocess.run(program, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.stderr == (
        f"hyper-parallel: error: {framework} is installed, but cannot be imported: {reason}; "
        "hyper-parallel doctor says more\n"
    )
    assert (done.returncode, done.stdout) == (2, "")
