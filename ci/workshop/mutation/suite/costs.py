"""Costs of plans: detects mutants that give right values but communicate more.

No tensor and no rank is involved: costs are added up from the steps of plans.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor import cheapest_steps, transition
from hyper_parallel.core.dtensor.boxes import coordinates
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.transition import Transition, plan_transition
from hyper_parallel.core.shard.op_plan import plan_call
from hyper_parallel.core.shard.rule import OpCall, Operand, Ref, Rule, find_rule
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.verify.checker.function import all_placements
from hyper_parallel.verify.checker.redistribution import PARTIAL, SHAPE
from hyper_parallel.verify.ops.claims import mesh_of

__all__ = ["Costs", "choice_costs", "late_plans", "plan_costs", "search_efforts"]

Costs = tuple[int, ...]
_ON_ONE, _ON_TWO = ((2,), (3,), (4,)), ((2, 3),)
_ROW = (1, 2)
"""A tensor of which most ranks hold nothing, and those at the ends of a mesh need no more than they hold."""


def plan_costs() -> dict[str, Costs]:
    """Return the costs per mesh of all changes of placement and their adjoints.

    Plans, elements, bytes of the worst ranks, messages, launches, steps, and the overhead of cutting and packing.
    """
    result = {"x".join(map(str, shape)): _total(_plans(_all_layouts(shape))) for shape in (*_ON_ONE, *_ON_TWO)}
    empty = {f"{_ROW} on {size}": _total(_plans(_all_layouts((size,), _ROW))) for (size,) in _ON_ONE}
    return result | empty


def _all_layouts(shape: tuple[int, ...], tensor: tuple[int, ...] = SHAPE) -> list[Layout]:
    mesh = mesh_of(shape)
    options = all_placements(len(tensor), len(shape), partial=PARTIAL)
    return [Layout.place(mesh, placements, tensor) for placements in options]


def _plans(layouts: Sequence[Layout]) -> Iterator[Transition]:
    for source, target in itertools.product(layouts, layouts):
        try:
            plan = plan_transition(source, target)
        except HyperParallelError:
            continue
        yield plan
        yield plan.linear.adjoint


def _total(plans: Iterator[Transition]) -> Costs:
    total = [0] * 7
    for plan in plans:
        for index, cost in enumerate(_plan_costs(plan)):
            total[index] += cost
    return tuple(total)


def _plan_costs(plan: Transition) -> Costs:
    cost = plan.cost(4)
    return (
        1,
        sum(step.received_at(at) for step in plan.steps for at in coordinates(plan.source.mesh)),
        cost.bytes,
        cost.messages,
        cost.launches,
        len(plan.steps),
        sum(round(step.overhead * 1e13) for step in plan.steps),
    )


def search_efforts() -> dict[str, Costs]:
    """Return the number of layouts per mesh that the search expands, over all changes of placement."""
    efforts: dict[str, Costs] = {}
    for shape in _ON_TWO:
        layouts = _all_layouts(shape)
        transition.clear_transition_cache()
        with _expanded_layouts() as expanded:
            for _ in _plans(layouts):
                pass
        efforts["x".join(map(str, shape))] = (len(expanded),)
    return efforts


@contextlib.contextmanager
def _expanded_layouts() -> Iterator[list[Layout]]:
    """Collect the layouts that the search expands inside."""
    expanded: list[Layout] = []
    moves = cheapest_steps._moves_from  # noqa: SLF001 - nothing else shows how far the search goes

    def recorded(layout: Layout, target: Layout) -> Any:
        expanded.append(layout)
        return moves(layout, target)

    cheapest_steps._moves_from = recorded  # noqa: SLF001 - restored below
    try:
        yield expanded
    finally:
        cheapest_steps._moves_from = moves  # noqa: SLF001 - as above


def late_plans() -> Iterator[str]:
    """Yield limits of the search that it does not keep: it must expand no more layouts, and have a plan by then."""
    mesh, most = mesh_of((2, 3)), cheapest_steps.MAX_STATES
    source = Layout.of(mesh, ((), ()), ((0, "sum"), (1, "sum")), (12, 12))
    target = Layout.of(mesh, ((0,), (1,)), (), (12, 12))
    try:
        for cheapest_steps.MAX_STATES in (1, 2, 3):
            with _expanded_layouts() as expanded:
                steps = cheapest_steps.cheapest_steps(source, target)
            if len(expanded) != cheapest_steps.MAX_STATES or steps[-1].target is not target:
                texts = [str(step) for step in steps]
                yield f"{len(expanded)} layouts expanded of {cheapest_steps.MAX_STATES}: {texts}"
    finally:
        cheapest_steps.MAX_STATES = most


@dataclass(frozen=True)
class _CostedCall:
    """An operator, shapes of its operands, and its other arguments."""

    op: str
    shapes: tuple[tuple[int, ...], ...]
    others: tuple[tuple[str, Any], ...] = ()
    in_place: bool = False

    def costs(self, layouts: Sequence[Layout]) -> Costs | None:
        """Return the costs of redistributing operands and the sizes of results; None where the call is refused."""
        rule = find_rule(self.op)
        assert isinstance(rule, Rule)
        names = [name.strip().partition("=")[0] for name in rule.signature.split(",")]
        operands = tuple(Operand(name, layout) for name, layout in zip(names, layouts, strict=False))
        args = {**{operand.name: Ref(index) for index, operand in enumerate(operands)}, **dict(self.others)}
        try:
            choice = plan_call(OpCall(self.op, layouts[0].mesh, operands, args), rule, in_place=self.in_place).choice
        except HyperParallelError:
            return None
        plans = [plan_transition(source, target) for source, target in zip(layouts, choice.targets, strict=True)]
        elements = sum(
            math.prod(output.local_shape_at(at)) for output in choice.outputs for at in coordinates(output.mesh)
        )
        partial_axes = sum(len(output.partials) for output in choice.outputs)
        return (1, *_total(iter(plans)), elements, partial_axes, sum(map(len, choice.varying)))


_CALLS = (
    _CostedCall("add", ((6, 5), (6, 5)), (("alpha", 1),)),
    _CostedCall("add", ((6, 5), (6, 5)), (("alpha", 1),), in_place=True),
    _CostedCall("mul", ((5, 1), (12,))),
    _CostedCall("matmul", ((5, 6), (6, 7))),
    _CostedCall("softmax", ((6, 7),), (("dim", 1),)),
    _CostedCall("view", ((12, 5),), (("shape", (3, 4, 5)),)),
    _CostedCall("view", ((4, 6),), (("shape", (24,)),)),
)


def choice_costs() -> dict[str, Costs]:
    """Return the costs per call and mesh, over all placements of all operands."""
    costs_by_call = {}
    for call, shape in itertools.product(_CALLS, ((3,), (2, 3))):
        mesh = mesh_of(shape)
        total: list[int] = []
        options = [_layouts(mesh, operand_shape) for operand_shape in call.shapes]
        for layouts in itertools.product(*options):
            costs = call.costs(layouts)
            if costs is not None:
                total = [a + b for a, b in itertools.zip_longest(total, costs, fillvalue=0)]
        costs_by_call[f"{call.op}{list(call.shapes)} {shape}"] = tuple(total)
    return costs_by_call


def _layouts(mesh: DeviceMesh, shape: tuple[int, ...]) -> list[Layout]:
    kinds = ("sum", "max", "avg") if mesh.ndim == 1 else ("sum", "max")
    options = all_placements(len(shape), mesh.ndim, partial=kinds)
    return [Layout.place(mesh, placements, shape) for placements in options]
