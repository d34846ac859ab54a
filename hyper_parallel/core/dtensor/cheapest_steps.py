"""Which steps: the cheapest way from one layout to another, structured collectives and exchanges priced alike.

A best-first search over layouts (A*). What a rank still lacks bounds every way on from below, so the search follows
few moves; an exchange, which must be cut into boxes to be priced, is looked at only from where it could win.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hyper_parallel.core.dtensor.boxes import contains, coordinates, intersect, volume
from hyper_parallel.core.dtensor.exchange import Exchange, ReduceExchange
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placements import DimAxes
from hyper_parallel.core.dtensor.steps import AllGather, AllReduce, AllToAll, ReduceScatter, Slice, Step

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Cost", "cheapest_steps", "cost_of"]

# Only the ratios matter. Latency is set low on purpose: a message counts as much as ten bytes and the start of a
# collective as twenty, so bytes decide and the rest settles near-ties. Layouts know no dtype, so plans are chosen for
# four-byte elements.
SECONDS_PER_BYTE = 1e-10
SECONDS_PER_MESSAGE = 1e-9
SECONDS_PER_LAUNCH = 2e-9
# Of plans whose worst ranks receive the same, the one that loads the network less.
MEAN_LOAD_WEIGHT = 0.05
PLANNING_ITEMSIZE = 4
SECONDS_PER_ELEMENT = PLANNING_ITEMSIZE * SECONDS_PER_BYTE
MOST_STATES = 2000


@dataclass(frozen=True)
class Cost:
    """What the worst rank receives.

    Attributes:
        bytes: bytes received.
        messages: messages waited for.
        launches: collectives started.
    """

    bytes: int
    messages: int
    launches: int = 0

    @property
    def seconds(self) -> float:
        """A figure to compare plans by."""
        return self.bytes * SECONDS_PER_BYTE + self.messages * SECONDS_PER_MESSAGE + self.launches * SECONDS_PER_LAUNCH


def cost_of(steps: Iterable[Step], itemsize: int) -> Cost:
    """Sum over ``steps``, each at its worst rank."""
    steps = tuple(steps)
    return Cost(
        sum(step.received for step in steps) * itemsize,
        sum(step.messages for step in steps),
        sum(step.launches for step in steps if step.received),
    )


def cheapest_steps(source: Layout, target: Layout) -> tuple[Step, ...]:
    """Cheapest steps; partial axes of ``target`` are partial in ``source`` too, all others that are owe a sum."""
    if source is target:
        return ()
    best: tuple[Step, ...] = ()
    bound = math.inf
    frontier: list[tuple[float, float, int, Layout, tuple[Step, ...]]] = [(0.0, 0.0, 0, source, ())]
    done: set[Layout] = set()
    ticket = itertools.count()
    while frontier:
        least, spent, _, layout, steps = heapq.heappop(frontier)
        if least >= bound or len(done) >= MOST_STATES:
            break
        if layout in done:
            continue
        done.add(layout)
        for step in _moves(layout, target):
            price = spent + _price(step)
            if step.target is target:
                best, bound = ((*steps, step), price) if price < bound else (best, bound)
            elif step.target not in done:
                least = price + _lacking(step.target, target)
                heapq.heappush(frontier, (least, price, next(ticket), step.target, (*steps, step)))
    return best


def _lacking(layout: Layout, target: Layout) -> float:
    """A price that no way from here can beat: some rank must still receive what it lacks."""
    corners = itertools.product(*({0, size - 1} for size in layout.mesh.shape))
    boxes = ((target.box_at(at), layout.box_at(at)) for at in corners)
    worst = max(volume(wanted) - volume(intersect(wanted, held)) for wanted, held in boxes)
    return worst * SECONDS_PER_ELEMENT


def _price(step: Step) -> float:
    """Seconds, with a little for every step, so that of two equal plans the shorter and simpler one wins."""
    shared = MEAN_LOAD_WEIGHT * sum(step.loads) / len(step.loads) * SECONDS_PER_ELEMENT
    return cost_of((step,), PLANNING_ITEMSIZE).seconds + shared + step.overhead


def _direct(layout: Layout, target: Layout) -> Step:
    """The one step that always exists."""
    if _owed(layout, target):
        return ReduceExchange(layout, target, _slice_axes(layout, target))
    if all(contains(layout.box_at(at), target.box_at(at)) for at in coordinates(layout.mesh)):
        return Slice(layout, target, ())
    return Exchange(layout, target, _slice_axes(layout, target))


def _slice_axes(layout: Layout, target: Layout) -> tuple[int, ...]:
    """Axes whose meaning changes: along the others every rank minds its own part, replica or term of a sum."""
    settled: set[int] = set()
    for held, wanted in zip(layout.dim_axes, target.dim_axes, strict=True):
        pairs = zip(held, wanted, strict=False)
        settled.update(axis for axis, other in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    used = {axis for axes in (*layout.dim_axes, *target.dim_axes) for axis in axes} | set(_owed(layout, target))
    return tuple(sorted(used - settled))


def _owed(layout: Layout, target: Layout) -> tuple[int, ...]:
    return tuple(axis for axis, _ in layout.partials if not target.is_partial(axis))


def _moves(layout: Layout, target: Layout) -> Iterator[Step]:
    owed = _owed(layout, target)
    if owed:
        yield AllReduce(layout, _without_partial(layout, owed), owed)
    yield from _reduce_scatters(layout, target, owed)
    yield from _gathers(layout)
    yield from _slices(layout, target)
    yield from _all_to_alls(layout, target)
    yield _direct(layout, target)


def _reduce_scatters(layout: Layout, target: Layout, owed: tuple[int, ...]) -> Iterator[Step]:
    for dim, wanted in enumerate(target.dim_axes):
        if not wanted and not layout.dim_axes[dim]:
            continue
        held = layout.dim_axes[dim]
        suffix = wanted[len(held) :]
        candidates: set[tuple[int, ...]] = {(axis,) for axis in owed}
        if suffix and wanted[: len(held)] == held and set(suffix) <= set(owed):
            candidates.add(suffix)
        for axes in sorted(candidates):
            reduced = _without_partial(layout, axes)
            yield ReduceScatter(layout, _with_dim(reduced, dim, (*held, *axes)), axes)


def _gathers(layout: Layout) -> Iterator[Step]:
    for dim, held in enumerate(layout.dim_axes):
        for kept in range(len(held)):
            yield AllGather(layout, _with_dim(layout, dim, held[:kept]), held[kept:])


def _slices(layout: Layout, target: Layout) -> Iterator[Step]:
    used = {axis for axes in layout.dim_axes for axis in axes} | {axis for axis, _ in layout.partials}
    for dim, wanted in enumerate(target.dim_axes):
        for axis in wanted:
            if axis not in used:
                yield Slice(layout, _with_dim(layout, dim, (*layout.dim_axes[dim], axis)), ())


def _all_to_alls(layout: Layout, target: Layout) -> Iterator[Step]:
    for left, right in itertools.permutations(range(layout.ndim), 2):
        held = layout.dim_axes[left]
        if held and (target.dim_axes[right] or layout.dim_axes[right]):
            without = _with_dim(layout, left, held[:-1])
            yield AllToAll(layout, _with_dim(without, right, (*layout.dim_axes[right], held[-1])), held[-1:])


def _with_dim(layout: Layout, dim: int, axes: tuple[int, ...]) -> Layout:
    dims: DimAxes = (*layout.dim_axes[:dim], axes, *layout.dim_axes[dim + 1 :])
    return Layout.of(layout.mesh, dims, layout.partials, layout.shape)


def _without_partial(layout: Layout, axes: tuple[int, ...]) -> Layout:
    kept = tuple(pair for pair in layout.partials if pair[0] not in axes)
    return Layout.of(layout.mesh, layout.dim_axes, kept, layout.shape)
