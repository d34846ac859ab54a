"""The numbers of one differing value on all ranks, as input for hypotheses about its cause."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from hyper_parallel.verify.engine.bounds import Key
from hyper_parallel.verify.engine.noise import multiple_of, unit
from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.placement import Placement

__all__ = ["Evidence"]


class Evidence:
    """Actual and expected values of one key on all ranks.

    Args:
        runs: both runs.
        key: key of the value.
        ranks: the ranks where it differs.

    Attributes:
        placements: by rank, for ranks with a known placement and a value of the expected shape.
        actual, expected, allowed: arrays by rank.
        wrong: for each rank, booleans that are true for elements that differ.
        ranks: those of the given ranks on which elements differ.
    """

    def __init__(self, runs: PairedRuns, key: Key, ranks: Sequence[int]) -> None:
        self.runs, self.key = runs, key
        self.placements: dict[int, Placement] = {}
        self.actual: dict[int, Any] = {}
        self.expected: dict[int, Any] = {}
        self.allowed: dict[int, Any] = {}
        self.wrong: dict[int, Any] = {}
        for rank in runs.holders(key):
            placement = runs.placement(key, rank)
            if placement is None or not placement.compared:
                continue
            actual, (expected, allowed) = runs.actual(key, rank, placement), runs.expected(key, placement)
            if actual is None or actual.shape != expected.shape or actual.dtype.kind not in "fc":
                continue
            self.placements[rank], self.actual[rank] = placement, actual
            self.expected[rank], self.allowed[rank] = expected, allowed
            with np.errstate(invalid="ignore"):
                self.wrong[rank] = ~((np.abs(actual - expected) <= allowed) | (actual == expected))
        self.ranks = [rank for rank in ranks if rank in self.wrong and self.wrong[rank].any()]

    @property
    def within_elements(self) -> bool:
        """Whether every element of every rank is within its tolerance, so that only the complete tensor differs."""
        return bool(self.wrong) and not any(wrong.any() for wrong in self.wrong.values())

    @cached_property
    def share(self) -> tuple[int, int]:
        """Number of elements that differ on all ranks, and number of elements on the ranks with differences."""
        return sum(int(self.wrong[rank].sum()) for rank in self.ranks), sum(self.wrong[r].size for r in self.ranks)

    @cached_property
    def replicated(self) -> bool:
        """Whether ranks that have the same shard have equal values, within the tolerance."""
        firsts: list[int] = []
        for rank, placement in self.placements.items():
            same = next((first for first in firsts if placement.same_place(self.placements[first])), None)
            if same is None:
                firsts.append(rank)
            elif not (np.abs(self.actual[rank] - self.actual[same]) <= 2 * self.slack(rank, self.actual[same])).all():
                return False
        return True

    def slack(self, rank: int, size: Any) -> Any:
        """Return the tolerance, on a rank, of a sum or multiple of values whose magnitudes add up to ``size``."""
        record = self.runs.bounds.reference[self.key]
        reference = np.asarray(record.value)
        return self.allowed[rank] + multiple_of(reference, record.dtype) * unit(reference, record.dtype) * np.abs(size)

    def combined(self, group: Sequence[int]) -> tuple[Any, Any, Any]:
        """Return, per global element, the sum of a group's values, the sum of their magnitudes, and their number."""
        shape = next(iter(self.placements.values())).shape
        size = int(np.prod(shape))
        kind = next(iter(self.actual.values())).dtype
        total, magnitude, count = np.zeros(size, dtype=kind), np.zeros(size), np.zeros(size, dtype=np.int64)
        for rank in group:
            if rank in self.placements:
                positions = self.placements[rank].all_positions().reshape(-1)
                np.add.at(total, positions, self.actual[rank].reshape(-1))
                np.add.at(magnitude, positions, np.abs(self.actual[rank].reshape(-1)))
                np.add.at(count, positions, 1)
        return total, magnitude, count

    def off(self, rank: int, value: Any, size: Any) -> tuple[bool, float]:
        """Return whether ``value`` is right wherever the rank's own value is wrong, and its relative error there."""
        wrong = self.wrong[rank]
        with np.errstate(invalid="ignore"):
            error = np.abs(value - self.expected[rank])[wrong]
        scale = float(np.abs(self.expected[rank]).max()) or 1.0
        fits = bool((error <= self.slack(rank, size)[wrong]).all())
        return fits, float(error.max(initial=0.0)) / scale

    def error(self) -> float:
        """Return the largest error of the values themselves, relative to the largest expected magnitude."""
        worst = 0.0
        for rank in self.ranks:
            scale = float(np.abs(self.expected[rank]).max()) or 1.0
            worst = max(worst, float(np.abs(self.actual[rank] - self.expected[rank]).max()) / scale)
        return worst

    def factors(self) -> dict[int, tuple[float, float]]:
        """Return, by rank, the factor from the reference to the rank's value that fits best, and its residual."""
        factors: dict[int, tuple[float, float]] = {}
        for rank, actual in self.actual.items():
            expected = np.asarray(self.expected[rank], np.float64).reshape(-1)
            square = float(expected @ expected)
            if actual.dtype.kind == "f" and square and np.isfinite(square) and np.isfinite(actual).all():
                own = actual.astype(np.float64).reshape(-1)
                factor = float(own @ expected) / square
                factors[rank] = factor, float(np.linalg.norm(own - factor * expected)) / square**0.5
        return factors
