"""Tolerances of the reference's values, measured by its perturbed repeats: per element and per tensor.

:mod:`hyper_parallel.verify.engine.noise` defines the tolerance per element. Each complete tensor has two further
tolerances (:class:`WholeBound`). A wrong scale or a missing summand moves all elements in the same way. Rounding moves
them in all directions, so that these movements cancel along the tensor.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.movement import MOVEMENTS, MovementKind, Movements, decode
from hyper_parallel.verify.engine.noise import (
    DISPLACED_MULTIPLE,
    NOISE_SHARE,
    ROUNDED_MULTIPLE,
    allowed_movement,
    multiple_of,
    unit,
)
from hyper_parallel.verify.engine.scratch import Scratch
from hyper_parallel.verify.engine.store import largest
from hyper_parallel.verify.frameworks.contract.records import DECISIONS, HALF_BITS, Record, Run

__all__ = ["DISPLACED", "ROUNDED", "Bounds", "Key", "WholeBound", "index_records"]

Key = tuple[str, str, int, int]

DISPLACED = "displaced gradients"
"""``Run.settings["perturbation"]`` of a repeat whose gradients were displaced
(:func:`hyper_parallel.verify.engine.noise.displace`); a repeat with neither this nor :data:`ROUNDED` was perturbed by
one ULP.
"""

ROUNDED = "half-precision outputs in the last place"
"""``Run.settings["perturbation"]`` of a repeat that moved half-precision outputs, and their gradients, by one ULP."""

_KIND_OF: dict[str | None, MovementKind] = {DISPLACED: "displaced", ROUNDED: "rounded"}

_SHARE = 4.0
"""For a complete tensor, the allowed multiple of its movement is this many times smaller than for an element: rounding
may reach the tolerance in one element of a million, but not in all of them.
"""

_NUMBERS = ("value", "rate", "norm", "loss")
_SINGLE_UNIT = 2.0**-23
_MOVES_OF_DOUBLES = 2.0**-40
"""Largest relative movement, in the repeats, of numbers that depend only on tensors of float64."""

_CACHED = 4  # values whose tolerances are cached


@dataclass(frozen=True)
class WholeBound:
    """Tolerances of a complete tensor.

    Attributes:
        scale: relative error along the reference: a gradient multiplied by ``1 + x`` differs if ``x`` exceeds this.
        norm: norm of the difference, relative to that of the reference.
    """

    scale: float
    norm: float


def index_records(records: Sequence[Record]) -> dict[Key, Record]:
    """Return records by key, in their order; of several records with the same key, the last."""
    return {record.key: record for record in records}


class Bounds:
    """Allowed differences of the values of a reference.

    Args:
        reference: a run on one rank.
        perturbed: repeats of the reference that are in memory; others are added by :meth:`fold`.
        scratch: folder of the measurements; None keeps them in memory.

    Attributes:
        records: records of the reference, by key.
        reference: records that are compared as numbers: all except decisions.
        movements: movements of the values, measured by the repeats.
    """

    def __init__(self, reference: Run, perturbed: Sequence[Run] = (), scratch: Scratch | None = None) -> None:
        self.records: Mapping[Key, Record] = index_records(reference.ranks[0].records)
        self.reference = {key: record for key, record in self.records.items() if key[0] not in DECISIONS}
        self.movements = Movements(self.records, scratch)
        self._allowed: OrderedDict[Key, Any] = OrderedDict()
        self._double: bool | None = None
        self._half: float | None = None
        self._last_gradients: dict[tuple[str, int], Key] | None = None
        self._others: list[Bounds] = []
        for run in perturbed:
            kind = _KIND_OF.get(run.settings.get("perturbation"), "moved")
            for record in run.ranks[0].records:
                self.movements.fold(kind, record.key, record.value)

    def require_repeats(self) -> None:
        """Check that at least one repeat was perturbed by one ULP.

        Raises:
            ValueError: there was no such repeat.
        """
        if not any(self.movements.folded("moved", key) for key in self.reference):
            raise ValueError(
                "the allowed differences are measured from perturbed repeats of the reference: none were run"
            )

    def fold(self, kind: MovementKind, record: Record) -> None:
        """Add one value of a repeat; tolerances that were computed before this call may be too small."""
        for each in (self, *self._others):
            each._allowed.pop(record.key, None)  # noqa: SLF001 - of the same class
        self.movements.fold(kind, record.key, record.value)

    def merge(self, summary: tuple[Any, ...]) -> None:
        """Merge the measurements of a copy of this object from another process."""
        for each in (self, *self._others):
            each._allowed.clear()  # noqa: SLF001 - of the same class
        self.movements.merge(summary)

    def with_values_of(self, run: Run) -> Bounds:
        """Return the tolerances of a run on one rank, from the repeats of this object, including those added later.

        Args:
            run: its values have the same shapes as this object's.
        """
        other = copy.copy(self)
        other.records = index_records(run.ranks[0].records)
        other.reference = {key: record for key, record in other.records.items() if key[0] not in DECISIONS}
        other._allowed, other._last_gradients, other._double = OrderedDict(), None, None  # noqa: SLF001
        self._others.append(other)
        return other

    def allowed(self, key: Key, kinds: Sequence[MovementKind] = MOVEMENTS) -> Any:
        """Return the tolerance of each element of the reference's value, as an array of its shape.

        Args:
            key: key of the value.
            kinds: kinds of the movements that are included.
        """
        if len(kinds) < len(MOVEMENTS):
            return self._measured(key, kinds)
        if key not in self._allowed:
            self._allowed[key] = self._measured(key, kinds)
            if len(self._allowed) > _CACHED:
                self._allowed.popitem(last=False)
        else:
            self._allowed.move_to_end(key)
        return self._allowed[key]

    def last_gradient(self, name: str, step: int) -> Key | None:
        """Return the key of the last gradient of a parameter in a step; None if the reference has none."""
        if self._last_gradients is None:
            self._last_gradients = {(key[1], key[2]): key for key in self.reference if key[0] == "gradient"}
        return self._last_gradients.get((name, step))

    def floor(self, key: Key) -> float:
        """Return the smallest magnitude relative to which an error of this value is measured.

        Repeats do not move a gradient whose terms are exact, such as the signs in the gradient of an absolute error. So
        they do not measure how much sums in a different order differ. That error is relative to the terms, which are as
        large as the sum.
        """
        least = NOISE_SHARE * self.movements.largest(key[0], key[2])
        if key[0] != "gradient" or any(self.movements.whole(kind, key).norm for kind in MOVEMENTS):
            return least
        return max(least, largest(self.records[key].value))

    def whole(self, key: Key) -> WholeBound | None:
        """Return the tolerances of a complete tensor; None if the value is not floating."""
        record = self.reference[key]
        if record.value.dtype.kind not in "fc" or not np.size(record.value):
            return None
        if not self.movements.folded("moved", key):
            return WholeBound(np.inf, np.inf)
        value = np.asarray(record.value)
        moved, rounded, displaced = (self.movements.whole(kind, key) for kind in MOVEMENTS)
        own, multiple = unit(value, record.dtype), multiple_of(value, record.dtype)
        scale, norm = (
            multiple / _SHARE * max(own, least) + ROUNDED_MULTIPLE * half + DISPLACED_MULTIPLE * step
            for least, half, step in (
                (moved.scale, rounded.scale, displaced.scale),
                (moved.norm, rounded.norm, displaced.norm),
            )
        )
        alike = self._rounded_alike(key) if rounded.norm else 0.0
        return WholeBound(scale + alike, norm + alike)

    def _rounded_alike(self, key: Key) -> float:
        """Return the relative error of a gradient all of whose terms are rounded to half precision in one direction.

        The gradient of a mean is the same number in many elements, and a different number on ranks with a different
        number of rows. Its rounding error is up to half a unit in the reference and half a unit in the parallel run.
        Repeats move elements in all directions, so they do not measure this. States may contain squares of the
        gradient, which have twice the error.
        """
        factor = {"gradient": 1.0, "state": 2.0}.get(key[0], 0.0)
        if factor and self._half is None:
            names = {record.dtype or str(np.asarray(record.value).dtype) for record in self.records.values()}
            self._half = _SINGLE_UNIT * max((2.0 ** HALF_BITS[name] for name in names & set(HALF_BITS)), default=0.0)
        return factor * (self._half or 0.0)

    def _measured(self, key: Key, kinds: Sequence[MovementKind]) -> Any:
        record = self.records[key]
        value = np.asarray(record.value)
        if not self.movements.folded("moved", key):  # the repeats took another branch: later values are not comparable
            return np.full(value.shape, np.inf)
        codes = [self.movements.codes(kind, key) if kind in kinds else None for kind in MOVEMENTS]
        exponent, wide = self.movements.exponent(key), value.real.dtype.itemsize > 4
        dtype = np.float64 if wide or value.dtype.kind not in "fc" else np.float32
        moves = [None if own is None else decode(own, exponent, dtype) for own in codes]
        if value.dtype.kind not in "fc":
            return np.max([own for own in moves if own is not None], axis=0)
        least = self._unit_of_source(record)
        return allowed_movement(value, *moves, floor=self.floor(key), dtype=record.dtype, least_unit=least)

    def _unit_of_source(self, record: Record) -> float:
        """Return float32's unit for a number that Python computed in float64 from float32 tensors; 0 for other numbers.

        Examples are clip factors, logged averages and learning rates that depend on losses. In at least one step, such
        numbers move in the repeats by far more than the rounding of float64. A program with weights of float64 has no
        such numbers.
        """
        value = record.value
        if record.kind not in _NUMBERS or value.dtype != np.float64 or np.size(value) != 1 or self._is_double():
            return 0.0
        same = (key for key in self.reference if key[:2] == record.key[:2])
        moved = max(self.movements.whole(kind, key).norm for key in same for kind in MOVEMENTS)
        return _SINGLE_UNIT if moved > _MOVES_OF_DOUBLES else 0.0

    def _is_double(self) -> bool:
        """Return whether the program has weights or outputs of float64."""
        if self._double is None:
            self._double = any(
                record.kind in ("weight", "output") and record.value.dtype == np.float64
                for record in self.reference.values()
            )
        return self._double
