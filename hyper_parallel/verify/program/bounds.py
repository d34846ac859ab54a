"""What each value of the reference may be off by, earned from its perturbed repeats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hyper_parallel.verify.noise import NOISE_SHARE, allowed_difference
from hyper_parallel.verify.program.records import Record, Run

__all__ = ["DISPLACED", "ROUNDED", "Bounds", "Key", "index_records"]

Key = tuple[str, str, int, int]

DISPLACED = "displaced gradients"
"""``Run.settings["perturbation"]`` of a repeat whose gradients were displaced (:func:`hyper_parallel.verify.noise.
displace`); a repeat that says neither this nor :data:`ROUNDED` was perturbed in the last place."""

ROUNDED = "half-precision outputs in the last place"
"""The same of a repeat that moved outputs of bfloat16 and float16, and their gradients, in the last place."""


def index_records(records: Sequence[Record]) -> dict[Key, Record]:
    """Return records by key, in their order; of equal keys the last."""
    return {record.key: record for record in records}


class Bounds:
    """Allowed differences of the values of a reference.

    Args:
        reference: a run on one rank.
        perturbed: its repeats.

    Raises:
        ValueError: there are no repeats perturbed in the last place.
    """

    def __init__(self, reference: Run, perturbed: Sequence[Run]) -> None:
        indexes = [(run.settings.get("perturbation"), index_records(run.ranks[0].records)) for run in perturbed]
        self.reference = index_records(reference.ranks[0].records)
        self._repeats = [index for perturbation, index in indexes if perturbation not in (DISPLACED, ROUNDED)]
        self._rounded = [index for perturbation, index in indexes if perturbation == ROUNDED]
        self._displaced = [index for perturbation, index in indexes if perturbation == DISPLACED]
        if not self._repeats:
            raise ValueError(
                "the allowed differences are earned from perturbed repeats of the reference: none were run"
            )
        self._allowed: dict[Key, Any] = {}
        self._largest: dict[tuple[str, int], float] = {}
        for record in self.reference.values():
            kind_step = record.kind, record.step
            self._largest[kind_step] = max(self._largest.get(kind_step, 0.0), largest(record.value))

    def allowed(self, key: Key) -> Any:
        """Return what each element of the reference's value may be off by, as an array of its shape."""
        if key not in self._allowed:
            self._allowed[key] = self._earn(key)
        return self._allowed[key]

    def floor(self, key: Key) -> float:
        """Return the least magnitude that an error of this value is measured against."""
        return NOISE_SHARE * self._largest.get((key[0], key[2]), 0.0)

    def _earn(self, key: Key) -> Any:
        record = self.reference[key]
        value = np.asarray(record.value)
        repeats, displaced, rounded = (
            [index[key].value for index in indexes if key in index and np.shape(index[key].value) == value.shape]
            for indexes in (self._repeats, self._displaced, self._rounded)
        )
        if not repeats:  # a repeat took another branch: nothing that follows from it can be compared
            return np.full(value.shape, np.inf)
        return allowed_difference(value, repeats, displaced, self.floor(key), rounded, dtype=record.dtype)


def largest(value: Any) -> float:
    """Return the largest finite magnitude in an array; 0 if there is none."""
    array = np.asarray(value)
    if array.dtype.kind not in "fciub" or not array.size:
        return 0.0
    magnitudes = np.abs(array.astype(np.complex128 if array.dtype.kind == "c" else np.float64))
    finite = magnitudes[np.isfinite(magnitudes)]
    return float(finite.max()) if finite.size else 0.0
