"""Records a PyTorch program's computations in half precision; perturbs their results in repeats of the reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor as TorchDTensor

from hyper_parallel._tree import CONTAINERS, named_leaves, tree_map
from hyper_parallel.verify.frameworks.contract.record_log import REDUCED, RecordLog, user_site
from hyper_parallel.verify.frameworks.torch.local_values import HALF_TYPES
from hyper_parallel.verify.frameworks.torch.partitions import overwrite

__all__ = ["REDUCTIONS", "HalfPrecision", "changed"]

_FRAMEWORK = str(Path(str(torch.__file__)).parent)
REDUCTIONS = {
    "all_reduce": "tensor", "reduce": "tensor", "reduce_scatter_tensor": "input", "reduce_scatter_single": "input",
}  # fmt: skip
"""Collectives that sum tensors, each with the name of its input argument; the last one is new in PyTorch 2.13."""


class HalfPrecision:
    """The half-precision computations and reductions of one rank.

    Args:
        log: log of the rank.

    Attributes:
        of_gradients: whether a backward has started and no optimizer step has ended since; tensors reduced meanwhile
            are gradients.
    """

    def __init__(self, log: RecordLog) -> None:
        self._log = log
        self._outputs = self._sums = 0
        self.of_gradients = False

    def output(self, path: str, output: Any) -> Any:
        """Record that a module's output has half-precision tensors; perturb these tensors and their gradients."""
        tensors = [value for _, value in named_leaves(path, output, CONTAINERS) if isinstance(value, torch.Tensor)]
        if not any(value.dtype in HALF_TYPES for value in tensors):
            return output
        self._log.notes["half precision"] = True
        perturbation = self._log.perturbation
        if perturbation is None:
            return output
        self._outputs += 1
        names = (f"{place} {path}, call {self._outputs}" for place in ("output", "gradient of output"))
        forward, backward = (partial(perturbation.rounded, name) for name in names)

        def change(value: Any) -> Any:
            if type(value) not in (torch.Tensor, TorchDTensor) or value.dtype not in HALF_TYPES:
                return value
            moved = value + (changed(value, forward) - value.detach())
            if moved.requires_grad:
                moved.register_hook(lambda gradient: changed(gradient, backward))
            return moved

        return tree_map(change, output, CONTAINERS)

    def reduced(self, value: Any) -> None:
        """Record the dtype of gradients that are about to be reduced over ranks; perturb half-precision ones in place.

        Each rank rounds its own term of the sum, but the single device rounds the sum. If terms cancel, they are larger
        than their sum, for example as large as other elements of the tensor. Therefore an element below the tensor's
        root mean square is perturbed by the rounding error of a number of that size.
        """
        if type(value) is not torch.Tensor:
            return
        if self.of_gradients and value.is_floating_point() and value.numel() > 1:
            dtype = str(value.dtype).removeprefix("torch.")
            reduced = self._log.notes.setdefault(REDUCED, {})
            key = (dtype, self._log.step, user_site(_FRAMEWORK))
            reduced[key] = reduced.get(key, 0) + 1
        if value.dtype not in HALF_TYPES:
            return
        self._log.notes["half precision"] = True
        perturbation = self._log.perturbation
        if perturbation is None or not value.numel():
            return
        self._sums += 1
        with torch.no_grad():
            typical = value.float().square().mean().sqrt().to(value.dtype)
            parts = torch.where(value.abs() < typical, typical, value)
            value += changed(parts, partial(perturbation.rounded, f"sum {self._sums}")) - parts


def changed(tensor: Any, change: Callable[[Any, str], Any]) -> Any:
    """Return a detached copy of ``tensor`` with ``change`` applied to its local values."""
    copy = tensor.detach().clone()
    overwrite(copy, change)
    return copy
