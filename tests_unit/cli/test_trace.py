"""The command ``trace``."""

from __future__ import annotations

import json
import random

import pytest

from hyper_parallel.cli import main
from hyper_parallel.transport.checks.fingerprint import CollectiveFingerprint, Site
from hyper_parallel.transport.checks.flight_recorder import FlightRecorder
from hyper_parallel.transport.failures import WorldFailedError
from hyper_parallel.transport.simulated.endpoint import Contribution


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
    page = tmp_path / "out" / "timeline.html"
    assert main(["trace", str(tmp_path), "--html", str(page)]) == 0
    assert "1 of 2 ranks raised" in page.read_text()
    assert capsys.readouterr().out.startswith("2 ranks\n")
    assert main(["trace", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["world_size"], report["raised"], report["difference"]) == (2, {"1": "ValueError: boom"}, None)
    assert sorted(report["ranks"]) == ["0", "1"]


def test_a_folder_without_records_is_invalid_input(tmp_path, capsys):
    """The status is 2, and the message says how to get a record."""
    assert main(["trace", str(tmp_path)]) == 2
    assert "set HP_FLIGHT_FOLDER to this folder and run the ranks again" in capsys.readouterr().err


HOSTILE = [b"", b"\xff\xfe", b"null", b'{"rank": 0', b"[" * 5000, b'{"rank": ' + b"9" * 5000 + b"}", b'{"a":' * 5000]


def damaged(whole):
    """Forms of a record that is no longer one: truncated anywhere, bits flipped, values of another kind."""
    draw = random.Random(0)  # noqa: S311 - no secret
    yield from HOSTILE
    yield from (whole[:length] for length in range(0, len(whole) - 1, 40))
    for _ in range(100):
        place = draw.randrange(len(whole))
        yield whole[:place] + bytes([whole[place] ^ (1 << draw.randrange(8))]) + whole[place + 1 :]
    record = json.loads(whole)
    for value in (None, True, -1, 1 << 62, 10**400, "a", [], {}, [[]]):
        for name in record:
            yield json.dumps({**record, name: value}).encode()
        for name in record["calls"][0]:
            yield json.dumps({**record, "calls": [{**record["calls"][0], name: value}]}).encode()


def test_damaged_records_are_one_line_and_status_2(tmp_path, capsys):
    """Whatever a record has become, it is shown, or refused in one line with status 2: no traceback, no hang."""
    recorder = FlightRecorder(1, tmp_path)
    fingerprint = CollectiveFingerprint("barrier", (0,), (("root", (1, 2)),), Site(("train.py", 7)))
    recorder.asked(0, "join", Contribution(fingerprint, [None]))
    recorder.write(WorldFailedError("failed", {0: ValueError("boom")}, {0: "Traceback: here"}))
    path, perfetto, refused = tmp_path / "rank-0.json", tmp_path / "trace.json", 0
    for content in damaged(path.read_bytes()):
        path.write_bytes(content)
        status = main(["trace", str(tmp_path), "--perfetto", str(perfetto)])
        shown = capsys.readouterr()
        assert status in (0, 2), content
        if status == 2:
            refused += 1
            assert shown.out == ""
            assert len(shown.err.splitlines()) == 1, (content, shown.err)
            assert "flight record" in shown.err or "records of ranks" in shown.err
        else:
            json.loads(perfetto.read_text(), parse_constant=pytest.fail)
    assert refused > 100
    path.unlink()
    path.mkdir()
    assert main(["trace", str(tmp_path)]) == 2
    assert "is not a flight record: it is not a regular file" in capsys.readouterr().err
