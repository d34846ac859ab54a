"""The command ``trace``."""

from __future__ import annotations

import json

from hyper_parallel.cli import main
from hyper_parallel.transport.failures import WorldFailedError
from hyper_parallel.transport.flight_recorder import FlightRecorder


def test_a_record_is_shown_and_converted(tmp_path, capsys):
    """The table goes to stdout, or JSON; the trace to a file; the status is 0."""
    FlightRecorder(2, tmp_path).write(WorldFailedError("failed", {1: ValueError("boom")}, {1: "Traceback: here"}))
    trace = tmp_path / "out" / "trace.json"
    assert main(["trace", str(tmp_path), "--perfetto", str(trace)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "2 ranks",
        "raised: rank 1: ValueError: boom",
        "  rank 0: no calls",
        "  rank 1: no calls",
        "--- rank 1: Traceback: here",
    ]
    assert json.loads(trace.read_text())["displayTimeUnit"] == "ms"
    assert main(["trace", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["world_size"], report["raised"], report["difference"]) == (2, {"1": "ValueError: boom"}, None)
    assert sorted(report["ranks"]) == ["0", "1"]


def test_a_folder_without_records_is_invalid_input(tmp_path, capsys):
    """The status is 2, and the message says how to get a record."""
    assert main(["trace", str(tmp_path)]) == 2
    assert "set HP_FLIGHT_FOLDER to it and run the ranks again" in capsys.readouterr().err
