"""Transitions: the planned, cached steps from one layout to another, and from the gradient's layout back.

The gradient of a value has the dual layout: ``dual(Shard) = Shard``, ``dual(Replicate) = dual(Partial) = Replicate``.
Let a transition go from A to B, and let the other operands of its consumer differ along the axes V. Then the gradient
is redistributed from dual(B), with Partial(sum) on V, to dual(A). This second transition is the adjoint of the first;
the adjoint of the adjoint is the transition itself.
"""

from __future__ import annotations

import math
import threading
from fractions import Fraction
from typing import TYPE_CHECKING

from hyper_parallel._caches import register
from hyper_parallel.core.dtensor.cheapest_steps import Cost, cheapest_steps, cost_of
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.steps import AllReduce, Scale, Step, ToPartial
from hyper_parallel.errors import LayoutError, MeshMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Cost",
    "Transition",
    "average_divisor",
    "clear_transition_cache",
    "dual",
    "plan_gradient",
    "plan_transition",
]

_DUALS: dict[tuple[Layout, tuple[int, ...]], Layout] = {}
_TRANSITIONS: dict[tuple[Layout, Layout, tuple[int, ...]], Transition] = {}
# Maximum number of entries of each cache. A full cache is emptied, so shapes that never recur cannot fill the memory.
_MAX_CACHED = 16384
# Re-entrant: building a transition may build that of its second half.
_LOCK = threading.RLock()
register("layouts of gradients", _DUALS, lambda: _MAX_CACHED, has_layouts=True)
register("transitions", _TRANSITIONS, lambda: _MAX_CACHED, has_layouts=True)


class Transition:
    """The steps from ``source`` to ``target``, created by :func:`plan_transition` (cached) or :func:`plan_gradient`.

    Attributes:
        source: layout before.
        target: layout after.
        varying: axes, replicated in the target, along which the other operands of the consumer differ, so that the
            gradient is Partial.
        steps: the steps in order.
        extremum: the reduction by max, min, prod, all or any that comes first, or None. It is not linear. For max and
            min the gradient is that of ``linear``, masked to the ranks that hold the extremum; the others have none.
        linear: the transition after ``extremum``; the transition itself if there is none.
        communicates: True if any rank receives anything.
    """

    __slots__ = (
        "_adjoint",
        "_costs",
        "_gathered",
        "_trivial",
        "communicates",
        "extremum",
        "linear",
        "source",
        "steps",
        "target",
        "varying",
    )

    extremum: AllReduce | None

    def __init__(
        self,
        source: Layout,
        target: Layout,
        varying: tuple[int, ...],
        steps: tuple[Step, ...],
        linear: Transition | None = None,
        adjoint: Transition | None = None,
    ) -> None:
        self.source, self.target, self.varying, self.steps = source, target, varying, steps
        self.linear = self if linear is None else linear
        self.extremum = steps[0] if linear is not None and isinstance(steps[0], AllReduce) else None
        self.communicates = any(step.received for step in steps)
        self._adjoint = adjoint
        self._trivial: bool | None = None
        self._costs: dict[int, Cost] = {}
        self._gathered: frozenset[int] | None = None

    @property
    def is_identity(self) -> bool:
        """True if the local tensor stays as it is; its gradient may still need steps."""
        return not self.steps

    @property
    def adjoint(self) -> Transition:
        """The transition of the gradient.

        Raises:
            LayoutError: the transition reduces by max, min, prod, all or any, which is not linear; see ``linear``.
        """
        adjoint = self._adjoint
        if adjoint is None:
            with _LOCK:  # another thread may have built it
                adjoint = self._adjoint = self._adjoint or _adjoint_of(self)
        return adjoint

    @property
    def is_trivial(self) -> bool:
        """True if neither the value nor its gradient needs any step."""
        if self._trivial is None:
            self._trivial = not self.steps and self.extremum is None and self.adjoint.is_identity
        return self._trivial

    def cost(self, itemsize: int) -> Cost:
        """Return bytes and messages of the worst rank, for elements of ``itemsize`` bytes."""
        cost = self._costs.get(itemsize)
        if cost is None:
            cost = self._costs[itemsize] = cost_of(self.steps, itemsize)
        return cost

    @property
    def gathered(self) -> frozenset[int]:
        """The axes that split the source; none if the transition is not linear.

        A gradient that varies along one of them goes straight to the source, by a reduce-scatter.
        """
        if self._gathered is None:
            split = frozenset(axis for axes in self.source.dim_axes for axis in axes)
            self._gathered = split if self.extremum is None else frozenset()
        return self._gathered

    def gathers_along(self, axes: Sequence[int]) -> bool:
        """Return True if the source is sharded along one of ``axes``, and the transition is linear."""
        return not self.gathered.isdisjoint(axes)

    def __repr__(self) -> str:
        """Return layouts and steps in the notation of messages."""
        body = "; ".join(map(str, self.steps)) or "identity"
        return f"Transition({self.source.notation()} -> {self.target.notation()}: {body})"


