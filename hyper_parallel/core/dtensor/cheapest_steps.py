"""The search for the cheapest steps from one layout to another, over collectives and exchanges of boxes.

A best-first search over layouts (A*; Hart, Nilsson and Raphael, 1968). The number of elements that a rank still lacks
is a lower bound of the remaining cost, so few layouts are visited. The cost of an exchange is slow to compute, since
its boxes must be listed; it is computed only from layouts that are visited.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

from hyper_parallel.core.dtensor.bounds import all_inside
from hyper_parallel.core.dtensor.boxes import intersect, volume
from hyper_parallel.core.dtensor.exchange import Exchange, ReduceExchange
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placements import DimAxes
from hyper_parallel.core.dtensor.steps import AllGather, AllReduce, AllToAll, ReduceScatter, Slice, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["Cost", "cheapest_steps", "cost_of"]

# Only the ratios matter. Latency is low on purpose: a message costs as much as ten bytes and the start of a collective
# as twenty, so bytes decide,
# except when they are nearly equal. Layouts have no dtype, so four-byte elements are assumed.
SECONDS_PER_BYTE = 1e-10
SECONDS_PER_MESSAGE = 1e-9
SECONDS_PER_LAUNCH = 2e-9
# Among steps whose worst rank receives the same, those that load the network less are cheaper.
MEAN_LOAD_WEIGHT = 0.05
PLANNING_ITEMSIZE = 4
SECONDS_PER_ELEMENT = PLANNING_ITEMSIZE * SECONDS_PER_BYTE
MAX_STATES = 2000
MAX_SUMMED = 1 << 14
"""Ranks of a slice times the partial values of an element, up to which a reduction straight to the target is
considered: its price takes arrays of that size, and a reduce-scatter or an all-reduce before an exchange costs little
more."""


_SLOWLY_PRICED = Exchange | ReduceExchange
"""Steps to the target whose price is slow to compute, so that it waits until they may be the cheapest."""


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
        return self.bytes * SECONDS_PER_BYTE + self.messages * SECONDS_PER_MESSAGE + self.launches * SECONDS_PER_LAUNCH


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
    best: tuple[Step, ...] = ()
    bound = math.inf
    # An entry ends at a layout; ``last`` is its last step if that is not priced yet.
    frontier: list[tuple[float, float, int, Layout, tuple[Step, ...], Step | None]] = [(0.0, 0.0, 0, source, (), None)]
    done: set[Layout] = set()
    ticket = itertools.count()
    lower_bound = _lower_bound_to(target)
    while frontier:
        least, spent, _, layout, steps, last = heapq.heappop(frontier)
        if least >= bound or len(done) >= MAX_STATES:
            break
        if last is not None:  # it reaches the target
            seconds = spent + _step_seconds(last)
            best, bound = ((*steps, last), seconds) if seconds < bound else (best, bound)
            continue
        if layout in done:
            continue
        done.add(layout)
        candidates = list(_candidate_steps(layout, target))
        seconds, direct = _cheapest_direct(candidates, target)
        if direct is not None and spent + seconds < bound:
            best, bound = (*steps, direct), spent + seconds
        for step in candidates:
            if isinstance(step, _SLOWLY_PRICED):
                heapq.heappush(frontier, (spent + _least_seconds(step), spent, next(ticket), target, steps, step))
                continue
            open_ = step.target is not target and step.target not in done
            if open_ and spent + (remaining := lower_bound(step.target)) < bound:  # else its price does not matter
                seconds = spent + _step_seconds(step)
                entry = (seconds + remaining, seconds, next(ticket), step.target, (*steps, step), None)
                heapq.heappush(frontier, entry)
    return best or (_single_step(source, target),)


def _cheapest_direct(candidates: Iterable[Step], target: Layout) -> tuple[float, Step | None]:
    """Return the cheapest of the steps to ``target`` whose price is quickly computed, with its cost in seconds."""
    direct = [step for step in candidates if step.target is target and not isinstance(step, _SLOWLY_PRICED)]
    return min(((_step_seconds(step), step) for step in direct), key=itemgetter(0), default=(math.inf, None))


def _lower_bound_to(target: Layout) -> Callable[[Layout], float]:
    """Return the function of a lower bound of the cost from a layout on: the most elements that a rank still lacks.

    Only the ranks at the corners of the mesh are considered; the maximum over a subset is still a lower bound.
    """
    corners = list(itertools.product(*({0, size - 1} for size in target.mesh.shape)))
    boxes = [target.box_at(corner) for corner in corners]
    needed = [(corner, box, volume(box)) for corner, box in zip(corners, boxes, strict=True)]

    def lower_bound(layout: Layout) -> float:
        worst = max(size - volume(intersect(box, layout.box_at(corner))) for corner, box, size in needed)
        return worst * SECONDS_PER_ELEMENT

    return lower_bound


def _step_seconds(step: Step) -> float:
    """Return the cost in seconds, with a small overhead per step, so that the shorter of two equal plans is cheaper."""
    mean_load = MEAN_LOAD_WEIGHT * step.mean_received * SECONDS_PER_ELEMENT
    return cost_of((step,), PLANNING_ITEMSIZE).seconds + mean_load + step.overhead


def _least_seconds(step: Exchange | ReduceExchange) -> float:
    """Return a lower bound of the cost of a step to the target, which takes less time than the cost itself."""
    worst, mean = step.least_received
    if not worst:
        return 0.0
    received = (worst + MEAN_LOAD_WEIGHT * mean) * SECONDS_PER_ELEMENT
    latency = step.least_messages * SECONDS_PER_MESSAGE + step.launches * SECONDS_PER_LAUNCH
    return received + latency + step.overhead


def _single_step(layout: Layout, target: Layout) -> Step:
    """Return the single step to ``target``, which always exists."""
    if _unreduced(layout, target):
        return ReduceExchange(layout, target, _slice_axes(layout, target))
    if all_inside(layout, target):
        return Slice(layout, target, ())
    return Exchange(layout, target, _slice_axes(layout, target))


def _slice_axes(layout: Layout, target: Layout) -> tuple[int, ...]:
    """Return the axes on which the layouts differ; ranks that differ along other axes exchange nothing."""
    equal: set[int] = set()
    for before, after in zip(layout.dim_axes, target.dim_axes, strict=True):
        pairs = zip(before, after, strict=False)
        equal.update(axis for axis, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    used = {axis for axes in (*layout.dim_axes, *target.dim_axes) for axis in axes} | set(_unreduced(layout, target))
    return tuple(sorted(used - equal))


def _unreduced(layout: Layout, target: Layout) -> tuple[int, ...]:
    """Return the axes that are partial in ``layout`` but not in ``target``."""
    return tuple(axis for axis, _ in layout.partials if not target.is_partial(axis))


def _candidate_steps(layout: Layout, target: Layout) -> Iterator[Step]:
    """Yield the steps that are considered from ``layout``."""
    unreduced = _unreduced(layout, target)
    if unreduced:
        yield AllReduce(layout, _without_partial(layout, unreduced), unreduced)
    yield from _reduce_scatters(layout, target, unreduced)
    yield from _gathers(layout)
    yield from _slices(layout, target)
    yield from _all_to_alls(layout, target)
    step = _single_step(layout, target)
    if not isinstance(step, ReduceExchange) or step.members * step.partial_values <= MAX_SUMMED:
        yield step


def _reduce_scatters(layout: Layout, target: Layout, unreduced: tuple[int, ...]) -> Iterator[Step]:
    for dim, (before, after) in enumerate(zip(layout.dim_axes, target.dim_axes, strict=True)):
        if not after and not before:
            continue
        missing = after[len(before) :]
        candidates: set[tuple[int, ...]] = {(axis,) for axis in unreduced}
        if missing and after[: len(before)] == before and set(missing) <= set(unreduced):
            candidates.add(missing)
        for axes in sorted(candidates):
            reduced = _without_partial(layout, axes)
            yield ReduceScatter(layout, _with_dim(reduced, dim, (*before, *axes)), axes)


def _gathers(layout: Layout) -> Iterator[Step]:
    for dim, axes in enumerate(layout.dim_axes):
        for kept in range(len(axes)):
            yield AllGather(layout, _with_dim(layout, dim, axes[:kept]), axes[kept:])


def _slices(layout: Layout, target: Layout) -> Iterator[Step]:
    used = {axis for axes in layout.dim_axes for axis in axes} | {axis for axis, _ in layout.partials}
    for dim, after in enumerate(target.dim_axes):
        for axis in after:
            if axis not in used:
                yield Slice(layout, _with_dim(layout, dim, (*layout.dim_axes[dim], axis)), ())


def _all_to_alls(layout: Layout, target: Layout) -> Iterator[Step]:
    for gathered, split in itertools.permutations(range(layout.ndim), 2):
        axes = layout.dim_axes[gathered]
        if axes and (target.dim_axes[split] or layout.dim_axes[split]):
            without = _with_dim(layout, gathered, axes[:-1])
            yield AllToAll(layout, _with_dim(without, split, (*layout.dim_axes[split], axes[-1])), axes[-1:])


def _with_dim(layout: Layout, dim: int, axes: tuple[int, ...]) -> Layout:
    dims: DimAxes = (*layout.dim_axes[:dim], axes, *layout.dim_axes[dim + 1 :])
    return Layout.of(layout.mesh, dims, layout.partials, layout.shape)


def _without_partial(layout: Layout, axes: tuple[int, ...]) -> Layout:
    kept = tuple(pair for pair in layout.partials if pair[0] not in axes)
    return Layout.of(layout.mesh, layout.dim_axes, kept, layout.shape)
