"""Records a PyTorch program's random draws and choices (top-k); can replace them by those of the reference."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from hyper_parallel.verify.frameworks.contract.record_log import RecordLog
from hyper_parallel.verify.frameworks.contract.records import THRESHOLDS, LocalValue
from hyper_parallel.verify.frameworks.contract.replayed import Replayed, rows_along, unrolled
from hyper_parallel.verify.frameworks.torch.local_values import read_tensor
from hyper_parallel.verify.frameworks.torch.modules import recomputes

__all__ = ["Decided"]


class Running(Protocol):
    """Tells which module of a program is running."""

    @property
    def inside(self) -> str:
        """Path of the innermost running module; empty for the model itself, and outside of modules."""

    @property
    def infers(self) -> bool:
        """Whether a pipeline stage infers its shapes, so that nothing is recorded."""


class Decided:
    """Records dropout masks, random draws, choices, and on which side of a threshold numbers are, into a log.

    Args:
        log: log of the rank.
        running: tells which module is running.
    """

    def __init__(self, log: RecordLog, running: Running) -> None:
        self._log, self._running, self._replayed = log, running, Replayed(log)

    def mask(self, output: Any) -> Any | None:
        """Record the mask of a dropout, given its output; return the mask that replaces it, or None."""
        path = self._running.inside
        if self._running.infers or not self._log.records_outputs(path or "(model)"):
            return None
        taken = read_tensor(output)
        if taken is None:
            return None
        drawn = taken.array != 0
        if recomputes():
            return self._replayed.again(drawn)
        mask = self._replayed.instead_of(drawn, "mask", path or "(model)")
        kept = drawn if mask is None else mask
        self._log.add("mask", path or "(model)", taken._replace(array=kept, dtype=""), module=path)
        return mask

    def attention_mask(self, kept: Any) -> Any | None:
        """Record the dropout mask inside a fused attention; ``kept`` is None if the mask cannot be determined.

        Returns:
            the mask that replaces it, or None.
        """
        if kept is not None:
            return self.mask(kept)
        if not (self._running.infers or recomputes()):
            names = self._log.notes.setdefault("masks that were not recorded", [])
            name = self._running.inside or "(model)"
            names += [] if name in names else [name]
        return None

    def draw(self, function: str, numbers: Any) -> Any | None:
        """Record random numbers that a module drew; return the numbers that replace them, or None."""
        taken = read_tensor(numbers)
        if taken is None or self._log.place is not None:
            return None
        if recomputes():
            return self._replayed.again(taken.array)
        name = f"{self._running.inside or '(model)'} {function}"
        other = self._replayed.instead_of(taken.array, "draw", name)
        kept = taken if other is None else taken._replace(array=other)
        self._log.add("draw", name, kept, module=self._running.inside)
        return other

    def choice(self, operator: str, scores: Any, chosen: Any, dim: int) -> Any | None:
        """Record an operator's choice along a dim; return the indices that replace the chosen ones, or None.

        Args:
            operator: name of the operator.
            scores: a plain tensor.
            chosen: chosen indices along ``dim``, with the same number of dims.
            dim: dim of ``scores`` and ``chosen``.
        """
        if self._running.infers:
            return None
        taken, indices = read_tensor(scores), read_tensor(chosen)
        if taken is None or indices is None:
            return None
        path = self._running.inside
        name = f"{path or '(model)'} {operator}"
        rows, own = (rows_along(array, dim) for array in (taken.array, indices.array))
        if recomputes():
            instead = self._replayed.again(rows)
        else:
            instead = self._replayed.instead_of(rows, "choice", name, own.shape)
            self._log.add("scores", name, taken._replace(array=rows), module=path)
            kept = own if instead is None or self._log.perturbation is None else instead
            self._log.add("choice", name, LocalValue(kept), module=path)
        if instead is None or np.array_equal(instead, own):
            return None
        return torch.from_numpy(unrolled(instead, indices.array.shape, dim)).to(chosen.device)

    @property
    def trains(self) -> bool:
        """Whether a forward of training is running, and not its recomputation in backward."""
        return not self._running.infers and not recomputes()

    def applied(self, function: str, numbers: Any, given: Any) -> None:
        """Record the targets or the mask of a function; they are not replaced.

        Args:
            function: name of the function.
            numbers: the logits or attention scores, a plain tensor.
            given: the targets, or the mask, for the leading dims of ``numbers``.
        """
        taken, own = read_tensor(numbers), read_tensor(given)
        if taken is None or own is None:
            return
        path = self._running.inside
        name = f"{path or '(model)'} {function}"
        self._log.add("operand", name, taken, module=path)
        self._log.add("applied", name, own, module=path)

    def side(self, operator: str, distance: Any, above: Any) -> Any | None:
        """Record on which side of a threshold each number is; return the sides that replace these, or None.

        Args:
            operator: name of the operator.
            distance: distance of each number from the nearest threshold.
            above: True for numbers above it.
        """
        if self._running.infers:
            return None
        taken, own = read_tensor(distance), above.numpy(force=True).copy()
        if taken is None:
            return None
        path = self._running.inside
        name = f"{path or '(model)'} {operator}"
        if recomputes():
            instead = self._replayed.again(taken.array)
        else:
            instead = self._replayed.instead_of(taken.array, THRESHOLDS[1], name, own.shape)
            self._log.add(THRESHOLDS[0], name, taken, module=path)
            self._log.add(THRESHOLDS[1], name, LocalValue(own), module=path)
        if instead is None:
            return None
        near = (instead != 0) & (taken.array <= np.abs(instead))
        return torch.from_numpy(np.where(near, instead > 0, own)).to(above.device) if near.any() else None
