"""A full disk: the error names the file and the disk, the earlier file is whole, ranks end, and nothing is left."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hyper_parallel.transport.processes import search_path
from hyper_parallel.transport.simulated.rank_pool import LEDGER_VARIABLE

pytestmark = [pytest.mark.platforms("torch"), pytest.mark.fault]

FULL = "No space left on device"


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What ``full_disk.py`` saw on a disk of two megabytes in a mount namespace of its own, and the disk's folder."""
    folder, mount = tmp_path_factory.mktemp("disk"), "mount -t tmpfs -o size=2m none "
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("mount namespaces: there is no command unshare")
    tried = subprocess.run([unshare, "--mount", "sh", "-c", f"{mount} {folder}"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(f"mount namespaces: {tried.stderr.decode().strip()}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search_path()), "HYPER_PARALLEL_PLATFORM": "torch"}
    environment.pop(LEDGER_VARIABLE, None)
    script = str(Path(__file__).with_name("full_disk.py"))
    ran = subprocess.run(
        [unshare, "--mount", "sh", "-c", f'{mount} "$2" && exec "$0" "$1" "$2"', sys.executable, script, str(folder)],
        env=environment, capture_output=True, text=True, timeout=480, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout), folder


def test_a_report_is_an_error_and_the_earlier_one_is_whole(outcome):
    """The option, the file and the disk are named; no part is left beside it."""
    error, files, text = outcome[0]["report"]
    path = outcome[1] / "report" / "report.json"
    assert error == f"ValueError: --json {path} cannot be written: {FULL}"
    assert files == {"report.json": 10}
    assert text == '{"run": 1}'


def test_a_flight_record_stays_that_of_one_world(outcome):
    """The failure is reported with the file that does not fit, and the earlier records of all ranks are left."""
    text, files, doing = outcome[0]["record"]
    folder = outcome[1] / "record"
    assert text == (
        f"failed\nthe flight record could not be written to {folder}: [Errno 28] {FULL}: '{folder / 'rank-1.json'}'"
    )
    assert files == ["rank-0.json", "rank-1.json"]
    assert doing == ["first", "first"]


def test_ranks_that_cannot_be_recorded_are_not_started(outcome):
    """The coverage gate would miss them; the file in the ledger is named, and no part of it is left."""
    error, files = outcome[0]["ledger"]
    assert error.startswith(f"OSError: [Errno 28] {FULL}: '{outcome[1] / 'ledger'}{os.sep}")
    assert files == ["filler"]


def test_a_checkpoint_of_pytorch_fails_on_all_ranks_and_the_earlier_one_loads(outcome):
    """The rank whose part does not fit is named, all ranks end, and what was written has no metadata."""
    text, loaded, complete, _ = outcome[0]["checkpoint"]
    assert text.startswith("ranks 0, 1 of 2 failed")
    assert "CheckpointException ranks:dict_keys([1])" in text
    assert "is the disk full?" in text
    assert loaded == [[0, 1, 2, 3, 4]] * 2
    assert complete is False


def test_a_checkpoint_of_ours_is_an_error_and_the_earlier_one_is_whole(outcome):
    """The file and the disk are named, and no part is left."""
    error, whole = outcome[0]["own_checkpoint"]
    path = outcome[1] / "own_checkpoint" / "own"
    assert error.startswith(f"CheckpointWriteError: save_checkpoint: {path} cannot be written (")
    assert FULL in error
    assert whole is True


def test_coverage_data_of_ranks_changes_no_verdict(outcome):
    """Every task has its results; ranks name the file and the reason, leave no half of it, and fail the gate."""
    told = outcome[0]["coverage_data"]
    assert isinstance(told, dict), told[-3000:]
    data = outcome[1] / "coverage_data" / "coverage_reports" / "data" / "torch" / ".coverage."
    assert [(results, failure) for results, failure, _ in told["results"]] == [([7, 8], "None")] * 3
    assert (told["before"], told["files"]) == (2, [])
    printed = {}
    for text in told["results"][1][2]:
        start, _, rest = text.partition(" is lost: Couldn't ")
        pid = int(start.removeprefix("coverage data of process "))
        assert f" data file '{data}" in rest
        assert f".pid{pid}." in rest
        assert "database or disk is full" in rest
        assert rest.endswith(
            "; the file is deleted and the process no longer measured, and the coverage gate reports it as one "
            "without data\n"
        )
        printed[pid] = text
    assert sorted(printed) == told["launched"]
    (failure,) = told["gate"]
    assert failure.startswith("2 of 2 started ranks left no coverage data: ")


def test_no_process_is_left(outcome):
    """The warm ranks that wrote to the full disk have ended with the process that started them."""
    *_, pids = outcome[0]["checkpoint"]
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
