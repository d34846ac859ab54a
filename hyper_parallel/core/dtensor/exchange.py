"""Exchange steps: redistribute between any two layouts by sending exactly the boxes that each receiver lacks.

:class:`Exchange` is one all-to-all with variable splits over the ranks of a slice of the mesh. :class:`ReduceExchange`
first sums partial values on ranks that hold one and need the sum (one variable reduce-scatter), then exchanges sums.
"""

from __future__ import annotations

import itertools
import math
import operator
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from hyper_parallel.core.dtensor.bounds import (
    SMALL,
    bounds_at,
    count_pieces,
    first_share,
    first_sizes,
    member_indices,
    member_ranges,
    most_pieces,
    shared_sizes,
    shared_volumes,
    volumes,
)
from hyper_parallel.core.dtensor.boxes import (
    BoxTransfer,
    box_edges,
    box_transfers,
    contains,
    mesh_slice,
    reduced_boxes,
    slice_origin,
    split_at_edges,
    volume,
)
from hyper_parallel.core.dtensor.reduction_assignment import loads_of_few, senders_of, senders_of_few, sum_parts
from hyper_parallel.core.dtensor.steps import Step, empty_like, narrow_box, sizes_of
from hyper_parallel.transport.base import Parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hyper_parallel.core.dtensor.bounds import Indices
    from hyper_parallel.core.dtensor.boxes import Coordinate, Interval, ReducedBox
    from hyper_parallel.core.dtensor.layout import Box
    from hyper_parallel.core.dtensor.reduction_assignment import SumParts
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["Exchange", "OwnBoxes", "ReduceExchange", "assemble", "pack"]


class OwnBoxes(NamedTuple):
    """The boxes that one rank exchanges with the members of a group.

    Attributes:
        outgoing: boxes that it sends, those for the first member first.
        incoming: boxes that it receives, those from the first member first.
        sends: number of elements that it sends to each member.
        expects: number of elements that it receives from each member.
    """

    outgoing: list[Box]
    incoming: list[Box]
    sends: Parts
    expects: Parts

    @classmethod
    def of(cls, transfers: Iterable[BoxTransfer], own: int, members: int) -> OwnBoxes:
        """Return the boxes that member ``own`` of ``members`` exchanges, from the ``transfers`` between all."""
        outgoing: list[list[Box]] = [[] for _ in range(members)]
        incoming: list[list[Box]] = [[] for _ in range(members)]
        for box, sender, receiver in transfers:
            if sender == own:
                outgoing[receiver].append(box)
            if receiver == own:
                incoming[sender].append(box)
        sends, expects = (
            Parts.of([(sum(map(volume, boxes)),) for boxes in by_member]) for by_member in (outgoing, incoming)
        )
        return cls([*itertools.chain(*outgoing)], [*itertools.chain(*incoming)], sends, expects)

    def exchange(
        self, ranks: tuple[int, ...], read: Callable[[Box], Any], like: Any, platform: Platform
    ) -> dict[Box, Any]:
        """Send and receive the boxes in one all-to-all.

        Args:
            ranks: the members.
            read: returns the values of a box that this rank sends.
            like: a tensor of the dtype and device of the values.
            platform: its framework.

        Returns:
            the received tensors, by box.
        """
        packed = pack(list(map(read, self.outgoing)), like, platform)
        return unpack(self.incoming, platform.transport().all_to_all(packed, ranks, self.sends, self.expects), platform)


class _SliceExchange(Step):
    """A step over a slice of the mesh along ``axes``, the axes on which source and target differ."""

    @property
    def overhead(self) -> float:
        """Seconds for packing and splitting buffers, more for more members."""
        return 1e-12 + 1e-16 * self.members

    @property
    def _own_origin(self) -> Coordinate:
        """First position of this rank's slice."""
        return slice_origin(self.coordinate, self.axes)

    @property
    def _first_origin(self) -> Coordinate:
        """First position of the first slice; all slices have the same cost."""
        return (0,) * self.source.mesh.ndim

    def _position(self, coordinate: Coordinate) -> int:
        """Return the index of the rank at ``coordinate`` among the members of its slice."""
        index = 0
        for axis in self.axes:
            index = index * self.source.mesh.shape[axis] + coordinate[axis]
        return index

    def _own_of(self, transfers: Sequence[BoxTransfer]) -> OwnBoxes:
        """Return the boxes that this rank exchanges, from the ``transfers`` of its slice."""
        return OwnBoxes.of(transfers, self._position(self.coordinate), self.members)


