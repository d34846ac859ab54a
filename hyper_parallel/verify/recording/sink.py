"""Receives the records of an observed rank, and writes their fingerprints to the rank's file."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.verify.frameworks.contract.fingerprint import fingerprint_of
from hyper_parallel.verify.frameworks.contract.records import Record
from hyper_parallel.verify.recording.file import RankFile, line_of, shown_record

if TYPE_CHECKING:
    from hyper_parallel.verify.frameworks.contract.harness import Fingerprints

__all__ = ["RECORDED", "FingerprintSink", "RecordingSettings"]

RECORDED = ("input", "output", "value", "loss", "collective", "norm", "gradient", "weight", "buffer", "rate")
"""Kinds of values in a recording."""

_WAITING = 256
"""Largest number of fingerprints that wait on a device to be written."""


@dataclass(frozen=True)
class RecordingSettings:
    """The settings of a recording.

    Attributes:
        steps: number of optimizer steps after which recording stops; with None, all steps are recorded.
        every: interval of recorded steps: the first step and each ``every``-th step after it are recorded.
        whole: patterns of names of tensors that are recorded with all elements as well.
        limit: largest size of a rank's file in bytes.
    """

    steps: int | None = None
    every: int = 1
    whole: tuple[str, ...] = ()
    limit: int = 1 << 30


@dataclass
class FingerprintSink:
    """A sink that writes fingerprints; those that are not yet written wait in memory.

    Attributes:
        file: file of the rank.
        settings: settings of the recording.
        fingerprints: computes fingerprints of the framework's tensors.
        stop: function that is called when recording stops.
        left_out: number of skipped records, by reason.
        stopped: reason why recording stopped; empty while it goes on.
    """

    file: RankFile
    settings: RecordingSettings
    fingerprints: Fingerprints
    stop: Callable[[], None]
    left_out: Counter[str] = field(default_factory=Counter)
    stopped: str = ""
    _waiting: list[dict[str, Any]] = field(default_factory=list)
    _vectors: list[Any] = field(default_factory=list)

    @property
    def folder(self) -> str:
        """An empty path, because no scratch folder is used."""
        return ""

    def take(self, record: Record) -> Record | None:
        """Queue the fingerprint of a record, whose value is a tensor of the program or a NumPy array."""
        if record.kind not in RECORDED or self.stopped:
            return None
        if self.settings.steps is not None and record.step >= self.settings.steps:
            self._end(f"steps after the first {self.settings.steps}")
            return None
        if record.step > 0 and record.step % self.settings.every:
            self.left_out[f"steps other than one in {self.settings.every}"] += 1
            return None
        if len(self._waiting) >= _WAITING or (self._waiting and self._waiting[-1]["step"] != record.step):
            self.flush()
        plain = isinstance(record.value, np.ndarray)
        whole = any(fnmatch.fnmatchcase(record.name, pattern) for pattern in self.settings.whole)
        if plain:
            own = fingerprint_of(record.value, record.dtype)
            dtype, array, vector = own.dtype, record.value, own.numbers
        else:
            dtype, vector = self.fingerprints.dtype(record.value), self.fingerprints.of(record.value)
            array = self.fingerprints.array(record.value) if whole else None
        self._waiting.append(shown_record(record, dtype, array if whole else None))
        self._vectors.append(vector)
        return None

    def flush(self) -> None:
        """Write the waiting fingerprints."""
        waiting, vectors = self._waiting, self._vectors
        self._waiting, self._vectors = [], []
        if not waiting or self.stopped:
            return
        numbers = self.fingerprints.numbers(vectors)
        lines = (line_of(shown, values) for shown, values in zip(waiting, numbers, strict=True))
        if not self.file.write(lines):
            self._end(f"all after the limit of {self.settings.limit} bytes")

    def finish(self, notes: dict[str, Any]) -> None:
        """Do nothing: a recording adds no notes."""

    def _end(self, reason: str) -> None:
        self.flush()
        self.stopped = self.stopped or reason
        self.left_out[reason] += 1
        self.stop()
