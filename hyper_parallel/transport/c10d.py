"""PyTorch's transports: the host operations of simulated ranks, and real collectives over ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.transport.base import Shape
from hyper_parallel.transport.calls import check_reduction

__all__ = ["TorchOps"]

_ACCUMULATE = {
    "sum": torch.add,
    "avg": torch.add,
    "prod": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "all": torch.logical_and,
    "any": torch.logical_or,
}


class TorchOps:
    """:class:`HostOps` for tensors of PyTorch, on any device."""

    def shape(self, x: torch.Tensor) -> Shape:
        """Sizes of ``x``."""
        return tuple(x.shape)

    def dtype(self, x: torch.Tensor) -> str:
        """``torch.float32`` and so on."""
        return str(x.dtype)

    def inexact(self, x: torch.Tensor) -> bool:
        """Whether ``x`` is floating or complex."""
        return x.is_floating_point() or x.is_complex()

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """A contiguous detached copy."""
        return x.detach().clone(memory_format=torch.contiguous_format)

    def reduce(self, parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
        """Fold ``parts`` from the left with ``op``; ``avg`` divides the sum once, at the end."""
        return reduce_in_order(parts, op)

    def save_state(self) -> tuple[torch.Tensor, torch.dtype]:
        """State of the default CPU generator, and the default dtype."""
        return torch.default_generator.get_state(), torch.get_default_dtype()

    def restore_state(self, state: tuple[torch.Tensor, torch.dtype]) -> None:
        """Put back what :meth:`save_state` returned."""
        generator, dtype = state
        torch.default_generator.set_state(generator)
        if torch.get_default_dtype() is not dtype:
            torch.set_default_dtype(dtype)


def reduce_in_order(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Fold equal-shaped ``parts`` from the left with ``op`` of ``REDUCTIONS``; a new tensor of their dtype.

    Raises:
        ReductionError: ``op`` is unknown, or ``avg`` of integers.
    """
    first = parts[0]
    check_reduction(op, inexact=first.is_floating_point() or first.is_complex())
    accumulate: Any = _ACCUMULATE[op]
    total = first.detach().clone(memory_format=torch.contiguous_format)
    for part in parts[1:]:
        accumulate(total, part, out=total)
    if op in ("all", "any") and len(parts) == 1:
        return total.to(torch.bool).to(first.dtype)
    return total.div_(len(parts)) if op == "avg" else total
