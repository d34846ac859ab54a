"""AdamW on gradients that are only rounding noise: the parallel run steps on the single device's.

AdamW divides a gradient by its own magnitude. Where the true gradient is zero (the bias of attention's keys, which
softmax cancels), only rounding noise is left, and its sign decides about a step of the whole learning rate: two correct
runs diverge. No tolerance on weights can tell that from a fault, so the step is made equal instead. Gradients are
compared first, as always. Elements that are equal under that comparison's bound, but would change the weight by more
than a step may, are replaced by the single device's before the parallel run's optimizer sees them. All other elements
step on their own gradient, and all weights are compared under the bound of every optimizer.
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

__all__ = ["NoiseReplacement", "noise_elements"]


@dataclass
class NoiseReplacement:
    """Replaces the noise in the gradients of one step.

    Attributes:
        bound: the allowed error.
        step: number of the step, from 0.
        learning_rate: of AdamW.
        gradients: the single device's, by path; None where there is none.
        terms: largest magnitude that was summed in a bias's gradient, by path.
        weights: the single device's after the step, by path.
        replaced: number of this rank's elements that were taken from the single device.
        total: number of this rank's elements.
    """

    bound: Bound
    step: int
    learning_rate: float
    gradients: Mapping[str, Any]
    terms: Mapping[str, float]
    weights: Mapping[str, Any]
    replaced: int = 0
    total: int = 0

    def __call__(self, platform: Platform, result: StepResult) -> StepResult:
        """Return the result that the optimizer sees; ``result`` keeps the gradients of backward for the comparison."""
        reference = {path: gradient for path, gradient in self.gradients.items() if gradient is not None}
        largest_gradient = max(map(magnitude, reference.values()), default=0.0)
        largest_weight = max(map(magnitude, self.weights.values()), default=0.0)
        replaced = dict(result.gradients)
        for path, expected in reference.items():
            gradient = replaced.get(path)
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            box = (
                tuple(slice(*range_) for range_ in gradient.layout.local_box()) if isinstance(gradient, DTensor) else ()
            )
            if local is None or tuple(local.shape) != expected[box].shape:
                continue  # the comparison reports it
            floor = noise_floor(largest_gradient, self.terms.get(path, 0.0))
            error = self.bound.at(self.step) * max(magnitude(expected), floor)
            # The bound of a weight grows by the same share in each step: this is this step's share.
            allowed = self.bound.at(0) * max(magnitude(self.weights[path]), noise_floor(largest_weight))
            own = platform.tensor_to_numpy(local)
            noise = noise_elements(own, expected[box], error, allowed / self.learning_rate)
            self.replaced, self.total = self.replaced + int(noise.sum()), self.total + noise.size
            if noise.any():
                mixed = np.where(noise, expected[box], own).astype(own.dtype)
                replaced[path] = _overwrite_gradient(platform, result, path, mixed)
        return StepResult(result.loss, replaced)

    def __str__(self) -> str:
        """Return which elements were not compared, and why."""
        return (
            f"for {self.replaced} of rank 0's {self.total} elements the single device's gradient was taken: it is "
            "equal, but so small that its rounding error decides about the step"
        )


def noise_elements(actual: Any, expected: Any, error: float, allowed: float) -> Any:
    """Return where gradients are equal, but lead to steps that differ too much.

    To first order two steps differ by ``|actual - expected| / (magnitude + epsilon)`` learning rates.

    Args:
        actual: the parallel run's gradient.
        expected: the single device's, of the same shape.
        error: the largest difference of equal gradients.
        allowed: the largest difference of the steps, in learning rates.

    Returns:
        booleans of the same shape.
    """
    distance = np.abs(actual - expected)
    smaller = np.minimum(np.abs(actual), np.abs(expected))
    return (distance <= error) & (distance > allowed * (smaller + ADAMW_EPSILON))


def _overwrite_gradient(platform: Platform, result: StepResult, path: str, array: Any) -> Any:
    """Write ``array`` where the optimizer finds this rank's gradient; ``result`` keeps a copy of the old gradient."""
    gradient = result.gradients[path]
    if not isinstance(gradient, DTensor):
        result.gradients[path] = platform.copy(gradient)
        return platform.overwritten(gradient, array)
    local = gradient.to_local()
    result.gradients[path] = platform.wrap(platform.copy(local), gradient.layout)
    return platform.wrap(platform.overwritten(local, array), gradient.layout)
