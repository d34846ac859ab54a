"""Exchanges: any layout to any other in the fewest bytes, by moving exactly the boxes that a receiver lacks.

:class:`Exchange` is one variable-split all-to-all over the ranks of the mesh. :class:`ReduceExchange` lets ranks that
want a part and hold a summand of it add it up (one variable reduce-scatter), and then exchanges the sums.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from hyper_parallel.core.dtensor.boxes import (
    BoxTransfer,
    box_edges,
    box_grid,
    box_transfers,
    contains,
    count_intersections,
    intersect,
    members,
    reduced_boxes,
    slice_origin,
    split_at_edges,
    volume,
)
from hyper_parallel.core.dtensor.steps import Step, empty_like, narrow_box, sizes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hyper_parallel.core.dtensor.boxes import Coordinate, ReducedBox
    from hyper_parallel.core.dtensor.layout import Box
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["Exchange", "ReduceExchange"]


class _Exchanging(Step):
    """A step whose members are a slice of the mesh along ``axes``, the axes whose meaning changes."""

    overhead: ClassVar[float] = 1e-12

    @property
    def _here(self) -> Coordinate:
        """First position of this rank's slice."""
        return slice_origin(self.at, self.axes)

    @property
    def _first(self) -> Coordinate:
        """First position of the first slice, which stands for all when a price is asked."""
        return (0,) * self.source.mesh.ndim

    def _position(self, at: Coordinate) -> int:
        """Number of the rank at ``at`` among the members of its slice."""
        index = 0
        for axis in self.axes:
            index = index * self.source.mesh.shape[axis] + at[axis]
        return index

    def _swap(
        self, sent: Sequence[BoxTransfer], held: Callable[[Box], Any], like: Any, platform: Platform
    ) -> dict[Box, Any]:
        """Carry the boxes of ``sent``, each read by ``held`` on its sender; what this rank receives, by box."""
        me = self._position(self.at)
        peers = range(self.members)
        outgoing = [[route.box for route in sent if (route.sender, route.receiver) == (me, peer)] for peer in peers]
        incoming = [[route.box for route in sent if (route.sender, route.receiver) == (peer, me)] for peer in peers]
        flat = platform.transport().all_to_all(
            [pack([held(box) for box in boxes], like, platform) for boxes in outgoing],
            self.source.mesh.ranks_along(self.axes),
            [(sum(map(volume, boxes)),) for boxes in incoming],
        )
        found: dict[Box, Any] = {}
        for boxes, buffer in zip(incoming, flat, strict=True):
            found.update(unpack(boxes, buffer, platform))
        return found


class Exchange(_Exchanging):
    """Any shard or replicate layout to any other; what a rank holds already does not travel."""

    collective = "exchange"

    def received_at(self, at: Coordinate) -> int:
        """What the rank lacks."""
        box = self.target.box_at(at)
        return volume(box) - volume(intersect(box, self.source.box_at(at)))

    def routes(self, first: Coordinate) -> tuple[BoxTransfer, ...]:
        """Every box that travels within the slice that starts at ``first``."""
        return box_transfers(self.source, self.target, self.axes, first)

    @cached_property
    def _own_routes(self) -> tuple[BoxTransfer, ...]:
        return self.routes(self._here)

    @cached_property
    def messages(self) -> int:
        """Most peers that one rank hears from: one for every other box that its own meets; no route is made for it."""
        at = members(self.source.mesh, self.axes, self._first)
        held = [self.source.box_at(one) for one in at]
        grid = box_grid(held, self.source.ndim)
        pairs = zip(map(self.target.box_at, at), held, strict=True)
        return max(count_intersections(wanted, grid) - (volume(intersect(wanted, own)) > 0) for wanted, own in pairs)

    def apply(self, local: Any, platform: Platform) -> Any:
        """The target's box, put together from own and received parts."""
        box, wanted = self.source.box_at(self.at), self.target.box_at(self.at)
        parts = self._swap(self._own_routes, lambda part: narrow_box(local, box, part, platform), local, platform)
        cells = split_at_edges(
            wanted, box_edges(map(self.source.box_at, members(self.source.mesh, self.axes, self.at)), len(box))
        )
        if not volume(wanted):
            return empty_like(local, sizes_of(wanted), platform)
        if not parts:
            return platform.copy(narrow_box(local, box, wanted, platform))
        for cell in itertools.product(*cells):
            if cell not in parts:
                parts[cell] = narrow_box(local, box, cell, platform)
        return assemble(parts, cells, platform)


