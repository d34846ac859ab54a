"""The distance of two arrays under an allowed difference per element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Distance", "distance", "within"]


@dataclass(frozen=True)
class Distance:
    """How far an array is from the expected one.

    Attributes:
        ratio: the largest error relative to what its element is allowed; more than 1 differs.
        error: of the worst element, relative to the largest expected magnitude.
        bound: what that element is allowed, relative to the same magnitude.
        why: what differs, with numbers; empty if nothing does.
    """

    ratio: float
    error: float
    bound: float
    why: str


def distance(actual: Any, expected: Any, allowed: Any, floor: float = 0.0) -> Distance:
    """Return how far ``actual`` is from ``expected``.

    Args:
        actual: an array.
        expected: what it should be.
        allowed: what each element may be off by, an array of the same shape.
        floor: least magnitude that the error is relative to.
    """
    actual, expected, allowed = np.asarray(actual), np.asarray(expected), np.asarray(allowed)
    if actual.shape != expected.shape:
        why = f"has shape {list(actual.shape)}, the single device {list(expected.shape)}"
        return Distance(np.inf, np.inf, 0.0, why)
    if not expected.size:
        return Distance(0.0, 0.0, 0.0, "")
    if expected.dtype.kind not in "fc" or actual.dtype.kind not in "fc":
        wrong = int(((actual != expected) & (allowed == 0)).sum())
        why = f"differs in {wrong} of {expected.size} elements" if wrong else ""
        return Distance(np.inf if wrong else 0.0, np.inf if wrong else 0.0, 0.0, why)
    finite = np.isfinite(expected)
    if not np.array_equal(actual[~finite], expected[~finite], equal_nan=True) or not np.isfinite(actual[finite]).all():
        own, other = int((~np.isfinite(actual)).sum()), int((~finite).sum())
        why = f"has {own} element{' that is' if own == 1 else 's that are'} inf or nan, the single device {other}"
        why += ", in other places or of another sign" if own == other else ""
        return Distance(np.inf, np.inf, 0.0, why)
    return _measured(np.where(finite, actual, 0), np.where(finite, expected, 0), allowed, floor)


def within(actual: Any, expected: Any, allowed: Any) -> bool:
    """Return whether every element is as far from the expected one as is allowed, at most."""
    return distance(actual, expected, allowed).ratio <= 1.0


def _measured(actual: Any, expected: Any, allowed: Any, floor: float) -> Distance:
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    off = np.abs(actual.astype(wide) - expected.astype(wide))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(off == 0, 0.0, off / np.maximum(allowed, np.finfo(np.float64).tiny))
    worst = np.unravel_index(int(ratios.argmax()), ratios.shape)
    scale = max(float(np.abs(expected.astype(wide)).max()), floor) or 1.0
    ratio, error, bound = float(ratios[worst]), float(off[worst]) / scale, float(allowed[worst]) / scale
    if ratio <= 1.0:
        return Distance(ratio, error, bound, "")
    place = f" at {[int(position) for position in worst]}" if worst else ""
    count = int((ratios > 1.0).sum())
    share = f"{count} of {ratios.size} elements differ, " if ratios.size > 1 else ""
    values = f"has {actual[worst]:.9g}{place}, the single device {expected[worst]:.9g}"
    return Distance(ratio, error, bound, f"{values} ({share}relative error {error:.1e}, allowed {bound:.1e})")
