"""Distance of two arrays relative to a tolerance per element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.bounds import WholeBound
from hyper_parallel.verify.engine.movement import exponent_of, whole_movement
from hyper_parallel.verify.engine.store import largest

__all__ = ["Distance", "distance", "energy_of", "share_of_movement", "whole_distance", "within"]


_CLEAR = 0.99
"""Largest ratio, measured in float32, at which a distance is accepted as within its tolerance."""


@dataclass(frozen=True)
class Distance:
    """The distance of an array from the expected one.

    Attributes:
        ratio: the largest ratio of an element's error to its tolerance; the value differs if it is more than 1.
        error: error of that element, relative to the largest expected magnitude.
        bound: tolerance of that element, relative to the same magnitude.
        why: description of the difference, with numbers; empty if there is none.
    """

    ratio: float
    error: float
    bound: float
    why: str


def distance(actual: Any, expected: Any, allowed: Any, floor: float = 0.0) -> Distance:
    """Return the distance of ``actual`` from ``expected``, element by element.

    Args:
        actual: an array.
        expected: the array that it should equal.
        allowed: tolerance of each element, an array of the same shape.
        floor: smallest magnitude that ``error`` and ``bound`` are relative to.
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
    if expected.dtype == actual.dtype == allowed.dtype == np.float32:
        near = _near(actual, expected, allowed, floor)
        if near is not None:
            return near
    finite = np.isfinite(expected)
    alike = (actual == expected) | (np.isnan(actual) & np.isnan(expected)) | np.isinf(allowed)
    if not np.where(finite, np.isfinite(actual) | np.isinf(allowed), alike).all():
        own, other = int((~np.isfinite(actual)).sum()), int((~finite).sum())
        why = f"has {own} element{' that is' if own == 1 else 's that are'} inf or nan, the single device {other}"
        why += ", in other places or of another sign" if own == other else ""
        return Distance(np.inf, np.inf, 0.0, why)
    finite &= np.isfinite(actual)
    return _measured(np.where(finite, actual, 0), np.where(finite, expected, 0), allowed, floor)


def whole_distance(
    actual: Any, expected: Any, bound: WholeBound, energy: float, shared: float = 0.0, noise: float = 0.0
) -> Distance | None:
    """Compare a shard with the tolerances of its complete tensor, for scale and norm; None if they cannot be measured.

    Args:
        actual: floating array with finite elements only.
        expected: array of the same shape that it should equal.
        bound: tolerances of the complete tensor.
        energy: sum of squares of that tensor. Dividing it by the shard's own sum of squares gives ``f``; the tolerances
            of the shard are larger by the square root of ``f``.
        shared: relative error that all shards may have in common; added to the tolerance of the scale.
        noise: the shard's share of the tensor's movement (:func:`share_of_movement`). If it is 1, only this shard moves
            the tensor, so the tolerance of its scale is larger by ``f``.
    """
    exponent = exponent_of(largest(expected))
    moved = whole_movement(actual.reshape(-1) - expected.reshape(-1), expected.reshape(-1), exponent)
    own = energy_of(expected)
    if not own or not np.isfinite(moved.norm):
        return None
    share = max(1.0, energy / own) ** 0.5
    scale, norm = bound.scale * max(share, share**2 * noise**0.5) + shared, bound.norm * share
    if not scale or not norm:
        return None
    ratio = max(abs(moved.scale) / scale, moved.norm / norm)
    why = ""
    if ratio > 1.0:
        why = (
            f"is {1 + moved.scale:.7g} times the single device's as a whole (allowed {scale:.1e} more or less)"
            if abs(moved.scale) / scale >= moved.norm / norm
            else f"is off by {moved.norm:.1e} of the single device's norm (allowed {norm:.1e})"
        )
    return Distance(ratio, moved.norm, norm, why)


def energy_of(array: Any) -> float:
    """Return the sum of squares of the finite elements of an array."""
    flat = np.asarray(array).reshape(-1)
    exponent = exponent_of(largest(flat))
    if flat.dtype == np.float32 and -100 < exponent < 100:
        scaled = flat * np.float32(2.0**-exponent)
        square = float(np.dot(scaled, scaled))
        if np.isfinite(square):
            return square * 4.0**exponent
    scaled = np.where(np.isfinite(flat), np.abs(flat), 0).astype(np.float64, copy=False) * 2.0**-exponent
    return float(np.dot(scaled, scaled)) * 4.0**exponent


def share_of_movement(part: Any, allowed: Any, whole: Any, whole_allowed: Any) -> float:
    """Return the fraction of a tensor's squared movement along itself that a shard causes, computed from tolerances.

    Args:
        part: floating array of finite numbers, a shard of ``whole``.
        allowed: tolerances of its elements, of the same shape.
        whole: the tensor.
        whole_allowed: tolerances of the tensor's elements.
    """
    own, total = energy_of(part * allowed), energy_of(whole * whole_allowed)
    return own / total if total and np.isfinite(allowed).all() else 1.0


def within(actual: Any, expected: Any, allowed: Any) -> bool:
    """Return whether every element differs by at most its tolerance."""
    return distance(actual, expected, allowed).ratio <= 1.0


def _near(actual: Any, expected: Any, allowed: Any, floor: float) -> Distance | None:
    """Return the distance of float32 arrays if it is clearly within the tolerance, otherwise None.

    Computing a difference in float32 rounds by half a unit, so a measured ratio of at most 0.99 is at most 1. An
    element that is infinite or NaN in one array makes the ratio infinite or NaN.
    """
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        ratios = np.asarray(np.subtract(actual, expected))
        np.abs(ratios, out=ratios)
        ratios /= np.maximum(allowed, np.finfo(np.float32).smallest_subnormal)
    worst = int(ratios.argmax())
    ratio = float(ratios.reshape(-1)[worst])
    if not ratio < _CLEAR:
        return None
    scale = max(largest(expected), floor) or 1.0
    place = np.unravel_index(worst, ratios.shape)
    error = abs(float(actual[place]) - float(expected[place]))
    return Distance(ratio, error / scale, float(allowed[place]) / scale, "")


def _measured(actual: Any, expected: Any, allowed: Any, floor: float) -> Distance:
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    off = np.abs(actual.astype(wide) - expected.astype(wide))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratios = np.where(off == 0, 0.0, off / np.maximum(allowed, np.finfo(np.float64).tiny))
    worst = np.unravel_index(int(ratios.argmax()), ratios.shape)
    scale = max(float(np.abs(expected).max()), floor) or 1.0
    ratio, error, bound = float(ratios[worst]), float(off[worst]) / scale, float(allowed[worst]) / scale
    if ratio <= 1.0:
        return Distance(ratio, error, bound, "")
    place = f" at {[int(position) for position in worst]}" if worst else ""
    count = int((ratios > 1.0).sum())
    share = f"{count} of {ratios.size} elements differ, " if ratios.size > 1 else ""
    values = f"has {actual[worst]:.9g}{place}, the single device {expected[worst]:.9g}"
    return Distance(ratio, error, bound, f"{values} ({share}relative error {error:.1e}, allowed {bound:.1e})")
