"""What a recorder changes about a program's case on one rank, so that the case can show more errors.

The program's code stays as it is. Values are chosen by the harness, the same for the single device and the ranks: a
rank gets its own part of them. Inputs are changed by their place in memory: the parts that ranks cut out of one batch
are views of it, so the same sample is changed alike in every world. What was changed is noted, so that nobody takes a
change for made that the program never met.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.verify.frameworks.contract.records import RecordingError

if TYPE_CHECKING:
    from hyper_parallel.verify.frameworks.contract.record_log import RecordLog

__all__ = [
    "IGNORED_LABEL",
    "INPUT_SPREAD",
    "KEPT_SHARES",
    "BaseAppliedChanges",
    "CaseChanges",
    "kept_elements",
    "noise_of",
]

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


class BaseAppliedChanges(ABC):
    """Applies the changes of a log to weights and outputs.

    Args:
        log: of the rank; ``log.changes`` says what is changed.
    """

    def __init__(self, log: RecordLog) -> None:
        self._log = log
        self._written: list[str] = []

    @abstractmethod
    def local_shape(self, parameter: Any) -> tuple[int, ...] | None:
        """Return the shape of what this rank holds of a parameter; None if that is not a tensor."""

    @abstractmethod
    def write(self, parameter: Any, array: Any) -> None:
        """Write an array into what this rank holds of a parameter."""

    def write_weights(self, named: Mapping[str, Any]) -> None:
        """Write initial values into parameters, each once.

        Raises:
            RecordingError: a parameter has another shape than the values.
        """
        for name, array in self._log.changes.weights.items():
            shape = self.local_shape(named[name]) if name in named and name not in self._written else None
            if shape is None:
                continue
            if shape != array.shape:
                msg = f"{name} has the shape {list(shape)} in this run, and had {list(array.shape)} before"
                raise RecordingError(msg)
            self.write(named[name], array)
            self._written.append(name)
            self._log.notes["changed weights"] = self._written

    def factors_of(self, name: str, shape: tuple[int, ...]) -> Any | None:
        """Return what multiplies the output that was recorded last under ``name``, or None.

        Raises:
            RecordingError: the output has another shape than the factors.
        """
        factors = self._log.changes.outputs.get((name, self._log.step, self._log.count("output", name) - 1))
        if factors is None:
            return None
        if shape != factors.shape:
            msg = f"the output {name!r} has the shape {list(shape)}, and had {list(factors.shape)} before"
            raise RecordingError(msg)
        self._log.notes["changed outputs"] = self._log.notes.get("changed outputs", 0) + 1
        return factors
