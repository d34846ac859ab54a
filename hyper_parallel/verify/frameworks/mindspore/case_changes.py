"""Changes weights, outputs and strides of inputs of a MindSpore program on one rank while it is recorded.

Losses are not multiplied by factors, because the function that MindSpore differentiates may reduce gradients itself.
Inputs keep their values: on MindSpore, shards of a batch are copies, so their position in the batch is unknown.
"""

from __future__ import annotations

import hashlib
from typing import Any

from mindspore import Tensor, mint

from hyper_parallel._tree import CONTAINERS, leaves, named_leaves, tree_map
from hyper_parallel.verify.frameworks.contract.case_changes import BaseAppliedChanges
from hyper_parallel.verify.frameworks.contract.record_log import RecordLog
from hyper_parallel.verify.frameworks.mindspore.local_values import read_tensor, write_tensor

__all__ = ["AppliedChanges"]


class AppliedChanges(BaseAppliedChanges):
    """Applies the changes of a log to weights, strides of inputs, and outputs; records properties of inputs.

    Args:
        log: log of the rank; ``log.changes`` has the changes.
    """

    def __init__(self, log: RecordLog) -> None:
        super().__init__(log)
        self._calls = 0

    def local_shape(self, parameter: Any) -> tuple[int, ...] | None:
        """Return the local shape of a parameter; None if it is not a tensor."""
        taken = read_tensor(parameter)
        return None if taken is None else taken.array.shape

    def write(self, parameter: Any, array: Any) -> None:
        """Write an array into the local tensor of a parameter."""
        write_tensor(parameter, array)

    def output(self, name: str, output: Any) -> Any:
        """Return a cell's output multiplied by its factors; called after the output was recorded.

        Raises:
            RecordingError: the shapes of the output and the factors differ.
        """
        factors = self.factors_of(name, tuple(output.shape)) if type(output) is Tensor else None
        return output if factors is None else output * Tensor(factors, dtype=output.dtype)

    def inputs(self, args: Any, kwargs: Any, *, evaluates: bool = False) -> tuple[Any, Any]:
        """Return the arguments of a model, with changed strides if requested; record the arguments of the first step.

        Args:
            args: positional arguments of the call.
            kwargs: named arguments of the call.
            evaluates: whether the call is not differentiated; its arguments may then be gradients, not samples.
        """
        if self._log.changes.strided:
            args, kwargs = tree_map(_strided, (args, kwargs), CONTAINERS)
        if not self._log.step:
            for name, value in named_leaves("", {**dict(enumerate(args)), **kwargs}, CONTAINERS):
                self._note_input(name, value, sample=not evaluates)
            self._calls += not evaluates
        return args, kwargs

    def _note_input(self, name: str, value: Any, *, sample: bool) -> None:
        taken = read_tensor(value) if type(value) is Tensor else None
        if taken is None:
            return
        notes = self._log.notes
        if sample:
            notes.setdefault("inputs", []).append((self._calls, name, taken.array))
        if value.ndim > 1:
            notes["contiguous inputs"] = notes.get("contiguous inputs", True) and bool(value.is_contiguous())

    def note_gradients(self, gradients: Any) -> None:
        """Record the gradients that a backward returns, before the program can reduce them."""
        if self._log.step or self._log.perturbation is not None:
            return
        digests = self._log.notes.setdefault("own gradients", {}).setdefault("all parameters", [])
        for taken in map(read_tensor, leaves(gradients, CONTAINERS)):
            if taken is not None:
                digests.append(hashlib.sha256(taken.array.tobytes()).hexdigest())


def _strided(value: Any) -> Any:
    """Return a tensor of two or more dims with the same values and different strides; any other value unchanged."""
    if type(value) is not Tensor or value.ndim < 2:
        return value
    last = value.ndim - 1
    return mint.transpose(mint.transpose(value, 0, last).contiguous(), 0, last)
