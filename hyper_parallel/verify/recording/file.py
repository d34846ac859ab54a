"""The file of one rank: lines of JSON, each of which is complete or absent.

The first line is the header. Then each record has a line. The last line states how the recording ended. Lines are
appended by single writes, so a killed process leaves complete lines and at most one truncated line, which is dropped.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.verify.frameworks.contract.fingerprint import NUMBERS, Fingerprint
from hyper_parallel.verify.frameworks.contract.records import Pending, RankRecords, Record, RecordingError, Region
from hyper_parallel.verify.input_error import InputError

__all__ = [
    "FORMAT",
    "RankFile",
    "RankRecording",
    "file_of_rank",
    "is_blank",
    "line_of",
    "read_header",
    "read_rank",
    "shown_record",
]

FORMAT = 2
"""Version of the format; different versions are rejected. Recordings of format 1 also have gradients before clipping.
"""

_ENCODER = json.JSONEncoder(separators=(",", ":"))

_END = b'{"end":'

_END_ROOM = 4096
"""Number of bytes, within the limit, that are reserved for the last line."""


def file_of_rank(folder: Path, rank: int) -> Path:
    """Return the path of a rank's file."""
    return folder / f"rank-{rank}.jsonl"


def is_blank(path: Path) -> bool:
    """Return whether a rank's recording ended without a record, because the program failed before training."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        file.readline()
        return file.readline().startswith(_END)


class RankFile:
    """The file of this rank, opened when the first line is written.

    Args:
        folder: folder of the file; it is created if needed.
        limit: largest size of the file in bytes.
        header: function that returns the header, called before the first line is written; ``rank`` in the header
            determines the file name.
    """

    def __init__(self, folder: Path, limit: int, header: Callable[[], Mapping[str, Any]]) -> None:
        self._folder, self._limit, self._header = folder, limit, header
        self._descriptor: int | None = None
        self._written = 0

    def write(self, lines: Iterable[str]) -> bool:
        """Append lines until the limit is reached; return whether all lines were appended.

        Raises:
            RecordingError: the folder cannot be written to, or has a recording of this rank.
        """
        descriptor = self._open()
        data = bytearray()
        fits = True
        for line in lines:
            encoded = f"{line}\n".encode()
            if self._written + len(data) + len(encoded) > self._limit - _END_ROOM:
                fits = False
                break
            data += encoded
        self._append(descriptor, data)
        return fits

    def close(self, ended: Mapping[str, Any]) -> None:
        """Append the reason why the recording ended, and close the file."""
        descriptor = self._open()
        self._append(descriptor, f"{json.dumps({'end': ended})}\n".encode())
        os.close(descriptor)
        self._descriptor = None

    def _append(self, descriptor: int, data: bytes | bytearray) -> None:
        view = memoryview(data)
        while view:
            count = os.write(descriptor, view)
            view, self._written = view[count:], self._written + count

    def _open(self) -> int:
        if self._descriptor is not None:
            return self._descriptor
        header = dict(self._header())
        path = file_of_rank(self._folder, header["rank"])
        try:
            if not self._folder.is_dir():
                self._folder.mkdir(parents=True)
        except OSError as error:
            if not self._folder.is_dir():  # else a different rank has created it
                msg = f"{self._folder} cannot be made: {error.strerror}"
                raise RecordingError(msg) from None
        try:
            if is_blank(path):
                path.unlink(missing_ok=True)
            self._descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o644)
        except FileExistsError:
            msg = f"{path} is there already: record into another folder, or delete the earlier recording"
            raise RecordingError(msg) from None
        except OSError as error:
            msg = f"{path} cannot be written: {error.strerror}"
            raise RecordingError(msg) from None
        self._append(self._descriptor, f"{json.dumps({'recording': FORMAT, **header})}\n".encode())
        return self._descriptor


def line_of(shown: Mapping[str, Any], numbers: list[float]) -> str:
    """Return the line of a record.

    Args:
        shown: the result of :func:`shown_record`.
        numbers: numbers of the record's fingerprint.
    """
    return _ENCODER.encode({**shown, "numbers": numbers})


def shown_record(record: Record, dtype: str, whole: Any | None) -> dict[str, Any]:
    """Return the fields of a record's line except the numbers.

    Args:
        record: the record; of its value, only the shape is used.
        dtype: dtype of the tensor.
        whole: all elements as a NumPy array, or None.
    """
    shown: dict[str, Any] = {
        "kind": record.kind, "name": record.name, "module": record.module, "step": record.step, "call": record.call,
        "dtype": dtype, "shape": list(record.value.shape),
    }  # fmt: skip
    if record.site:
        shown["site"] = record.site
    if record.region is not None:
        region = record.region
        shown["region"] = {"shape": list(region.shape), "start": list(region.start)}
        if region.pending:
            shown["region"]["pending"] = [[each.reduction, list(each.ranks)] for each in region.pending]
        if region.spans:
            shown["region"]["spans"] = [list(each) for each in region.spans]
    if whole is not None:
        shown["array"] = str(whole.dtype)
        shown["whole"] = base64.b64encode(np.ascontiguousarray(whole).tobytes()).decode()
    return shown


@dataclass
class RankRecording:
    """The content of a rank's file.

    Attributes:
        header: version, host, dtype and the like.
        records: the records, whose values are :class:`Fingerprint`.
        end: the reason why the recording ended; None if the process was killed or is still running.
        cut: whether the last line was truncated, so that it was dropped.
        steps: steps that have records.
    """

    header: dict[str, Any]
    records: RankRecords
    end: dict[str, Any] | None = None
    cut: bool = False
    steps: set[int] = field(default_factory=set)


def read_header(path: Path, label: str) -> dict[str, Any]:
    """Return the header of a rank's file.

    Raises:
        InputError: the file has no header, or is of a different format version.
    """
    with path.open("rb") as file:
        first = file.readline()
    try:
        header = json.loads(first) if first.endswith(b"\n") else None
    except ValueError:
        header = None
    if not isinstance(header, dict) or "recording" not in header:
        msg = f"{label}: {path} is not a recording: its first line is not a header"
        raise InputError(msg)
    if header["recording"] != FORMAT:
        version = header.get("version")
        writer = f"version {version}" if version else "the version that wrote it, which the file does not name"
        msg = (
            f"{label}: {path} is a recording of format {header['recording']!r}, but this version of hyper-parallel "
            f"reads format {FORMAT}; read it with {writer}"
        )
        raise InputError(msg)
    if not all(isinstance(header.get(name), int) for name in ("rank", "world_size")):
        msg = f"{label}: {path} is damaged: its header has no rank and world size"
        raise InputError(msg)
    return header


def read_rank(path: Path, label: str) -> RankRecording:
    """Return the content of a rank's file, without a truncated last line.

    Raises:
        InputError: as in :func:`read_header`, or a line is damaged.
    """
    header = read_header(path, label)
    found = RankRecording(header, RankRecords(header["rank"]))
    for number, line in enumerate(_lines(path), 1):
        if number == 1:
            continue
        if not line.endswith(b"\n"):
            found.cut = True
            break
        try:
            shown = json.loads(line)
            if "end" in shown:
                found.end = dict(shown["end"])
            else:
                found.records.records.append(_record(shown))
        except (ValueError, KeyError, TypeError, AttributeError):
            msg = f"{label}: {path}, line {number}, is damaged: it is not a record; copy the file again"
            raise InputError(msg) from None
    found.steps = {record.step for record in found.records.records if record.step >= 0}
    return found


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


def _record(shown: Mapping[str, Any]) -> Record:
    numbers = np.array([float(number) for number in shown["numbers"]])
    if numbers.shape != (len(NUMBERS),):
        raise ValueError("wrong number of numbers")
    shape = tuple(int(size) for size in shown["shape"])
    whole = None
    if "whole" in shown:
        dtype = np.dtype(shown["array"])
        if dtype.hasobject:
            raise ValueError("not an array of numbers")
        whole = np.frombuffer(base64.b64decode(shown["whole"], validate=True), dtype).reshape(shape)
    region = None
    if "region" in shown:
        given = shown["region"]
        pending = tuple(Pending(str(name), tuple(ranks)) for name, ranks in given.get("pending", ()))
        spans = tuple((int(start), int(size)) for start, size in given.get("spans", ()))
        region = Region(tuple(given["shape"]), tuple(given["start"]), pending, spans)
    fingerprint = Fingerprint(numbers, shape, str(shown["dtype"]), whole)
    words = (str(shown["kind"]), str(shown["name"]), str(shown["module"]), int(shown["step"]), int(shown["call"]))
    return Record(*words, fingerprint, region, str(shown.get("site", "")))
