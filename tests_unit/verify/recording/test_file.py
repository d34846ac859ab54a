"""The file of one rank: what is written is read, and what cannot be written or read is an error that names the file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from hyper_parallel.verify.frameworks.contract.fingerprint import NUMBERS, Fingerprint
from hyper_parallel.verify.frameworks.contract.records import Pending, Record, RecordingError, Region
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.recording.file import RankFile, file_of_rank, line_of, read_rank, shown_record

HEADER = {"rank": 1, "world_size": 3}
REGIONS = [
    None,
    Region((7, 5), (3, 0)),
    Region((7, 5), (0, 2), (Pending("sum", (0, 2)), Pending("max", (0, 1)))),
    Region((35,), (0,), (), ((4, 6), (20, 9))),
]


def _record(region=None, site="train.py:7"):
    rng = np.random.default_rng(3)
    numbers = [float(number) for number in rng.standard_normal(len(NUMBERS))]
    value = rng.standard_normal((3, 5)).astype(np.float32)
    fingerprint = Fingerprint(np.array(numbers), value.shape, "float32", value)
    record = Record("gradient", "up.weight", "up", 2, 1, fingerprint, region, site)
    return record, line_of(shown_record(record, "float32", value), numbers)


def _written(folder, *lines):
    file = RankFile(folder, 1 << 20, lambda: HEADER)
    assert file.write(lines)
    file.close({"reason": "exit"})
    return file_of_rank(folder, 1)


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("site", ["", "train.py:7"])
def test_what_is_written_is_read(tmp_path, region, site):
    """A record comes back with its name, place, numbers, elements, and the part of the tensor that it is."""
    record, line = _record(region, site)
    found = read_rank(_written(tmp_path / "r", line), "A")
    (read,) = found.records.records
    for name in ("kind", "name", "module", "step", "call", "region", "site"):
        assert getattr(read, name) == getattr(record, name)
    assert np.array_equal(read.value.numbers, record.value.numbers)
    assert np.array_equal(read.value.whole, record.value.whole)
    assert (read.value.shape, read.value.dtype) == ((3, 5), "float32")
    assert (found.end, found.cut) == ({"reason": "exit"}, False)


@pytest.mark.parametrize(
    "change", [{"numbers": [1.0]}, {"array": "O"}, {"shape": [4, 5]}, {"region": {}}, {"step": "x"}]
)
def test_a_damaged_line_is_refused(tmp_path, change):
    """A line with another number of numbers, with objects, or without its parts is refused with its number."""
    _, line = _record()
    path = _written(tmp_path, line, json.dumps({**json.loads(line), **change}))
    with pytest.raises(InputError) as caught:
        read_rank(path, "A")
    assert str(caught.value) == f"A: {path}, line 3, is damaged: it is not a record; copy the file again"


def test_a_line_without_its_end_is_dropped(tmp_path):
    """A process that was killed leaves at most one such line, the last."""
    _, line = _record()
    path = _written(tmp_path, line)
    path.write_bytes(path.read_bytes()[:-4])
    found = read_rank(path, "A")
    assert (len(found.records.records), found.end, found.cut) == (1, None, True)


def test_a_folder_that_another_rank_makes_meanwhile_is_taken(tmp_path, monkeypatch):
    """Ranks start at the same time, and each makes the folder if it is not there."""
    plain = Path.mkdir

    def late(path, *args, **kwargs):
        plain(path, *args, **kwargs)
        raise FileExistsError(17, "File exists")

    monkeypatch.setattr(Path, "mkdir", late)
    assert _written(tmp_path / "r", _record()[1]).is_file()


def test_a_file_that_cannot_be_opened_is_named(tmp_path, monkeypatch):
    """A full disk is an error with the file's path; so is a folder that cannot be made."""

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    (tmp_path / "file").write_text("")
    with pytest.raises(RecordingError) as caught:
        _written(tmp_path / "file" / "r", "")
    assert str(caught.value) == f"{tmp_path / 'file' / 'r'} cannot be made: Not a directory"
    monkeypatch.setattr(os, "open", full)
    with pytest.raises(RecordingError) as caught:
        _written(tmp_path, "")
    assert str(caught.value) == f"{file_of_rank(tmp_path, 1)} cannot be written: No space left on device"
