"""Compares arrays: bitwise if the operator is exact, else within a rounding bound."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = ["coarsest_eps", "difference", "is_dyadic", "is_single_precision", "is_uninformative"]

UNITS = 64
"""Difference that another order of summation may cause: units in the last place of the largest magnitude."""

_SHORT_FRACTION = 2.0**19
_ENOUGH_FRACTIONS = 3
_GRAIN = 64.0
_LARGEST = 2.0**20


def is_dyadic(arrays: Iterable[Any]) -> bool:
    """Whether all values are small multiples of 1/64: sums and products of a few of them are exact."""
    for array in arrays:
        if array is None or array.dtype.kind not in "fc":
            continue
        parts = array.view(array.real.dtype) if array.dtype.kind == "c" and array.ndim else array.real
        finite = np.clip(parts[np.isfinite(parts)], -_LARGEST, _LARGEST) * _GRAIN
        if (np.abs(finite) >= _LARGEST).any() or (finite != np.round(finite)).any():
            return False
    return True


def difference(actual: Any, expected: Any, *, exact: bool, eps: float = 0.0, summed: float = 0.0) -> str | None:
    """Return how ``actual`` differs from ``expected``, None where it does not.

    Args:
        actual: what an operator returned.
        expected: what it should be.
        exact: compare to the bit.
        eps: rounding unit of the coarsest dtype involved.
        summed: largest sum of magnitudes that was added up to ``actual``, if any: terms that cancel round as well.
    """
    if actual.shape != expected.shape:
        return f"has shape {list(actual.shape)}, should have {list(expected.shape)}"
    if actual.dtype != expected.dtype:
        return f"has dtype {actual.dtype}, should have {expected.dtype}"
    if actual.tobytes() == expected.tobytes():
        return None
    same = _equal_elements(actual, expected, exact=exact, eps=eps, summed=summed)
    if same.all():
        return None
    worst = tuple(int(index) for index in np.unravel_index(np.argmin(same), same.shape))
    count = int(same.size - np.count_nonzero(same))
    return f"is {actual[worst]} at {list(worst)}, should be {expected[worst]} ({count} of {same.size} differ)"


def _equal_elements(actual: Any, expected: Any, *, exact: bool, eps: float, summed: float) -> Any:
    if expected.dtype.kind not in "fc":
        return actual == expected
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    if exact:
        return same
    finite = np.isfinite(expected) & np.isfinite(actual)
    magnitude = np.abs(expected[finite])
    bound = (
        UNITS
        * max(float(np.finfo(expected.dtype).eps), eps)
        * max(1.0, summed, float(magnitude.max()) if magnitude.size else 1.0)
    )
    with np.errstate(invalid="ignore", over="ignore"):
        near = np.abs(actual - expected) <= bound
    return same | (finite & near)


def coarsest_eps(arrays: Iterable[Any]) -> float:
    """Return the largest rounding unit among floating arrays."""
    return max((float(np.finfo(array.dtype).eps) for array in arrays if array.dtype.kind in "fc"), default=0.0)


def is_single_precision(arrays: Iterable[Any]) -> bool:
    """Whether an array of doubles was computed in single precision: long fractions, none of which needs a double."""
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
    """Whether a wrong result could equal ``outputs`` by accident: all empty, zero, constant or NaN.

    Args:
        outputs: arrays.
        constant: a constant result is what the sample means.
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