class ReduceExchange(_Exchanging):
    """Summands to any layout: those who want a part and hold a summand of it add it up, then the sums travel."""

    collective = "reduce_exchange"
    launches: ClassVar[int] = 2

    @property
    def reduced(self) -> tuple[int, ...]:
        """Axes whose summands are added up."""
        kept = {axis for axis, _ in self.target.partials}
        return tuple(axis for axis, _ in self.source.partials if axis not in kept)

    def pieces(self, first: Coordinate) -> tuple[ReducedBox, ...]:
        """Every part of the slice that starts at ``first``, with the rank that adds it up."""
        return reduced_boxes(self.source, self.target, self.axes, self.reduced, first)

    @cached_property
    def _own_pieces(self) -> tuple[ReducedBox, ...]:
        return self.pieces(self._here)

    @cached_property
    def loads(self) -> tuple[int, ...]:
        """Summands of each member's own parts and sums of the others, in the first slice."""
        return self._loads(self._first)

    def received_at(self, at: Coordinate) -> int:
        """Summands of the own parts and sums of the others."""
        return self._loads(slice_origin(at, self.axes))[self._position(at)]

    def _loads(self, first: Coordinate) -> tuple[int, ...]:
        heard: dict[int, int] = defaultdict(int)
        sums: dict[tuple[int, ...], int] = defaultdict(int)
        for piece in self.pieces(first):
            size = volume(piece.box)
            sums[piece.wanted] += size
            heard[piece.owner] += (len(piece.group) - 1 - (piece.owner in piece.wanted)) * size
        for wanted, size in sums.items():  # of which a member's own, taken off above, do not travel
            for receiver in wanted:
                heard[receiver] += size
        return tuple(heard[member] for member in range(self.members))

    @cached_property
    def messages(self) -> int:
        """Most peers that one rank hears from, both phases together."""
        pieces = self.pieces(self._first)
        owners: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for piece in pieces:
            owners[piece.wanted].add(piece.owner)
        senders: dict[int, set[int]] = defaultdict(set)
        for wanted, who in owners.items():
            for receiver in wanted:
                senders[receiver] |= who
        heard = Counter({receiver: len(who - {receiver}) for receiver, who in senders.items()})
        for owner, group in {(piece.owner, piece.group) for piece in pieces}:
            heard[owner] += len(group) - 1
        return max(heard.values(), default=0)

    def apply(self, local: Any, platform: Platform) -> Any:
        """The target's box, put together from own and received sums."""
        sums = self._add_up(local, platform)
        sums.update(self._swap(_spread(self._own_pieces), sums.__getitem__, local, platform))
        wanted = self.target.box_at(self.at)
        if not volume(wanted):
            return empty_like(local, sizes_of(wanted), platform)
        slice_members = members(self.source.mesh, self.axes, self.at)
        held = [layout.box_at(one) for layout in (self.source, self.target) for one in slice_members]
        cells = split_at_edges(wanted, box_edges(held, len(wanted)))
        parts = {cell: _joined(cell, sums, platform) for cell in itertools.product(*cells)}
        return assemble(parts, cells, platform)

    def _add_up(self, local: Any, platform: Platform) -> dict[Box, Any]:
        """This rank's sums, by box."""
        me, box = self._position(self.at), self.source.box_at(self.at)
        group = tuple(self._position(one) for one in members(self.source.mesh, self.reduced, self.at))
        shares = [[p.box for p in self._own_pieces if p.group == group and p.owner == owner] for owner in group]
        if not any(shares):
            return {}
        ranks = self.source.mesh.ranks_along(self.reduced)
        chunks = [pack([narrow_box(local, box, one, platform) for one in boxes], local, platform) for boxes in shares]
        return unpack(shares[group.index(me)], platform.transport().reduce_scatter(chunks, "sum", ranks), platform)


def _spread(pieces: Sequence[ReducedBox]) -> tuple[BoxTransfer, ...]:
    """How the sums travel from those who add up to those who want them."""
    return tuple(
        BoxTransfer(piece.box, piece.owner, receiver)
        for piece in pieces
        for receiver in piece.wanted
        if receiver != piece.owner
    )


def pack(parts: Sequence[Any], like: Any, platform: Platform) -> Any:
    """Parts one after the other in one flat tensor."""
    flat = [platform.reshape(part, (-1,)) for part in parts]
    if not flat:
        return empty_like(like, (0,), platform)
    return platform.contiguous(flat[0] if len(flat) == 1 else platform.cat(flat, 0))


def unpack(boxes: Sequence[Box], buffer: Any, platform: Platform) -> dict[Box, Any]:
    """The parts of a flat tensor, each in the shape of its box."""
    found, start = {}, 0
    for box in boxes:
        found[box] = platform.reshape(platform.narrow(buffer, 0, start, volume(box)), sizes_of(box))
        start += volume(box)
    return found


def assemble(
    parts: dict[Box, Any], cells: Sequence[Sequence[tuple[int, int]]], platform: Platform, head: Box = ()
) -> Any:
    """Put the parts of a product grid together, one dim after another, the last dim first."""
    dim = len(head)
    if dim == len(cells):
        return parts[head]
    return _cat([assemble(parts, cells, platform, (*head, interval)) for interval in cells[dim]], dim, platform)


def _joined(cell: Box, sums: dict[Box, Any], platform: Platform) -> Any:
    """A cell from the pieces that it was cut into along one dim."""
    boxes = sorted(box for box in sums if contains(cell, box))
    dim = next((d for d, interval in enumerate(boxes[0]) if interval != cell[d]), 0)
    return _cat([sums[box] for box in boxes], dim, platform)


def _cat(parts: Sequence[Any], dim: int, platform: Platform) -> Any:
    return parts[0] if len(parts) == 1 else platform.cat(parts, dim)
