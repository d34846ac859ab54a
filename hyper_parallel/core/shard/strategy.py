"""Chooses the cheapest row for each mesh axis and combines the rows into layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placements import Partial, Placement, Replicate, Shard
from hyper_parallel.core.dtensor.transition import plan_transition

if TYPE_CHECKING:
    from hyper_parallel.core.shard.rule import LayoutOptions, OpCall, Row, Strategies

__all__ = ["Choice", "cheapest", "choose", "combine", "move_cost", "varying_operands"]

IMPOSSIBLE = math.inf


@dataclass(frozen=True)
class Choice:
    """The layouts that the local call needs of its operands, and the layouts of its outputs.

    Attributes:
        targets: layout per operand.
        outputs: layout per output.
        varying: per operand, the axes on which it is replicated but another operand is not.
    """

    targets: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    varying: tuple[tuple[int, ...], ...]


def choose(call: OpCall, strategies: Strategies, *, in_place: bool = False) -> Choice | None:
    """Choose the cheapest row per axis.

    Args:
        call: the call.
        strategies: result of the rule: rows, and shapes of the outputs.
        in_place: True if the first operand is written; its layout cannot change then.

    Returns:
        the choice, or None if no row keeps the layout of the operand that is written.
    """
    cuts: dict[tuple[int, int], int] = {}
    chosen_rows: list[Row] = []
    for axis in range(call.mesh.ndim):
        best = _cheapest(call, strategies.rows, axis, cuts, in_place=in_place)
        if best is None:
            return None
        chosen_rows.append(best)
        _count_cuts(best, call.mesh.shape[axis], cuts)
    choice = _expand(call, strategies, chosen_rows, in_place=in_place)
    return choice if not in_place or _keeps_written_layout(call, choice) else None


def combine(call: OpCall, strategies: Strategies, picked: Sequence[Row], order: Sequence[int]) -> Choice | None:
    """Combine one row per axis into layouts; axes that share a dim split it in ``order``.

    Args:
        call: the call.
        strategies: result of the rule, with the shapes of the outputs.
        picked: a row per axis.
        order: every axis, outermost first.

    Returns:
        the choice, or None if the sizes violate a condition of a row.
    """
    cuts: dict[tuple[int, int], int] = {}
    for axis, row in enumerate(picked):
        if not _row_applies(call, row, axis, cuts):
            return None
        _count_cuts(row, call.mesh.shape[axis], cuts)
    return _combine_rows(call, strategies, picked, order)


def _count_cuts(row: Row, size: int, cuts: dict[tuple[int, int], int]) -> None:
    for index, place in enumerate(row.inputs):
        if isinstance(place, Shard):
            key = (index, place.dim)
            cuts[key] = cuts.get(key, 1) * size


def cheapest(call: OpCall, listed: LayoutOptions) -> Choice:
    """Choose the option with the lowest cost; among equals the one that moves fewest operands, then the first."""
    best = min(listed.options, key=lambda option: _option_cost(call, *option))
    varying = varying_operands(call, best[0]) if listed.varying is None else listed.varying
    return Choice(best[0], best[1], varying)


def _option_cost(
    call: OpCall, targets: tuple[Layout, ...], outputs: tuple[Layout, ...], declared: float | None
) -> tuple[float, int]:
    del outputs
    moves = [(operand.layout, target) for operand, target in zip(call.operands, targets, strict=True)]
    cost = (
        float(sum(plan_transition(now, target).cost(1).bytes for now, target in moves))
        if declared is None
        else declared
    )
    return cost, sum(now is not target for now, target in moves)


def varying_operands(call: OpCall, layouts: Sequence[Layout]) -> tuple[tuple[int, ...], ...]:
    """Return for each operand the axes on which it is replicated but another operand is not."""
    placements = [[layout.placement_on(axis) for layout in layouts] for axis in range(call.mesh.ndim)]
    return tuple(
        tuple(
            axis
            for axis, on_axis in enumerate(placements)
            if on_axis[index].is_replicate() and not all(placement.is_replicate() for placement in on_axis)
        )
        for index in range(len(layouts))
    )


def _keeps_written_layout(call: OpCall, choice: Choice) -> bool:
    """Whether the written operand keeps its layout: the same axes in the same order, and the same shape."""
    first = call.operands[0].layout
    return choice.targets[0] is first and choice.outputs[0] is first


def _cheapest(
    call: OpCall, rows: Sequence[Row], axis: int, cuts: dict[tuple[int, int], int], *, in_place: bool
) -> Row | None:
    best: Row | None = None
    best_cost: tuple[float, ...] = (IMPOSSIBLE,)  # rows that cost this much are never chosen
    for row in rows:
        if in_place and not _keeps_first(call, row, axis):
            continue
        if not _row_applies(call, row, axis, cuts):
            continue
        cost = _row_cost(call, row, axis)
        if cost < best_cost:
            best, best_cost = row, cost
    return best


def _keeps_first(call: OpCall, row: Row, axis: int) -> bool:
    now = call.operands[0].layout.placement_on(axis)
    return row.inputs[0] == now and row.outputs[0] == now


def _row_applies(call: OpCall, row: Row, axis: int, cuts: dict[tuple[int, int], int]) -> bool:
    size = call.mesh.shape[axis]
    for index, dim in row.even:
        if call.operands[index].shape[dim] % (cuts.get((index, dim), 1) * size):
            return False
    for index, dim, other in row.sizes:
        if other % (cuts.get((index, dim), 1) * size):
            return False
    if not all(_is_split_into(cuts.get((index, dim), 1), size, *wanted) for index, dim, *wanted in row.cut):
        return False
    return all(
        _never_empty(call.operands[index].shape[dim], cuts.get((index, dim), 1), size) for index, dim in row.full
    )


def _is_split_into(cut: int, size: int, parts: int, rest: int | None = None) -> bool:
    if rest is None:
        return cut == parts
    return cut % parts == 0 and rest % (cut // parts * size) == 0


def _never_empty(size: int, cut: int, parts: int) -> bool:
    # Several axes split a dim into nested chunks; none of these is sure to be non-empty unless all are equal.
    if cut > 1:
        return size > 0 and size % (cut * parts) == 0
    return size > -(-size // parts) * (parts - 1)


def _row_cost(call: OpCall, row: Row, axis: int) -> tuple[float, int]:
    current = [(operand.layout.placement_on(axis), math.prod(operand.shape)) for operand in call.operands]
    moves = [(now, wanted, count) for (now, count), wanted in zip(current, row.inputs, strict=True) if now != wanted]
    return sum(move_cost(*move, call.mesh.shape[axis]) for move in moves), len(moves)


def move_cost(now: Placement, wanted: Placement, elements: int, size: int) -> float:  # noqa: PLR0911 - a table
    """Return the cost of changing the placement of one operand along one axis.

    Args:
        now: present placement of the operand.
        wanted: placement of the operand in the row.
        elements: number of elements of the operand.
        size: the number of ranks on the axis.

    Returns:
        the number of elements that one rank receives.
    """
    if now == wanted:
        return 0.0
    if isinstance(now, Replicate):
        # No communication: a shard is a local slice, which also reduces the work.
        return 0.0
    if isinstance(now, Partial):
        if isinstance(wanted, Partial):
            return IMPOSSIBLE
        share = (size - 1) / size * elements
        return share if isinstance(wanted, Shard) and now.reduce_op in {"sum", "avg"} else 2 * share
    if isinstance(wanted, Replicate):
        return (size - 1) / size * elements
    if isinstance(wanted, Shard):
        return (size - 1) / size / size * elements
    return (size - 1) / size * elements  # a shard is gathered before it becomes partial


def _expand(call: OpCall, strategies: Strategies, chosen_rows: list[Row], *, in_place: bool) -> Choice:
    return _combine_rows(call, strategies, chosen_rows, _axis_order(call, chosen_rows, in_place=in_place))


def _combine_rows(call: OpCall, strategies: Strategies, chosen_rows: Sequence[Row], order: Sequence[int]) -> Choice:
    targets = tuple(
        _layout(call, [row.inputs[index] for row in chosen_rows], operand.shape, order)
        for index, operand in enumerate(call.operands)
    )
    outputs = tuple(
        _layout(call, [row.outputs[index] for row in chosen_rows], shape, order)
        for index, shape in enumerate(strategies.outputs)
    )
    return Choice(targets, outputs, tuple(_varying(chosen_rows, index) for index in range(len(call.operands))))


def _axis_order(call: OpCall, chosen_rows: list[Row], *, in_place: bool) -> list[int]:
    """The order in which axes split a dim that they share: as in the largest operand that they already split.

    The order of an operand that is written in place takes precedence, because that operand cannot be redistributed.
    """
    first = call.operands[0]
    order = list(range(call.mesh.ndim))
    for operand in sorted(call.operands, key=lambda operand: (in_place and operand is first, math.prod(operand.shape))):
        for axes in operand.layout.dim_axes:
            if len({id(chosen_rows[axis]) for axis in axes}) == 1:
                rest = sorted(order.index(axis) for axis in axes)
                for position, axis in zip(rest, axes, strict=True):
                    order[position] = axis
    return order


def _layout(call: OpCall, places: list[Placement], shape: Sequence[int], order: Sequence[int]) -> Layout:
    dims: list[list[int]] = [[] for _ in shape]
    for axis in order:
        place = places[axis]
        if isinstance(place, Shard):
            dims[place.dim].append(axis)
    partials = [(axis, place.reduce_op) for axis, place in enumerate(places) if isinstance(place, Partial)]
    return Layout.of(call.mesh, dims, partials, shape)


def _varying(chosen_rows: Sequence[Row], index: int) -> tuple[int, ...]:
    return tuple(
        axis
        for axis, row in enumerate(chosen_rows)
        if isinstance(row.inputs[index], Replicate) and any(not isinstance(place, Replicate) for place in row.inputs)
    )
