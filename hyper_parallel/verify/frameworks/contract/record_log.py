"""Common parts of the recorders of all frameworks: the log of one rank, its limits, and perturbations of a reference.

A framework's recorder (``verify/frameworks/<framework>/recorder.py``) watches modules and optimizers and adds their
values to the :class:`RecordLog` of its rank. The recorder does not communicate, and does not change values, random
state or order of execution.
"""

from __future__ import annotations

import fnmatch
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from hyper_parallel.transport.frames import PROGRAMS, take_for_programs
from hyper_parallel.verify.frameworks.contract.case_changes import CaseChanges
from hyper_parallel.verify.frameworks.contract.records import (
    Group,
    LocalValue,
    RankRecords,
    Record,
    RecordingError,
    Region,
)

__all__ = [
    "REDUCED",
    "Perturbation",
    "ProgramStopped",
    "RecordLimits",
    "RecordLog",
    "RecordingError",
    "ReplayTable",
    "active_log",
    "record",
    "sink_folder",
    "unrecorded",
    "use_log",
    "user_site",
]

ReplayTable: TypeAlias = Mapping[int, Mapping[tuple[str, str, int, int], Any]]
"""Dropout masks and choices that a rank takes from the reference, by rank and key of the record."""

_PACKAGE = Path(__file__).parents[3]
take_for_programs(_PACKAGE / "verify" / "bugs")  # the bug corpus: its programs count as the user's code


class ProgramStopped(BaseException):
    """Raised to end a program after its last step; a BaseException, so that the program does not catch it."""


class RecordSink(Protocol):
    """Receives the records of a run that are not kept in memory."""

    @property
    def folder(self) -> str:
        """Path of the folder that it writes to; empty if it writes no files."""

    def take(self, record: Record) -> Record | None:
        """Store a record; return it with a placeholder for its array, for the log; or None, to keep no record there."""

    def finish(self, notes: dict[str, Any]) -> None:
        """Add facts about the rank's process to ``notes``, after the rank's program has ended."""


@dataclass(frozen=True)
class RecordLimits:
    """The values of a run to record, and limits of the recording.

    Attributes:
        steps: optimizer steps after which the program is stopped; None lets it end by itself.
        only: patterns of names (``layers.0.*``) of the outputs, masks and values to record; empty records all.
            Weights, gradients, losses and the optimizer's values are always recorded.
        size: maximum number of bytes of one rank's records in memory.
        sink: receiver of the records; None keeps them in memory.
        upcast: wider dtype of the program's computations: ``float32`` instead of half precision, ``float64`` instead of
            all narrower dtypes; empty changes nothing.
        pretend: device for which the CPU stands in, ``cuda`` or ``npu``, in a process that ends with the run.
        contributions: step in which the gradient of each backward is recorded separately; None for no step.
        draws: whether the samples that data loaders draw are recorded.
        replay: dropout masks, and choices such as top-k, of the reference, which ranks use instead of their own ones.
        observe: whether the program is only observed, as in a recording: nothing is copied, drawn again or kept, and
            the sink gets the framework's own tensors, which the program may overwrite later.
    """

    steps: int | None = None
    only: tuple[str, ...] = ()
    size: int = 1 << 30
    sink: RecordSink | None = None
    upcast: str = ""
    pretend: str = ""
    contributions: int | None = None
    draws: bool = False
    replay: ReplayTable = field(default_factory=dict)
    observe: bool = False


REDUCED = "gradients that were reduced"
"""Key of the note with the number of reductions of gradients, by dtype, step and ``file:line``."""


def sink_folder(limits: RecordLimits) -> str:
    """Return the folder that records are written to; empty if they stay in memory."""
    return "" if limits.sink is None else limits.sink.folder


