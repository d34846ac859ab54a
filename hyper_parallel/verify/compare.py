"""Comparing values: a parallel run with the single-device one under a derived bound, and arrays element by element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Bound", "Comparison", "TensorCheck", "difference", "elementwise_difference", "magnitude", "noise_floor"]

NOISE_SHARE = 1e-3
"""Tensors whose values cancel are compared relative to this fraction of the largest value of their kind."""

_ULPS = 64
"""Default tolerance of :func:`elementwise_difference`, in units in the last place."""


@dataclass(frozen=True)
class Bound:
    """The largest difference that rounding alone can cause between two orders of summation.

    Adding ``terms`` numbers in another order changes the sum by at most ``terms`` units of rounding of the largest
    magnitude (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2). ``depth`` operations in a row
    each add their error, and every training step starts with the error of the step before.

    Attributes:
        dtype: name of the floating dtype that the values are computed in.
        terms: length of the longest sum: the largest dim of a weight, or the tokens of a batch.
        depth: modules that ran, forward and backward.
    """

    dtype: str
    terms: int
    depth: int

    def at(self, step: int) -> float:
        """Return the bound in step ``step`` (from 0), relative to a tensor's largest magnitude."""
        return float(np.finfo(self.dtype).eps) * self.terms * self.depth * (step + 1)

    def __str__(self) -> str:
        """Return the formula with its numbers."""
        eps = float(np.finfo(self.dtype).eps)
        return (
            f"{self.at(0):.1e} x step, relative to a tensor's largest magnitude "
            f"({eps:.1e} of {self.dtype} x sums of {self.terms} terms x {self.depth} modules forward and backward)"
        )


@dataclass(frozen=True)
class TensorCheck:
    """One tensor compared on one rank.

    Attributes:
        kind: ``output``, ``loss``, ``gradient``, ``weight`` or ``buffer``.
        module: path of the module it belongs to.
        name: its full name.
        step: training step, from 0.
        rank: the rank that compared it.
        values: number of elements.
        error: largest difference, relative to the tensor's magnitude.
        bound: the largest error that is allowed.
        why: what is wrong, or empty.
    """

    kind: str
    module: str
    name: str
    step: int
    rank: int
    values: int
    error: float
    bound: float
    why: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.why

    def __str__(self) -> str:
        """Return one line."""
        return f"step {self.step + 1}, {self.kind} of {self.name}, rank {self.rank}: {self.why or 'equal'}"


class Comparison:
    """The checks of one rank, in the order in which a divergence would show.

    Args:
        bound: the allowed error.
        rank: the rank that compares.
    """

    def __init__(self, bound: Bound, rank: int) -> None:
        self.bound, self.rank = bound, rank
        self.checks: list[TensorCheck] = []
        self.skipped: list[str] = []

    def compare(
        self, kind: str, module: str, name: str, step: int, actual: Any, expected: Any, floor: float = 0.0
    ) -> None:
        """Record the comparison of two NumPy arrays, whose magnitude counts as at least ``floor``."""
        bound = self.bound.at(step)
        why = ""
        if kind == "buffer":  # a mask may contain -inf on purpose; an infinite loss or weight is an error
            actual, expected, why = _finite_part(np.asarray(actual), np.asarray(expected))
        error, why = (float("inf"), why) if why else difference(actual, expected, bound, floor)
        self.checks.append(TensorCheck(kind, module, name, step, self.rank, int(np.size(expected)), error, bound, why))

    def missing(self, kind: str, module: str, name: str, step: int, why: str) -> None:
        """Record a tensor that one of the runs does not have."""
        self.checks.append(TensorCheck(kind, module, name, step, self.rank, 0, float("inf"), self.bound.at(step), why))

    def skip(self, name: str, why: str) -> None:
        """Record, once, a tensor that cannot be compared."""
        line = f"{name}: {why}"
        if line not in self.skipped:
            self.skipped.append(line)


def magnitude(array: Any) -> float:
    """Return the largest finite magnitude in ``array``; 0 if there is none."""
    if array.dtype.kind in "fc":
        array = array[np.isfinite(array)]
    return float(np.abs(array).max()) if array.size else 0.0


