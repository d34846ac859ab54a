"""Whether an array is what it must be: to the bit where the operator is exact, within a bound of rounding otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = ["coarsest", "difference", "in_single", "is_dyadic", "says_nothing"]

UNITS = 64
"""Units in the last place of the largest magnitude that another order of summation may cost."""

_SHORT = 2.0**19
_SEVERAL = 3
_GRAIN = 64.0
_LARGEST = 2.0**20


def is_dyadic(arrays: Iterable[Any]) -> bool:
    """True when all values are small multiples of 1/64: sums and products of a few of them are exact."""
    for array in arrays:
        if array is None or array.dtype.kind not in "fc":
            continue
        parts = array.view(array.real.dtype) if array.dtype.kind == "c" and array.ndim else array.real
        finite = np.clip(parts[np.isfinite(parts)], -_LARGEST, _LARGEST) * _GRAIN
        if (np.abs(finite) >= _LARGEST).any() or (finite != np.round(finite)).any():
            return False
    return True


def difference(found: Any, wanted: Any, *, exact: bool, eps: float = 0.0, summed: float = 0.0) -> str | None:
    """None where ``found`` is ``wanted``, else what is wrong with it.

    Args:
        found: what an operator gave.
        wanted: what it should be.
        exact: to the bit.
        eps: rounding unit of the coarsest dtype on the way.
        summed: largest sum of magnitudes that was added up to ``found``, where it was: what cancels has rounded too.
    """
    if found.shape != wanted.shape:
        return f"has shape {list(found.shape)}, should have {list(wanted.shape)}"
    if found.dtype != wanted.dtype:
        return f"has dtype {found.dtype}, should have {wanted.dtype}"
    if found.tobytes() == wanted.tobytes():
        return None
    same = _same(found, wanted, exact=exact, eps=eps, summed=summed)
    if same.all():
        return None
    worst = tuple(int(one) for one in np.unravel_index(np.argmin(same), same.shape))
    count = int(same.size - np.count_nonzero(same))
    return f"is {found[worst]} at {list(worst)}, should be {wanted[worst]} ({count} of {same.size} differ)"


def _same(found: Any, wanted: Any, *, exact: bool, eps: float, summed: float) -> Any:
    if wanted.dtype.kind not in "fc":
        return found == wanted
    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    if exact:
        return same
    finite = np.isfinite(wanted) & np.isfinite(found)
    magnitude = np.abs(wanted[finite])
    bound = (
        UNITS
        * max(float(np.finfo(wanted.dtype).eps), eps)
        * max(1.0, summed, float(magnitude.max()) if magnitude.size else 1.0)
    )
    with np.errstate(invalid="ignore", over="ignore"):
        near = np.abs(found - wanted) <= bound
    return same | (finite & near)


def coarsest(arrays: Iterable[Any]) -> float:
    """The largest rounding unit among floating arrays."""
    return max((float(np.finfo(one.dtype).eps) for one in arrays if one.dtype.kind in "fc"), default=0.0)


def in_single(arrays: Iterable[Any]) -> bool:
    """True when an array of doubles was computed in single precision: long fractions, none longer than it holds."""
    for array in arrays:
        if array is None or array.dtype not in (np.float64, np.complex128):
            continue
        parts = np.ravel(np.ascontiguousarray(array)).view(np.float64)
        parts = parts[np.isfinite(parts) & (parts != np.round(parts))]
        head = np.frexp(parts)[0] * _SHORT
        long = np.count_nonzero(head != np.round(head))
        with np.errstate(over="ignore", under="ignore"):
            if long >= _SEVERAL and (parts.astype(np.float32) == parts).all():
                return True
    return False


def says_nothing(outputs: Iterable[Any], *, constant: bool) -> bool:
    """True for outputs that a wrong result could equal by accident: empty, all zero, all equal or not a number."""
    arrays = [one for one in outputs if one.size]
    if constant:
        return not arrays
    return all(_flat(one) for one in arrays)


def _flat(array: Any) -> bool:
    if array.size == 1:
        return array.dtype.kind in "fc" and (not np.isfinite(array).all() or not array.any())
    if array.dtype.kind in "fc":
        array = array[np.isfinite(array)]
    return array.size == 0 or bool((array == array.reshape(-1)[0]).all())