class Perturbation(Protocol):
    """Small changes of the reference's values; they show how much rounding errors change its results."""

    def perturbed_input(self, name: str, array: Any, dtype: str = "") -> Any:
        """Return the perturbed input or weight ``array``, of the same shape and dtype; ``name`` identifies it.

        ``dtype`` is that of :class:`LocalValue`.
        """

    def rounded(self, name: str, array: Any, dtype: str = "") -> Any:
        """Return the perturbed output of a module, or its gradient; half precision as float32."""

    def computes_exact_norms(self) -> bool:
        """Return whether the norm that the program computes now, for clipping, is to be computed in float64."""

    def perturbed_gradient(self, name: str, step: int, array: Any) -> Any:
        """Return the perturbed gradient of parameter ``name``, before the optimizer gets it."""

    def decided(self, key: tuple[str, str, int, int]) -> Any | None:
        """Return the choice that the unperturbed reference recorded under ``key``; None if it recorded none."""


@dataclass
class RecordLog:
    """The records of one rank while its program runs.

    Attributes:
        rank: number of the rank.
        limits: selection of the values to record.
        perturbation: perturbation of a reference; None changes no value.
        changes: changes of the case; applied before the perturbation.
        step: number of completed optimizer steps.
        records: records so far, in order of execution.
        groups: names of the program's process groups, by their ranks.
        notes: facts for messages, as in :class:`RankRecords`.
        take: reads a tensor of the framework as a local value; None for a value that is not a tensor.
        paused: whether recorders are paused.
        place: returns the region of a module's plain output; None if the caller of the program does not know regions.
    """

    rank: int
    limits: RecordLimits = field(default_factory=RecordLimits)
    perturbation: Perturbation | None = None
    changes: CaseChanges = field(default_factory=CaseChanges)
    step: int = 0
    records: list[Record] = field(default_factory=list)
    groups: dict[tuple[int, ...], str] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    take: Callable[[Any], LocalValue | None] | None = None
    paused: bool = False
    place: Callable[[Any, Any], Region | None] | None = None
    _counts: dict[tuple[str, str, int], int] = field(default_factory=dict)
    _size: int = 0

    def records_outputs(self, name: str) -> bool:
        """Return whether values called ``name`` are recorded under the limits."""
        only = self.limits.only
        return not only or any(fnmatch.fnmatchcase(name, pattern) for pattern in only)

    def add(
        self,
        kind: str,
        name: str,
        value: LocalValue,
        *,
        module: str = "",
        step: int | None = None,
        site: str = "",
    ) -> None:
        """Append a record.

        Args:
            kind: one of ``KINDS``.
            name: as in :class:`Record`.
            value: an array that no other code writes to, with its region.
            module: as in :class:`Record`.
            step: number of optimizer steps completed before; by default, the log's step.
            site: as in :class:`Record`.

        Raises:
            RecordingError: the records take more bytes than the limits allow.
        """
        step = self.step if step is None else step
        call = self._counts.get((kind, name, step), 0)
        self._counts[kind, name, step] = call + 1
        record = Record(kind, name, module, step, call, value.array, value.region, site, value.dtype)
        kept: Record | None = record
        sink = self.limits.sink
        if sink is None:
            self._size += value.array.nbytes
            if self._size > self.limits.size:
                raise RecordingError(self._too_large(kind, name, value.array.nbytes))
        else:
            kept = sink.take(record)
        if kept is not None:
            self.records.append(kept)

    def count(self, kind: str, name: str) -> int:
        """Return the number of records of a kind and name in this step."""
        return self._counts.get((kind, name, self.step), 0)

    def replayed(self, kind: str, name: str) -> Any | None:
        """Return the reference's value that replaces the next record of a kind and name; None if it is not replaced."""
        key = (kind, name, self.step, self.count(kind, name))
        own = self.limits.replay.get(self.rank, {}).get(key)
        return own if own is not None or self.perturbation is None else self.perturbation.decided(key)

    def forget(self, step: int) -> None:
        """Discard counts of records before ``step``, so that they need no more memory with every step."""
        self._counts = {key: count for key, count in self._counts.items() if key[2] >= step}

    def drop(self, kind: str, step: int) -> None:
        """Discard the records of ``kind`` of ``step``; the caller then records them again."""
        dropped = [record for record in self.records if record.kind == kind and record.step == step]
        self._size -= sum(record.value.nbytes for record in dropped)
        for name in [name for own, name, at in self._counts if (own, at) == (kind, step)]:
            del self._counts[kind, name, step]
        self.records = [record for record in self.records if record.kind != kind or record.step != step]

    def move_to_start(self, kinds: Sequence[str], step: int) -> None:
        """Move the records of ``kinds`` of ``step`` before all others, for example the weights before training."""
        self.records.sort(key=lambda record: not (record.kind in kinds and record.step == step))

    def result(self) -> RankRecords:
        """Return everything recorded, as plain data."""
        if self.limits.sink is not None:
            self.limits.sink.finish(self.notes)
        groups = [Group(name, ranks) for ranks, name in self.groups.items()]
        return RankRecords(self.rank, self.records, groups, self.notes)

    def _too_large(self, kind: str, name: str, size: int) -> str:
        fewer = f"record fewer steps (--steps {self.step}), " if self.step else ""
        return (
            f"the records of rank {self.rank} do not fit in memory: {kind} {name!r} of step {self.step} takes {size} "
            f"bytes, and {self._size - size} of the {self.limits.size} bytes of this rank are taken; {fewer}record "
            "only some outputs (--only 'layers.0.*')"
        )