class Exchange(_SliceExchange):
    """Redistribute between layouts without partial values to reduce; what a rank already holds is not sent."""

    collective = "exchange"

    def received_by(self, indices: Indices) -> Any:
        """Return the number of elements that each rank lacks."""
        needed = bounds_at(self.target, indices)
        return volumes(needed) - shared_volumes(needed, bounds_at(self.source, indices))

    def transfers(self, origin: Coordinate) -> tuple[BoxTransfer, ...]:
        """Return every box that is sent within the slice that starts at ``origin``."""
        return box_transfers(self.source, self.target, self.axes, origin)

    @cached_property
    def load(self) -> tuple[int, float]:
        """Elements that the worst rank receives, and that a rank receives on average."""
        if self.members > SMALL or not self.target.ndim:
            return super().load
        needed = member_ranges(self.target, self.axes)
        sizes = map(math.prod, zip(*([stop - start for start, stop in ranges] for ranges in needed), strict=True))
        loads = list(map(operator.sub, sizes, shared_sizes(needed, member_ranges(self.source, self.axes))))
        return max(loads), float(sum(loads)) / self.members

    @cached_property
    def _own_transfers(self) -> OwnBoxes:
        return self._own_of(self.transfers(self._own_origin))

    @cached_property
    def _own_cells(self) -> list[list[Interval]]:
        """The grid of the parts of which this rank's target is assembled."""
        target = self.target.box_at(self.coordinate)
        boxes = map(self.source.box_at, mesh_slice(self.source.mesh, self.axes, self.coordinate))
        return split_at_edges(target, box_edges(boxes, len(target)))

    @property
    def least_received(self) -> tuple[float, float]:
        """Elements that the worst rank receives, and that a rank receives on average."""
        return self.load

    @property
    def least_messages(self) -> int:
        """A lower bound of the messages of the worst rank."""
        return 1

    @cached_property
    def messages(self) -> int:
        """Most peers that one rank receives from.

        A rank receives from one peer for every box of another member that its target box intersects. So the number is
        found without listing transfers.
        """
        if self.members <= SMALL and self.target.ndim:
            wanted, held = (member_ranges(layout, self.axes) for layout in (self.target, self.source))
            return most_pieces(wanted, held, shared_sizes(wanted, held))
        indices = member_indices(self.source.mesh, self.axes, self._first_origin)
        own, needed = (bounds_at(layout, indices) for layout in (self.source, self.target))
        return int(np.max(count_pieces(needed, own, self.members) - (shared_volumes(needed, own) > 0)))

    def apply(self, local: Any, platform: Platform) -> Any:
        """Return the target's local tensor, assembled from own and received parts."""
        box, target = self.source.box_at(self.coordinate), self.target.box_at(self.coordinate)
        parts = self._own_transfers.exchange(
            self.ranks, lambda part: narrow_box(local, box, part, platform), local, platform
        )
        if not volume(target):
            return empty_like(local, sizes_of(target), platform)
        if not parts:
            return platform.copy(narrow_box(local, box, target, platform))
        for cell in itertools.product(*self._own_cells):
            if cell not in parts:
                parts[cell] = narrow_box(local, box, cell, platform)
        return assemble(parts, self._own_cells, platform)


