"""Steps of a redistribution: immutable values that know their price and run on plain local tensors.

A step carries its ``source`` and ``target`` layout, hence every member's shape, uneven and empty shards included.
Nothing here knows autograd: the backward of a plan is another plan.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from hyper_parallel.core.dtensor.boxes import intersect, members, volume
from hyper_parallel.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from fractions import Fraction

    from hyper_parallel.core.dtensor.boxes import Coordinate
    from hyper_parallel.core.dtensor.layout import Box, Layout
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["AllGather", "AllReduce", "AllToAll", "ReduceScatter", "Scale", "Slice", "Step", "ToPartial", "empty_like",
           "narrow_box", "sizes_of"]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Step(abc.ABC):
    """One move of a tensor from ``source`` to ``target``, both over one mesh and one global shape.

    Attributes:
        source: layout of what :meth:`apply` takes.
        target: layout of what it returns.
        axes: mesh axes along which it communicates; empty for a local step.
        collective: name for logs; empty for a local step.
        launches: collectives that one application starts.
        overhead: seconds of packing and of cutting buffers; decides between steps of equal traffic.
    """

    source: Layout
    target: Layout
    axes: tuple[int, ...]
    collective: ClassVar[str] = ""
    launches: ClassVar[int] = 1
    overhead: ClassVar[float] = 1e-13

    @abc.abstractmethod
    def apply(self, local: Any, platform: Platform) -> Any:
        """The local tensor of ``target`` from the one of ``source``; in storage of its own."""

    def received_at(self, at: Coordinate) -> int:
        """Elements that the rank at ``at`` receives."""
        return volume(self.target.box_at(at)) - volume(self.source.box_at(at))

    @cached_property
    def loads(self) -> tuple[int, ...]:
        """Elements that each member of the first group receives: chunks never grow, so no group receives more."""
        first = (0,) * self.source.mesh.ndim
        return tuple(self.received_at(at) for at in members(self.source.mesh, self.axes, first))

    @property
    def received(self) -> int:
        """Elements that the worst rank receives."""
        return max(self.loads)

    @cached_property
    def messages(self) -> int:
        """Messages that the worst rank waits for; gathers and reductions double their reach with each."""
        return (self.members - 1).bit_length()

    @property
    def members(self) -> int:
        """Number of ranks that take part in one collective."""
        return math.prod(self.source.mesh.shape[axis] for axis in self.axes)

    @property
    def at(self) -> Coordinate:
        """Position of the current rank."""
        return self.source.mesh._member()  # noqa: SLF001 - the mesh's own check and message

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks that take part in the current rank's collective."""
        return self.source.mesh.ranks_along(self.axes)

    @cached_property
    def sent_shapes(self) -> list[tuple[int, ...]]:
        """Shape that each of those ranks holds before the step."""
        return [self.source.local_shape_at(one) for one in members(self.source.mesh, self.axes, self.at)]

    def __str__(self) -> str:
        """``all_gather over tp: [7@tp] -> [7]``."""
        over = f" over {', '.join(self.source.mesh.names[axis] for axis in self.axes)}" if self.axes else ""
        name = self.collective or type(self).__name__.lower()
        return f"{name}{over}: {self.source.notation()} -> {self.target.notation()}"


class LocalStep(Step):
    """A step that receives nothing."""

    launches: ClassVar[int] = 0

    def received_at(self, at: Coordinate) -> int:  # noqa: ARG002 - the same everywhere
        """Nothing."""
        return 0

    @cached_property
    def messages(self) -> int:
        """None."""
        return 0


class Slice(LocalStep):
    """Every rank keeps the part of its box that the target asks for."""

    def apply(self, local: Any, platform: Platform) -> Any:
        """The part, in storage of its own: writing into it leaves the source alone."""
        return platform.copy(narrow_box(local, self.source.box_at(self.at), self.target.box_at(self.at), platform))


@dataclass(frozen=True, eq=False)
class Scale(LocalStep):
    """Multiply by ``factor``: the price of writing ``Partial(avg)`` as ``Partial(sum)``."""

    factor: Fraction

    def apply(self, local: Any, platform: Platform) -> Any:
        """``local * factor``, by whole numbers: a third has no floating number.

        Raises:
            LayoutError: ``local`` is an integer tensor, whose average is none.
        """
        if not platform.is_floating(local):
            msg = f"Partial(avg) of {local.dtype}: an average of integers is no integer; cast to a floating dtype first"
            raise LayoutError(msg)
        up, down = self.factor.numerator, self.factor.denominator
        grown = local if up == 1 else local * up
        return grown if down == 1 else grown / down


class ToPartial(LocalStep):
    """Write the value as summands along ``axes``, without communication.

    A sharded axis embeds its shard in zeros. A replicated one keeps the value at position 0 and the neutral element
    elsewhere; for the idempotent reductions (max, min, all, any), and for avg, every rank keeps it.
    """

    def apply(self, local: Any, platform: Platform) -> Any:
        """This rank's summand."""
        at = self.at
        for axis, op in self.target.partials:
            if axis in self.axes and self._replicated(axis) and at[axis] and op in ("sum", "prod"):
                local = platform.zeros_like(local) if op == "sum" else platform.ones_like(local)
        box, whole = self.source.box_at(at), self.target.box_at(at)
        return platform.copy(local) if box == whole else _embed(local, box, whole, platform)

    def _replicated(self, axis: int) -> bool:
        return not any(axis in axes for axes in self.source.dim_axes)


