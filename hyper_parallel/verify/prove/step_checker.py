"""Checks whether the steps of a redistribution preserve the value that the layouts denote.

The steps are plain data: their layouts, axes and boxes (index ranges per dim) are read, and the planner is not called.
A collective is checked by a law that is valid for every size and number of ranks (``docs/proofs.md``). An exchange of
boxes is checked at the sizes of its layouts, on all ranks: every element of a target box arrives exactly once, from a
rank that has the element, and each partial value of a sum is counted exactly once.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from hyper_parallel.core.dtensor.exchange import Exchange, ReduceExchange
from hyper_parallel.core.dtensor.steps import AllGather, AllReduce, AllToAll, ReduceScatter, Scale, Slice, ToPartial
from hyper_parallel.verify.prove.laws import UnprovenError

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.core.dtensor.steps import Step
    from hyper_parallel.core.dtensor.transition import Transition

__all__ = ["AT_SIZES", "BY_LAW", "TooManyRanksError", "check_gradient", "check_steps", "check_transition", "interval"]

BY_LAW = "for every size"
AT_SIZES = "at these sizes"
_MOST_CHECKS = 1 << 12
"""Maximum number of ranks whose boxes are checked in one exchange, in all groups of communicating ranks together."""

_Dims = tuple[tuple[int, ...], ...]
_Box = tuple[tuple[int, int], ...]
_Partials = dict[int, str]


class TooManyRanksError(UnprovenError):
    """No law applies, and there are too many ranks to check their boxes."""


def interval(size: int, counts: Sequence[int], at: Sequence[int]) -> tuple[int, int]:
    """Return the index range of a rank's shard along a dim.

    Several axes may split the dim, outermost first: each divides the range of the previous one into blocks of equal
    size, rounded up.

    Args:
        size: size of the dim.
        counts: numbers of ranks along the axes that split it.
        at: the rank's index on each of these axes.
    """
    start, stop = 0, size
    for count, index in zip(counts, at, strict=True):
        share = -(-(stop - start) // count)
        start, stop = min(start + index * share, stop), min(start + (index + 1) * share, stop)
    return start, stop


def check_transition(transition: Transition) -> list[tuple[str, str]]:
    """Return kind and proof of each step of a transition and of its backward.

    Raises:
        UnprovenError: a step is wrong.
        TooManyRanksError: no law applies to a step, and too many ranks take part to check their boxes.
    """
    source, target = transition.source, transition.target
    found = check_steps(source, target, transition.steps)
    linear = transition.linear
    adjoint = linear.adjoint
    before, after = _dims_of(linear.source), _dims_of(linear.target)
    shared = {axis for axis in linear.varying if linear.source.mesh.shape[axis] > 1}
    # After a step from replicate to a partial maximum, all ranks attain it: each gets a share of the gradient.
    extrema = _partials_of(linear.target).items() - _partials_of(linear.source).items()
    shared |= {axis for axis, op in extrema if op in ("max", "min")}
    given, wanted = adjoint.source, adjoint.target
    if (_dims_of(given), _partials_of(given)) != (after, dict.fromkeys(sorted(shared), "sum")):
        msg = f"the gradient starts as {given.notation()}"
        raise UnprovenError(msg)
    if (_dims_of(wanted), _partials_of(wanted)) != (before, {}):
        msg = f"the gradient ends as {wanted.notation()}"
        raise UnprovenError(msg)
    return found + check_gradient(adjoint)


def check_gradient(adjoint: Transition) -> list[tuple[str, str]]:
    """Return kind and proof of each step of ``adjoint``, a redistribution of a gradient."""
    forward = adjoint.adjoint
    # An average over n ranks: the gradient with respect to one rank's term is the average's gradient divided by n.
    scale = Fraction(_divisor(forward.source), _divisor(forward.target))
    return check_steps(adjoint.source, adjoint.target, adjoint.steps, scale)


def check_steps(
    source: Layout, target: Layout, steps: Sequence[Step], scale: Fraction | None = None
) -> list[tuple[str, str]]:
    """Return kind and proof of each step.

    Args:
        source: layout before the steps.
        target: layout after the steps.
        steps: steps from ``source`` to ``target``.
        scale: ratio of the final value to the initial value; None if both layouts denote the same value.

    Raises:
        UnprovenError: a step is wrong.
        TooManyRanksError: no law applies to a step, and too many ranks take part to check their boxes.
    """
    state = _State(source)
    found = [(type(step).__name__, state.after(step)) for step in steps]
    wanted = Fraction(1, _divisor(target)) if scale is None else scale / _divisor(source)
    if (state.dims, state.partials) != (_dims_of(target), _partials_of(target)):
        msg = f"the steps do not lead to {target.notation()}"
        raise UnprovenError(msg)
    if state.factor != wanted:
        msg = f"the result is {wanted / state.factor} of the value"
        raise UnprovenError(msg)
    return found


class _State:
    """Placement of the value after some steps: ``factor`` times the reduction of the ranks' shards is the value."""

    def __init__(self, layout: Layout) -> None:
        self.counts, self.shape = layout.mesh.shape, layout.shape or ()
        self.dims, self.partials = _dims_of(layout), _partials_of(layout)
        self.factor = Fraction(1, _divisor(layout))

    def after(self, step: Step) -> str:
        """Apply ``step`` and return its proof."""
        try:
            return self._after(step)
        except UnprovenError as error:
            msg = f"{step}: {error}"
            raise type(error)(msg) from None

    def _after(self, step: Step) -> str:
        dims, partials = _dims_of(step.target), _partials_of(step.target)
        _require((_dims_of(step.source), _partials_of(step.source)) == (self.dims, self.partials), "starts elsewhere")
        self._check_order(partials)
        evidence = BY_LAW
        match step:
            case Scale():
                _require((dims, partials) == (self.dims, self.partials), "a factor changes no layout")
                self.factor /= step.factor
            case ToPartial():
                self._to_partial(step, dims, partials)
            case AllReduce():
                _require(dims == self.dims, "a reduction moves nothing")
                self._reduced(step.axes, partials)
            case ReduceScatter():
                dim = self._changed(dims)
                _require(dims[dim] == (*self.dims[dim], *step.axes), "each rank gets another share of the sum")
                _require(self._reduced(step.axes, partials) == {"sum"}, "only sums are scattered")
            case AllGather():
                dim = self._changed(dims)
                _require((*dims[dim], *step.axes) == self.dims[dim], "shards are joined in another order")
                _require(partials == self.partials, "a gather reduces nothing")
            case AllToAll():
                self._all_to_all(step.axes, dims)
                _require(partials == self.partials, "it reduces nothing")
            case Slice():
                evidence = self._slice(dims)
                _require(partials == self.partials, "a slice reduces nothing")
            case Exchange():
                _require(partials == self.partials, "it reduces nothing")
                evidence = self._exchange(step, dims)
            case ReduceExchange():
                evidence = self._reduce_exchange(step, dims, partials)
            case _:
                msg = "no law of such a step"
                raise UnprovenError(msg)
        self.dims, self.partials = dims, partials
        return evidence

    def _check_order(self, partials: _Partials) -> None:
        """Check that no reduction begins or ends while a different one, such as a maximum and a sum, is pending.

        The two would not commute.
        """
        _require(
            partials == self.partials or len({*partials.values(), *self.partials.values()}) == 1,
            "reductions that do not commute",
        )

    def _changed(self, dims: _Dims) -> int:
        """Return the only dim that other axes split after the step than before."""
        changed = [dim for dim, (old, new) in enumerate(zip(self.dims, dims, strict=True)) if old != new]
        _require(len(changed) == 1, "more than one dim changes")
        return changed[0]

    def _reduced(self, axes: Sequence[int], partials: _Partials) -> set[str]:
        """Return the reduction over ``axes``; exactly these axes must be partial before the step but not after it."""
        kept = {axis: op for axis, op in self.partials.items() if axis not in axes}
        _require(partials == kept and set(axes) <= set(self.partials), "it reduces along other axes")
        ops = {self.partials[axis] for axis in axes}
        _require(len(ops) == 1, "it reduces by several operations")
        return ops

    def _all_to_all(self, axes: Sequence[int], dims: _Dims) -> None:
        changed = [dim for dim, (old, new) in enumerate(zip(self.dims, dims, strict=True)) if old != new]
        _require(len(axes) == 1 and len(changed) == 2, "it moves one axis between two dims")
        fits = [
            (*dims[gathered], *axes) == self.dims[gathered] and (*self.dims[split], *axes) == dims[split]
            for gathered, split in (changed, changed[::-1])
        ]
        _require(any(fits), "the axis is not the innermost of both dims")

    def _to_partial(self, step: Step, dims: _Dims, partials: _Partials) -> None:
        """Check a step to partial.

        A shard becomes partial if it is padded with zeros. Of replicated values, a partial sum keeps one and replaces
        the others by zeros; a partial average or maximum keeps all.
        """
        new = {axis: op for axis, op in partials.items() if axis not in self.partials}
        labels = dict(step.target.partials)
        _require({**self.partials, **new} == partials and set(new) == set(step.axes), "it makes other partial values")
        for dim, (old, kept) in enumerate(zip(self.dims, dims, strict=True)):
            gone = old[len(kept) :]
            _require(old[: len(kept)] == kept and set(gone) <= set(new), f"dim {dim} is embedded at another place")
            _require(all(new[axis] == "sum" for axis in gone), "zeros are neutral in sums only")
        for axis in new:
            if labels[axis] == "avg" and not any(axis in axes for axes in self.dims):
                self.factor /= self.counts[axis]

    # -- boxes ----------------------------------------------------------------------------------------------------

    def _box(self, dims: _Dims, at: Sequence[int]) -> _Box:
        return tuple(
            interval(size, [self.counts[axis] for axis in axes], [at[axis] for axis in axes])
            for size, axes in zip(self.shape, dims, strict=True)
        )

    def _slice(self, dims: _Dims) -> str:
        if all(new[: len(old)] == old for old, new in zip(self.dims, dims, strict=True)):
            return BY_LAW
        axes = sorted({axis for axes in (*self.dims, *dims) for axis in axes})
        for at in self._positions(axes, (0,) * len(self.counts)):
            target = self._box(dims, at)
            _require(not _filled(target) or _inside(target, self._box(self.dims, at)), f"rank at {at} lacks elements")
        return AT_SIZES

    def _positions(self, axes: Sequence[int], origin: Sequence[int]) -> list[tuple[int, ...]]:
        """Return all positions in the mesh that equal ``origin`` except along ``axes``, row-major."""
        if math.prod(self.counts[axis] for axis in axes) > _MOST_CHECKS:
            msg = "too many ranks to look at"
            raise TooManyRanksError(msg)
        found = []
        for indices in itertools.product(*(range(self.counts[axis]) for axis in axes)):
            at = list(origin)
            for axis, index in zip(axes, indices, strict=True):
                at[axis] = index
            found.append(tuple(at))
        return found

    def _slices(self, step: Step, dims: _Dims) -> Iterator[tuple[tuple[int, ...], list[_Box], list[_Box]]]:
        """Yield each distinct slice of the mesh along the step's axes, as origin and its ranks' boxes before and after.

        Slices that differ only along axes that split no dim have equal boxes; one of them is yielded.
        """
        kept = self.partials.keys() & _partials_of(step.target).keys()
        _require(kept.isdisjoint(step.axes), "it crosses partial values")
        split = {axis for axes in (*self.dims, *dims) for axis in axes}
        every = self._positions(sorted(split | set(step.axes)), (0,) * len(self.counts))
        origins = dict.fromkeys(tuple(0 if axis in step.axes else i for axis, i in enumerate(at)) for at in every)
        for origin in origins:
            members = self._positions(step.axes, origin)
            yield origin, [self._box(self.dims, at) for at in members], [self._box(dims, at) for at in members]

    def _exchange(self, step: Exchange, dims: _Dims) -> str:
        for origin, held, wanted in self._slices(step, dims):
            received: dict[tuple[int, _Box], list[int]] = {}
            for box, sender, receiver in step.transfers(origin):
                received.setdefault((receiver, box), []).append(sender)
            for receiver, target in enumerate(wanted):
                for cell in _cells(target, held):
                    senders = received.pop((receiver, cell), [])
                    _require(len(senders) <= 1, f"{cell} comes {len(senders)} times")
                    holder = senders[0] if senders else receiver
                    _require(_inside(cell, held[holder]), f"nobody who has {cell} sends it")
            _require(not received, "a rank receives what it does not need")
        return AT_SIZES

    def _reduce_exchange(self, step: ReduceExchange, dims: _Dims, partials: _Partials) -> str:
        reduced = [axis for axis in self.partials if axis not in partials]
        _require(self._reduced(reduced, partials) == {"sum"}, "only sums are exchanged")
        _require(set(reduced) <= set(step.axes), "partial values are in other slices")
        for origin, held, wanted in self._slices(step, dims):
            members = self._positions(step.axes, origin)
            number = {at: index for index, at in enumerate(members)}
            groups = {tuple(number[each] for each in self._positions(reduced, at)) for at in members
                      if not any(at[axis] for axis in reduced)}  # fmt: skip
            sums: dict[int, set[_Box]] = {receiver: set() for receiver in range(len(members))}
            counted = Counter[int]()
            for box, reducer, holders, receivers in step.reduced_boxes(origin):
                _require(tuple(sorted(holders)) in {tuple(sorted(group)) for group in groups}, f"{box} is not one sum")
                _require(reducer in holders, f"{box} is summed by a rank without a partial value")
                _require(all(_inside(box, held[holder]) for holder in holders), f"{box} lacks a partial value")
                for receiver in receivers:
                    sums[receiver].add(box)
                    counted[receiver] += 1
            for receiver, target in enumerate(wanted):
                _require(counted[receiver] == len(sums[receiver]), "a sum comes twice")
                for cell in _cells(target, [*held, *wanted]):
                    inside = sorted(box for box in sums[receiver] if _inside(box, cell))
                    _require(_tile(cell, inside), f"the sums of {cell} do not fill it")
                    sums[receiver] -= set(inside)
                _require(not sums[receiver], "a rank receives what it does not need")
        return AT_SIZES


