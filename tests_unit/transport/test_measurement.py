"""Coverage of rank processes."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import hyper_parallel
from hyper_parallel.transport import measurement
from hyper_parallel.transport.measurement import (
    Measurement,
    current_measurement,
    in_test_context,
    measured,
    wrote_data_at,
)

coverage = pytest.importorskip("coverage")


@pytest.fixture
def nested(monkeypatch, tmp_path):
    """A Coverage object of the test's own, whatever measures the test run; stopped at the end."""
    started = coverage.Coverage(config_file=False, data_file=str(tmp_path / ".coverage"), data_suffix=True, branch=True)
    monkeypatch.setattr(coverage.Coverage, "current", lambda: started)
    return started


def test_a_process_that_is_not_measured_has_no_measurement(monkeypatch, nested):
    """Without coverage.py, without a running measurement, and while the tracer pauses, ranks are not measured."""
    tracer = sys.gettrace()
    try:
        sys.settrace(None)
        assert current_measurement() is None
    finally:
        sys.settrace(tracer)
    monkeypatch.setattr(coverage.Coverage, "current", lambda: None)
    assert current_measurement() is None
    monkeypatch.delitem(sys.modules, "coverage")
    assert current_measurement() is None
    with measured(None):
        pass


def test_a_measurement_says_how_and_where(nested, tmp_path):
    """Settings, folder and test of the measured process travel to its ranks."""
    nested.start()
    try:
        with in_test_context("test_x.py::test_y|run"):
            inside = current_measurement()
        outside = current_measurement()
    finally:
        nested.stop()
    assert inside.settings["branch"] is True
    assert inside.settings["data_file"] == str(tmp_path / ".coverage")
    assert inside.context == "test_x.py::test_y|run"
    assert outside.context is None
    assert "no-data-collected" in nested.get_option("run:disable_warnings")


def test_a_rank_writes_its_data_after_each_task(monkeypatch, tmp_path):
    """A process that nothing measures starts to, keeps on for the next task, and begins anew with other settings."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code.py").write_text("def f():\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    running = []
    plain = coverage.Coverage.start
    monkeypatch.setattr(coverage.Coverage, "current", lambda: running[-1] if running else None)
    monkeypatch.setattr(coverage.Coverage, "start", lambda self: (plain(self), running.append(self)))
    plain_stop = coverage.Coverage.stop
    monkeypatch.setattr(coverage.Coverage, "stop", lambda self: (plain_stop(self), running.remove(self)))
    config = coverage.Coverage(config_file=False, source=[str(tmp_path)]).config
    settings = {name: value for name, value in vars(config).items() if not name.startswith("_")}

    def rank(data_file, context=None):
        taken = Measurement({**settings, "data_file": str(tmp_path / data_file)}, str(tmp_path), context)
        with measured(taken):
            namespace = {}
            exec(compile((tmp_path / "code.py").read_text(), str(tmp_path / "code.py"), "exec"), namespace)  # noqa: S102
            namespace["f"]()
        return sorted(path.name for path in tmp_path.glob(f"{data_file}.*"))

    try:
        assert len(rank("first", "test_one|run")) == 1
        first = rank("first", "test_two|run")
        assert len(first) == 1
        data = coverage.CoverageData(str(tmp_path / first[0]))
        data.read()
        contexts = set(data.contexts_by_lineno(str(tmp_path / "code.py"))[2])
        assert len(rank("second")) == 1
        assert len(running) == 1
    finally:
        for each in running[:]:
            each.stop()
    assert contexts == {"test_one|run", "test_two|run"}


FORKED = """
import os, sys
import coverage
import measured_package

from hyper_parallel.transport.measurement import measured, current_measurement

measured_package.before()
child = os.fork()
if not child:
    with measured(current_measurement()):
        measured_package.after()
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_forked_process_writes_what_it_ran_itself(tmp_path):
    """Its data has no line from before the fork and no file that never ran: the parent's data has these."""
    package = tmp_path / "measured_package"
    package.mkdir()
    (package / "never_ran.py").write_text("ANSWER = 42\n")
    (package / "__init__.py").write_text("def before():\n    return 1\n\n\ndef after():\n    return 2\n")
    (tmp_path / "program.py").write_text(FORKED)
    (tmp_path / "settings").write_text("[run]\nparallel = true\nsource_pkgs = measured_package\npatch = _exit\n")
    path = os.pathsep.join([str(tmp_path), str(Path(hyper_parallel.__file__).parents[1]), *sys.path])
    command = [sys.executable, "-m", "coverage", "run", "--rcfile=settings", "program.py"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": path}  # nothing of what measures the test
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=240)
    found = []
    for written in tmp_path.glob(".coverage.*"):
        data = coverage.CoverageData(str(written))
        data.read()
        found.append({Path(name).name: sorted(data.lines(name)) for name in data.measured_files()})
    child, parent = sorted(found, key=len)
    assert child == {"__init__.py": [6]}
    assert parent == {"__init__.py": [1, 2, 5], "never_ran.py": []}


ENDED_WHILE_SAVING = """
import os, signal, sys
import coverage
from hyper_parallel.transport.measurement import Measurement, measured

started = coverage.Coverage(config_file=False)
settings = {name: value for name, value in vars(started.config).items() if not name.startswith("_")}
settings["data_file"] = os.path.abspath(".coverage")

def end_at_the_first_write(event, arguments):
    if event == "sqlite3.connect" and not signalled:
        signalled.append(event)
        os.kill(os.getpid(), signal.SIGTERM)

def task():
    sys.addaudithook(end_at_the_first_write)

signalled = []

with measured(Measurement(settings, os.getcwd())):
    task()
print("goes on")
"""


