"""Changes the case of a MindSpore program on one rank while it is recorded: weights, outputs, strides.

Losses are not weighted, since MindSpore differentiates functions whose gradients may be reduced inside; parts of a
batch are copies, so that inputs keep their values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from mindspore import Tensor, mint

from hyper_parallel._tree import CONTAINERS, leaves, named_leaves, tree_map
from hyper_parallel.platform.contract.recording import RecordingError, RecordLog
from hyper_parallel.platform.mindspore.recorded_values import read_tensor, write_tensor

__all__ = ["ChangedCase"]


class ChangedCase:
    """Applies the changes of a log, and notes what the case is.

    Args:
        log: of the rank; ``log.changes`` says what is changed.
    """

    def __init__(self, log: RecordLog) -> None:
        self._log = log
        self._written: list[str] = []
        self._calls = 0

    def write_weights(self, named: Mapping[str, Any]) -> None:
        """Write initial values into parameters, each once.

        Raises:
            RecordingError: a parameter has another shape than the values.
        """
        for name, array in self._log.changes.weights.items():
            taken = read_tensor(named[name]) if name in named and name not in self._written else None
            if taken is None:
                continue
            if taken[0].shape != array.shape:
                msg = f"{name} has the shape {list(taken[0].shape)} in this run, and had {list(array.shape)} before"
                raise RecordingError(msg)
            write_tensor(named[name], array)
            self._written.append(name)
            self._log.notes["changed weights"] = self._written

    def output(self, name: str, output: Any) -> Any:
        """Return a cell's output, multiplied by its factors; called after it was recorded.

        Raises:
            RecordingError: the output has another shape than the factors.
        """
        factors = self._log.changes.outputs
        key = (name, self._log.step, self._log.count("output", name) - 1)
        if key not in factors or type(output) is not Tensor:
            return output
        if tuple(output.shape) != factors[key].shape:
            msg = f"the output {name!r} has the shape {list(output.shape)}, and had {list(factors[key].shape)} before"
            raise RecordingError(msg)
        self._log.notes["changed outputs"] = self._log.notes.get("changed outputs", 0) + 1
        return output * Tensor(factors[key], dtype=output.dtype)

    def inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a model, with other strides if that is asked for; note those of the first step."""
        if self._log.changes.strided:
            args, kwargs = tree_map(_strided, (args, kwargs), CONTAINERS)
        if not self._log.step:
            for name, value in named_leaves("", {**dict(enumerate(args)), **kwargs}, CONTAINERS):
                self._note_input(name, value)
            self._calls += 1
        return args, kwargs

    def _note_input(self, name: str, value: Any) -> None:
        taken = read_tensor(value) if type(value) is Tensor else None
        if taken is None:
            return
        notes = self._log.notes
        notes.setdefault("inputs", []).append((self._calls, name, taken[0]))
        if value.ndim > 1:
            notes["contiguous inputs"] = notes.get("contiguous inputs", True) and bool(value.is_contiguous())

    def note_gradients(self, gradients: Any) -> None:
        """Note the gradients that a backward returns, before the program can reduce them."""
        if self._log.step or self._log.perturbation is not None:
            return
        digests = self._log.notes.setdefault("own gradients", {}).setdefault("all parameters", [])
        for taken in map(read_tensor, leaves(gradients, CONTAINERS)):
            if taken is not None:
                digests.append(hashlib.sha256(taken[0].tobytes()).hexdigest())


def _strided(value: Any) -> Any:
    """Return a matrix with the same values and other strides; other values as they are."""
    if type(value) is not Tensor or value.ndim < 2:
        return value
    last = value.ndim - 1
    return mint.transpose(mint.transpose(value, 0, last).contiguous(), 0, last)
