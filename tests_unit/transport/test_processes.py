"""Processes that the library starts find what their parent finds."""

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import hyper_parallel
from hyper_parallel.pytest_plugin.ranks import require_transport
from hyper_parallel.transport.processes import available, end_ranks, end_session, process_state, python_command, stay_on
from hyper_parallel.transport.real import launched_processes
from hyper_parallel.transport.real.launched_processes import run_launched
from hyper_parallel.transport.serialization import pack
from hyper_parallel.transport.simulated import rank_pool

# Every way in which the library starts Python: warm ranks, live teams, torchrun and the fork servers.
SCRIPT = """
import importlib.util, sys

import hyper_parallel
from hyper_parallel import cli
from hyper_parallel.transport.real.launched_processes import run_launched
from hyper_parallel.transport.serialization import pack
from hyper_parallel.verify import launch, simulate

def home():
    import hyper_parallel
    return hyper_parallel.__file__

if __name__ == "__main__":
    platform = sys.argv[1]
    found = simulate(home, 1, platform)
    if importlib.util.find_spec("torch"):  # carries real worlds of both
        run = run_launched(pack((home, ()), home), 1, platform, 240.0)
        assert run.failure is None, run.failure
        found += launch(home, 1, platform) + run.results
    assert set(found) == {hyper_parallel.__file__}, found
    sys.exit(cli.main(["verify", "ops", "--quick", "--op", "abs", "--platform", platform]))
"""


def searching(folder):
    """Return an environment in which Python finds this package and ``folder``, and the current folder by itself."""
    places = [str(Path(hyper_parallel.__file__).parents[1]), str(folder)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    return {**environment, "PYTHONPATH": os.pathsep.join(places)}


@pytest.mark.sweep
def test_ranks_import_the_package_of_their_parent(platform_name, tmp_path):
    """Every process imports its parent's package, not that of the current folder, and leaves no file behind."""
    other = tmp_path / "checkout" / "hyper_parallel"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise RuntimeError('the package of the current folder')")
    (tmp_path / "script.py").write_text(SCRIPT)
    with tempfile.TemporaryDirectory() as temporary:  # pytest's own is too long a name for a socket
        done = subprocess.run(
            [sys.executable, str(tmp_path / "script.py"), platform_name],
            cwd=other.parent, env={**searching(tmp_path), "TMPDIR": temporary},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "the package of the current folder" not in done.stderr
        assert not list(Path(temporary).glob("hyper_parallel_*"))


def test_a_command_has_the_search_path_and_the_arguments_that_it_was_given(tmp_path, monkeypatch):
    """The child has its parent's search path, with the current folder if the parent has it, and its own arguments."""
    (tmp_path / "there").mkdir()
    (tmp_path / "told.py").write_text("import sys\nif __name__ == '__main__':\n    print(sys.path, sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    command = python_command("told", "--word", "a b")
    done = subprocess.run(command, cwd=tmp_path / "there", capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{[str(tmp_path), *sys.path[1:]]} ['--word', 'a b']"
    assert importlib.util.find_spec("told") is not None


def test_a_forked_child_leaves_its_parents_ranks_alone(platform_name):
    """A forked child cannot end its parent's warm ranks; they obey the process that started them."""
    require_transport(platform_name)
    ranks = [run_launched(pack((os.getpid, ()), os.getpid), 2, platform_name, 240.0).results]
    child = os.fork()
    if not child:
        try:
            end_ranks()
        except BaseException:  # noqa: BLE001 - the child must not go on as pytest
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ranks.append(run_launched(pack((os.getpid, ()), os.getpid), 2, platform_name, 240.0).results)
    assert ranks[0] == ranks[1]


@pytest.mark.platforms("torch")
def test_warm_ranks_of_both_kinds_are_ended(monkeypatch):
    """`end_ranks` ends the ranks of simulated and of launched worlds whose modules are loaded."""
    closed = []
    monkeypatch.setattr(launched_processes, "close_launched_teams", lambda: closed.append("launched"))
    monkeypatch.setattr(rank_pool, "close_workers", lambda: closed.append("simulated"))
    end_ranks()
    assert closed == ["launched", "simulated"]


@pytest.fixture
def two(monkeypatch):
    """Two usable CPUs; the value lists the CPU sets that this process would have been bound to."""
    put = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7, 4}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, to: put.append(to), raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    return put


@pytest.mark.platforms("torch")
def test_seats_are_counted_around(two):
    """A seat is one of the usable CPUs; seats beyond their number start over."""
    for seat in range(3):
        stay_on(seat)
    assert two == [{4}, {7}, {4}]


@pytest.mark.platforms("torch")
def test_other_systems_bind_nothing(two, monkeypatch):
    """On a system that cannot bind processes, no process is bound and no CPUs are listed."""
    monkeypatch.setattr(sys, "platform", "darwin")
    stay_on(0)
    assert (two, available()) == ([], [])


def test_a_session_ends_with_all_that_it_runs(tmp_path):
    """A process that ignores SIGTERM is killed, and its child ended; one that has ended is left alone."""
    ignore = "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    child = "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    (tmp_path / "ignores.py").write_text(f"{ignore}{child}print(child.pid, flush=True)\ntime.sleep(600)\n")
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "ignores.py")], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        pid = int(process.stdout.readline())
        end_session(process, 0.3)
        assert process.returncode == -signal.SIGKILL
        end_session(process, 0.3)
    deadline = time.monotonic() + 60
    while process_state(pid) not in {"", "Z"}:
        assert time.monotonic() < deadline
        time.sleep(0.01)
