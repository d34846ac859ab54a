"""Steps of a redistribution: immutable values that know their cost and run on plain local tensors.

A step has a ``source`` and a ``target`` layout, which give every member's local shape, uneven and empty shards
included. Steps do not know autograd: the backward of a transition is another transition.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from hyper_parallel.core.dtensor.bounds import (
    SMALL,
    bounds_at,
    first_sizes,
    least_share,
    member_indices,
    shared_volumes,
    volumes,
)
from hyper_parallel.core.dtensor.boxes import intersect, mesh_slice, volume
from hyper_parallel.core.dtensor.rows import GatheredRows, ScatteredRows, padded
from hyper_parallel.errors import LayoutError
from hyper_parallel.transport.base import Parts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from fractions import Fraction

    from hyper_parallel.core.dtensor.bounds import Indices
    from hyper_parallel.core.dtensor.boxes import Coordinate
    from hyper_parallel.core.dtensor.layout import Box, Layout
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["LEAST_OVERHEAD", "AllGather", "AllReduce", "AllToAll", "ReduceScatter", "Scale", "Slice", "Step",
           "ToPartial", "empty_like", "narrow_box", "sizes_of"]  # fmt: skip

LEAST_OVERHEAD = 1e-13
"""Fixed cost of a step, in seconds."""


@dataclass(frozen=True, eq=False)
class Step(abc.ABC):
    """One step of a tensor from ``source`` to ``target``, layouts of the same mesh and global shape.

    Attributes:
        source: layout of the argument of :meth:`apply`.
        target: layout of its result.
        axes: mesh axes along which it communicates; empty for a local step.
        collective: name for logs; empty for a local step.
        launches: collectives that one application starts.
    """

    source: Layout
    target: Layout
    axes: tuple[int, ...]
    collective: ClassVar[str] = ""
    launches: ClassVar[int] = 1

    @property
    def overhead(self) -> float:
        """Seconds for packing and splitting buffers; it decides between steps of equal traffic."""
        return LEAST_OVERHEAD

    @abc.abstractmethod
    def apply(self, local: Any, platform: Platform) -> Any:
        """Return the local tensor of ``target``, in storage of its own, from the local tensor of ``source``."""

    def received_by(self, indices: Indices) -> Any:
        """Return the number of elements that each rank at ``indices`` receives."""
        return volumes(bounds_at(self.target, indices)) - volumes(bounds_at(self.source, indices))

    def received_at(self, coordinate: Coordinate) -> int:
        """Return the number of elements that the rank at ``coordinate`` receives."""
        return int(self.received_by(coordinate))

    @cached_property
    def load(self) -> tuple[int, float]:
        """Elements that the worst rank receives, and that a rank receives on average; only these two numbers are kept.

        They are those of the first group, whose shards are the largest.
        """
        mesh, origin = self.source.mesh, (0,) * self.source.mesh.ndim
        of_each = np.broadcast_to(self.received_by(member_indices(mesh, self.axes, origin)), (self.members,))
        return int(of_each.max()), float(of_each.sum()) / self.members

    @classmethod
    def least_load(cls, before: int, after: int, members: int) -> int:
        """Return a lower bound of the elements that the worst rank receives, without building a step.

        Args:
            before: elements that the first rank holds before the step.
            after: elements that it holds after the step.
            members: number of ranks that take part in one collective.
        """
        del before, after, members
        return 0

    @property
    def beats_exchange(self) -> bool:
        """True if no exchange, with or without a reduction, is cheaper between the same layouts; False if unknown."""
        return False

    @property
    def received(self) -> int:
        """Elements that the worst rank receives."""
        return self.load[0]

    @cached_property
    def messages(self) -> int:
        """Messages that the worst rank waits for: log2 of the members, for gathers and reductions."""
        return (self.members - 1).bit_length()

    @cached_property
    def members(self) -> int:
        """Number of ranks that take part in one collective."""
        counts = self.source.mesh.shape
        return math.prod([counts[axis] for axis in self.axes])

    @property
    def coordinate(self) -> Coordinate:
        """Position of the current rank."""
        return self.source.mesh.own_coordinate()

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks that take part in the current rank's collective."""
        return self.source.mesh.ranks_along(self.axes)

    @cached_property
    def sent_shapes(self) -> list[tuple[int, ...]]:
        """Local shape of each of those ranks before the step."""
        positions = mesh_slice(self.source.mesh, self.axes, self.coordinate)
        return [self.source.local_shape_at(position) for position in positions]

    def __str__(self) -> str:
        """Return one line, such as ``all_gather over tp: [7@tp] -> [7]``."""
        over = f" over {', '.join(self.source.mesh.names[axis] for axis in self.axes)}" if self.axes else ""
        name = self.collective or type(self).__name__.lower()
        return f"{name}{over}: {self.source.notation()} -> {self.target.notation()}"


