"""Reads gradients after backward: what each backward adds, and gradients of steps without a PyTorch optimizer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from hyper_parallel.verify.frameworks.contract.record_log import RecordLog
from hyper_parallel.verify.frameworks.contract.records import LocalValue
from hyper_parallel.verify.frameworks.torch.local_values import read_part
from hyper_parallel.verify.frameworks.torch.partitions import read_weight

__all__ = ["StepsByHand", "noting_contributions"]


class StepsByHand:
    """The gradients of a step without an optimizer, and the weights before it.

    Gradients are read after every backward, and again before they are set to zero or the model is called, so that
    reductions by the program are included. If the program reduces gradients and then deletes them itself, the gradients
    before the reduction are kept.

    Attributes:
        gradients: gradients of the backwards since the last step, by name.
        own: names of gradients that are unchanged since backward, so that the program has not reduced them in place.
    """

    def __init__(self) -> None:
        self.gradients: dict[str, LocalValue] = {}
        self.own: set[str] = set()
        self._weights: dict[str, bytes] = {}

    def take(self, named: Mapping[str, Any], *, backward: bool = False) -> None:
        """Keep the current gradients of the parameters.

        Args:
            named: the parameters.
            backward: whether a backward has just run; otherwise only nonzero gradients replace earlier ones.
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
        """Remember hashes of the weights, to detect changes."""
        self._weights = {name: _digest(value) for name, value in named.items()}

    def has_stepped(self, named: Mapping[str, Any]) -> bool:
        """Return whether a backward ran and weights have changed since :meth:`remember`."""
        return bool(self.gradients) and any(
            name in self._weights and self._weights[name] != _digest(value) for name, value in named.items()
        )


def _digest(value: Any) -> bytes:
    taken = read_weight(value)
    return b"" if taken is None else hashlib.sha256(taken.array.tobytes()).digest()


@contextmanager
def noting_contributions(log: RecordLog, parameters: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """Record how the backward inside this context changes each gradient, in the step that the limits name.

    Args:
        log: log of the rank.
        parameters: returns the parameters by name.
    """
    if log.limits.contributions != log.step:
        yield
        return
    named = parameters()
    before = _gradients(named)
    yield
    added = {name: value - before[name] if name in before else value for name, value in _gradients(named).items()}
    log.notes.setdefault("contributions", []).append(added)


def _gradients(named: Mapping[str, Any]) -> dict[str, Any]:
    taken = {name: read_part(parameter, parameter.grad) for name, parameter in named.items()}
    return {name: value.array for name, value in taken.items() if value is not None}
