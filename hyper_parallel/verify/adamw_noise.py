"""AdamW where a gradient is too small to determine its step.

AdamW divides a gradient by its own magnitude. Where the true gradient is zero (the bias of attention's keys, which
softmax cancels), what is left is rounding noise, and its sign decides about a step of the whole learning rate: two
correct runs part. No tolerance on weights tells that from a fault, so the step itself is settled. Gradients are
compared as always. Elements that are equal under that comparison's bound, and yet would move the weight by more than a
step may, are given to the parallel run's optimizer as the single device has them. Everything else steps on its own
gradient, and all weights are compared under the bound that every optimizer has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.platform.contract.training import ADAMW_EPSILON, StepResult
from hyper_parallel.verify.compare import Bound, magnitude, noise_floor

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["Settlement", "undetermined"]


@dataclass
class Settlement:
    """Settles one step.

    Attributes:
        bound: the allowed error.
        step: number of the step, from 0.
        learning_rate: of AdamW.
        gradients: the single device's, by path.
        summands: largest magnitude that was summed in a bias's gradient, by path.
        weights: the single device's after the step, by path.
        settled: number of this rank's elements that were taken from the single device.
        total: number of this rank's elements.
    """

    bound: Bound
    step: int
    learning_rate: float
    gradients: Mapping[str, Any]
    summands: Mapping[str, float]
    weights: Mapping[str, Any]
    settled: int = 0
    total: int = 0

    def __call__(self, platform: Platform, result: StepResult) -> StepResult:
        """What the optimizer shall see; ``result`` keeps what backward gave, to be compared."""
        known = {path: one for path, one in self.gradients.items() if one is not None}
        largest = [max(map(magnitude, held), default=0.0) for held in (known.values(), list(self.weights.values()))]
        seen = dict(result.gradients)
        for path, wanted in known.items():
            given = seen.get(path)
            local = given.to_local() if isinstance(given, DTensor) else given
            box = tuple(slice(*one) for one in given.layout.local_box()) if isinstance(given, DTensor) else ()
            if local is None or tuple(local.shape) != wanted[box].shape:
                continue  # the comparison says so
            floor = noise_floor(largest[0], self.summands.get(path, 0.0))
            error = self.bound.at(self.step) * max(magnitude(wanted), floor)
            # A weight's allowance grows by the same share each step: that share is this step's.
            allowed = self.bound.at(0) * max(magnitude(self.weights[path]), noise_floor(largest[1]))
            own = platform.tensor_to_numpy(local)
            where = undetermined(own, wanted[box], error, allowed / self.learning_rate)
            self.settled, self.total = self.settled + int(where.sum()), self.total + where.size
            if where.any():
                mixed = np.where(where, wanted[box], own).astype(own.dtype)
                seen[path] = _replaced(platform, result, path, mixed)
        return StepResult(result.loss, seen)

    def __str__(self) -> str:
        """What was not compared."""
        return (
            f"for {self.settled} of rank 0's {self.total} elements the single device's gradient was taken: it is "
            "equal, but so small that its rounding error decides about the step"
        )


def undetermined(found: Any, wanted: Any, error: float, allowed: float) -> Any:
    """Where gradients that are equal under ``error`` lead to steps that differ by more than ``allowed``.

    To first order a step differs by ``|found - wanted| / (magnitude + epsilon)`` learning rates.
    """
    distance = np.abs(found - wanted)
    smaller = np.minimum(np.abs(found), np.abs(wanted))
    return (distance <= error) & (distance > allowed * (smaller + ADAMW_EPSILON))


def _replaced(platform: Platform, result: StepResult, path: str, array: Any) -> Any:
    """A gradient of this rank's values ``array``, where the optimizer finds it; ``result`` keeps a copy of the old."""
    given = result.gradients[path]
    if not isinstance(given, DTensor):
        result.gradients[path] = platform.copy(given)
        return platform.overwritten(given, array)
    local = given.to_local()
    result.gradients[path] = platform.wrap(platform.copy(local), given.layout)
    return platform.wrap(platform.overwritten(local, array), given.layout)