def _require(condition: bool, why: str) -> None:
    if not condition:
        raise UnprovenError(why)


def _dims_of(layout: Layout) -> _Dims:
    """Return the axes that split each dim, leaving out axes of size 1."""
    return tuple(tuple(axis for axis in axes if layout.mesh.shape[axis] > 1) for axes in layout.dim_axes)


def _partials_of(layout: Layout) -> _Partials:
    """Return the partial reduction by axis, leaving out axes of size 1; ``avg`` becomes ``sum``, see ``_divisor``."""
    sizes = layout.mesh.shape
    return {axis: "sum" if op == "avg" else op for axis, op in layout.partials if sizes[axis] > 1}


def _divisor(layout: Layout) -> int:
    return math.prod(layout.mesh.shape[axis] for axis, op in layout.partials if op == "avg")


def _cells(box: _Box, boxes: Sequence[_Box]) -> Iterator[_Box]:
    """Yield the cells into which the edges of ``boxes`` divide ``box``."""
    intervals = []
    for dim, (start, stop) in enumerate(box):
        edges = sorted({edge for other in boxes for edge in other[dim] if start < edge < stop} | {start, stop})
        intervals.append(list(itertools.pairwise(edges)))
    yield from itertools.product(*intervals)


def _filled(box: _Box) -> bool:
    return all(start < stop for start, stop in box)


def _inside(inner: _Box, outer: _Box) -> bool:
    return all(c <= a < b <= d for (a, b), (c, d) in zip(inner, outer, strict=True))


def _tile(cell: _Box, boxes: Sequence[_Box]) -> bool:
    """Return whether sorted ``boxes`` fill ``cell`` without overlap, adjacent to each other along one dim."""
    if not boxes:
        return False
    dim = next((dim for dim, part in enumerate(boxes[0]) if part != cell[dim]), None)
    if dim is None:
        return list(boxes) == [cell]
    edges = [cell[dim][0], *(box[dim][1] for box in boxes)]
    parts = [(*cell[:dim], part, *cell[dim + 1 :]) for part in itertools.pairwise(edges)]
    return list(boxes) == parts and edges[-1] == cell[dim][1]
