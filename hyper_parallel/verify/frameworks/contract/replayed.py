"""Replaces a rank's dropout masks, and its choices such as the indices of top-k, by those of the reference.

A module that is recomputed in backward draws and chooses again, and must get the same replacement as in forward. The
replacement is looked up by the rank's own mask, or by the scores from which it chooses: the recomputation has the same.
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
        log: log of the rank; its limits or its perturbation contain the replacements.
    """

    def __init__(self, log: RecordLog) -> None:
        self._log = log
        self._known: dict[tuple[Any, ...], Any] = {}

    def instead_of(self, own: Any, kind: str, name: str, shape: tuple[int, ...] | None = None) -> Any | None:
        """Return the replacement of the next mask or choice called ``name``; None if there is none of this shape.

        Args:
            own: array by which a recomputation finds the replacement again.
            kind: ``mask`` or ``choice``.
            name: name of the record.
            shape: shape that the replacement must have; by default, the shape of ``own``.
        """
        found = self._log.replayed(kind, name)
        if found is None or np.shape(found) != (np.shape(own) if shape is None else shape):
            return None
        self._known[_mark(own)] = found
        return found

    def again(self, own: Any) -> Any | None:
        """Return the earlier result of :meth:`instead_of` for an array equal to ``own``; None if there was none."""
        return self._known.get(_mark(own)) if self._known else None


def _mark(array: Any) -> tuple[Any, ...]:
    """Return a key that is the same for equal arrays: shape, dtype and a hash of the elements."""
    array = np.ascontiguousarray(array)
    return array.shape, array.dtype.str, hashlib.sha256(array.tobytes()).digest()


def rows_along(array: Any, dim: int) -> Any:
    """Return an array as a matrix: its columns are dim ``dim``, its rows are the elements of all other dims."""
    array = np.asarray(array)
    moved = np.moveaxis(array, dim, -1) if array.ndim else array.reshape(1, 1)
    return np.ascontiguousarray(moved.reshape(-1, moved.shape[-1]))


def unrolled(rows: Any, shape: tuple[int, ...], dim: int) -> Any:
    """Return the array of ``shape`` for which :func:`rows_along` returned ``rows``: the inverse of that function."""
    dim %= len(shape)
    others = tuple(size for place, size in enumerate(shape) if place != dim)
    return np.ascontiguousarray(np.moveaxis(np.asarray(rows).reshape(*others, shape[dim]), -1, dim))
