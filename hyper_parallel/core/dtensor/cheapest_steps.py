"""The search for the cheapest steps from one layout to another, over collectives and exchanges of boxes.

It is a best-first search over layouts (A*; Hart, Nilsson and Raphael, 1968). The number of elements that a rank still
lacks is a lower bound of the remaining cost, so few layouts are visited. Steps are built and priced only when a lower
bound of their own cost says that they may be the cheapest, because the cost of an exchange, which depends on the boxes
of all its ranks, is slow to compute.
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from hyper_parallel._caches import register
from hyper_parallel.core.dtensor.bounds import all_inside, first_sizes_of, shared_parts
from hyper_parallel.core.dtensor.exchange import Exchange, ReduceExchange
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placements import DimAxes, Partials
from hyper_parallel.core.dtensor.steps import LEAST_OVERHEAD, AllGather, AllReduce, AllToAll, ReduceScatter, Slice, Step

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Cost", "cheapest_steps", "cost_of"]

# Only the ratios matter. Latency is low on purpose: a message costs as much as ten bytes and the start of a collective
# as twenty, so bytes decide, except when they are nearly equal. Layouts have no dtype, so four-byte elements are
# assumed.
SECONDS_PER_BYTE = 1e-10
SECONDS_PER_MESSAGE = 1e-9
SECONDS_PER_LAUNCH = 2e-9
# Among steps with equal traffic at the worst rank, those that load the network less are cheaper.
MEAN_LOAD_WEIGHT = 0.05
PLANNING_ITEMSIZE = 4
SECONDS_PER_ELEMENT = PLANNING_ITEMSIZE * SECONDS_PER_BYTE
MAX_STATES = 2000
MAX_SUMMED = 1 << 14
"""Ranks of a slice times the partial values of an element, up to which a reduction straight to the target is
considered: computing its cost takes arrays of that size, and a reduce-scatter or an all-reduce before an exchange costs
little more."""

_SLOWLY_PRICED = Exchange, ReduceExchange
"""Steps to the target whose cost is slow to compute; it is computed only once they may be the cheapest."""
MAX_CACHED = 1024
"""Maximum number of entries of a cache of moves or ranges; its entries contain only numbers."""

_Move: TypeAlias = "tuple[type[Step], DimAxes, Partials, tuple[int, ...]]"
"""A step that is not built yet: its kind, the axes that split each dim after it, the partial axes after it, and the
axes that it communicates over.
"""
_Entry: TypeAlias = "tuple[float, float, int, float, Layout, tuple[Step, ...], Step | _Move | None]"
"""An entry of the search's queue, the cheapest first: a lower bound of the cost of the plan, two numbers that break
ties, the cost of the steps so far, the layout that they reach, and the steps. The last is not priced yet: a step from
the layout to the target, a move to another layout, or nothing, if the layout itself is to be visited.
"""


@dataclass(frozen=True)
class Cost:
    """The cost of a sequence of steps, for the rank that receives the most.

    Attributes:
        bytes: bytes received.
        messages: messages that the rank waits for.
        launches: collectives started.
    """

    bytes: int
    messages: int
    launches: int = 0

    @property
    def seconds(self) -> float:
        """Estimated time, for comparing costs only."""
        return _seconds(self.bytes, self.messages, self.launches)


def cost_of(steps: Iterable[Step], itemsize: int) -> Cost:
    """Return the sum of the costs of ``steps``, each at its worst rank, for elements of ``itemsize`` bytes."""
    steps = tuple(steps)
    return Cost(
        sum(step.received for step in steps) * itemsize,
        sum(step.messages for step in steps),
        sum(step.launches for step in steps if step.received),
    )


def cheapest_steps(source: Layout, target: Layout) -> tuple[Step, ...]:
    """Return the cheapest steps from ``source`` to ``target``.

    Axes that are partial in ``target`` must be partial in ``source`` with the same reduction. Other partial axes of
    ``source`` are summed.
    """
    if source is target:
        return ()
    return _Search(source, target).run() or (_single_step(source, target),)


class _Search:
    """A search for the cheapest steps to a layout; ``best`` are the steps found so far, and ``bound`` is their cost."""

    def __init__(self, source: Layout, target: Layout) -> None:
        self.target, self.least = target, _LowerBounds(target)
        self.best: tuple[Step, ...] = ()
        self.bound = math.inf
        self.frontier: list[_Entry] = [(0.0, 0.0, 0, 0.0, source, (), None)]
        self.tickets = itertools.count(1)
        self.done: set[Layout] = set()

    def run(self) -> tuple[Step, ...]:
        """Return the best steps; no steps if the limit of visited layouts is reached before any are found."""
        frontier = self.frontier
        while frontier:
            least, _, ticket, spent, layout, steps, last = heapq.heappop(frontier)
            if least >= self.bound or len(self.done) >= MAX_STATES:
                break
            if isinstance(last, Step):
                self._arrive(spent, steps, last)
            elif last is not None:
                self._move(ticket, spent, layout, steps, last)
            elif layout not in self.done:
                self._visit(spent, layout, steps)
        return self.best

    def _arrive(self, spent: float, steps: tuple[Step, ...], step: Step) -> None:
        """Price ``step``, which reaches the target."""
        seconds = spent + _step_seconds(step)
        if seconds < self.bound:
            self.best, self.bound = (*steps, step), seconds

    def _move(self, ticket: int, spent: float, layout: Layout, steps: tuple[Step, ...], move: _Move) -> None:
        """Price a move from ``layout`` to a layout other than the target."""
        kind, dims, partials, axes = move
        reached = layout.with_axes(dims, partials)
        if reached not in self.done:
            step = kind(layout, reached, axes)
            seconds = spent + _step_seconds(step)
            self._consider((seconds + self.least.after(dims), seconds, ticket, seconds, reached, (*steps, step), None))

    def _visit(self, spent: float, layout: Layout, steps: tuple[Step, ...]) -> None:
        """Go straight to the target from ``layout``, and consider the other moves."""
        self.done.add(layout)
        direct, others = _moves_from(layout, self.target)
        beaten = False
        for kind, _, _, axes in direct:
            step = kind(layout, self.target, axes)
            self._arrive(spent, steps, step)
            beaten = beaten or step.beats_exchange
        single = None
        if not beaten:
            single = _single_step(layout, self.target, may_be_inside=not self.least.after(layout.dim_axes))
            if isinstance(single, Slice):
                self._arrive(spent, steps, single)
        for move in others:
            least = spent + self.least.after(move[1])
            if least < self.bound:
                least += self.least.of_move(layout.dim_axes, move)
                self._consider((least, -1.0, next(self.tickets), spent, layout, steps, move))
        if isinstance(single, _SLOWLY_PRICED) and _may_be_priced(single):
            self._consider((spent + _least_seconds(single), spent, next(self.tickets), spent, layout, steps, single))

    def _consider(self, entry: _Entry) -> None:
        """Keep an entry whose plans may be the cheapest."""
        if entry[0] < self.bound:
            heapq.heappush(self.frontier, entry)


class _LowerBounds:
    """Lower bounds of costs on the way to ``target``, in seconds; layouts are known by the axes that split each dim."""

    def __init__(self, target: Layout) -> None:
        self.counts, self.shape, self.target = target.mesh.shape, target.shape or (), target.dim_axes
        self.ranges = [*map(_corner_ranges, itertools.repeat(self.counts), self.shape, self.target)]
        self.lengths = [[stop - start for start, stop in ranges] for ranges in self.ranges]
        self.sizes = [*map(math.prod, zip(*self.lengths, strict=True))]
        self._shared: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        self._after: dict[DimAxes, float] = {self.target: 0.0}
        self._elements: dict[DimAxes, int] = {}

    def after(self, dim_axes: DimAxes) -> float:
        """Return a lower bound of the cost from a layout on: the most elements that a rank still lacks.

        Only the ranks at the corners of the mesh are considered; the maximum over a subset is still a lower bound.
        """
        bound = self._after.get(dim_axes)
        if bound is None:
            shared = [*map(self._shared_lengths, enumerate(dim_axes))]
            lacking = map(operator.sub, self.sizes, map(math.prod, zip(*shared, strict=True)))
            bound = self._after[dim_axes] = max(lacking) * SECONDS_PER_ELEMENT
        return bound

    def _shared_lengths(self, key: tuple[int, tuple[int, ...]]) -> list[int]:
        """Return the lengths that each rank at a corner holds and needs of a dim that is split along some axes."""
        shared = self._shared.get(key)
        if shared is None:
            dim, axes = key
            if self.target[dim][: len(axes)] == axes:
                shared = self.lengths[dim]
            else:
                shared = shared_parts(self.ranges[dim], _corner_ranges(self.counts, self.shape[dim], axes))
            self._shared[key] = shared
        return shared

    def of_move(self, before: DimAxes, move: _Move) -> float:
        """Return a lower bound of the cost of a move from a layout, for which no step is built."""
        kind, after, _, axes = move
        if not axes:
            return LEAST_OVERHEAD
        members = math.prod([self.counts[axis] for axis in axes])
        least = kind.least_load(self._first_elements(before), self._first_elements(after), members)
        return least * SECONDS_PER_ELEMENT + (members > 1) * SECONDS_PER_MESSAGE

    def _first_elements(self, dim_axes: DimAxes) -> int:
        """Return the number of elements that the first rank holds."""
        elements = self._elements.get(dim_axes)
        if elements is None:
            elements = self._elements[dim_axes] = math.prod(first_sizes_of(self.shape, dim_axes, self.counts))
        return elements


@lru_cache(MAX_CACHED)
def _corner_ranges(counts: tuple[int, ...], size: int, axes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return the ranges of a dim of ``size`` elements, split by ``axes``, at the corners of a mesh."""
    corners = list(itertools.product(*({0, count - 1} for count in counts)))
    if not axes:
        return ((0, size),) * len(corners)
    ranges = []
    for corner in corners:
        start, stop = 0, size
        for axis in axes:
            chunk = -(-(stop - start) // counts[axis])
            start, stop = min(start + corner[axis] * chunk, stop), min(start + (corner[axis] + 1) * chunk, stop)
        ranges.append((start, stop))
    return tuple(ranges)


def _step_seconds(step: Step) -> float:
    """Return the cost in seconds, with a small overhead per step, so that the shorter of two equal plans is cheaper."""
    received, mean = step.load
    seconds = _seconds(received * PLANNING_ITEMSIZE, step.messages, step.launches if received else 0)
    return seconds + MEAN_LOAD_WEIGHT * mean * SECONDS_PER_ELEMENT + step.overhead


def _seconds(number_of_bytes: int, messages: int, launches: int) -> float:
    """Return the estimated time of steps, for comparing costs only."""
    return number_of_bytes * SECONDS_PER_BYTE + messages * SECONDS_PER_MESSAGE + launches * SECONDS_PER_LAUNCH


def _least_seconds(step: Exchange | ReduceExchange) -> float:
    """Return a lower bound of the cost of a step to the target; it is faster to compute than the cost."""
    worst, mean = step.least_received
    if not worst:
        return 0.0
    received = (worst + MEAN_LOAD_WEIGHT * mean) * SECONDS_PER_ELEMENT
    latency = step.least_messages * SECONDS_PER_MESSAGE + step.launches * SECONDS_PER_LAUNCH
    return received + latency + step.overhead


def _single_step(layout: Layout, target: Layout, *, may_be_inside: bool = True) -> Step:
    """Return the single step to ``target``, which always exists.

    Args:
        layout: the layout before the step.
        target: the layout after it.
        may_be_inside: False if a rank is known to lack elements, so that the step is not a slice.
    """
    axes = _slice_axes(layout.dim_axes, layout.partials, target.dim_axes, target.partials)
    if _unreduced(layout.partials, target.partials):
        return ReduceExchange(layout, target, axes)
    if may_be_inside and all_inside(layout, target):
        return Slice(layout, target, ())
    return Exchange(layout, target, axes)


def _may_be_priced(step: Step) -> bool:
    """Return False for a reduction whose cost takes large arrays to compute."""
    return not isinstance(step, ReduceExchange) or step.members * step.partial_values <= MAX_SUMMED


def _moves_from(layout: Layout, target: Layout) -> tuple[tuple[_Move, ...], tuple[_Move, ...]]:
    """Return the steps that are considered from ``layout``: those that reach ``target``, and others."""
    return _moves(layout.dim_axes, layout.partials, target.dim_axes, target.partials)


@lru_cache(MAX_CACHED)
def _moves(
    dims: DimAxes, partials: Partials, target_dims: DimAxes, target_partials: Partials
) -> tuple[tuple[_Move, ...], tuple[_Move, ...]]:
    """Return the moves from a layout; they do not depend on sizes, so they are shared by all tensors and meshes."""
    unreduced = _unreduced(partials, target_partials)
    used = {axis for axes in dims for axis in axes} | {axis for axis, _ in partials}
    moves: list[_Move] = []
    if unreduced:
        moves.append((AllReduce, dims, _without(partials, unreduced), unreduced))
    moves.extend(_reduce_scatters(dims, partials, target_dims, unreduced))
    moves.extend(
        (AllGather, _with_dim(dims, dim, axes[:kept]), partials, axes[kept:])
        for dim, axes in enumerate(dims)
        for kept in range(len(axes))
    )
    moves.extend(
        (Slice, _with_dim(dims, dim, (*dims[dim], axis)), partials, ())
        for dim, after in enumerate(target_dims)
        for axis in after
        if axis not in used
    )
    for gathered, split in itertools.permutations(range(len(dims)), 2):
        axes = dims[gathered]
        if axes and (target_dims[split] or dims[split]):
            without = _with_dim(dims, gathered, axes[:-1])
            moves.append((AllToAll, _with_dim(without, split, (*dims[split], axes[-1])), partials, axes[-1:]))
    reached = [move[1:3] == (target_dims, target_partials) for move in moves]
    return tuple(itertools.compress(moves, reached)), tuple(itertools.compress(moves, map(operator.not_, reached)))


def _reduce_scatters(
    dims: DimAxes, partials: Partials, target_dims: DimAxes, unreduced: tuple[int, ...]
) -> Iterator[_Move]:
    for dim, (before, after) in enumerate(zip(dims, target_dims, strict=True)):
        if not after and not before:
            continue
        missing = after[len(before) :]
        candidates: set[tuple[int, ...]] = {(axis,) for axis in unreduced}
        if missing and after[: len(before)] == before and set(missing) <= set(unreduced):
            candidates.add(missing)
        for axes in sorted(candidates):
            yield ReduceScatter, _with_dim(dims, dim, (*before, *axes)), _without(partials, axes), axes


@lru_cache(MAX_CACHED)
def _slice_axes(dims: DimAxes, partials: Partials, target_dims: DimAxes, target_partials: Partials) -> tuple[int, ...]:
    """Return the axes on which the layouts differ; ranks that differ along other axes exchange nothing."""
    equal: set[int] = set()
    for before, after in zip(dims, target_dims, strict=True):
        pairs = zip(before, after, strict=False)
        equal.update(axis for axis, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    used = {axis for axes in (*dims, *target_dims) for axis in axes} | set(_unreduced(partials, target_partials))
    return tuple(sorted(used - equal))


def _unreduced(partials: Partials, target_partials: Partials) -> tuple[int, ...]:
    """Return the axes that are partial before, but not in the target."""
    kept = [axis for axis, _ in target_partials]
    return tuple([axis for axis, _ in partials if axis not in kept])


def _with_dim(dims: DimAxes, dim: int, axes: tuple[int, ...]) -> DimAxes:
    return (*dims[:dim], axes, *dims[dim + 1 :])


def _without(partials: Partials, axes: tuple[int, ...]) -> Partials:
    return tuple([pair for pair in partials if pair[0] not in axes])


register("moves between layouts", _moves)
register("axes on which layouts differ", _slice_axes)
register("ranges at corners", _corner_ranges)