class LocalStep(Step):
    """A step without communication."""

    launches: ClassVar[int] = 0

    def received_by(self, indices: Indices) -> Any:
        """Return zero."""
        del indices
        return 0

    @property
    def load(self) -> tuple[int, float]:
        """Zero."""
        return 0, 0.0

    @property
    def messages(self) -> int:
        """Zero."""
        return 0


class Slice(LocalStep):
    """Every rank keeps the part of its box that is in its target box."""

    def apply(self, local: Any, platform: Platform) -> Any:
        """Return the part, in storage of its own, so that writing to it does not change the source."""
        box, target = self.source.box_at(self.coordinate), self.target.box_at(self.coordinate)
        return platform.copy(narrow_box(local, box, target, platform))


@dataclass(frozen=True, eq=False)
class Scale(LocalStep):
    """Multiply by ``factor``, which converts ``Partial(avg)`` to ``Partial(sum)`` or back."""

    factor: Fraction

    def apply(self, local: Any, platform: Platform) -> Any:
        """Return ``local * factor``; it multiplies and divides by integers, because 1/3 is not exact.

        Raises:
            LayoutError: ``local`` is an integer tensor; an average of integers is not an integer.
        """
        if not platform.is_floating(local):
            msg = (
                f"Partial(avg) of {local.dtype}: an average of integers is not an integer; cast to a floating dtype "
                "first"
            )
            raise LayoutError(msg)
        numerator, denominator = self.factor.numerator, self.factor.denominator
        product = local if numerator == 1 else local * numerator
        return product if denominator == 1 else product / denominator


class ToPartial(LocalStep):
    """Write the value as partial values along ``axes``, without communication.

    Along a sharded axis every rank embeds its shard in zeros. Along a replicated axis the first rank keeps the value
    and the others hold the neutral element; for avg and the idempotent reductions (max, min, all, any) every rank
    keeps it.
    """

    def apply(self, local: Any, platform: Platform) -> Any:
        """Return this rank's partial value."""
        coordinate = self.coordinate
        for axis, op in self.target.partials:
            if axis in self.axes and self._replicated(axis) and coordinate[axis] and op in ("sum", "prod"):
                local = platform.zeros_like(local) if op == "sum" else platform.ones_like(local)
        box, whole = self.source.box_at(coordinate), self.target.box_at(coordinate)
        return platform.copy(local) if box == whole else _embed(local, box, whole, platform)

    def _replicated(self, axis: int) -> bool:
        return not any(axis in axes for axes in self.source.dim_axes)


