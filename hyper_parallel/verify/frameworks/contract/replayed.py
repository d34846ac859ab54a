"""Replacement of a rank's dropout masks, and of choices such as those of top-k, by those of the reference.

A module that is recomputed in backward repeats the draws and choices of its forward, and gets the same replacement. The
replacement is found by the values that the rank itself drew or chose from.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from hyper_parallel.verify.frameworks.contract.record_log import RecordLog

__all__ = ["Replayed", "rows_along", "unrolled"]


class Replayed:
    """The replacements of one rank.

    Args:
        log: log of the rank, whose limits or perturbation have the replacements.
    """

    def __init__(self, log: RecordLog) -> None:
        self._log = log
        self._known: dict[tuple[Any, ...], Any] = {}

    def instead_of(self, own: Any, kind: str, name: str, shape: tuple[int, ...] | None = None) -> Any | None:
        """Return the replacement of the next mask or choice of a name, in its shape; None if it is not replaced.

        Args:
            own: array by which a recomputation finds the replacement again.
            kind: ``mask`` or ``choice``.
            name: name of the record.
            shape: shape of the replacement; that of ``own`` by default.
        """
        found = self._log.replayed(kind, name)
        if found is None or np.shape(found) != (np.shape(own) if shape is None else shape):
            return None
        self._known[_mark(own)] = found
        return found

    def again(self, own: Any) -> Any | None:
        """Return the earlier result of :meth:`instead_of` for the same array; None if there is none."""
        return self._known.get(_mark(own)) if self._known else None


def _mark(array: Any) -> tuple[Any, ...]:
    """Return a key that equal arrays share."""
    array = np.ascontiguousarray(array)
    return array.shape, array.dtype.str, hashlib.sha256(array.tobytes()).digest()


def rows_along(array: Any, dim: int) -> Any:
    """Return an array as rows along a dim: of shape (all other dims, that dim)."""
    array = np.asarray(array)
    moved = np.moveaxis(array, dim, -1) if array.ndim else array.reshape(1, 1)
    return np.ascontiguousarray(moved.reshape(-1, moved.shape[-1]))


def unrolled(rows: Any, shape: tuple[int, ...], dim: int) -> Any:
    """Return the array of ``shape`` with these :func:`rows_along` a dim: the inverse of that function."""
    dim %= len(shape)
    others = tuple(size for place, size in enumerate(shape) if place != dim)
    return np.ascontiguousarray(np.moveaxis(np.asarray(rows).reshape(*others, shape[dim]), -1, dim))
