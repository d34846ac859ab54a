"""Plans: how a value gets from one layout to another, and how its gradient gets back. Pure and cached.

The gradient of a value lives in the dual layout: ``dual(Shard) = Shard``, ``dual(Replicate) = dual(Partial) =
Replicate``. A plan from A to B whose consumer differs along the axes V sends its gradient back by the plan from
dual(B), with Partial(sum) on V, to dual(A). The adjoint of an adjoint is the plan it came from.
"""

from __future__ import annotations

import math
import threading
from fractions import Fraction
from typing import TYPE_CHECKING

from hyper_parallel.core.dtensor.cheapest_steps import Cost, cheapest_steps, cost_of
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.steps import AllReduce, Scale, Step, ToPartial
from hyper_parallel.errors import LayoutError, MeshMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Cost", "Transition", "dual", "forget_transitions", "plan_transition"]

# Layouts are interned, so two threads that race here write the same object.
_DUALS: dict[tuple[Layout, tuple[int, ...]], Layout] = {}
_PLANS: dict[tuple[Layout, Layout, tuple[int, ...]], Transition] = {}
# Sizes that never come again must not fill the memory: beyond so many all are forgotten, and made when asked for again.
_MOST_KEPT = 16384
# Re-entrant: building a plan may build the plan of its second half.
_LOCK = threading.RLock()


class Transition:
    """Steps from ``source`` to ``target``; made by :func:`plan` only, one object per question.

    Attributes:
        source: layout of what goes in.
        target: layout of what comes out.
        varying: axes, replicated in the target, along which the consumer differs: the gradient arrives as summands.
        steps: what to do, in order.
        extremum: the reduction by max, min, prod, all or any that comes first, or None; it is not linear, so the
            plan's gradient is that of ``linear`` masked to the ranks that attained it.
        linear: the plan without that reduction; the plan itself where there is none.
        communicates: True when any rank receives anything.
    """

    __slots__ = (
        "_adjoint",
        "_costs",
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
    ) -> None:
        self.source, self.target, self.varying, self.steps = source, target, varying, steps
        self.linear = self if linear is None else linear
        self.extremum = steps[0] if linear is not None and isinstance(steps[0], AllReduce) else None
        self.communicates = any(step.received for step in steps)
        self._adjoint: Transition | None = None
        self._trivial: bool | None = None
        self._costs: dict[int, Cost] = {}

    @property
    def is_identity(self) -> bool:
        """True when the local tensor comes out as it went in; its gradient may need work all the same."""
        return not self.steps

    @property
    def adjoint(self) -> Transition:
        """The plan of the gradient.

        Raises:
            LayoutError: the plan reduces by max, min, prod, all or any, which is not linear; see ``linear``.
        """
        found = self._adjoint
        if found is None:
            with _LOCK:  # another thread may have come first
                found = self._adjoint = self._adjoint or _adjoint_of(self)
        return found

    @property
    def is_trivial(self) -> bool:
        """True when neither the value nor its gradient needs anything."""
        if self._trivial is None:
            self._trivial = not self.steps and self.extremum is None and self.adjoint.is_identity
        return self._trivial

    def cost(self, itemsize: int) -> Cost:
        """Bytes and messages of the worst rank, for elements of ``itemsize`` bytes."""
        found = self._costs.get(itemsize)
        if found is None:
            found = self._costs[itemsize] = cost_of(self.steps, itemsize)
        return found

    def gathers_along(self, axes: Sequence[int]) -> bool:
        """True when a gradient that varies along ``axes`` had better go straight to the source: one of them gathers."""
        gathered = {axis for held in self.source.dim_axes for axis in held}
        return self.extremum is None and any(axis in gathered for axis in axes)

    def __repr__(self) -> str:
        """The steps, in the one notation."""
        body = "; ".join(map(str, self.steps)) or "identity"
        return f"Plan({self.source.notation()} -> {self.target.notation()}: {body})"


def plan_transition(source: Layout, target: Layout, varying: Sequence[int] = ()) -> Transition:
    """The cheapest way from ``source`` to ``target``.

    Args:
        source: layout with a global shape.
        target: layout of the same mesh and shape.
        varying: mesh axes, replicated in ``target``, along which the consumer's operands differ.

    Raises:
        MeshMismatchError: the layouts live on different meshes.
        LayoutError: shapes differ or are missing, a varying axis is not replicated, or reductions that do not
            commute meet.
    """
    key = (source, target, tuple(varying))
    found = _PLANS.get(key)
    if found is None:
        with _LOCK:  # another thread may have come first
            found = _PLANS.get(key) or _build(source, target, tuple(sorted(varying)))
            if len(_PLANS) >= _MOST_KEPT:
                _PLANS.clear()
            _PLANS[key] = found
    return found


def forget_transitions() -> None:
    """Make every plan anew from here on."""
    with _LOCK:
        _PLANS.clear()
        _DUALS.clear()


