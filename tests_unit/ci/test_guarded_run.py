"""`ci/guarded_run.py`: a time limit that shows every rank's stack before it ends anything."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "ci" / "guarded_run.py"
RANK = """
import faulthandler, signal, sys, time
faulthandler.register(signal.SIGUSR1, file=open(sys.argv[1], "w"), all_threads=False)
open(sys.argv[1] + ".up", "w").close()
def stuck():
    while True:
        time.sleep(0.05)
stuck()  # multiprocessing.forkserver
"""


@pytest.fixture
def guard(monkeypatch, tmp_path, script):
    """Return the script as a module, for a project in an empty folder."""
    module = script("guarded_run")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


@pytest.fixture
def rank(tmp_path):
    """A process that looks like a rank and is in the list of ranks; the fixture ends it."""
    stack = tmp_path / "0.stack"
    with subprocess.Popen([sys.executable, "-c", RANK, str(stack)]) as process:
        while not Path(f"{stack}.up").exists():
            time.sleep(0.01)
        ledger = tmp_path / "coverage_reports" / "data" / "torch" / "ranks"
        ledger.mkdir(parents=True)
        (ledger / str(process.pid)).write_text(f"rank-0\n{stack}")
        yield process
        process.kill()


def test_the_status_is_that_of_the_command(guard):
    """Exit statuses pass through; a signal is 128 and its number."""
    python = [sys.executable, "-c"]
    assert guard.main(["--minutes", "1", "--", *python, "pass"]) == 0
    assert guard.main(["--minutes", "1", "--", *python, "raise SystemExit(7)"]) == 7
    assert guard.main(["--minutes", "1", "--", *python, "import os; os.kill(os.getpid(), 15)"]) == 143
    assert guard.main(["--minutes", "1", "--", "no-such-command"]) == 127


def test_when_time_is_up_stacks_come_first_and_nothing_is_left(guard, rank, tmp_path, capsys):
    """The ranks' stacks are printed before anything is ended; then command and ranks are gone; status 124."""
    status = guard.run([sys.executable, "-c", "import time; time.sleep(60)"], 0.5, 2.0, tmp_path)
    out = capsys.readouterr().out
    assert status == 124
    assert "time is up" in out
    assert f"--- rank-0 (process {rank.pid}):" in out
    assert "in stuck" in out
    assert rank.wait(60) == -15


def test_leftovers_are_ended_by_their_numbers(guard, rank, capsys):
    """`--end` ends the ranks in the list, and nothing else."""
    assert guard.main(["--end", "--grace", "2"]) == 0
    assert "1 ranks were left" in capsys.readouterr().out
    assert rank.wait(60) == -15


def test_a_number_that_belongs_to_another_process_now_is_left_alone(guard, tmp_path):
    """A process number may be reused: a process that is not a rank is not touched."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        ledger = tmp_path / "coverage_reports" / "data" / "torch" / "ranks"
        ledger.mkdir(parents=True)
        (ledger / str(other.pid)).write_text("rank-0\n")
        assert guard.main(["--end", "--grace", "1"]) == 0
        assert other.poll() is None
        other.kill()


@pytest.mark.parametrize("arguments", [[], ["--minutes", "1"], ["--minutes", "0", "--", "x"], ["--", "x"]])
def test_a_call_without_limit_or_command_is_refused(guard, arguments):
    """A call without a limit or without a command is invalid."""
    with pytest.raises(SystemExit) as stopped:
        guard.main(arguments)
    assert stopped.value.code == 2
