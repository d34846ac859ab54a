"""Steps of programs that update their weights without an optimizer of PyTorch: seen where weights have changed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from hyper_parallel.verify.frameworks.contract.records import LocalValue
from hyper_parallel.verify.frameworks.torch.local_values import read_part
from hyper_parallel.verify.frameworks.torch.partitions import read_weight

__all__ = ["StepsByHand"]


class StepsByHand:
    """The gradients of a step, and the weights before it.

    Gradients are those after the last backward, or what was made of them until they are set to zero or the model is
    called again: where a program reduces them in between and then drops them, they are each rank's own.

    Attributes:
        gradients: by name, of the backwards since the last step.
        own: names of those that are as backward has left them, so that the program has not reduced them in place.
    """

    def __init__(self) -> None:
        self.gradients: dict[str, LocalValue] = {}
        self.own: set[str] = set()
        self._weights: dict[str, bytes] = {}

    def take(self, named: Mapping[str, Any], *, backward: bool = False) -> None:
        """Keep the gradients that parameters have now.

        Args:
            named: the parameters.
            backward: whether a backward has just run; else only gradients that are not zero replace earlier ones.
        """
        if not backward and not self.gradients:
            return
        for name, parameter in named.items():
            gradient = parameter.grad
            taken = None if gradient is None else read_part(parameter, gradient)
            if taken is None or not (backward or taken.array.any()):
                continue
            if backward:
                self.own.add(name)
            elif name in self.own and not np.array_equal(taken.array, self.gradients[name].array):
                self.own.remove(name)
            self.gradients[name] = taken

    def remember(self, named: Mapping[str, Any]) -> None:
        """Keep what tells whether weights change."""
        self._weights = {name: _digest(value) for name, value in named.items()}

    def has_stepped(self, named: Mapping[str, Any]) -> bool:
        """Return whether a backward ran and weights have changed since :meth:`remember`."""
        return bool(self.gradients) and any(
            name in self._weights and self._weights[name] != _digest(value) for name, value in named.items()
        )


def _digest(value: Any) -> bytes:
    taken = read_weight(value)
    return b"" if taken is None else hashlib.sha256(taken.array.tobytes()).digest()
