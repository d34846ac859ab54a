"""Changes the case of a program on one rank while it is recorded: the part that both frameworks share.

What was changed is noted, so that nobody takes a change for made that the program never met.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from hyper_parallel.verify.frameworks.contract.recording import RecordingError, RecordLog

__all__ = ["BaseChangedCase"]


class BaseChangedCase(ABC):
    """Applies the changes of a log to weights and outputs.

    Args:
        log: of the rank; ``log.changes`` says what is changed.
    """

    def __init__(self, log: RecordLog) -> None:
        self._log = log
        self._written: list[str] = []

    @abstractmethod
    def local_shape(self, parameter: Any) -> tuple[int, ...] | None:
        """Return the shape of what this rank holds of a parameter; None if that is no tensor."""

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
