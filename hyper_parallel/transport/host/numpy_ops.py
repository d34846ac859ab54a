"""Host operations on numpy arrays, for simulated ranks that are processes and for the MindSpore bridge.

bfloat16, which numpy lacks, is represented by the structured dtype :data:`BFLOAT16` (one unsigned 16-bit field of that
name). It pickles without any framework, and its arithmetic here rounds to nearest even after every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hyper_parallel.transport.base import Shape, check_reduction

__all__ = ["BFLOAT16", "NumpyOps", "narrow", "widen"]

BFLOAT16 = np.dtype([("bfloat16", "<u2")])

_ACCUMULATE: dict[str, np.ufunc] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "all": np.logical_and,
    "any": np.logical_or,
}


class NumpyOps:
    """:class:`HostOps` for numpy arrays."""

    framework = ""

    def shape(self, x: np.ndarray[Any, Any]) -> Shape:
        """Shape of ``x``."""
        return tuple(x.shape)

    def dtype(self, x: np.ndarray[Any, Any]) -> str:
        """Name of the dtype, such as ``float32``; ``bfloat16`` for :data:`BFLOAT16`."""
        return "bfloat16" if x.dtype == BFLOAT16 else str(x.dtype)

    def inexact(self, x: np.ndarray[Any, Any]) -> bool:
        """Whether ``x`` is floating-point (including bfloat16) or complex."""
        return x.dtype == BFLOAT16 or np.issubdtype(x.dtype, np.inexact)

    def device(self, x: np.ndarray[Any, Any]) -> str:
        """Return an empty text: arrays are in host memory."""
        del x
        return ""

    def copy(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return a contiguous copy."""
        return np.array(x, order="C")

    def stack(self, parts: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        """Stack ``parts`` as rows of a new array."""
        return np.stack(parts)

    def split(self, x: np.ndarray[Any, Any], sizes: Sequence[int]) -> list[np.ndarray[Any, Any]]:
        """Split ``x`` into flat chunks; each is a copy."""
        return [part.copy() for part in np.split(x.reshape(-1), np.cumsum(sizes)[:-1])]

    def join(self, parts: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        """Concatenate flat ``parts``."""
        filled = [part for part in parts if part.size]
        return filled[0] if len(filled) == 1 else np.concatenate(parts)

    def reduce(self, parts: Sequence[np.ndarray[Any, Any]], op: str) -> np.ndarray[Any, Any]:
        """Fold ``parts`` from the left with ``op``; ``avg`` divides the sum once, at the end.

        Raises:
            ReductionError: ``op`` is unknown, or ``avg`` of integers.
        """
        first = parts[0]
        check_reduction(op, inexact=self.inexact(first))
        half = first.dtype == BFLOAT16
        total = widen(first) if half else np.array(first, order="C")
        for part in parts[1:]:
            _ACCUMULATE[op](total, widen(part) if half else part, out=total)
            if half:
                total = widen(narrow(total))
        if op in ("all", "any") and len(parts) == 1:
            total = total.astype(np.bool_).astype(total.dtype)
        if op == "avg":
            np.divide(total, len(parts), out=total)
        return narrow(total) if half else total

    def save_state(self) -> None:
        """Save nothing, since process ranks share no state."""

    def restore_state(self, state: None, now: None = None) -> None:
        """Do nothing, since no state was saved."""


def widen(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Convert :data:`BFLOAT16` to float32, exactly."""
    # Shifting a 0-d array gives a scalar, which asarray converts back to an array.
    return np.asarray(x["bfloat16"].astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Convert float32 to :data:`BFLOAT16`, to nearest even; NaN stays NaN."""
    bits = np.asarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.asarray(np.where(np.isnan(x), np.uint32(0x7FC0), rounded).astype(np.uint16)).view(BFLOAT16)