class AllGather(Step):
    """One dim is gathered along ``axes``, the innermost axes that split it."""

    collective = "all_gather"

    @cached_property
    def load(self) -> tuple[int, float]:
        """Elements missing at the member with the shortest shard, and on average."""
        whole, members = first_sizes(self.target), self.members
        dim, elements = _changed_dim(self.source, self.target), math.prod(whole)
        lacking = elements and elements // whole[dim] * (whole[dim] - self._least_share)
        return lacking, (members - 1) * elements / members

    @cached_property
    def _least_share(self) -> int:
        """Length of the shortest gathered shard."""
        dim, counts = _changed_dim(self.source, self.target), self.source.mesh.shape
        return least_share(first_sizes(self.target)[dim], [counts[axis] for axis in self.axes])

    @classmethod
    def least_load(cls, before: int, after: int, members: int) -> int:
        """Return the elements that the first member, whose shard is the largest, lacks."""
        del members
        return after - before

    @property
    def beats_exchange(self) -> bool:
        """True if no shard is empty: then an exchange receives as many elements, from every other member."""
        return self._least_share > 0 and all(first_sizes(self.target))

    def apply(self, local: Any, platform: Platform) -> Any:
        """Return the members' shards, concatenated; shards may be uneven or empty."""
        rows = self.rows
        if rows is None:
            parts = platform.transport().all_gather(platform.contiguous(local), self.ranks, self.sent_shapes)
            return platform.cat(parts, _changed_dim(self.source, self.target))
        gathered = platform.transport().all_gather_rows(rows.padded(local, platform), self.ranks, rows.shapes)
        return rows.joined(gathered, platform)

    @cached_property
    def rows(self) -> GatheredRows | None:
        """How the shards are joined, where only the last ones are shorter; else None."""
        return GatheredRows.of(self.sent_shapes, _changed_dim(self.source, self.target))


class ReduceScatter(Step):
    """The partial values along ``axes`` are summed and split along one dim, inside the axes that split it already."""

    collective = "reduce_scatter"

    def received_by(self, indices: Indices) -> Any:
        """Return the size of the other members' partial values of the rank's shard."""
        return (self.members - 1) * volumes(bounds_at(self.target, indices))

    @cached_property
    def load(self) -> tuple[int, float]:
        """Elements that the first member, whose shard is the largest, receives; all shards add up to the source."""
        others = self.members - 1
        first, whole = (math.prod(first_sizes(layout)) for layout in (self.target, self.source))
        return others * first, others * whole / self.members

    @classmethod
    def least_load(cls, before: int, after: int, members: int) -> int:
        """Return the elements that the first member receives."""
        del before
        return (members - 1) * after

    @property
    def beats_exchange(self) -> bool:
        """True if the tensor is not empty: a reduction to boxes receives as many elements, from no fewer members."""
        return self.received > 0

    def apply(self, local: Any, platform: Platform) -> Any:
        """Return this rank's shard of the sum."""
        rows = self.rows
        if rows is not None:
            transport = platform.transport()
            row = transport.reduce_scatter_rows(rows.split(local, platform), "sum", self.ranks, rows.shapes)
            return _truncated(row, rows.dim, self.target.local_shape[rows.dim], platform)
        mesh, box = self.source.mesh, self.source.box_at(self.coordinate)
        chunks = [
            platform.contiguous(narrow_box(local, box, self.target.box_at(position), platform))
            for position in mesh_slice(mesh, self.axes, self.coordinate)
        ]
        return platform.transport().reduce_scatter(chunks, "sum", self.ranks)

    @cached_property
    def rows(self) -> ScatteredRows | None:
        """How the partial value is split, where only the last shards are shorter; else None."""
        positions = mesh_slice(self.source.mesh, self.axes, self.coordinate)
        shapes = [self.target.local_shape_at(position) for position in positions]
        return ScatteredRows.of(shapes, _changed_dim(self.source, self.target))


class AllReduce(Step):
    """The partial values along ``axes`` are reduced on all ranks, in one flattened group."""

    collective = "all_reduce"

    @cached_property
    def op(self) -> str:
        """Name of the reduction."""
        return str(self.source.get_partial_by_dev_id(self.axes[0]))

    def received_by(self, indices: Indices) -> Any:
        """Return the elements of a reduce-scatter and an all-gather, of which a ring all-reduce consists."""
        return 2 * (self.members - 1) * volumes(bounds_at(self.source, indices)) // self.members

    @cached_property
    def load(self) -> tuple[int, float]:
        """Elements that each member receives."""
        received = self.least_load(math.prod(first_sizes(self.source)), 0, self.members)
        return received, float(received)

    @classmethod
    def least_load(cls, before: int, after: int, members: int) -> int:
        """Return the elements that each member receives."""
        del after
        return 2 * (members - 1) * before // members

    @property
    def beats_exchange(self) -> bool:
        """True if the tensor is not empty: a reduction to boxes receives no less and starts one more collective."""
        return self.received > 0

    @cached_property
    def messages(self) -> int:
        """Messages that a rank waits for: those of the reduction and those of the gather."""
        return 2 * (self.members - 1).bit_length()

    def apply(self, local: Any, platform: Platform) -> Any:
        """Return the reduced tensor."""
        return platform.transport().all_reduce(platform.contiguous(local), self.op, self.ranks)