class ReduceExchange(_SliceExchange):
    """Reduces partial values to any layout: ranks sum what they hold and need, then send the sums to other ranks."""

    collective = "reduce_exchange"
    launches: ClassVar[int] = 2

    @cached_property
    def reduced(self) -> tuple[int, ...]:
        """Axes whose partial values are summed."""
        kept = {axis for axis, _ in self.target.partials}
        return tuple(axis for axis, _ in self.source.partials if axis not in kept)

    def reduced_boxes(self, origin: Coordinate) -> tuple[ReducedBox, ...]:
        """Return every part of the slice that starts at ``origin``, with the member that sums it."""
        return reduced_boxes(self.source, self.target, self.axes, self.reduced, origin)

    @cached_property
    def _own_boxes(self) -> tuple[ReducedBox, ...]:
        return self.reduced_boxes(self._own_origin)

    @cached_property
    def _own_transfers(self) -> OwnBoxes:
        return self._own_of(_transfers_of(self._own_boxes))

    @cached_property
    def _own_cells(self) -> list[list[Interval]]:
        """The grid of the parts of which this rank's target is assembled."""
        target = self.target.box_at(self.coordinate)
        positions = mesh_slice(self.source.mesh, self.axes, self.coordinate)
        boxes = [layout.box_at(position) for layout in (self.source, self.target) for position in positions]
        return split_at_edges(target, box_edges(boxes, len(target)))

    @cached_property
    def _price(self) -> tuple[int, float, int]:
        """Elements received by the worst rank and on average, and messages of the worst rank."""
        if self.members <= SMALL:
            loads, messages = loads_of_few(self.source, self.target, self.axes, self.reduced)
            return max(loads), float(sum(loads)) / self.members, messages
        sums = self._sums(self._first_origin)
        loads = self._loads(self._first_origin, sums)
        return int(loads.max()), float(loads.sum()) / self.members, self._messages(sums)

    @property
    def load(self) -> tuple[int, float]:
        """Elements that the worst rank receives, and that a rank receives on average."""
        return self._price[:2]

    @property
    def least_received(self) -> tuple[float, float]:
        """Lower bounds of the elements received by the worst rank and on average, computed without boxes.

        For an element with ``k`` partial values, the rank that sums it receives ``k - 1`` of them. The sum is then sent
        to the ``d`` ranks that need it, or to ``d - 1`` if the summing rank is one of them. The first member sums an
        even share of what it holds and needs; no other share is larger.
        """
        shapes, axes = self.source.mesh.shape, set(self.axes)
        sharding, splitting = (
            {axis for dim_axes in layout.dim_axes for axis in dim_axes} for layout in (self.source, self.target)
        )
        elements = 1
        for size, dim_axes in zip(self.target.shape or (), self.target.dim_axes, strict=True):
            elements *= first_share(size, [shapes[axis] for axis in dim_axes if axis not in axes])
        copies = math.prod(shapes[axis] for axis in axes - splitting)
        sharers = math.prod(shapes[axis] for axis in axes - splitting - sharding)
        own, first_own = self._held_and_needed()
        sent = (self.partial_values - 1 + copies) * elements - own / sharers
        first = math.prod(first_sizes(self.target)) + (self.partial_values - 2) * first_own / sharers
        mean = sent / self.members
        return max(mean, first), mean

    def _held_and_needed(self) -> tuple[int, int]:
        """Elements that a member of the first slice both holds and needs: the sum over all members, and the first's."""
        if not self.source.ndim:
            return self.members, 1
        if self.members <= SMALL:
            few = shared_sizes(member_ranges(self.source, self.axes), member_ranges(self.target, self.axes))
            return sum(few), few[0]
        indices = member_indices(self.source.mesh, self.axes, self._first_origin)
        own = shared_volumes(bounds_at(self.source, indices), bounds_at(self.target, indices))
        own = np.broadcast_to(own, (self.members,))
        return own.sum(), own[0]

    @property
    def least_messages(self) -> int:
        """A lower bound of the messages of the worst rank.

        It is the larger of two numbers: the ranks that send sums to a rank in the middle of the slice, and the other
        ranks that send partial values to a summing rank.
        """
        middle = tuple(size // 2 if axis in self.axes else 0 for axis, size in enumerate(self.source.mesh.shape))
        if self.members <= SMALL:
            senders = senders_of_few(self.source, self.target, self.axes, self._position(middle))
        else:
            senders = senders_of(self.source, self.target, self.axes, middle)
        return max(senders, self.partial_values - 1)

    @cached_property
    def partial_values(self) -> int:
        """Number of partial values of each element."""
        return math.prod(self.source.mesh.shape[axis] for axis in self.reduced)

    def received_at(self, coordinate: Coordinate) -> int:
        """Return the number of elements that the rank receives: partial values to sum, and sums of other members."""
        origin = slice_origin(coordinate, self.axes)
        return int(self._loads(origin, self._sums(origin))[self._position(coordinate)])

    def _loads(self, origin: Coordinate, sums: SumParts) -> Any:
        """Elements that each member of a slice receives: partial values to sum, and sums of other members."""
        needed = volumes(bounds_at(self.target, member_indices(self.source.mesh, self.axes, origin)))
        received = np.array(np.broadcast_to(needed, (self.members,)))
        # A reducer needs its own sums too, but they are not sent.
        np.add.at(received, sums.reducers, (self.partial_values - 1 - sums.needed) * sums.sizes)
        return received

    @property
    def messages(self) -> int:
        """Most peers that one rank receives from, in both phases together."""
        return self._price[2]

    def _messages(self, sums: SumParts) -> int:
        if not sums.reducers.size:
            return 0
        sent = np.unique(sums.boxes * self.members + sums.reducers)  # each reducer sends to a box once
        peers = np.bincount(sent // self.members, minlength=self.members)[sums.box_of]
        own = np.unique(sums.reducers[sums.needed])
        peers[own] -= 1
        peers[np.unique(sums.reducers)] += self.partial_values - 1
        return int(peers.max())

    def _sums(self, origin: Coordinate) -> SumParts:
        return sum_parts(self.source, self.target, self.axes, self.reduced, origin)

    def apply(self, local: Any, platform: Platform) -> Any:
        """Return the target's local tensor, assembled from own and received sums."""
        sums = self._reduce(local, platform)
        sums.update(self._own_transfers.exchange(self.ranks, sums.__getitem__, local, platform))
        target = self.target.box_at(self.coordinate)
        if not volume(target):
            return empty_like(local, sizes_of(target), platform)
        cells = self._own_cells
        parts = {cell: _concatenate_parts(cell, sums, platform) for cell in itertools.product(*cells)}
        return assemble(parts, cells, platform)

    @cached_property
    def _summed_boxes(self) -> dict[int, list[Box]]:
        """Boxes of which this rank and its reduction group hold the partial values, by the member that sums them."""
        holders = tuple(map(self._position, mesh_slice(self.source.mesh, self.reduced, self.coordinate)))
        boxes_of: dict[int, list[Box]] = {reducer: [] for reducer in holders}
        for part in self._own_boxes:
            if part.holders == holders:
                boxes_of[part.reducer].append(part.box)
        return boxes_of

    def _reduce(self, local: Any, platform: Platform) -> dict[Box, Any]:
        """Sum this rank's boxes in one reduce-scatter; return the sums by box."""
        boxes_of, box = self._summed_boxes, self.source.box_at(self.coordinate)
        if not any(boxes_of.values()):
            return {}
        chunks = [
            pack([narrow_box(local, box, part, platform) for part in boxes], local, platform)
            for boxes in boxes_of.values()
        ]
        buffer = platform.transport().reduce_scatter(chunks, "sum", self.source.mesh.ranks_along(self.reduced))
        return unpack(boxes_of[self._position(self.coordinate)], buffer, platform)


def _transfers_of(boxes: Sequence[ReducedBox]) -> tuple[BoxTransfer, ...]:
    """Return the transfers of sums from the ranks that compute them to the ranks that need them."""
    return tuple(
        BoxTransfer(box, reducer, receiver)
        for box, reducer, _, receivers in boxes
        for receiver in receivers
        if receiver != reducer
    )


def pack(parts: Sequence[Any], like: Any, platform: Platform) -> Any:
    """Return ``parts`` flattened and concatenated; without parts, an empty tensor with the dtype of ``like``."""
    flat = [platform.reshape(part, (-1,)) for part in parts]
    if not flat:
        return empty_like(like, (0,), platform)
    return platform.contiguous(flat[0] if len(flat) == 1 else platform.cat(flat, 0))


def unpack(boxes: Sequence[Box], buffer: Any, platform: Platform) -> dict[Box, Any]:
    """Return the parts of a flat tensor by box, each in the shape of its box."""
    parts, start = {}, 0
    for box in boxes:
        parts[box] = platform.reshape(platform.narrow(buffer, 0, start, volume(box)), sizes_of(box))
        start += volume(box)
    return parts


def assemble(
    parts: dict[Box, Any], cells: Sequence[Sequence[tuple[int, int]]], platform: Platform, prefix: Box = ()
) -> Any:
    """Concatenate the parts of a product grid, the last dim first.

    Args:
        parts: tensors by box.
        cells: per dim the intervals of the grid.
        platform: the framework of the tensors.
        prefix: intervals of the leading dims that are fixed.
    """
    dim = len(prefix)
    if dim == len(cells):
        return parts[prefix]
    return _cat([assemble(parts, cells, platform, (*prefix, interval)) for interval in cells[dim]], dim, platform)


def _concatenate_parts(cell: Box, sums: dict[Box, Any], platform: Platform) -> Any:
    """Concatenate the parts into which ``cell`` was split along one dim."""
    boxes = sorted(box for box in sums if contains(cell, box))
    dim = next((d for d, interval in enumerate(boxes[0]) if interval != cell[d]), 0)
    return _cat([sums[box] for box in boxes], dim, platform)


def _cat(parts: Sequence[Any], dim: int, platform: Platform) -> Any:
    return parts[0] if len(parts) == 1 else platform.cat(parts, dim)
