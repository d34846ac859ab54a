"""What a recorder changes about a program's case on one rank, so that the case can show more errors.

The program's code stays as it is. Values are chosen by the harness, the same for the single device and the ranks: a
rank gets its own part of them. Inputs are changed by their place in memory: the parts that ranks cut out of one batch
are views of it, so the same sample is changed alike in every world.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["IGNORED_LABEL", "INPUT_SPREAD", "KEPT_SHARES", "CaseChanges", "kept_elements", "noise_of"]

IGNORED_LABEL = -100
"""Label that losses leave out."""

INPUT_SPREAD = 0.5
"""Standard deviation of what is added to floating inputs."""

KEPT_SHARES = (0.4, 1.0)
"""Probability that a mask still selects an element, at the start and at the end of its memory: parts differ."""


@dataclass(frozen=True)
class CaseChanges:
    """The changes on one rank; an empty one changes nothing.

    Attributes:
        weights: initial values by the rank's own name of the parameter, of the shape that the rank holds; written
            before the first forward of the model.
        share: what the losses are multiplied by when they enter a backward. The mean over ranks of equal data is 1.
        outputs: factors by which outputs are multiplied before the program sees them, by the name of the output, the
            step and the call, of the shape that the rank holds.
        input_seed: seed of the noise that is added to floating inputs of models (:func:`noise_of`); None adds none.
        mask_seed: seed of the elements that boolean inputs and labels drop in addition (:func:`kept_elements`); None
            drops none.
        strided: whether inputs of two and more dims come with other strides, and the same values.
    """

    weights: Mapping[str, Any] = field(default_factory=dict)
    share: float = 1.0
    outputs: Mapping[tuple[str, int, int], Any] = field(default_factory=dict)
    input_seed: int | None = None
    mask_seed: int | None = None
    strided: bool = False


def noise_of(seed: int, size: int) -> Any:
    """Return float64 noise of ``size`` elements, one for each element of a tensor's memory."""
    return INPUT_SPREAD * np.random.default_rng([seed, size]).standard_normal(size)


def kept_elements(seed: int, size: int) -> Any:
    """Return which of ``size`` elements of a tensor's memory a mask may still select, as booleans."""
    return np.random.default_rng([seed, size]).random(size) < np.linspace(*KEPT_SHARES, size)