def plan_transition(source: Layout, target: Layout, varying: Sequence[int] = ()) -> Transition:
    """Return the cheapest transition from ``source`` to ``target``.

    Args:
        source: layout with a global shape.
        target: layout of the same mesh and shape.
        varying: mesh axes, replicated in ``target``, along which the other operands of the consumer differ.

    Raises:
        MeshMismatchError: the layouts are on different meshes.
        LayoutError: shapes differ or are missing, a varying axis is not replicated, or partial values of reductions
            that do not commute would be reduced.
    """
    key = (source, target, tuple(varying))
    transition = _TRANSITIONS.get(key)
    if transition is None:
        with _LOCK:  # another thread may have built it
            transition = _TRANSITIONS.get(key) or _build(source, target, tuple(sorted(varying)))
            if len(_TRANSITIONS) >= _MAX_CACHED:
                _TRANSITIONS.clear()
            _TRANSITIONS[key] = transition
    return transition


def plan_gradient(layout: Layout, gradient: Layout) -> Transition:
    """Return the transition that keeps a value in ``layout`` and expects its gradient in ``gradient``.

    Args:
        layout: layout of the value.
        gradient: layout of the gradient: the dual of ``layout``, or the dual with Partial(sum) along more axes.
    """
    return Transition(layout, layout, (), (), adjoint=plan_transition(dual(layout), gradient))


def clear_transition_cache() -> None:
    """Empty the caches, so that every transition is planned again."""
    with _LOCK:
        _TRANSITIONS.clear()
        _DUALS.clear()


def _build(source: Layout, target: Layout, varying: tuple[int, ...]) -> Transition:
    _check(source, target, varying)
    if source.mesh.coordinate is None:
        return Transition(source, target, varying, ())  # a rank outside of the mesh has nothing to redistribute
    start, end = _without_unit_axes(source), _without_unit_axes(target)
    nonlinear = tuple(
        (axis, op) for axis, op in start.partials if op not in ("sum", "avg") and (axis, op) not in end.partials
    )
    if not nonlinear:
        return Transition(source, target, varying, _linear_steps(start, end))
    axes = tuple(axis for axis, _ in nonlinear)
    middle = Layout.of(start.mesh, start.dim_axes, [p for p in start.partials if p not in nonlinear], start.shape)
    rest = plan_transition(middle, target, varying)
    return Transition(source, target, varying, (AllReduce(start, middle, axes), *rest.steps), rest)


def _check(source: Layout, target: Layout, varying: tuple[int, ...]) -> None:
    if source.mesh is not target.mesh:
        msg = f"redistribute: source is on {source.mesh!r}, target on {target.mesh!r}"
        raise MeshMismatchError(msg)
    if source.shape is None or source.shape != target.shape:
        msg = (
            f"redistribute: shapes of source {source.notation()} and target {target.notation()} must be known and equal"
        )
        raise LayoutError(msg)
    for axis in varying:
        if target.is_partial(axis) or any(axis in axes for axes in target.dim_axes):
            name = target.mesh.names[axis]
            msg = f"redistribute: varying axis {name} must be replicated in the target {target.notation()}"
            raise LayoutError(msg)
    _check_reductions(_without_unit_axes(source), _without_unit_axes(target))


def _check_reductions(source: Layout, target: Layout) -> None:
    """Reject reductions that do not commute: a layout does not record their order."""
    if source.partials == target.partials:
        return
    for layout in (source, target):
        if len({"sum" if op == "avg" else op for _, op in layout.partials}) > 1:
            msg = f"redistribute: the reductions of {layout.notation()} do not commute, and their order is not known"
            raise LayoutError(msg)


def _without_unit_axes(layout: Layout) -> Layout:
    """Return the layout without axes of size one, along which nothing is split, reduced or sent."""
    sizes = layout.mesh.shape
    if 1 not in sizes:
        return layout
    dims = [tuple(axis for axis in axes if sizes[axis] > 1) for axes in layout.dim_axes]
    return Layout.of(layout.mesh, dims, [p for p in layout.partials if sizes[p[0]] > 1], layout.shape)