_LOG: ContextVar[RecordLog | None] = ContextVar("hyper_parallel_record_log", default=None)


def active_log() -> RecordLog | None:
    """Return the log of the program that runs in this context; None outside of a verification."""
    return _LOG.get()


@contextmanager
def use_log(log: RecordLog) -> Iterator[RecordLog]:
    """Record into ``log`` inside this context."""
    token = _LOG.set(log)
    try:
        yield log
    finally:
        _LOG.reset(token)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Pause recording inside this context, as for a forward that infers sizes; no effect without a verification."""
    log = _LOG.get()
    if log is None:
        yield
        return
    log.paused = True
    try:
        yield
    finally:
        log.paused = False


def record(name: str, value: Any, *, placement: Mapping[str, Sequence[int]] | None = None) -> None:
    """Record a value of the program that is being verified; outside of a verification, this function does nothing.

    Args:
        name: name by which the value is compared with the single device's, and between ranks.
        value: a tensor of the framework (a DTensor has its own placement), a NumPy array or a number.
        placement: for a value that is not a DTensor, the position of the rank's shard: global shape and first index,
            such as ``{"shape": (8, 6), "start": (4, 0)}``.

    Raises:
        RecordingError: the value is not a tensor, array or number, or the records do not fit in memory.
    """
    log = _LOG.get()
    if log is None or not log.records_outputs(name):
        return
    taken = log.take(value) if log.take is not None else None
    if taken is None:
        array = np.array(value)
        if array.dtype.kind not in "biufc":
            msg = f"record({name!r}): expected a tensor, an array or a number, got {type(value).__name__}"
            raise RecordingError(msg)
        taken = LocalValue(array)
    if placement is not None:
        taken = taken._replace(region=Region(tuple(placement["shape"]), tuple(placement["start"])))
    log.add("value", name, taken, site=_caller())


def _caller() -> str:
    frame: Any = inspect.currentframe()
    frame = frame.f_back.f_back  # the caller of record
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def user_site(framework: str) -> str:
    """Return ``file:line`` of the innermost frame outside of a framework and this library; empty if there is none.

    Args:
        framework: folder of the framework's package.
    """
    frame: Any = inspect.currentframe()
    libraries = (framework, str(_PACKAGE), threading.__file__, "<")
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(tuple(PROGRAMS)) or not file.startswith(libraries):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