class AllToAll(Step):
    """One axis, the innermost that splits some dim, becomes the innermost that splits another."""

    collective = "all_to_all"

    @cached_property
    def load(self) -> tuple[int, float]:
        """Elements that the worst rank receives, and that a rank receives on average; fast for few members."""
        members = self.members
        if members > SMALL:
            return super().load
        before, after = first_sizes(self.source), first_sizes(self.target)
        gathered = self._gathered_dim()
        split = self._split_dim()
        whole, length = after[gathered], before[split]
        others = math.prod(size for dim, size in enumerate(before) if dim not in (gathered, split))
        held, kept = before[gathered], after[split]
        loads = [
            (whole - min(held, max(whole - index * held, 0))) * min(kept, max(length - index * kept, 0))
            for index in range(members)
        ]
        return others * max(loads), float(others * sum(loads)) / members

    @property
    def beats_exchange(self) -> bool:
        """True if the tensor is not empty: an exchange sends the same parts, each to the same member."""
        return all(first_sizes(self.source)) and all(first_sizes(self.target))

    @cached_property
    def messages(self) -> int:
        """Messages that the worst rank waits for: one per other member that has a part of the tensor."""
        holders, receivers = self._filled_of(first_sizes(self.source), first_sizes(self.target))
        return holders - (holders >= receivers)

    def received_by(self, indices: Indices) -> Any:
        """Return the number of elements of the target box that each rank lacks."""
        needed = bounds_at(self.target, indices)
        return volumes(needed) - shared_volumes(needed, bounds_at(self.source, indices))

    def _filled_of(self, source: Sequence[int], target: Sequence[int]) -> tuple[int, int]:
        """Return the numbers of members of a slice that hold and that receive a part, from the first member's shapes.

        Shards of one axis are shorter, or empty, only at the end.
        """
        gathered, split = self._gathered_dim(), self._split_dim()
        if not all(source) or not all(target):
            return 0, 0
        return -(-target[gathered] // source[gathered]), -(-source[split] // target[split])

    def apply(self, local: Any, platform: Platform) -> Any:
        """Return the members' parts of this rank's target box, concatenated along the dim that is gathered."""
        sent, received, missing, parts = self.rows
        transport = platform.transport()
        if missing:
            local = padded(local, received.dim, missing, platform)
        if parts is None:
            arrived = transport.all_to_all_rows(sent.split(local, platform), self.ranks, *self._exchanged_shapes)
        else:
            rows = sent.split(local, platform) if parts.sends.total else empty_like(local, (0,), platform)
            arrived = transport.all_to_all(rows, self.ranks, parts.sends, parts.expects)
            if not parts.expects.total:
                return empty_like(local, self.target.local_shape, platform)
        return _truncated(received.joined(arrived, platform), sent.dim, self.target.local_shape[sent.dim], platform)

    @cached_property
    def _exchanged_shapes(self) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """Shapes that this rank sends to each member, and shapes that it receives from each."""
        positions = mesh_slice(self.source.mesh, self.axes, self.coordinate)
        box, target = self.source.box_at(self.coordinate), self.target.box_at(self.coordinate)
        sends = tuple(sizes_of(intersect(box, self.target.box_at(position))) for position in positions)
        return sends, tuple(sizes_of(intersect(target, self.source.box_at(position))) for position in positions)

    @cached_property
    def rows(self) -> _ExchangedRows:
        """How the shard is split and the parts are joined.

        The members of a slice agree: all rows have the sizes of the first member's along both dims. Shards of one axis
        are shorter only at the end; to and from members whose shard is empty, nothing is sent.
        """
        gathered, split = self._gathered_dim(), self._split_dim()
        first = mesh_slice(self.source.mesh, self.axes, self.coordinate)[0]
        source, target = self.source.local_shape_at(first), self.target.local_shape_at(first)
        longest, widest = source[gathered], target[split]
        sends, expects = self._exchanged_shapes
        holders, receivers = self._filled_of(source, target)
        outgoing = [_resized(shape, gathered, longest) for shape in sends[: receivers or None]]
        incoming = [_resized(shape, split, widest) for shape in expects[: holders or None]]
        rows, arrived = ScatteredRows.filled(outgoing, split), GatheredRows.filled(incoming, gathered)
        if holders == receivers == self.members or not holders:
            return _ExchangedRows(rows, arrived, longest - sends[0][gathered])
        size = math.prod(arrived.shape)
        sent, expected = (
            Parts(shapes, tuple(size if math.prod(shape) else 0 for shape in shapes)) for shapes in (sends, expects)
        )
        missing = longest - sends[0][gathered] if sent.total else 0
        return _ExchangedRows(rows, arrived, missing, _SentParts(sent, expected))

    def _gathered_dim(self) -> int:
        return _dim_of(self.axes[0], self.source)

    def _split_dim(self) -> int:
        return _dim_of(self.axes[0], self.target)


class _SentParts(NamedTuple):
    """The parts that a rank sends to each member, and those that it receives from each."""

    sends: Parts
    expects: Parts


class _ExchangedRows(NamedTuple):
    """How a shard is split into rows for the members, and how the rows that arrive are joined.

    Attributes:
        sent: the split of the shard.
        received: the concatenation of the rows that arrive.
        missing: size of the padding of this rank's parts along the dim that is gathered.
        parts: the parts to exchange if some shards are empty; None if every member sends a row to every other.
    """

    sent: ScatteredRows
    received: GatheredRows
    missing: int
    parts: _SentParts | None = None


def _resized(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _truncated(local: Any, dim: int, size: int, platform: Platform) -> Any:
    """Return the first ``size`` elements along ``dim``, contiguous; ``local`` itself if it has no more."""
    return local if local.shape[dim] == size else platform.contiguous(platform.narrow(local, dim, 0, size))


def narrow_box(local: Any, box: Box, part: Box, platform: Platform) -> Any:
    """Return the part ``part`` of the local tensor of ``box``; ``local`` itself if both are equal."""
    if not volume(part):
        return empty_like(local, sizes_of(part), platform)
    for dim, ((start, stop), (low, high)) in enumerate(zip(box, part, strict=True)):
        if (low, high) != (start, stop):
            local = platform.narrow(local, dim, low - start, high - low)
    return local


def empty_like(local: Any, shape: Sequence[int], platform: Platform) -> Any:
    """Return zeros of ``shape``, usually an empty shape, with the dtype and device of ``local``."""
    return platform.zeros(tuple(shape), dtype=local.dtype, device=getattr(local, "device", None))


def _embed(local: Any, box: Box, whole: Box, platform: Platform) -> Any:
    """Return ``local``, the values of ``box``, embedded in zeros of the size of ``whole``."""
    for dim, ((start, stop), (low, high)) in enumerate(zip(box, whole, strict=True)):
        sizes = (start - low, high - stop)
        if any(sizes):
            shapes = [(*local.shape[:dim], size, *local.shape[dim + 1 :]) for size in sizes]
            before, after = (empty_like(local, shape, platform) for shape in shapes)
            local = platform.cat([before, local, after], dim)
    return local


def _dim_of(axis: int, layout: Layout) -> int:
    """Return the dim that ``axis`` splits."""
    return next(dim for dim, axes in enumerate(layout.dim_axes) if axis in axes)


def _changed_dim(source: Layout, target: Layout) -> int:
    pairs = zip(source.dim_axes, target.dim_axes, strict=True)
    return next(dim for dim, (before, after) in enumerate(pairs) if before != after)


def sizes_of(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(stop - start for start, stop in box)