def _with_avg_as_sum(layout: Layout) -> Layout:
    """Return the layout with Partial(avg) written as Partial(sum)."""
    if all(op != "avg" for _, op in layout.partials):
        return layout
    return Layout.of(
        layout.mesh, layout.dim_axes, [(a, "sum" if op == "avg" else op) for a, op in layout.partials], layout.shape
    )


def average_divisor(layout: Layout) -> int:
    """Return the number of ranks over which ``layout`` averages."""
    return math.prod(layout.mesh.shape[axis] for axis, op in layout.partials if op == "avg")


def _linear_steps(source: Layout, target: Layout) -> tuple[Step, ...]:
    """Return steps between layouts; partial values of sums and averages are reduced, others are kept."""
    before, after = _with_avg_as_sum(source), _with_avg_as_sum(target)
    kept = [pair for pair in after.partials if pair in before.partials]
    steps = cheapest_steps(before, _target_before_to_partial(before, after, kept))
    new = tuple([axis for axis, op in after.partials if (axis, op) not in kept])
    middle = steps[-1].target if steps else before
    if before is source and after is target:  # nothing is averaged
        return (*steps, ToPartial(middle, target, new)) if new else steps
    factor = Fraction(average_divisor(target), average_divisor(source))
    if new:
        # The average of equal values is the value itself, so along axes that were replicated it needs no scale factor.
        replicated = {axis for axis in new if not any(axis in axes for axes in middle.dim_axes)}
        ops = [
            (axis, "avg" if op == "avg" and axis in replicated else summed)
            for (axis, op), (_, summed) in zip(target.partials, after.partials, strict=True)
        ]
        factor /= average_divisor(Layout.of(target.mesh, (), [pair for pair in ops if pair[0] in new]))
        partial = Layout.of(target.mesh, target.dim_axes, ops, target.shape)
        steps = (*steps, ToPartial(middle, partial, new))
    if factor < 1:
        return (Scale(source, before, (), factor), *steps)
    return (*steps, Scale(after, target, (), factor)) if factor > 1 else steps


def _target_before_to_partial(source: Layout, target: Layout, kept: Sequence[tuple[int, str]]) -> Layout:
    """Return the layout before the last step, which creates the new partial axes of ``target``.

    A new partial axis that shards a dim of ``source`` still shards it there, as the innermost axis of the dim.

    Embedding a shard in zeros needs no communication; gathering it first would.
    """
    if len(kept) == len(target.partials):
        return target
    dims = list(target.dim_axes)
    for axis, op in target.partials:
        if (axis, op) in kept or op != "sum":
            continue
        for dim, axes in enumerate(source.dim_axes):
            if axis in axes:
                dims[dim] = (*dims[dim], axis)
    return target.with_axes(tuple(dims), tuple(kept))


def dual(layout: Layout, varying: tuple[int, ...] = ()) -> Layout:
    """Return the layout of the gradient of a value laid out as ``layout``; it is Partial(sum) along ``varying``."""
    key = (layout, varying)
    gradient = _DUALS.get(key)
    if gradient is None:
        partials = [(axis, "sum") for axis in varying]
        gradient = Layout.of(layout.mesh, layout.dim_axes, partials, layout.shape)
        with _LOCK:
            if len(_DUALS) >= _MAX_CACHED:
                _DUALS.clear()
            _DUALS[key] = gradient
    return gradient


def _adjoint_of(forward: Transition) -> Transition:
    """Return the adjoint of ``forward``.

    Axes that are partial in the source of ``forward`` are replicated, and varying, in the target of the adjoint.
    """
    if forward.extremum is not None:
        msg = f"{forward!r} is not linear and has no adjoint"
        raise LayoutError(msg)
    source, target = _without_unit_axes(forward.source), _without_unit_axes(forward.target)
    # All copies of the maximum or minimum tie: each receives its share of the gradient, and the shares are summed.
    tied = {axis for axis, op in target.partials if op in ("max", "min") and (axis, op) not in source.partials}
    varying = tuple(sorted(tied | {axis for axis in forward.varying if forward.source.mesh.shape[axis] > 1}))
    start, end = dual(target, varying), dual(source)
    steps = _linear_steps(start, end)
    factor = Fraction(average_divisor(target), average_divisor(source))
    if factor != 1:
        steps = (*steps, Scale(end, end, (), factor))
    return Transition(start, end, tuple(axis for axis, _ in source.partials), steps, adjoint=forward)
