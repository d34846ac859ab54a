"""Movements of each value in the perturbed repeats, accumulated during the repeats: one byte per element and kind.

A movement is the difference of a value from the reference's. A repeat is never stored. Each of its values is compared
with the reference's as soon as it is recorded. The largest movement of each element over all repeats of one kind is
kept as an eight-bit code relative to the largest number of its tensor. Codes are rounded up by at most a quarter, or by
half for float64, which needs a wider range. Two numbers per tensor are kept as well (:class:`WholeMovement`).
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hyper_parallel.verify.engine.scratch import Scratch
from hyper_parallel.verify.engine.store import largest, read_at, write_at

__all__ = [
    "MOVEMENTS",
    "MovementKind",
    "Movements",
    "WholeMovement",
    "decode",
    "encode",
    "exponent_of",
    "whole_movement",
]

MovementKind = Literal["moved", "rounded", "displaced"]

MOVEMENTS: tuple[MovementKind, ...] = ("moved", "rounded", "displaced")
"""Kinds of perturbations: inputs and weights by one ULP, half-precision values by one ULP, gradients by their
tolerance.
"""

UNBOUNDED = 255
"""The code of an element that a repeat made infinite or NaN, or moved by more than the largest code."""


_NUMBERS = itertools.count()


@dataclass(frozen=True)
class _Format:
    """The format of a dtype's codes: the number of ``mantissa`` bits, and ``lowest``, the exponent of code 1."""

    mantissa: int
    lowest: int

    @property
    def base(self) -> int:
        """The number that is subtracted from the leading bits of a float32 to get its code."""
        return ((127 + self.lowest) << self.mantissa) - 1


_SINGLE, _DOUBLE = _Format(2, -48), _Format(1, -90)


@dataclass(frozen=True)
class WholeMovement:
    """The largest movement of a complete tensor over repeats of one kind.

    Attributes:
        scale: ``<d, r> / <r, r>`` of the movement ``d`` and the reference ``r``: the growth along the reference. Of all
            repeats, the largest magnitude is kept.
        norm: ``|d| / |r|``.
    """

    scale: float = 0.0
    norm: float = 0.0

    def merged(self, other: WholeMovement) -> WholeMovement:
        """Return the larger of both movements, separately for each of the two numbers."""
        return WholeMovement(max(abs(self.scale), abs(other.scale)), max(self.norm, other.norm))


def exponent_of(magnitude: float) -> int:
    """Return the exponent by which the codes of a tensor are scaled, from its largest magnitude."""
    return math.frexp(magnitude)[1] if 0 < magnitude < math.inf else 0


def encode(moved: Any, exponent: int) -> Any:
    """Return the codes of movements.

    Args:
        moved: floating vector of magnitudes; NaN and infinity become :data:`UNBOUNDED`.
        exponent: exponent of the tensor's largest number (:func:`exponent_of`).
    """
    form = _format(moved.dtype)
    dropped = 23 - form.mantissa
    bits = _scaled(moved, exponent).view(np.uint32)
    bits += np.uint32((1 << dropped) - 1)
    bits >>= np.uint32(dropped)
    codes = bits.view(np.int32)
    codes -= form.base
    return np.clip(codes, 0, UNBOUNDED, out=codes).astype(np.uint8)


