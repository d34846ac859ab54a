"""Changes of a program's weights, inputs and outputs on one rank, so that the test case can expose more errors.

The program's code is not changed. The harness chooses global values; the single device uses them, and each rank uses
its shard. The change of an input element depends on its position in the storage: the shards that ranks slice from a
batch are views of the batch, so a sample gets the same change for every number of ranks. Applied changes are recorded,
because a program may never reach a planned change.
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
"""Label of a position that losses ignore."""

INPUT_SPREAD = 0.5
"""Standard deviation of the noise that is added to floating-point inputs."""

KEPT_SHARES = (0.4, 1.0)
"""Probability that a mask keeps an element, at the start and at the end of its storage; it differs between shards."""


@dataclass(frozen=True)
class CaseChanges:
    """The changes on one rank; by default, nothing is changed.

    Attributes:
        weights: initial values in the local shape, by the name that the parameter has on this rank; written before the
            first forward of the model.
        share: factor by which losses are multiplied when backward starts. Its mean over ranks with equal data is 1.
        outputs: factors in the local shape by which outputs are multiplied before the program gets them; by name of
            the output, step and call.
        input_seed: seed of the noise that is added to floating-point inputs of models (:func:`noise_of`); None adds
            none.
        mask_seed: seed that selects elements of boolean inputs and labels to set to False or to the ignored label
            (:func:`kept_elements`); None selects none.
        strided: whether inputs of two or more dims get different strides with the same values.
    """

    weights: Mapping[str, Any] = field(default_factory=dict)
    share: float = 1.0
    outputs: Mapping[tuple[str, int, int], Any] = field(default_factory=dict)
    input_seed: int | None = None
    mask_seed: int | None = None
    strided: bool = False


def noise_of(seed: int, size: int) -> Any:
    """Return float64 noise of ``size`` elements, one for each element of a tensor's storage."""
    return INPUT_SPREAD * np.random.default_rng([seed, size]).standard_normal(size)


def kept_elements(seed: int, size: int) -> Any:
    """Return a boolean for each of the ``size`` elements of a tensor's storage: False if a mask must not select it."""
    return np.random.default_rng([seed, size]).random(size) < np.linspace(*KEPT_SHARES, size)


class BaseAppliedChanges(ABC):
    """Applies the changes of a log to weights and outputs.

    Args:
        log: log of the rank; ``log.changes`` has the changes.
    """

    def __init__(self, log: RecordLog) -> None:
        self._log = log
        self._written: list[str] = []

    @abstractmethod
    def local_shape(self, parameter: Any) -> tuple[int, ...] | None:
        """Return the local shape of a parameter; None if it is not a tensor."""

    @abstractmethod
    def write(self, parameter: Any, array: Any) -> None:
        """Write an array into the local tensor of a parameter."""

    def write_weights(self, named: Mapping[str, Any]) -> None:
        """Write initial values into parameters, each once.

        Raises:
            RecordingError: the shapes of a parameter and its values differ.
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
        """Return the factors for the output that was recorded last under ``name``, or None.

        Raises:
            RecordingError: the shapes of the output and the factors differ.
        """
        factors = self._log.changes.outputs.get((name, self._log.step, self._log.count("output", name) - 1))
        if factors is None:
            return None
        if shape != factors.shape:
            msg = f"the output {name!r} has the shape {list(shape)}, and had {list(factors.shape)} before"
            raise RecordingError(msg)
        self._log.notes["changed outputs"] = self._log.notes.get("changed outputs", 0) + 1
        return factors
