"""Carries the rows of gathered parameters and reduced gradients: payload, and at each row's end one flag per rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hyper_parallel.transport.base import Ranks, Transport
    from hyper_parallel.transport.checks.sequence import Step
    from hyper_parallel.transport.work import Work

__all__ = ["RowCarrier"]


class RowCarrier:
    """See :class:`Carrier`. Rows have the shape (width,), those of a reduce-scatter (ranks, width).

    Args:
        platform: PyTorch's platform.
        device: device of the rows.
        caller: the function whose rows they are, for error messages.
    """

    def __init__(self, platform: Any, device: torch.device | None, caller: str = "fully_shard") -> None:
        self._platform, self.device, self._caller = platform, device, caller

    def transport(self) -> Transport:
        """See :meth:`Carrier.transport`."""
        transport: Transport = self._platform.transport()
        return transport

    def agree(self, ranks: Ranks, **facts: Any) -> None:
        """See :meth:`Carrier.agree`."""
        self._platform._agree(self._caller, None, ranks, **facts)  # noqa: SLF001 - for members of the platform

    def agreed(self, step: Step, rows: torch.Tensor, ranks: Ranks) -> Any:
        """See :meth:`Carrier.agreed`."""
        if step.operation == "all_gather":
            return self._platform.all_gather_into_tensor(rows, ranks).view(len(ranks), step.width).unbind()
        if step.operation == "all_reduce":
            return self._platform.all_reduce(rows, ranks)
        return self._platform.reduce_scatter_tensor(rows, ranks, op="sum").view(step.width)

    def start(self, step: Step, rows: torch.Tensor, ranks: Ranks) -> Work:
        """See :meth:`Carrier.start`."""
        transport = self.transport()
        if step.operation == "all_gather":
            return transport.start("all_gather", rows, ranks, [(step.width,)] * len(ranks))
        if step.operation == "all_reduce":
            return transport.start("all_reduce", rows, "sum", ranks)
        return transport.start("reduce_scatter", list(rows.unbind()), "sum", ranks)

    def flagged(self, step: Step, ranks: Ranks) -> torch.Tensor:
        """See :meth:`Carrier.flagged`."""
        shape = (len(ranks), step.width) if step.operation == "reduce_scatter" else (step.width,)
        rows = torch.zeros(shape, dtype=step.dtype, device=self.device)
        rows[..., step.width - len(ranks) + ranks.index(self.transport().rank)] = 1
        return rows

    def flags(self, step: Step, result: Any, ranks: Ranks) -> list[bool]:
        """See :meth:`Carrier.flags`; on the meta device no other rank runs, so there are no flags."""
        if (result[0] if step.operation == "all_gather" else result).is_meta:
            return [False] * len(ranks)
        rows = result if step.operation == "all_gather" else [result]
        total = sum(row[step.width - len(ranks) :] for row in rows)
        return [bool(flag) for flag in total.tolist()]