def test_sigterm_waits_until_a_rank_has_written_its_data(tmp_path):
    """A rank that is asked to end while it writes its coverage data writes all of it first, and ends then."""
    (tmp_path / "rank.py").write_text(ENDED_WHILE_SAVING)
    path = os.pathsep.join([str(Path(hyper_parallel.__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, "rank.py"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path},  # nothing of what measures the test
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "", "")
    (written,) = tmp_path.glob(".coverage.*")
    data = coverage.CoverageData(str(written))
    data.read()
    assert any(name.endswith("rank.py") for name in data.measured_files())


def test_a_signal_is_not_deferred_where_no_handler_can_be_set(monkeypatch):
    """A thread, and a process whose handler of SIGTERM is not Python's, keep the handler that they have."""
    before = signal.getsignal(signal.SIGTERM)
    handlers = []
    thread = threading.Thread(target=lambda: handlers.append(handler_inside()))
    thread.start()
    thread.join()
    assert handlers == [before]
    monkeypatch.setattr(signal, "getsignal", lambda _number: None)
    monkeypatch.setattr(signal, "signal", None)
    with measurement._sigterm_deferred():
        pass


def handler_inside():
    """The handler of SIGTERM where it would be deferred."""
    with measurement._sigterm_deferred():
        return signal.getsignal(signal.SIGTERM)


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """Let every test begin in a process that has started no measurement."""
    monkeypatch.setattr(measurement, "_STARTED", [])
    monkeypatch.setattr(measurement, "_LOST", set())


class FakeCoverage:
    """Coverage without a tracer: what is called on it."""

    running: list = []  # noqa: RUF012 - what `current` knows, like coverage's own

    def __init__(self, **_options):
        self.config = SimpleNamespace(disable_warnings=[], sigterm=False)
        self.calls = []

    @classmethod
    def current(cls):
        """Return the one that runs."""
        return cls.running[-1] if cls.running else None

    def start(self):
        """Run."""
        self.running.append(self)

    def stop(self):
        """Run no longer."""
        self.running.remove(self)

    def get_data(self):
        """Note the call, which writes what was measured until now."""
        self.calls.append("get_data")

    def save(self):
        """Note the call."""
        self.calls.append("save")

    def switch_context(self, name):
        """Note the context."""
        self.calls.append(name)


def test_a_measured_process_is_measured_once(monkeypatch, tmp_path):
    """A process starts one measurement, and another one for other settings; a failed task's data is written, too."""
    monkeypatch.setitem(sys.modules, "coverage", SimpleNamespace(Coverage=FakeCoverage))
    monkeypatch.setattr(FakeCoverage, "running", [])
    with in_test_context("test_x.py::test_y|run"):
        first = Measurement({"branch": True, "data_file": "d"}, str(tmp_path), "test_x.py::test_y|run")
    with pytest.raises(ValueError, match="task"), measured(first):
        raise ValueError("task")
    (started,) = FakeCoverage.running
    assert started.calls == ["test_x.py::test_y|run", "get_data"]
    assert (started.config.branch, started.config.sigterm) == (True, True)
    with measured(Measurement({"branch": True, "data_file": "d"}, str(tmp_path))):
        assert FakeCoverage.running == [started]
    with measured(Measurement({"branch": False, "data_file": "d"}, str(tmp_path))):
        (other,) = FakeCoverage.running
    assert started.calls[2:] == ["get_data", "save"]
    assert other is not started
    assert other.calls == ["get_data"]
    assert other.config.sigterm


@pytest.mark.parametrize("writes", ["get_data", "switch_context"])
def test_data_that_cannot_be_written_changes_no_outcome(monkeypatch, tmp_path, capsys, writes):
    """The task's own error or result stays, the half file goes, other processes' files stay, and no more is written."""

    def no_room(self, *_arguments):
        half.write_text("half")
        raise OSError(28, "No space left on device", str(half))

    class FullDisk(FakeCoverage):
        running: list = []  # noqa: RUF012

    own, half = tmp_path / ".coverage", tmp_path / f".coverage.host.pid{os.getpid()}.Xa"
    other = tmp_path / ".coverage.host.pid1.Xb"
    other.write_text("data")
    monkeypatch.setitem(sys.modules, "coverage", SimpleNamespace(Coverage=FullDisk))
    monkeypatch.setattr(FullDisk, writes, no_room)
    with pytest.raises(ValueError, match="task"), measured(Measurement({"data_file": str(own)}, str(tmp_path), "test")):
        raise ValueError("task")
    assert capsys.readouterr().err == (
        f"coverage data of process {os.getpid()} is lost: [Errno 28] No space left on device: '{half}'; the file is "
        "deleted and the process no longer measured, and the coverage gate reports it as one without data\n"
    )
    assert (list(tmp_path.iterdir()), FullDisk.running) == ([other], [])
    with measured(Measurement({"data_file": str(own)}, str(tmp_path), "later")):
        assert FullDisk.running == []


def test_the_time_of_the_last_write_is_that_of_the_ranks_own_files(monkeypatch, nested, tmp_path):
    """Files of the process count, a journal too, and no other's; a process without files wrote at 0."""
    assert wrote_data_at(71) == 0.0
    for name, seconds in (("host.pid71.Xa", 50), ("host.pid71.Xa-journal", 60), ("host.pid710.Xb", 70)):
        path = tmp_path / f".coverage.{name}"
        path.touch()
        os.utime(path, (seconds, seconds))
    assert (wrote_data_at(71), wrote_data_at(710), wrote_data_at(7)) == (60.0, 70.0, 0.0)
    monkeypatch.setattr(coverage.Coverage, "current", lambda: None)
    assert wrote_data_at(71) == 0.0
