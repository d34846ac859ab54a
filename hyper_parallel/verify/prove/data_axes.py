"""Checks the groups of ``fully_shard``: parameters are all-gathered before use, gradients averaged over the ranks.

The inputs are layouts, the ranks and axes of the collectives that ran, factors, and positions in the flat buffers that
are communicated; the code that made them is not called. The steps are checked by
:mod:`~hyper_parallel.verify.prove.step_checker`. The copies of tensors into the buffers and out of them are tested, not
proven.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.steps import AllGather, AllReduce, ReduceScatter, Scale
from hyper_parallel.core.dtensor.transition import dual
from hyper_parallel.verify.prove.laws import UnprovenError
from hyper_parallel.verify.prove.step_checker import check_steps, interval

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.events import Event
    from hyper_parallel.core.dtensor.steps import Step

__all__ = ["GroupProof", "prove_groups"]


@dataclass
class GroupProof:
    """Proofs of the collectives of ``fully_shard``.

    Attributes:
        steps: number of steps by kind and by the proof that covers them.
        collectives: proven collectives, each as module, collective and axes.
        axes: names of the axes over which gradients are averaged.
        wrong: differences from one device, with the module.
    """

    steps: Counter[str] = field(default_factory=Counter)
    collectives: set[tuple[str, str, tuple[str, ...]]] = field(default_factory=set)
    axes: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)


def prove_groups(
    groups: Iterable[tuple[str, Any]], events: Sequence[Event], axes_of: Callable[[Sequence[int]], tuple[str, ...]]
) -> GroupProof:
    """Return the proofs for groups of parameters.

    Args:
        groups: pairs of module path and group.
        events: collectives that ran in the step.
        axes_of: returns the names of the mesh axes along which the given ranks lie.
    """
    found = GroupProof()
    proofs: dict[_Facts, list[tuple[str, str]]] = {}
    ran_in: dict[str, set[tuple[str, tuple[str, ...]]]] = {}
    for event in events:
        if not event.source:
            ran_in.setdefault(event.module, set()).add((event.collective, event.axes))
    for path, group in groups:
        options = group.options
        ran = ran_in.get(path, set())
        data, replicas = axes_of(options.ranks), axes_of(options.replicas)
        reduced = {("reduce_scatter", data)} if len(options.ranks) > 1 else set()
        reduced |= {("all_reduce", replicas)} if len(options.replicas) > 1 else set()
        known = reduced | ({("all_gather", data)} if len(options.ranks) > 1 else set())
        has_gradient = any(
            member.sharded.grad is not None or member.accumulated is not None for member in group.members
        )
        try:
            for collective, axes in sorted(reduced - ran) if has_gradient else ():
                _refuse(f"no {collective} over {', '.join(axes)} runs, which its gradients need")
            for member in group.members:
                facts = _Facts.of(group, member)
                if facts not in proofs:
                    proofs[facts] = _proven(facts)
                found.steps.update(f"{kind} of fully_shard {proof}" for kind, proof in proofs[facts])
            _check_rows(group)
        except UnprovenError as error:
            found.wrong.append(f"{path or '(model)'}: fully_shard: {error}")
            continue
        found.collectives |= {(path, *each) for each in known & ran}
        found.axes |= {*data, *replicas}
    return found


def _refuse(why: str) -> None:
    raise UnprovenError(why)


@dataclass(frozen=True)
class _Facts:
    """The facts from which the steps of a parameter are proven; equal layers have equal facts.

    Attributes:
        sharded: layout of the parameter.
        slot: its slot in the flat buffer, with offset 0.
        ranks: ranks over which it is sharded.
        replicas: ranks that have the same shard.
        divisor: factor by which the sum of its gradients is divided.
    """

    sharded: Layout
    slot: Any
    ranks: tuple[int, ...]
    replicas: tuple[int, ...]
    divisor: Fraction

    @classmethod
    def of(cls, group: Any, member: Any) -> _Facts:
        """Return the facts of a parameter of a group."""
        options, divisor = group.options, Fraction(group.divide_factor or group.options.count)
        slot = replace(member.slot, offset=0)
        return cls(member.sharded.layout, slot, tuple(options.ranks), tuple(options.replicas), divisor)


def _proven(facts: _Facts) -> list[tuple[str, str]]:
    """Return the steps of one parameter and of its gradient, with the proof of each."""
    sharded, slot = facts.sharded, facts.slot
    data, replicas = _axes_along(sharded, facts.ranks), _axes_along(sharded, facts.replicas)
    dims = [tuple(axis for axis in axes if axis not in data) for axes in sharded.dim_axes]
    whole = Layout.of(sharded.mesh, dims, (), sharded.shape)
    size, counts = whole.local_shape[slot.dim] if slot.shape else 1, [slot.ranks]
    parts = [interval(size, counts, [rank]) for rank in range(slot.ranks)]
    if tuple(slot.shape) != whole.local_shape or [slot.length(rank) for rank in range(slot.ranks)] != [
        stop - start for start, stop in parts
    ]:
        _refuse(f"a parameter {list(slot.shape)} is cut otherwise than {sharded.notation()} says")
    averaged = Layout.of(whole.mesh, dims, [(axis, "avg") for axis in sorted((*data, *replicas))], whole.shape)
    scattered = Layout.of(whole.mesh, sharded.dim_axes, [(axis, "avg") for axis in replicas], whole.shape)
    gather: list[Step] = [AllGather(sharded, whole, data)] if data else []
    reduce: list[Step] = [ReduceScatter(averaged, scattered, data)] if data else []
    target = dual(sharded)
    reduce += [AllReduce(scattered, target, replicas)] if replicas else []
    reduce.append(Scale(target, target, (), 1 / facts.divisor))
    return check_steps(sharded, whole, gather) + check_steps(averaged, target, reduce)


def _axes_along(layout: Layout, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the axes of the layout's mesh along which these ranks lie; none for one rank."""
    mesh = layout.mesh
    for count in range(1, mesh.ndim + 1) if len(ranks) > 1 else ():
        for axes in itertools.combinations(range(mesh.ndim), count):
            if tuple(mesh.ranks_along(axes)) == tuple(ranks):
                return axes
    if len(ranks) > 1:
        _refuse(f"a parameter {layout.notation()} is on no axis of the ranks that share it")
    return ()


def _check_rows(group: Any) -> None:
    """Raise an error if slots of parameters overlap in a flat buffer, or leave gaps."""
    for plan in (group.plan, group.gradient_plan):
        ends = [0, *(slot.offset + slot.size for slot in plan.slots)]
        if [slot.offset for slot in plan.slots] != ends[:-1] or plan.row != ends[-1]:
            _refuse("parameters overlap in a row")
