"""Ranks whose parent has gone write their own last calls; ranks whose parent lives leave that to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from multiprocessing import Pipe

import pytest

from hyper_parallel.transport import processes
from hyper_parallel.transport.checks import orphaned_rank
from hyper_parallel.transport.checks.fingerprint import MessageFingerprint, Site
from hyper_parallel.transport.checks.flight_recorder import FOLDER_VARIABLE
from hyper_parallel.transport.checks.flight_trace import read_flight
from hyper_parallel.transport.checks.orphaned_rank import RankFlight, RecordedLine
from hyper_parallel.transport.simulated.endpoint import Resumption

MESSAGE = MessageFingerprint(0, 1, 3, (("shape", (2,)),), Site(("train.py", 7)))


@pytest.fixture
def ended():
    """The number of a process that has ended and that its parent has not asked for."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield process.pid
    process.wait()


def flight_of(folder, monkeypatch, parent, rank=1):
    """A rank's recorder of a world of two, with the line of a rank and the other end."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    flight = RankFlight(rank, 2, parent)
    flight.begin()
    here, there = Pipe()
    return flight, RecordedLine(here, flight), there


def calls(folder, rank=1):
    """What a rank wrote of its calls."""
    return [(call["operation"], call["state"]) for call in read_flight(folder).records[rank]["calls"]]


def test_a_line_that_breaks_with_the_parent_leaves_the_calls(tmp_path, monkeypatch, ended):
    """Whether the rank sends or receives when the parent is killed; records of earlier worlds are removed."""
    (tmp_path / "rank-7.json").write_text("{}")
    os.utime(tmp_path / "rank-7.json", (1, 1))
    _, line, parent = flight_of(tmp_path, monkeypatch, ended)
    _, other, other_parent = flight_of(tmp_path, monkeypatch, ended, rank=0)
    line.send(("receive", MESSAGE))
    assert parent.recv() == ("receive", MESSAGE)
    parent.send(Resumption(5))
    assert line.recv().value == 5
    line.send(("receive", MESSAGE))
    parent.close()
    with pytest.raises((EOFError, ConnectionResetError)):
        line.recv()
    assert calls(tmp_path) == [("recv", "completed"), ("recv", "started")]
    with pytest.raises(BrokenPipeError):
        line.send(("send", (MESSAGE, None)))
    other_parent.close()
    with pytest.raises(BrokenPipeError):
        other.send(("send", (MESSAGE, None)))
    assert sorted(read_flight(tmp_path).records) == [0, 1]
    assert calls(tmp_path, 0) == [("send", "started")]


def test_a_line_that_a_living_parent_closes_leaves_nothing(tmp_path, monkeypatch):
    """The parent writes the record of the world itself; without a folder a line records nothing."""
    monkeypatch.setattr(orphaned_rank, "_ENDING_SECONDS", 0.05)
    for parent in (os.getpid(), 1):
        flight, line, other = flight_of(tmp_path / "none", monkeypatch, parent)
        other.close()
        with pytest.raises(BrokenPipeError):
            line.send(("receive", MESSAGE))
    monkeypatch.delenv(FOLDER_VARIABLE)
    flight.begin()
    here, there = Pipe()
    line = RecordedLine(here, flight)
    line.send(("receive", MESSAGE))
    there.send(Resumption(1))
    assert line.recv().value == 1
    there.close()
    with pytest.raises((EOFError, ConnectionResetError)):
        line.recv()
    assert not (tmp_path / "none").exists()


def test_a_rank_that_computes_leaves_with_its_parent(tmp_path, monkeypatch):
    """It writes its calls first, as soon as the parent has ended; a folder that cannot be written stops nobody."""
    monkeypatch.setattr(orphaned_rank, "_FOLLOW_SECONDS", 0.02)
    parent = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    flight, line, _ = flight_of(tmp_path / "flight", monkeypatch, parent.pid)
    line.send(("send", (MESSAGE, None)))
    left = []
    follower = threading.Thread(target=flight.leave_with_parent, args=(left.append,))
    follower.start()
    assert left == []
    parent.send_signal(signal.SIGKILL)
    follower.join(60)
    assert left == [1]
    assert calls(tmp_path / "flight") == [("send", "started")]
    parent.communicate()
    flight.leave_with_parent(left.append)
    (tmp_path / "file").write_text("")
    flight, line, _ = flight_of(tmp_path / "file", monkeypatch, parent.pid)
    flight.leave_with_parent(left.append)
    assert left == [1, 1, 1]


def test_where_no_file_has_the_state_a_process_has_ended_once_nobody_has_its_number(tmp_path, monkeypatch, ended):
    """One that nobody has asked for yet still counts as running there."""
    monkeypatch.setattr(processes, "_STATE", f"{tmp_path}/{{}}")
    monkeypatch.setattr(orphaned_rank, "_ENDING_SECONDS", 0.05)
    _, line, parent = flight_of(tmp_path / "none", monkeypatch, ended)
    parent.close()
    with pytest.raises(BrokenPipeError):
        line.send(("receive", MESSAGE))
    assert not (tmp_path / "none").exists()
