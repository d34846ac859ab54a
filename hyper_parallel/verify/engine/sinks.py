"""Sinks of recorded values: arrays of the reference and of ranks go to disk, those of a repeat only widen tolerances.

A sink can be sent to the process of a rank. The results from that process come back with the rank's notes
(:meth:`finish`, :func:`merge_notes`).
"""

from __future__ import annotations

import itertools
import os
import shutil
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hyper_parallel.verify.engine.movement import MovementKind
from hyper_parallel.verify.engine.store import ArrayFile, forget
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Record

if TYPE_CHECKING:
    from typing_extensions import Self

    from hyper_parallel.verify.engine.bounds import Bounds
    from hyper_parallel.verify.engine.scratch import Scratch

__all__ = ["FoldSink", "KeepSink", "merge_notes"]

_NUMBERS = itertools.count()
_MOVEMENTS = "movements of a repeat"


@dataclass
class KeepSink:
    """Writes arrays to files of the scratch folder, one file per process; equal arrays of ranks are stored once.

    Attributes:
        scratch: the folder.
        words: owner of the arrays, for messages: ``the reference``, ``4 ranks``.
    """

    scratch: Scratch
    words: str
    name: str = field(default_factory=lambda: f"arrays-{next(_NUMBERS)}", repr=False)
    _file: ArrayFile | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Register the files to be closed with the folder."""
        self.scratch.at_end(self.close)

    @property
    def folder(self) -> str:
        """Path of the scratch folder."""
        return str(self.scratch.path)

    def take(self, record: Record) -> Record | None:
        """Return the record with its array on disk."""
        if self._file is None:
            self._file = ArrayFile(self.scratch, f"{self.name}-{os.getpid()}", f"{self.name}-index")
        what = f"{record.kind} {record.name!r} of step {record.step} of {self.words}"
        return replace(record, value=self._file.put(record.value, what))

    def finish(self, notes: dict[str, Any]) -> None:
        """Do nothing, because the arrays are already on disk."""

    def close(self) -> None:
        """Delete all files that were written, by all processes."""
        if self._file is not None:
            self._file.close()
            self._file = None
        for path in self.scratch.path.glob(f"{self.name}-*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                forget(str(path))
                self.scratch.drop(str(path))

    def __enter__(self) -> Self:
        """Return the sink itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Delete all files that were written, by all processes."""
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, which writes to its own file."""
        return {**self.__dict__, "_file": None}


@dataclass
class FoldSink:
    """Adds the values of one repeat to the tolerances, without storing them.

    Attributes:
        bounds: tolerances of the reference.
        kind: kind of the movements before a gradient is displaced.
        displaced: names of parameters whose gradient was displaced so far.
        exact: whether a norm was computed in float64 so far, which moves later values as a displacement does.
        keys: keys of the records, in their order.
    """

    bounds: Bounds
    kind: MovementKind
    displaced: set[str] = field(default_factory=set)
    exact: bool = False
    keys: list[tuple[str, str, int, int]] = field(default_factory=list)

    @property
    def folder(self) -> str:
        """Path of the scratch folder; empty if movements are in memory."""
        return self.bounds.movements.folder

    def take(self, record: Record) -> Record | None:
        """Add one record."""
        self.keys.append(record.key)
        after = record.name in self.displaced if record.kind == "gradient" else bool(self.displaced)
        after = after or self.exact
        self.bounds.fold("displaced" if after else self.kind, record)
        return None

    def finish(self, notes: dict[str, Any]) -> None:
        """Put the measurements into the rank's notes, for the process that started the rank."""
        notes[_MOVEMENTS] = (self.keys, self.bounds.movements.summary())


def merge_notes(sink: FoldSink, rank: RankRecords) -> None:
    """Merge the measurements of a repeat, which may have run in another process."""
    sink.keys, summary = rank.notes.pop(_MOVEMENTS)
    sink.bounds.merge(summary)
