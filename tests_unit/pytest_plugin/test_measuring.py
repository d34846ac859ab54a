"""Coverage of tests on ranks: `pytest --cov` counts the lines that every rank runs, without a setting."""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import hyper_parallel
from hyper_parallel.pytest_plugin.measuring import RankContexts
from hyper_parallel.transport import measurement

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pytest_cov") is None, reason="[no-tool] pytest-cov is not installed"
)

WORK = """\
def double(x):
    if x > 10:
        return 0
    return 2 * x

def on_last_rank(rank, world_size):
    if rank == world_size - 1:
        value = 7
        return value
    return 1

def never():
    return 3
"""
LINES = {1, 2, 4, 6, 7, 8, 9, 10, 12}  # 3 and 13 never run
ARCS = {(2, 4), (7, 8), (7, 10)}

RANKED = """
import pytest
@pytest.mark.launch({launch!r})
@pytest.mark.world_size({size})
def test_{launch}(rank, world_size):
    from mypkg.work import double, on_last_rank
    double(rank)
    on_last_rank(rank, world_size)
"""
LAUNCHED = """
from hyper_parallel.verify import launch
def body():
    from hyper_parallel.transport.base import active_transport
    from mypkg.work import double, on_last_rank
    double(1)
    return on_last_rank(active_transport().rank, 2)
def test_launch(platform_name):
    assert launch(body, 2, platform_name) == [1, 7]
"""


@pytest.fixture
def project(pytester):
    """A user's project: a package, and tests of it on ranks of each kind."""
    package = pytester.mkpydir("mypkg")
    (package / "work.py").write_text(WORK)
    pytester.makepyfile(
        test_simulated=RANKED.format(launch="simulated", size=3),
        test_processes=RANKED.format(launch="processes", size=2),
        test_launch=LAUNCHED,
    )
    return pytester.path


def run(folder, platform, *options):
    """Run the project's tests in a process that is not measured, and return what it printed."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("COVERAGE_") and name != "HP_RANK_LEDGER"
    }
    names = {
        "COVERAGE_FILE": str(folder / ".coverage"),
        "PYTHONPATH": os.pathsep.join([str(Path(hyper_parallel.__file__).parents[1]), *sys.path]),
        "HP_TEST_PLATFORMS": platform,
    }
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "hyper_parallel.pytest_plugin"]
    done = subprocess.run(
        [*command, "--cov=mypkg", *options],
        cwd=folder,
        env={**inherited, **names},
        text=True,
        capture_output=True,
        timeout=240,
        check=False,
    )
    return done.stdout + done.stderr


def copy_of(path):
    """Copy the data file `path`, which may have been renamed: the name of a finished file ends in a hash."""
    copied = path.with_name("copied_data")
    try:
        return shutil.copy(path, copied)
    except FileNotFoundError:
        return shutil.copy(next(path.parent.glob(f"{path.name}.H*")), copied)


def written_data(path):
    """The data in the file `path`, once the process that may still write it has finished.

    A copy is read: coverage adds its tables to an empty file that it reads, in the writer's place.
    """
    import coverage

    last_try = time.monotonic() + 60
    while True:
        data = coverage.CoverageData(copy_of(path))
        try:
            data.read()
        except coverage.exceptions.DataError:
            if time.monotonic() > last_try:
                raise
            time.sleep(0.05)
        else:
            return data


def data_of(folder):
    """The combined data, and the name of the measured file in it; no other data file has a line in it.

    A process that ends after pytest-cov has combined leaves a file that only lists the package.
    """
    import coverage

    for path in folder.glob(".coverage.*"):
        rest = written_data(path)
        assert not [line for name in rest.measured_files() for line in rest.lines(name)], path.name
    data = coverage.CoverageData(str(folder / ".coverage"))
    data.read()
    return data, next(name for name in data.measured_files() if name.endswith("work.py"))


def test_every_kind_of_rank_is_counted(project, platform_name):
    """Lines, branches and contexts of simulated, warm and launched ranks are in pytest-cov's data."""
    gloo = importlib.util.find_spec("torch") is not None
    kinds = ("simulated", "processes", "launch") if gloo else ("simulated",)
    files = [f"test_{kind}.py" for kind in kinds]
    text = run(project, platform_name, *files, "--cov-branch", "--cov-context=test", "-W", "error")
    assert f"{len(kinds)} passed" in text, text
    assert "CoverageWarning" not in text
    data, name = data_of(project)
    tests = {f"test_{kind}.py::test_{kind}[{platform_name}]|run" for kind in kinds}
    contexts = data.contexts_by_lineno(name)
    assert dict.fromkeys(LINES, tests) == {line: set(found) for line, found in contexts.items()}
    assert set(data.arcs(name)) >= ARCS


