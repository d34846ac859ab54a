"""Explains wrong factors: products of group sizes, ratios of counts, weights of a mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache

import numpy as np

__all__ = ["axes_of_factor", "axis_sizes", "integer_weights", "ratio_of_counts"]

_COUNT = 256
"""Largest numerator and denominator of a ratio of counts."""

_DECIMAL = (20, 25, 40, 50, 100, 125, 200, 250)
"""Denominators of numbers with two or three decimals, as people write them, such as a weight of 0.47."""

_TRIALS = 1 << 20

_OF_ONE_SIZE = 8
"""Maximum number of axes of equal size that are tried as divisors of a factor."""


def axes_of_factor(factor: float, sizes: Mapping[str, int], tolerance: float = 1e-6) -> tuple[str, ...]:
    """Return the fewest axes whose sizes multiply to ``factor`` or its inverse, each at most twice; empty if none."""
    same: dict[int, list[str]] = {}
    for name, size in sizes.items():
        same.setdefault(size, []).append(name)
    names = [name for name, size in sizes.items() if size > 1 and name in same[size][-_OF_ONE_SIZE:]]
    number = factor if factor >= 1 else 1 / factor if factor > 0 else 0.0

    @cache
    def powers(index: int, left: int, value: int) -> tuple[int, ...] | None:
        """Return exponents, with sum ``left``, of the axes from ``index`` on that turn ``value`` into ``number``."""
        if index == len(names):
            return () if not left and value > 1 and abs(number - value) <= tolerance * value else None
        for power in range(min(left, 2) + 1):
            larger = value * sizes[names[index]] ** power
            if larger * (1 - tolerance) > number * (1 + 1e-9):
                break
            rest = powers(index + 1, left - power, larger)
            if rest is not None:
                return (power, *rest)
        return None

    found = (powers(0, count, 1) for count in range(1, 2 * len(names) + 1)) if np.isfinite(number) else ()
    chosen = next((each for each in found if each is not None), ())
    return tuple(name for name, power in zip(names, chosen, strict=False) for _ in range(power))


def ratio_of_counts(factor: float, tolerance: float) -> Fraction | None:
    """Return ``factor`` as a ratio of two counts up to 256; None if it is not, or if the tolerance is too wide."""
    if not np.isfinite(factor) or factor <= 0 or tolerance * _COUNT**2 > 1e-2:
        return None
    ratio = Fraction(factor).limit_denominator(_COUNT)
    if ratio.numerator > _COUNT or not ratio or ratio == 1 or ratio.denominator in _DECIMAL:
        return None
    return ratio if abs(float(ratio) - factor) <= tolerance * factor else None


def integer_weights(values: Sequence[float], mean: float, tolerance: float) -> tuple[int, ...] | None:
    """Return counts for which the weighted mean of ``values`` is ``mean``; None if there are none or too many.

    Args:
        values: at least two numbers.
        mean: the weighted mean.
        tolerance: relative to the largest magnitude of the values.
    """
    if len(values) < 2:
        return None
    largest = int(min(64, _TRIALS ** (1 / len(values)))) - 1
    scale = max(map(abs, values)) or 1.0
    if largest < 4 or tolerance * (largest + 1) ** len(values) > 1e-3:
        return None
    counts = np.indices((largest + 1,) * len(values)).reshape(len(values), -1)[:, 1:]
    off = np.abs((counts * (np.asarray(values)[:, None] - mean)).sum(axis=0)) / counts.sum(axis=0)
    fits = counts[:, off <= tolerance * scale]
    distinct = fits[:, (fits > 0).sum(axis=0) >= 2]
    if not distinct.size:
        return None
    smallest = distinct[:, distinct.sum(axis=0).argmin()]
    return tuple(int(count) for count in smallest)


def axis_sizes(axes: Sequence[str], sizes: Mapping[str, int]) -> str:
    """Return a product of sizes in words: ``tp (3)``, ``dp x tp (2 x 3)``."""
    return f"{' x '.join(axes)} ({' x '.join(str(sizes[axis]) for axis in axes)})"
