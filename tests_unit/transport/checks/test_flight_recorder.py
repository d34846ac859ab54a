"""The record of a failed world of real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from multiprocessing import Pipe

import pytest

from hyper_parallel.transport import processes
from hyper_parallel.transport.base import active_transport
from hyper_parallel.transport.checks import flight_recorder
from hyper_parallel.transport.checks.fingerprint import CollectiveFingerprint, MessageFingerprint, Site
from hyper_parallel.transport.checks.flight_recorder import (
    CALLS,
    FOLDER_VARIABLE,
    FlightRecorder,
    RankFlight,
    RecordedLine,
    recorder_from_environment,
)
from hyper_parallel.transport.checks.flight_trace import read_flight
from hyper_parallel.transport.failures import WorldFailedError
from hyper_parallel.transport.real.launched_processes import run_launched
from hyper_parallel.transport.serialization import pack
from hyper_parallel.transport.simulated.endpoint import Contribution, Resumption
from hyper_parallel.transport.simulated.rank_pool import LEDGER_VARIABLE

SITE = Site(("train.py", 7))


def contribution(ticket=None, awaited=True):
    """A part in a barrier."""
    fingerprint = CollectiveFingerprint("barrier", (0, 1), (("root", (1, 2)),), SITE)
    return Contribution(fingerprint, [None, None], ticket, awaited)


def states(folder, rank):
    """What the record says of the calls of a rank."""
    calls = json.loads((folder / f"rank-{rank}.json").read_text())["calls"]
    return [(call["operation"], call["sequence"], call["state"], call["ended"] is not None) for call in calls]


def test_a_call_is_started_then_matched_then_completed(tmp_path):
    """It is matched by the answer, completed by the next call; an error leaves it started; handles are followed."""
    recorder = FlightRecorder(2, tmp_path)
    message = MessageFingerprint(0, 1, 3, (("shape", (2,)), ("dtype", "float32")), SITE)
    recorder.asked(0, "join", contribution())
    recorder.answered(0, None)
    recorder.asked(0, "start", contribution(4))
    recorder.asked(0, "start", contribution(5, awaited=False))
    recorder.asked(0, "post", (6, message, None, True, True))
    recorder.asked(0, "await", 4)
    recorder.answered(0, None)
    recorder.asked(0, "settle", 6)
    recorder.answered(0, ValueError())
    recorder.asked(1, "send", (message, None))
    recorder.asked(1, "receive", message)
    recorder.answered(1, None)
    recorder.write(WorldFailedError("failed", {}))
    assert states(tmp_path, 0) == [
        ("barrier", 0, "completed", True),
        ("barrier", 1, "completed", True),
        ("barrier", 2, "started", False),
        ("send", 0, "started", False),
    ]
    assert states(tmp_path, 1) == [("send", 0, "started", False), ("recv", 1, "matched", False)]


def test_the_last_calls_are_kept(tmp_path):
    """More calls than the ring holds push out the oldest; numbers go on."""
    recorder = FlightRecorder(2, tmp_path / "new")
    for _ in range(CALLS + 3):
        recorder.asked(1, "join", contribution())
    failed = WorldFailedError("rank 0 failed", {0: ValueError("boom"), 1: TimeoutError("late")})
    recorder.write(failed)
    assert str(failed) == f"rank 0 failed\nflight record: hyper-parallel trace {tmp_path / 'new'}"
    flight = read_flight(tmp_path / "new")
    assert [call["number"] for call in flight.records[1]["calls"]] == list(range(3, CALLS + 3))
    assert flight.raised() == {0: "ValueError: boom"}


def test_a_record_that_cannot_be_written_costs_no_error(tmp_path, monkeypatch):
    """The failure of the world is reported, and that its record is missing; without a folder there is none."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file"))
    recorder = recorder_from_environment(1)
    failed = WorldFailedError("rank 0 failed", {})
    recorder.write(failed)
    assert str(failed).startswith(
        f"rank 0 failed\nthe flight record could not be written to {tmp_path / 'file'}: [Errno"
    )
    monkeypatch.delenv(FOLDER_VARIABLE)
    assert recorder_from_environment(1) is None


CRASHES = ["SIGSEGV", "SIGABRT"]


def _fails(how):
    """Rank 1 raises, dies or runs on, while the others wait for it."""
    transport = active_transport()
    for _ in range(3):
        transport.barrier((0, 1, 2))
    if transport.rank == 1:
        if how == "raised":
            raise ValueError("boom")
        if how.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, how))
        while how == "timeout":
            pass
    transport.barrier((0, 1, 2))


@pytest.mark.fault
@pytest.mark.platforms("torch")
@pytest.mark.parametrize(
    "how", ["raised", "SIGKILL", "timeout", *(pytest.param(name, marks=pytest.mark.sweep) for name in CRASHES)]
)
def test_a_failed_world_leaves_its_record(tmp_path, monkeypatch, how):
    """Raised, killed, crashed or too late: all ranks' calls with sites, the culprit, its error and the stacks."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.delenv(LEDGER_VARIABLE, raising=False)
    flight = _recorded(tmp_path, how)
    assert sorted(flight.records) == [0, 1, 2]
    errors = {"timeout": [], "raised": ["ValueError: boom"]}
    assert [error.split(";")[0] for error in flight.raised().values()] == errors.get(
        how, [f"RankFailedError: rank 1 died of {how}"]
    )
    assert set(flight.raised()) == ({1} if how != "timeout" else set())
    assert [call["operation"] for call in flight.records[1]["calls"]] == ["barrier"] * 3
    if how == "timeout":
        assert "rank 1 never called it" in flight.difference()
    assert f"barrier() at {__file__}:" in flight.text()


def _recorded(folder, how):
    """The record of a world that failed so; a rank that runs on gets the time that it needs to reach its loop."""
    limit = 3.0 if how == "timeout" else 120.0
    while True:
        done = run_launched(pack((_fails, (how,)), _fails), 3, "torch", limit)
        assert f"flight record: hyper-parallel trace {folder}" in str(done.failure)
        flight = read_flight(folder)
        if how != "timeout" or "in _fails" in flight.records[1]["doing"]:
            return flight
        limit *= 2
        assert limit < 300, flight.text()


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
    monkeypatch.setattr(flight_recorder, "_ENDING_SECONDS", 0.05)
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
    monkeypatch.setattr(flight_recorder, "_FOLLOW_SECONDS", 0.02)
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
    monkeypatch.setattr(flight_recorder, "_ENDING_SECONDS", 0.05)
    _, line, parent = flight_of(tmp_path / "none", monkeypatch, ended)
    parent.close()
    with pytest.raises(BrokenPipeError):
        line.send(("receive", MESSAGE))
    assert not (tmp_path / "none").exists()