class AllGather(Step):
    """``axes``, the innermost ones of one dim, give up splitting it."""

    collective = "all_gather"

    def apply(self, local: Any, platform: Platform) -> Any:
        """Every member's shard, concatenated; shards may be uneven or empty."""
        parts = platform.transport().all_gather(platform.contiguous(local), self.ranks, self.sent_shapes)
        return platform.cat(parts, _changed_dim(self.source, self.target))


class ReduceScatter(Step):
    """The summands along ``axes`` are added up and split along one dim, inside what splits it already."""

    collective = "reduce_scatter"

    def received_at(self, at: Coordinate) -> int:
        """Everybody else's summand of the own shard."""
        return (self.members - 1) * volume(self.target.box_at(at))

    def apply(self, local: Any, platform: Platform) -> Any:
        """This rank's shard of the sum."""
        mesh, box = self.source.mesh, self.source.box_at(self.at)
        chunks = [
            platform.contiguous(narrow_box(local, box, self.target.box_at(one), platform))
            for one in members(mesh, self.axes, self.at)
        ]
        return platform.transport().reduce_scatter(chunks, "sum", self.ranks)


class AllReduce(Step):
    """What the ranks along ``axes`` hold is reduced, on all of them, as one flattened group."""

    collective = "all_reduce"

    @cached_property
    def op(self) -> str:
        """The reduction."""
        return str(self.source.get_partial_by_dev_id(self.axes[0]))

    def received_at(self, at: Coordinate) -> int:
        """Twice everybody else's part of a shared box: once to reduce it, once to spread the result."""
        size = volume(self.source.box_at(at))
        return 2 * (self.members - 1) * size // self.members

    @cached_property
    def messages(self) -> int:
        """As for gathering, once to reduce and once to spread."""
        return 2 * (self.members - 1).bit_length()

    def apply(self, local: Any, platform: Platform) -> Any:
        """The reduction."""
        return platform.transport().all_reduce(platform.contiguous(local), self.op, self.ranks)


class AllToAll(Step):
    """One axis moves from splitting one dim, innermost, to splitting another, innermost."""

    collective = "all_to_all"

    @cached_property
    def messages(self) -> int:
        """One per other member."""
        return self.members - 1

    def received_at(self, at: Coordinate) -> int:
        """The target's box without what this rank holds of it."""
        box = self.target.box_at(at)
        return volume(box) - volume(intersect(box, self.source.box_at(at)))

    def apply(self, local: Any, platform: Platform) -> Any:
        """Every member's part of this rank's box, concatenated along the dim that is whole again."""
        mesh, at = self.source.mesh, self.at
        group = members(mesh, self.axes, at)
        held, wanted = self.source.box_at(at), self.target.box_at(at)
        chunks = [
            platform.contiguous(narrow_box(local, held, intersect(held, self.target.box_at(one)), platform))
            for one in group
        ]
        shapes = [sizes_of(intersect(wanted, self.source.box_at(one))) for one in group]
        parts = platform.transport().all_to_all(chunks, self.ranks, shapes)
        return platform.cat(parts, self._gathered_dim())

    def _gathered_dim(self) -> int:
        axis = self.axes[0]
        return next(dim for dim, axes in enumerate(self.source.dim_axes) if axis in axes)


def narrow_box(local: Any, held: Box, wanted: Box, platform: Platform) -> Any:
    """The part ``wanted`` of a local tensor that holds ``held``; ``local`` itself when that is all of it."""
    if not volume(wanted):
        return empty_like(local, sizes_of(wanted), platform)
    for dim, ((start, stop), (low, high)) in enumerate(zip(held, wanted, strict=True)):
        if (low, high) != (start, stop):
            local = platform.narrow(local, dim, low - start, high - low)
    return local


def empty_like(local: Any, shape: Sequence[int], platform: Platform) -> Any:
    """Zeros of ``shape`` with the dtype and device of ``local``; nearly always no element at all."""
    return platform.zeros(tuple(shape), dtype=local.dtype, device=getattr(local, "device", None))


def _embed(local: Any, held: Box, whole: Box, platform: Platform) -> Any:
    """``local`` at its place in zeros of the size of ``whole``."""
    for dim, ((start, stop), (low, high)) in enumerate(zip(held, whole, strict=True)):
        sizes = (start - low, high - stop)
        if any(sizes):
            shapes = [(*local.shape[:dim], size, *local.shape[dim + 1 :]) for size in sizes]
            before, after = (empty_like(local, shape, platform) for shape in shapes)
            local = platform.cat([before, local, after], dim)
    return local


def _changed_dim(one: Layout, other: Layout) -> int:
    pairs = zip(one.dim_axes, other.dim_axes, strict=True)
    return next(dim for dim, (before, after) in enumerate(pairs) if before != after)


def sizes_of(box: Box) -> tuple[int, ...]:
    """Shape of a box."""
    return tuple(stop - start for start, stop in box)
