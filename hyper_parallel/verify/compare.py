"""Comparing values of a parallel run with those of the single device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Comparison", "TensorCheck", "difference", "magnitude"]


@dataclass(frozen=True)
class TensorCheck:
    """One tensor compared on one rank.

    Attributes:
        kind: ``output``, ``loss``, ``norm`` (of the gradients), ``factor`` (of clipping), ``gradient``, ``state`` (of
            the optimizer), ``weight``, ``buffer``, ``rate`` (learning rate), ``mask`` (of the program's own draws) or
            ``random`` (state).
        module: path of the module it belongs to.
        name: its full name.
        step: training step, from 0.
        rank: the rank that compared it.
        values: number of elements.
        error: largest difference, relative to the tensor's magnitude.
        bound: the largest error that is allowed, relative likewise.
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

    @property
    def share(self) -> float:
        """The error as a share of what is allowed; infinite for an error where none is."""
        if self.bound:
            return self.error / self.bound
        return float("inf") if self.error else 0.0

    def __str__(self) -> str:
        """Return one line."""
        return f"step {self.step + 1}, {self.kind} of {self.name}, rank {self.rank}: {self.why or 'equal'}"


class Comparison:
    """The checks of one rank, in the order in which a divergence would show.

    Args:
        rank: the rank that compares.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.checks: list[TensorCheck] = []
        self.skipped: list[str] = []

    def compare(
        self, kind: str, module: str, name: str, step: int, actual: Any, expected: Any, allowed: float = 0.0
    ) -> None:
        """Record the comparison of two NumPy arrays, of which any element may be off by ``allowed``."""
        why = ""
        actual, expected = np.asarray(actual), np.asarray(expected)
        if kind == "buffer":  # a mask may contain -inf on purpose; an infinite loss or weight is an error
            actual, expected, why = _finite_part(actual, expected)
        scale = max(magnitude(expected), allowed) if expected.dtype.kind in "fc" else 0.0
        bound = allowed / scale if scale else 0.0
        error, why = (float("inf"), why) if why else difference(actual, expected, bound, scale)
        self.checks.append(TensorCheck(kind, module, name, step, self.rank, int(expected.size), error, bound, why))

    def record(self, kind: str, module: str, name: str, step: int, why: str) -> None:
        """Record a fact that is right, or what is wrong with it."""
        error = float("inf") if why else 0.0
        self.checks.append(TensorCheck(kind, module, name, step, self.rank, 1, error, 0.0, why))

    def missing(self, kind: str, module: str, name: str, step: int, why: str) -> None:
        """Record a tensor that one of the runs does not have."""
        self.checks.append(TensorCheck(kind, module, name, step, self.rank, 0, float("inf"), 0.0, why))

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
