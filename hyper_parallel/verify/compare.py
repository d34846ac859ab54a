"""Comparing a parallel run with the single-device one: value by value, without scale factors, under a derived bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Bound", "Comparison", "TensorCheck", "difference", "magnitude", "noise_floor"]

NOISE_SHARE = 1e-3
"""A tensor that cancels to almost nothing is measured against this share of the largest value of its kind."""


@dataclass(frozen=True)
class Bound:
    """How far rounding alone may carry two orders of summation apart.

    Adding ``terms`` numbers in another order changes the sum by at most ``terms`` units of rounding of the largest
    magnitude (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2); ``depth`` operations in a row
    each add theirs, and every training step starts from the last one's.

    Attributes:
        dtype: name of the floating dtype that the values are computed in.
        terms: longest sum: the largest dim of a weight, or the tokens of a batch.
        depth: modules that ran, forward and backward.
    """

    dtype: str
    terms: int
    depth: int

    def at(self, step: int) -> float:
        """The bound in step ``step`` (from 0), relative to a tensor's largest magnitude."""
        return float(np.finfo(self.dtype).eps) * self.terms * self.depth * (step + 1)

    def __str__(self) -> str:
        """The formula with its numbers."""
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
        rank: who compared.
        values: how many numbers.
        error: largest difference, relative to ``scale``.
        bound: what was allowed.
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
        """True when nothing is wrong."""
        return not self.why

    def __str__(self) -> str:
        """One line."""
        return f"step {self.step + 1}, {self.kind} of {self.name}, rank {self.rank}: {self.why or 'equal'}"


class Comparison:
    """Collects checks of one rank, in the order in which a divergence would show.

    Args:
        bound: the allowed error.
        rank: whose.
    """

    def __init__(self, bound: Bound, rank: int) -> None:
        self.bound, self.rank = bound, rank
        self.checks: list[TensorCheck] = []
        self.skipped: list[str] = []

    def compare(
        self, kind: str, module: str, name: str, step: int, found: Any, wanted: Any, floor: float = 0.0
    ) -> None:
        """Compare two NumPy arrays; their magnitude counts as at least ``floor``."""
        bound = self.bound.at(step)
        why = ""
        if kind == "buffer":  # a mask of -inf is no accident; an infinite loss or weight is
            found, wanted, why = _finite_part(np.asarray(found), np.asarray(wanted))
        error, why = (float("inf"), why) if why else difference(found, wanted, bound, floor)
        self.checks.append(TensorCheck(kind, module, name, step, self.rank, int(np.size(wanted)), error, bound, why))

    def missing(self, kind: str, module: str, name: str, step: int, why: str) -> None:
        """Record a tensor that one of the runs does not have."""
        self.checks.append(TensorCheck(kind, module, name, step, self.rank, 0, float("inf"), self.bound.at(step), why))

    def skip(self, name: str, why: str) -> None:
        """Record what cannot be compared, once."""
        line = f"{name}: {why}"
        if line not in self.skipped:
            self.skipped.append(line)


def magnitude(array: Any) -> float:
    """The largest finite magnitude in ``array``; 0 where there is none."""
    if array.dtype.kind in "fc":
        array = array[np.isfinite(array)]
    return float(np.abs(array).max()) if array.size else 0.0


def noise_floor(largest: float, summands: float = 0.0) -> float:
    """The least magnitude that a tensor is measured against.

    Args:
        largest: the largest magnitude among all tensors of its kind.
        summands: the largest magnitude that was added up in it, where that is known: rounding a sum costs by the
            size of what is summed, however much of it cancels.
    """
    return max(largest * NOISE_SHARE, summands)


def _finite_part(found: Any, wanted: Any) -> tuple[Any, Any, str]:
    """Both arrays without the values that are not finite, and what is wrong if those are not the same ones."""
    if wanted.dtype.kind not in "fc" or found.shape != wanted.shape or found.dtype != wanted.dtype:
        return found, wanted, ""
    finite = np.isfinite(wanted)
    if not np.array_equal(found[~finite], wanted[~finite], equal_nan=True):
        return found, wanted, "values that are not finite differ from the single device's"
    return np.where(finite, found, 0), np.where(finite, wanted, 0), ""


def difference(found: Any, wanted: Any, bound: float, floor: float = 0.0) -> tuple[float, str]:
    """Largest error of ``found`` relative to the magnitude of ``wanted`` (at least ``floor``), and what is wrong."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    why = _incomparable(found, wanted)
    if why:
        return float("inf"), why
    if wanted.size == 0:
        return 0.0, ""
    if wanted.dtype.kind not in "fc":
        wrong = int((found != wanted).sum())
        return (float("inf"), f"{wrong} of {wanted.size} values differ") if wrong else (0.0, "")
    distance = np.abs(found - wanted)
    scale = max(float(np.abs(wanted).max()), floor)
    worst = np.unravel_index(int(distance.argmax()), distance.shape)
    error = 0.0 if distance[worst] == 0 else float(distance[worst]) / scale if scale else float("inf")
    if error <= bound:
        return error, ""
    at = f" at {[int(index) for index in worst]}" if worst else ""
    return error, f"{found[worst]:.9g}{at}, single device {wanted[worst]:.9g} (error {error:.1e}, bound {bound:.1e})"


def _incomparable(found: Any, wanted: Any) -> str:
    """What keeps two arrays from being compared, values that are not finite included."""
    if found.shape != wanted.shape:
        return f"has shape {list(found.shape)}, single device {list(wanted.shape)}"
    if found.dtype != wanted.dtype:
        return f"has dtype {found.dtype}, single device {wanted.dtype}"
    if wanted.dtype.kind in "fc":
        for array, whose in ((wanted, "single device"), (found, "parallel")):
            if not np.isfinite(array).all():
                return f"{whose} has {int((~np.isfinite(array)).sum())} values that are not finite"
    return ""