def decode(codes: Any, exponent: int, dtype: Any) -> Any:
    """Return the movements that codes stand for, each at least as large as the encoded movement.

    Args:
        codes: codes from :func:`encode`.
        exponent: the one given to :func:`encode`.
        dtype: dtype of the movements, float32 or float64.
    """
    form = _format(np.dtype(dtype))
    bits = np.arange(256) + form.base
    size = 1 << form.mantissa
    with np.errstate(over="ignore"):
        values = np.ldexp(1.0 + (bits % size) / size, bits // size - 127 + exponent).astype(dtype)
    values[0], values[UNBOUNDED] = 0.0, np.inf
    return values.take(codes, mode="wrap")  # every code is a valid index, so skip the check


def _format(dtype: np.dtype[Any]) -> _Format:
    return _DOUBLE if dtype.itemsize > 4 else _SINGLE


def _scaled(array: Any, exponent: int) -> Any:
    """Return ``array`` divided by two to the ``exponent``, as a new float32 array."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if array.dtype == np.float32 and -100 < exponent < 100:
            return array * np.float32(2.0**-exponent)
        return np.ldexp(array, -exponent).astype(np.float32)


def whole_movement(difference: Any, reference: Any, exponent: int) -> WholeMovement:
    """Return the movement of a complete tensor; infinity where the difference is not finite.

    Args:
        difference: difference of the tensor and its reference, floating or complex.
        reference: array of the same shape.
        exponent: exponent of the reference's largest number.
    """
    if difference.dtype.kind == "c":
        difference, reference = (np.stack([array.real, array.imag]) for array in (difference, reference))
    moved, size = (_scaled(array, exponent).reshape(-1) for array in (difference, reference))
    with np.errstate(invalid="ignore", over="ignore"):
        square = float(np.dot(size, size))
        along, across = float(np.dot(moved, size)), float(np.dot(moved, moved))
    if not square:
        return WholeMovement()
    scale, norm = along / square, math.sqrt(across / square) if across >= 0 else math.inf
    finite = math.isfinite(scale) and math.isfinite(norm)
    return WholeMovement(scale, norm) if finite else WholeMovement(math.inf, math.inf)


class Movements:
    """The movements of all values of a reference.

    Args:
        reference: the records of a run on one rank by key.
        scratch: folder for the codes; None keeps them in memory, for runs that are in memory as well.
    """

    def __init__(self, reference: Mapping[Any, Any], scratch: Scratch | None) -> None:
        self._reference, self._scratch = reference, scratch
        self._lock, self._name = threading.Lock(), f"movement-{next(_NUMBERS)}"
        self._offsets: dict[Any, int] = {}
        end = 0
        self._largest: dict[tuple[str, int], float] = {}
        for key, record in reference.items():
            self._offsets[key] = end
            end += int(np.size(record.value))
            kind_step = key[0], key[2]
            self._largest[kind_step] = max(self._largest.get(kind_step, 0.0), largest(record.value))
        self._size = end
        self._files: dict[str, int] = {}
        self._codes: dict[tuple[str, Any], Any] = {}
        self._whole: dict[tuple[str, Any], WholeMovement] = {}
        self._other_shape: set[tuple[str, Any]] = set()
        if scratch is not None:
            scratch.at_end(self.close)

    @property
    def folder(self) -> str:
        """Path of the scratch folder; empty if codes are in memory."""
        return "" if self._scratch is None else str(self._scratch.path)

    def largest(self, kind: str, step: int) -> float:
        """Return the largest finite magnitude of the reference's values of a kind in a step."""
        return self._largest.get((kind, step), 0.0)

    def exponent(self, key: Any) -> int:
        """Return the exponent by which the codes of a value are scaled."""
        return exponent_of(largest(self._reference[key].value) or self.largest(key[0], key[2]))

    def fold(self, kind: MovementKind, key: Any, value: Any) -> None:
        """Add one repeat's value.

        Args:
            kind: kind of the repeat's perturbation.
            key: key of the value; keys that the reference does not have are ignored.
            value: array.
        """
        if key not in self._reference:
            return
        reference, value = np.asarray(self._reference[key].value), np.asarray(value)
        if reference.shape != value.shape:
            self._other_shape.add((kind, key))
            return
        self._other_shape.discard((kind, key))
        if reference.dtype.kind not in "fc" or value.dtype.kind not in "fc":
            codes, whole = np.where((reference != value).reshape(-1), UNBOUNDED, 0).astype(np.uint8), WholeMovement()
        else:
            exponent = self.exponent(key)
            value, reference = value.reshape(-1), reference.reshape(-1)
            with np.errstate(invalid="ignore", over="ignore"):
                difference = value - reference
            codes = encode(np.abs(difference), exponent)
            whole = whole_movement(difference, reference, exponent)
            if not math.isfinite(whole.norm):
                known = np.isfinite(reference)
                same = (reference == value) | (np.isnan(reference) & np.isnan(value))
                codes = np.where(known, codes, np.where(same, 0, UNBOUNDED)).astype(np.uint8)
                known &= np.isfinite(value)
                whole = whole_movement(np.where(known, difference, 0), np.where(known, reference, 0), exponent)
        self._whole[kind, key] = whole.merged(self._whole.get((kind, key), WholeMovement()))
        self._keep(kind, key, codes)

    def folded(self, kind: MovementKind, key: Any) -> bool:
        """Return whether a repeat of this kind had the value, in the reference's shape."""
        return (kind, key) in self._whole

    def codes(self, kind: MovementKind, key: Any) -> Any | None:
        """Return the codes of a value, in its shape; None if no repeat of this kind had it."""
        if (kind, key) not in self._whole:
            return None
        shape = np.shape(self._reference[key].value)
        if self._scratch is None:
            return self._codes[kind, key].reshape(shape)
        codes = np.empty(int(np.prod(shape, dtype=np.int64)), np.uint8)
        if codes.size:
            read_at(self._file(kind), codes, self._offsets[key])
        return codes.reshape(shape)

    def whole(self, kind: MovementKind, key: Any) -> WholeMovement:
        """Return the movement of a complete value in repeats of a kind."""
        return self._whole.get((kind, key), WholeMovement())

    def summary(self) -> tuple[Any, ...]:
        """Return the measurements except the codes, for :meth:`merge`; the codes are on disk."""
        return self._whole, self._other_shape, self._codes if self._scratch is None else {}

    def merge(self, summary: tuple[Any, ...]) -> None:
        """Merge the :meth:`summary` of a copy of this object from another process."""
        self._whole, self._other_shape, codes = summary
        self._codes.update(codes)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, which opens the files anew."""
        return {**self.__dict__, "_files": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state without opening files."""
        self.__dict__.update(state, _lock=threading.Lock())

    def close(self) -> None:
        """Close and delete the files."""
        for kind, descriptor in self._files.items():
            os.close(descriptor)
            if self._scratch is not None:
                self._scratch.drop(self._scratch.file(f"{self._name}-{kind}"))
        self._files = {}

    def _keep(self, kind: MovementKind, key: Any, codes: Any) -> None:
        if self._scratch is None:
            known = self._codes.get((kind, key))
            self._codes[kind, key] = codes if known is None else np.maximum(known, codes)
            return
        if not codes.size:
            return
        offset, file = self._offsets[key], self._file(kind)
        known = np.empty_like(codes)
        read_at(file, known, offset)
        np.maximum(known, codes, out=known)
        write_at(file, known, offset)

    def _file(self, kind: MovementKind) -> int:
        """Return the descriptor of the file with a kind's codes; a new file has zeros for all values."""
        with self._lock:
            if kind not in self._files and self._scratch is not None:
                path = self._scratch.file(f"{self._name}-{kind}")
                if not Path(path).exists():
                    self._scratch.require(self._size, "the measured bounds")
                self._files[kind] = os.open(path, os.O_CREAT | os.O_RDWR)
                os.ftruncate(self._files[kind], self._size)
            return self._files[kind]
