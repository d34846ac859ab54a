"""Temporary folders whose owner was killed are removed by the next process."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys

from hyper_parallel.transport.owned_folders import owned_folder

OWNER = """
import sys
from pathlib import Path
from hyper_parallel.transport.owned_folders import owned_folder
with owned_folder("owned_", Path(sys.argv[1])) as folder:
    (folder / "data").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_the_folder_of_a_killed_process_is_removed_by_the_next(tmp_path):
    """A running owner keeps its folder; a killed one leaves it, until another process makes one with its prefix."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        name = owner.stdout.readline().strip()
        with owned_folder("owned_", tmp_path) as own:
            assert sorted(str(folder) for folder in tmp_path.iterdir()) == sorted([name, str(own)])
        owner.send_signal(signal.SIGKILL)
    with owned_folder("other_", tmp_path):
        assert (tmp_path / name).is_dir()
    with owned_folder("owned_", tmp_path) as own:
        assert [str(folder) for folder in tmp_path.iterdir()] == [str(own)]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_being_made_is_left_alone(tmp_path, monkeypatch):
    """Another process that looks just before a folder is locked does not take it for one of a killed process."""
    plain, looked = fcntl.flock, []

    def look_first(descriptor, operation):
        if not looked:
            looked.append(True)
            with owned_folder("owned_", tmp_path):
                pass
        plain(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", look_first)
    with owned_folder("owned_", tmp_path) as folder:
        assert folder.is_dir()
    assert looked == [True]
