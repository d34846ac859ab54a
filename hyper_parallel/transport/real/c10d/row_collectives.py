"""Collectives on rows, by a process group's calls that read one buffer and write one, without lists of tensors.

Rows that the engine (gloo) does not reduce are exchanged, and every member adds them in the order of ``ranks``. That
costs one addition per member and memory for all rows, but the results are bitwise equal on all members and in a
simulation.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.transport.base import ORDERED_REDUCTIONS, Ranks, Shape, check_ranks, check_reduction
from hyper_parallel.transport.host.torch.ops import bytes_of, reduce_in_order
from hyper_parallel.transport.real.c10d.groups import C10dGroups

__all__ = ["DTYPES", "OPS", "OPTIONS", "SCATTER_OPTIONS", "C10dRows", "is_native"]


# Reductions and dtypes that accelerators' engines support; all others are reduced in rank order.
OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def _options(kind: Any, op: Any) -> Any:
    options = kind()
    options.reduceOp = op
    return options


OPTIONS = {name: _options(dist.AllreduceOptions, op) for name, op in OPS.items()}
SCATTER_OPTIONS = {name: _options(dist.ReduceScatterOptions, op) for name, op in OPS.items()}
_COMMON_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int32, torch.int64})
# "fake" is PyTorch's engine without transfers; it is used to measure host costs as on an accelerator.
DTYPES = {
    "nccl": _COMMON_DTYPES | {torch.float64, torch.uint8},
    "hccl": _COMMON_DTYPES,
    "fake": _COMMON_DTYPES,
}


def is_native(backend: str, dtype: torch.dtype, op: str) -> bool:
    """Whether ``backend`` reduces ``dtype`` with ``op`` itself; otherwise terms are reduced in rank order.

    Rank order is also used while PyTorch's deterministic algorithms are on, unless the order is irrelevant.
    """
    native, ordered = _reduction(backend, dtype, op)
    return native and not (ordered and torch.are_deterministic_algorithms_enabled())


@cache
def _reduction(backend: str, dtype: torch.dtype, op: str) -> tuple[bool, bool]:
    """Return whether ``backend`` reduces ``dtype`` with ``op`` itself, and whether the order is relevant."""
    whole = op == "avg" and not dtype.is_floating_point
    native = op in OPS and not whole and dtype in DTYPES.get(backend, ())
    return native, op in ORDERED_REDUCTIONS and dtype.is_floating_point


# Every engine transfers these dtypes; the others are sent as bytes.
_CARRIED = frozenset({torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.int8})
_OF_ACCELERATORS = frozenset({torch.float16, torch.bfloat16})
_UNKNOWN: Any = object()


class C10dRows(C10dGroups):
    """The collectives on rows of a ``torch.distributed`` world."""

    def __init__(self) -> None:
        super().__init__()
        self._flat = self.backend == "gloo"
        self._carried = _CARRIED if self._flat else _CARRIED | _OF_ACCELERATORS
        self._orders: dict[Ranks, tuple[list[int], list[int]] | None] = {}

    def all_gather_rows(self, x: torch.Tensor, ranks: Ranks, shapes: tuple[Shape, ...]) -> torch.Tensor:
        """See :meth:`RowCollectives.all_gather_rows`."""
        del shapes
        order = self._order(ranks)
        own = x.detach() if x.requires_grad else x
        rows = own.new_empty((len(ranks), *own.shape))
        if own.numel():
            sent, received = self._buffers(own, rows)
            self._finish("all_gather", ranks, self.group(ranks)._allgather_base(received, sent))  # noqa: SLF001 - no public spelling
        return rows if order is None else rows[order[1]]

    def reduce_scatter_rows(self, rows: torch.Tensor, op: str, ranks: Ranks, shapes: tuple[Shape, ...]) -> torch.Tensor:
        """See :meth:`RowCollectives.reduce_scatter_rows`."""
        if not is_native(self.backend, rows.dtype, op):
            check_reduction(op, inexact=rows.is_floating_point() or rows.is_complex())
            return reduce_in_order(self.all_to_all_rows(rows, ranks, shapes, shapes).unbind(), op)
        order = self._order(ranks)
        sent = _in_order(rows, order)
        mine = sent.new_empty((1, *sent.shape[1:]))
        if mine.numel():
            work = self.group(ranks)._reduce_scatter_base(mine, sent, SCATTER_OPTIONS[op])  # noqa: SLF001 - no public spelling
            self._finish("reduce_scatter", ranks, work)
        return (mine.div_(len(ranks)) if op == "avg" else mine).squeeze(0)

    def all_to_all_rows(
        self, rows: torch.Tensor, ranks: Ranks, sends: tuple[Shape, ...], expects: tuple[Shape, ...]
    ) -> torch.Tensor:
        """See :meth:`RowCollectives.all_to_all_rows`."""
        del sends, expects
        order = self._order(ranks)
        own = _in_order(rows, order)
        arrived = torch.empty_like(own)
        if own.numel():
            sent, received = self._buffers(own, arrived)
            self._finish("all_to_all", ranks, self.group(ranks).alltoall_base(received, sent, [], []))
        return arrived if order is None else arrived[order[1]]

    def _order(self, ranks: Ranks) -> tuple[list[int], list[int]] | None:
        """Return the positions of rows in the group's order, which is rank order; None if it equals that of ``ranks``.

        Returns:
            for each member of the group its position in ``ranks``, and for each of ``ranks`` its position in the group.
        """
        order = self._orders.get(ranks, _UNKNOWN)
        if order is _UNKNOWN:
            check_ranks(ranks, self.rank, self.world_size)
            members = sorted(range(len(ranks)), key=ranks.__getitem__)
            places = sorted(range(len(ranks)), key=members.__getitem__)
            order = None if members == places == list(range(len(ranks))) else (members, places)
            self._orders[ranks] = order
        return order

    def _buffers(self, sent: torch.Tensor, received: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both buffers in the form that the engine transfers: unchanged, or as bytes of the same memory."""
        if sent.dtype in self._carried and not sent.is_neg():
            # Gloo compares the input's shape with that of a row of the output.
            return (sent.view(-1), received.view(-1)) if self._flat else (sent, received)
        return bytes_of(sent), received.view(-1).view(torch.uint8)

    def _finish(self, what: str, ranks: Ranks, work: Any) -> None:
        """Wait for the engine; a subclass may name the members that do not answer."""
        del what, ranks
        work.wait()


def _in_order(rows: torch.Tensor, order: tuple[list[int], list[int]] | None) -> torch.Tensor:
    """Return ``rows``, detached, in the group's order."""
    plain = rows.detach() if rows.requires_grad else rows
    return plain if order is None else plain[order[0]]