def noise_floor(largest: float, terms: float = 0.0) -> float:
    """Return the least magnitude that a tensor is measured against.

    Args:
        largest: the largest magnitude among all tensors of its kind.
        terms: the largest magnitude that was added up in it, if known: rounding a sum costs by the size of its terms,
            however much of it cancels.
    """
    return max(largest * NOISE_SHARE, terms)


def difference(actual: Any, expected: Any, bound: float, floor: float = 0.0) -> tuple[float, str]:
    """Compare a tensor of the parallel run with the single device's.

    Args:
        actual: an array of the parallel run.
        expected: the single device's array.
        bound: the largest error that is allowed.
        floor: the least magnitude that the error is relative to.

    Returns:
        the largest error relative to the largest magnitude in ``expected``, and what is wrong, or empty.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    why = _incomparable(actual, expected)
    if why:
        return float("inf"), why
    if expected.size == 0:
        return 0.0, ""
    if expected.dtype.kind not in "fc":
        wrong = int((actual != expected).sum())
        return (float("inf"), f"{wrong} of {expected.size} values differ") if wrong else (0.0, "")
    distance = np.abs(actual - expected)
    scale = max(float(np.abs(expected).max()), floor)
    worst = np.unravel_index(int(distance.argmax()), distance.shape)
    error = 0.0 if distance[worst] == 0 else float(distance[worst]) / scale if scale else float("inf")
    if error <= bound:
        return error, ""
    index = f" at {[int(position) for position in worst]}" if worst else ""
    values = f"{actual[worst]:.9g}{index}, single device {expected[worst]:.9g}"
    return error, f"{values} (error {error:.1e}, bound {bound:.1e})"


def elementwise_difference(
    actual: Any, expected: Any, tolerance: float | None, scale: float | None = None
) -> str | None:
    """Return how two arrays differ in shape, dtype or any element; None if they do not. NaN equals NaN.

    Args:
        actual: an array.
        expected: what it should be.
        tolerance: relative and absolute, as in ``numpy.isclose``, times ``max(1, largest magnitude)``; None takes 64
            units in the last place.
        scale: magnitude that the default tolerance is relative to; None takes ``max(1, largest magnitude)``.
    """
    if actual.shape != expected.shape:
        return f"has shape {actual.shape}, should have {expected.shape}"
    if actual.dtype != expected.dtype:
        return f"has dtype {actual.dtype}, should have {expected.dtype}"
    if expected.size == 0:
        return None
    if expected.dtype.kind not in "fc":
        return None if (actual == expected).all() else f"differs in {int((actual != expected).sum())} elements"
    bound = float(_ULPS * np.finfo(expected.dtype).eps) if tolerance is None else tolerance
    scale = max(1.0, magnitude(expected)) if scale is None or tolerance is not None else scale
    close = np.isclose(actual, expected, rtol=bound, atol=bound * scale, equal_nan=True)
    if close.all():
        return None
    worst = np.unravel_index(np.argmax(~close), close.shape)
    values = f"is {actual[worst]!r} at {worst}, should be {expected[worst]!r}"
    return f"{values} ({int((~close).sum())} of {close.size} differ)"


def _finite_part(actual: Any, expected: Any) -> tuple[Any, Any, str]:
    """Return both arrays with their non-finite values as 0, and what is wrong if those values differ."""
    if expected.dtype.kind not in "fc" or actual.shape != expected.shape or actual.dtype != expected.dtype:
        return actual, expected, ""
    finite = np.isfinite(expected)
    if not np.array_equal(actual[~finite], expected[~finite], equal_nan=True):
        return actual, expected, "values that are not finite differ from the single device's"
    return np.where(finite, actual, 0), np.where(finite, expected, 0), ""


def _incomparable(actual: Any, expected: Any) -> str:
    """Return why two arrays cannot be compared, non-finite values included; empty if they can."""
    if actual.shape != expected.shape:
        return f"has shape {list(actual.shape)}, single device {list(expected.shape)}"
    if actual.dtype != expected.dtype:
        return f"has dtype {actual.dtype}, single device {expected.dtype}"
    if expected.dtype.kind in "fc":
        for array, run in ((expected, "single device"), (actual, "parallel")):
            if not np.isfinite(array).all():
                return f"{run} has {int((~np.isfinite(array)).sum())} values that are not finite"
    return ""