def _build(source: Layout, target: Layout, varying: tuple[int, ...]) -> Transition:
    _check(source, target, varying)
    start, end = _essential(source), _essential(target)
    nonlinear = tuple((a, op) for a, op in start.partials if op not in ("sum", "avg") and (a, op) not in end.partials)
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
    placed = {axis for axes in target.dim_axes for axis in axes} | {axis for axis, _ in target.partials}
    for axis in varying:
        if axis in placed:
            name = target.mesh.names[axis]
            msg = f"redistribute: varying axis {name} must be replicated in the target {target.notation()}"
            raise LayoutError(msg)
    _check_reductions(_essential(source), _essential(target))


def _check_reductions(source: Layout, target: Layout) -> None:
    """Nobody said which of two reductions that do not commute comes first, so nobody may guess."""
    if source.partials == target.partials:
        return
    for layout in (source, target):
        if len({"sum" if op == "avg" else op for _, op in layout.partials}) > 1:
            msg = f"redistribute: the reductions of {layout.notation()} do not commute, and their order is not known"
            raise LayoutError(msg)


def _essential(layout: Layout) -> Layout:
    """The same layout without axes of size one, along which there is nothing to split, reduce or send."""
    sizes = layout.mesh.shape
    dims = [tuple(axis for axis in axes if sizes[axis] > 1) for axes in layout.dim_axes]
    return Layout.of(layout.mesh, dims, [p for p in layout.partials if sizes[p[0]] > 1], layout.shape)


def _summed(layout: Layout) -> Layout:
    """The layout with Partial(avg) written as Partial(sum)."""
    return Layout.of(
        layout.mesh, layout.dim_axes, [(a, "sum" if op == "avg" else op) for a, op in layout.partials], layout.shape
    )


def _averaged(layout: Layout) -> int:
    """Number of ranks over which ``layout`` averages."""
    return math.prod(layout.mesh.shape[axis] for axis, op in layout.partials if op == "avg")


def _linear_steps(source: Layout, target: Layout) -> tuple[Step, ...]:
    """Steps between layouts that owe sums and averages, or keep what else they owe."""
    before, after = _summed(source), _summed(target)
    kept = [pair for pair in after.partials if pair in before.partials]
    steps = cheapest_steps(before, _embeddable(before, after, kept))
    factor = Fraction(_averaged(target), _averaged(source))
    fresh = tuple(axis for axis, op in after.partials if (axis, op) not in kept)
    if fresh:
        middle = steps[-1].target if steps else before
        # An average of equal values is that value: axes that were replicated keep it instead of scaling a summand.
        replicated = {a for a in fresh if not any(a in axes for axes in middle.dim_axes)}
        ops = [(a, "avg" if op == "avg" and a in replicated else s) for (a, op), (_, s) in _paired(target, after)]
        factor /= _averaged(Layout.of(target.mesh, (), [p for p in ops if p[0] in fresh]))
        spread = Layout.of(target.mesh, target.dim_axes, ops, target.shape)
        steps = (*steps, ToPartial(middle, spread, fresh))
    if factor < 1:
        return (Scale(source, before, (), factor), *steps)
    return (*steps, Scale(after, target, (), factor)) if factor > 1 else steps


def _paired(target: Layout, after: Layout) -> zip[tuple[tuple[int, str], tuple[int, str]]]:
    return zip(target.partials, after.partials, strict=True)


def _embeddable(source: Layout, target: Layout, kept: Sequence[tuple[int, str]]) -> Layout:
    """``target`` before its new partial axes are made: an axis that splits a dim keeps doing so, innermost.

    Embedding a shard in zeros needs no communication, gathering it first would.
    """
    dims = list(target.dim_axes)
    for axis, op in target.partials:
        if (axis, op) in kept or op != "sum":
            continue
        for dim, axes in enumerate(source.dim_axes):
            if axis in axes:
                dims[dim] = (*dims[dim], axis)
    return Layout.of(target.mesh, dims, kept, target.shape)


def dual(layout: Layout, varying: tuple[int, ...] = ()) -> Layout:
    """Layout of the gradient of a value laid out as ``layout``; summands are pending along ``varying``."""
    key = (layout, varying)
    found = _DUALS.get(key)
    if found is None:
        partials = [(axis, "sum") for axis in varying]
        found = Layout.of(layout.mesh, layout.dim_axes, partials, layout.shape)
        if len(_DUALS) >= _MOST_KEPT:
            _DUALS.clear()
        _DUALS[key] = found
    return found


def _adjoint_of(forward: Transition) -> Transition:
    """The gradient's plan. What was partial is replicated in the dual and used per rank, hence varying."""
    if forward.extremum is not None:
        msg = f"{forward!r} is not linear and has no adjoint"
        raise LayoutError(msg)
    source, target = _essential(forward.source), _essential(forward.target)
    # Copies that all hold the extremum tie, and each gets its share of the gradient: the shares add up.
    tied = {axis for axis, op in target.partials if op in ("max", "min") and (axis, op) not in source.partials}
    varying = tuple(sorted(tied | {axis for axis in forward.varying if forward.source.mesh.shape[axis] > 1}))
    start, end = dual(target, varying), dual(source)
    steps = _linear_steps(start, end)
    factor = Fraction(_averaged(target), _averaged(source))
    if factor != 1:
        steps = (*steps, Scale(end, end, (), factor))
    back = Transition(start, end, tuple(axis for axis, _ in source.partials), steps)
    back._adjoint = forward  # noqa: SLF001 - the pair is made here
    return back
