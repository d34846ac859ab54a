"""Compares arrays with their expected values: bitwise, or within a multiple of the rounding unit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.noise import MULTIPLE

__all__ = [
    "coarsest_eps",
    "difference",
    "is_dyadic",
    "is_floating",
    "is_single_precision",
    "is_uninformative",
    "magnitude",
    "rounding_bound",
]

_SHORT_FRACTION = 2.0**19
_ENOUGH_FRACTIONS = 3
_GRAIN = 64.0
_LARGEST = 2.0**20


def is_dyadic(arrays: Iterable[Any]) -> bool:
    """Whether all values are small multiples of 1/64, so that sums and products of a few values are exact."""
    for array in arrays:
        if array is None or array.dtype.kind not in "fc":
            continue
        parts = array.view(array.real.dtype) if array.dtype.kind == "c" and array.ndim else array.real
        finite = np.clip(parts[np.isfinite(parts)], -_LARGEST, _LARGEST) * _GRAIN
        if (np.abs(finite) >= _LARGEST).any() or (finite != np.round(finite)).any():
            return False
    return True


def difference(actual: Any, expected: Any, allowed: Any = 0.0) -> str:
    """Return a text that says how ``actual`` differs from ``expected``; empty if equal. NaN equals NaN.

    Args:
        actual: the array.
        expected: expected values, of the same shape and dtype.
        allowed: tolerance per element: a number, or an array of the same shape. Infinity accepts any value. For
            integers, booleans and non-finite numbers, every finite tolerance counts as zero.
    """
    if actual.shape != expected.shape:
        return f"has shape {list(actual.shape)}, should have {list(expected.shape)}"
    if actual.dtype != expected.dtype:
        return f"has dtype {actual.dtype}, should have {expected.dtype}"
    if actual.tobytes() == expected.tobytes():
        return ""
    same = _same(actual, expected, allowed)
    if same.all():
        return ""
    worst = tuple(int(index) for index in np.unravel_index(int(np.argmin(same)), same.shape))
    count = int(same.size - np.count_nonzero(same))
    return f"is {actual[worst]} at {list(worst)}, should be {expected[worst]} ({count} of {same.size} differ)"


def _same(actual: Any, expected: Any, allowed: Any) -> Any:
    same = np.asarray((actual == expected) | np.isinf(allowed))
    if expected.dtype.kind not in "fc":
        return same
    same |= np.isnan(actual) & np.isnan(expected)
    if same.all() or not np.any(allowed):
        return same
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(actual.astype(wide) - expected.astype(wide))
    return same | (distance <= allowed)


def rounding_bound(
    expected: Any, *, eps: float = 0.0, scale: float | None = None, summed: float = 0.0, tolerance: float | None = None
) -> float:
    """Return the tolerance per element for an array that was computed with sums in a different order.

    Args:
        expected: the array.
        eps: rounding unit of the coarsest dtype in the computation, if coarser than the array's own.
        scale: magnitude to which the tolerance is relative; None takes the largest in the array, at least 1.
        summed: if the array is a sum of partial values, the largest sum of their magnitudes at one element; partial
            values that cancel leave rounding errors too.
        tolerance: relative tolerance that replaces the default multiple of the rounding unit.
    """
    if not is_floating(expected):
        return 0.0
    if scale is None or tolerance is not None:
        scale = max(1.0, summed, magnitude(expected))
    return scale * (MULTIPLE * max(float(np.finfo(expected.dtype).eps), eps) if tolerance is None else tolerance)


def is_floating(array: Any) -> bool:
    """Whether the argument is an array of real or complex floating-point numbers."""
    return array is not None and array.dtype.kind in "fc"


def magnitude(array: Any) -> float:
    """Return the largest finite magnitude of a floating array; 0 for None and other dtypes."""
    if not is_floating(array):
        return 0.0
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max()) if finite.size else 0.0


def coarsest_eps(arrays: Iterable[Any]) -> float:
    """Return the largest rounding unit among floating arrays."""
    return max((float(np.finfo(array.dtype).eps) for array in arrays if array.dtype.kind in "fc"), default=0.0)


def is_single_precision(arrays: Iterable[Any]) -> bool:
    """Whether an array of doubles was computed in single precision.

    This is so if all its values are exact in float32, and enough of them have a fraction of many bits.
    """
    for array in arrays:
        if array is None or array.dtype not in (np.float64, np.complex128):
            continue
        parts = np.ravel(np.ascontiguousarray(array)).view(np.float64)
        parts = parts[np.isfinite(parts) & (parts != np.round(parts))]
        head = np.frexp(parts)[0] * _SHORT_FRACTION
        long = np.count_nonzero(head != np.round(head))
        with np.errstate(over="ignore", under="ignore"):
            if long >= _ENOUGH_FRACTIONS and (parts.astype(np.float32) == parts).all():
                return True
    return False


def is_uninformative(outputs: Iterable[Any], *, constant: bool) -> bool:
    """Whether a wrong result could equal ``outputs`` by chance: all of them are empty, zero, constant or NaN.

    Args:
        outputs: arrays of the results.
        constant: whether a constant result is intended by the sample.
    """
    arrays = [output for output in outputs if output.size]
    if constant:
        return not arrays
    return all(_is_constant(array) for array in arrays)


def _is_constant(array: Any) -> bool:
    if array.size == 1:
        return array.dtype.kind in "fc" and (not np.isfinite(array).all() or not array.any())
    if array.dtype.kind in "fc":
        array = array[np.isfinite(array)]
    return array.size == 0 or bool((array == array.reshape(-1)[0]).all())
