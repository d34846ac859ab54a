"""Power of a comparison: the smallest error of a gradient that exceeds its tolerance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from hyper_parallel.verify.engine.bounds import Bounds, Key

__all__ = ["UNJUDGED", "WEAK", "Power", "percent", "power_of"]

WEAK = 0.05
"""A parameter counts as weak if relative errors of its gradient up to this size would not be detected."""

UNJUDGED = 0.1
"""A parameter counts as not judged if relative errors of its gradient up to this size would not be detected."""


@dataclass(frozen=True)
class Power:
    """The smallest detectable errors, as relative sizes: 0.01 stands for a gradient of 1.01 times the right one.

    Attributes:
        median: median over all parameters.
        weakest: name of the parameter whose smallest detectable error is the largest; empty if no gradient was
            compared.
        largest: smallest detectable error of that parameter.
        weak: parameters whose smallest detectable error is more than :data:`WEAK`, with that error.
        count: number of parameters.
    """

    median: float = math.inf
    weakest: str = ""
    largest: float = math.inf
    weak: dict[str, float] = field(default_factory=dict)
    count: int = 0

    @property
    def unjudged(self) -> dict[str, float]:
        """Parameters whose gradients were not judged, with the largest undetected errors, in descending order."""
        names = sorted(self.weak, key=lambda name: -self.weak[name])
        return {name: self.weak[name] for name in names if self.weak[name] > UNJUDGED}

    @property
    def little(self) -> bool:
        """Whether most gradients were not judged."""
        return 2 * len(self.unjudged) > self.count

    def words(self) -> str:
        """Return the power in one sentence."""
        if not self.weakest:
            return "no gradient was compared"
        shown = f"a gradient that is off by {percent(self.median)} would have been noticed in the median parameter"
        return f"{shown}, by {percent(self.largest)} in the weakest ({self.weakest})"


def power_of(bounds: Bounds, keys: Iterable[Key]) -> Power:
    """Return the power of a comparison.

    Args:
        bounds: tolerances of the reference.
        keys: keys of the values that were compared. Only gradients count: for each parameter, the gradient of the step
            with the highest power.
    """
    least: dict[str, float] = {}
    for key in keys:
        bound = bounds.whole(key) if key[0] == "gradient" else None
        if bound is not None:
            least[key[1]] = min(least.get(key[1], math.inf), bound.scale)
    if not least:
        return Power()
    weakest = max(least, key=lambda name: least[name])
    weak = {name: error for name, error in least.items() if error > WEAK}
    return Power(statistics.median(least.values()), weakest, least[weakest], weak, len(least))


def percent(share: float) -> str:
    """Return a share in words: ``0.0002 %``, ``4 %``."""
    return f"{100 * share:.2g} %" if math.isfinite(share) else "any amount"