@pytest.mark.sweep
@pytest.mark.platforms("torch")
@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="[no-tool] pytest-xdist is not installed")
def test_workers_of_xdist_count_their_ranks(project):
    """With `-n 2`, the ranks of both workers are counted, each under its own test."""
    options = ("-n", "2", "--dist", "loadfile", "--cov-context=test")
    text = run(project, "torch", *options, "test_simulated.py", "test_processes.py")
    assert "2 passed" in text, text
    data, name = data_of(project)
    tests = {f"test_{kind}.py::test_{kind}[torch]|run" for kind in ("processes", "simulated")}
    assert set(data.contexts_by_lineno(name)[9]) == tests


@pytest.mark.sweep
@pytest.mark.platforms("torch")
def test_data_is_added_to_that_of_an_earlier_run(project):
    """`--cov-append` keeps the earlier run's lines; a test that changes the folder writes to the same place."""
    (project / "test_later.py").write_text("""
import os, pytest
@pytest.mark.launch("processes")
@pytest.mark.world_size(2)
def test_later():
    os.chdir("/")
    from mypkg.work import never
    never()
""")
    (project / "test_plain.py").write_text("from mypkg.work import double\ndef test_plain():\n    double(1)\n")
    assert "1 passed" in run(project, "torch", "test_plain.py")
    text = run(project, "torch", "test_later.py", "--cov-append")
    assert "1 passed" in text, text
    data, name = data_of(project)
    assert set(data.lines(name)) == {1, 2, 4, 6, 12, 13}


@pytest.mark.sweep
@pytest.mark.platforms("torch")
def test_ranks_that_coverage_measures_itself_are_in_time(project):
    """With `patch = subprocess` in the user's settings, ranks write their data before pytest-cov combines it."""
    (project / ".coveragerc").write_text("[run]\npatch = subprocess\n")
    text = run(project, "torch", "test_processes.py", "--cov-context=test")
    assert "1 passed" in text, text
    data, name = data_of(project)
    assert set(data.lines(name)) == LINES
    assert data.contexts_by_lineno(name)[9] == ["test_processes.py::test_processes[torch]|run"]


@pytest.mark.platforms("torch")
def test_ranks_of_failed_tests_are_counted(project):
    """A killed rank loses its last test only, and one that is ended by SIGTERM, as it waits for a peer, loses none."""
    with (project / "test_processes.py").open("a") as file:
        file.write("""
@pytest.mark.launch("processes")
@pytest.mark.world_size(2)
def test_killed():
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.launch("processes")
@pytest.mark.world_size(2)
def test_ended(rank):
    import pathlib, time
    from mypkg.work import never
    if rank == 0:
        while not pathlib.Path("ran").exists():
            time.sleep(0.01)
        raise ValueError
    never()
    pathlib.Path("ran").touch()
    while True:
        time.sleep(0.01)
""")
    text = run(project, "torch", "test_processes.py")
    assert "2 failed, 1 passed" in text, text
    data, name = data_of(project)
    assert set(data.lines(name)) == LINES | {13}


@pytest.mark.parametrize("phase, word", [("setup", "setup"), ("call", "run"), ("teardown", "teardown")])
def test_ranks_learn_the_name_of_the_test(phase, word):
    """While a test is set up, runs and is torn down, its name is the context of ranks, spelled as pytest-cov does."""
    hook = getattr(RankContexts(), f"pytest_runtest_{phase}")(SimpleNamespace(nodeid="test_x.py::test_y"))
    next(hook)
    assert measurement._TEST_CONTEXT.get() == f"test_x.py::test_y|{word}"
    with pytest.raises(StopIteration):
        hook.send(None)
    assert measurement._TEST_CONTEXT.get() is None
