"""Collectives on rows by a process group's own calls on tensors: one buffer in, one out, no list of members' tensors.

What the engine does not reduce itself (gloo; see ``native.py``) is exchanged, and every member adds the rows
in the order of ``ranks``. That costs one addition per member and the room of all rows, and gives every member, and a
simulation, the same bits.
"""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.transport.base import Ranks, Shape, check_ranks, check_reduction
from hyper_parallel.transport.host.torch.ops import bytes_of, reduce_in_order
from hyper_parallel.transport.real.c10d.groups import C10dGroups
from hyper_parallel.transport.real.c10d.native import SCATTER_OPTIONS, is_native

__all__ = ["C10dRows"]

# Every engine moves these; the others travel as bytes.
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
        """Where rows stand in the group's order, which is that of the ranks' numbers; None if it is that of ``ranks``.

        Returns:
            the positions in ``ranks`` of the group's members, and the places in the group of the members of ``ranks``.
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
        """Both buffers as the engine carries them: as they are, or as bytes of the same memory."""
        if sent.dtype in self._carried and not sent.is_neg():
            # Gloo compares the input's shape with that of a part of the output.
            return (sent.view(-1), received.view(-1)) if self._flat else (sent, received)
        return bytes_of(sent), received.view(-1).view(torch.uint8)

    def _finish(self, what: str, ranks: Ranks, work: Any) -> None:
        """Wait for the engine; a backend may name the members that do not answer."""
        del what, ranks
        work.wait()


def _in_order(rows: torch.Tensor, order: tuple[list[int], list[int]] | None) -> torch.Tensor:
    """``rows`` off the graph, in the group's order."""
    plain = rows.detach() if rows.requires_grad else rows
    return plain if order is None else plain[order[0]]
