"""What plans cost: a change of the library by which values are still right, and more is sent, is noticed here.

Pure: no tensor, no ranks. Prices are added up from what each step says of itself.
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
from hyper_parallel.core.dtensor.steps import Step
from hyper_parallel.core.dtensor.transition import Transition, plan_transition
from hyper_parallel.core.shard.op_plan import plan_call
from hyper_parallel.core.shard.rule import OpCall, Operand, Ref, Rule, find_rule
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.verify.check import all_placements
from hyper_parallel.verify.ops.claims import mesh_of
from hyper_parallel.verify.redistribution import PARTIAL, SHAPE

__all__ = ["choice_costs", "plan_costs", "plans_come_in_time", "search_efforts"]

Costs = tuple[int, ...]
_ON_ONE, _ON_TWO = ((2,), (3,), (4,)), ((2, 3),)


def plan_costs() -> dict[str, Costs]:
    """Per mesh, over all changes of placement and their ways back.

    Plans, elements, elements of the worst ranks, messages, launches, steps, and what cutting and packing cost.
    """
    found = {}
    for shape in (*_ON_ONE, *_ON_TWO):
        found["x".join(map(str, shape))] = _added(_plans(_all_layouts(shape)))
    return found


def _all_layouts(shape: tuple[int, ...]) -> list[Layout]:
    mesh = mesh_of(shape)
    return [Layout.place(mesh, one, SHAPE) for one in all_placements(len(SHAPE), len(shape), partial=PARTIAL)]


def _plans(layouts: Sequence[Layout]) -> Iterator[Transition]:
    for source, target in itertools.product(layouts, layouts):
        try:
            there = plan_transition(source, target)
        except HyperParallelError:
            continue
        yield there
        yield there.linear.adjoint


def _added(plans: Iterator[Transition]) -> Costs:
    total = [0] * 7
    for one in plans:
        for index, price in enumerate(_price(one)):
            total[index] += price
    return tuple(total)


def _price(one: Transition) -> Costs:
    received = [[step.received_at(at) for at in coordinates(one.source.mesh)] for step in one.steps]
    return (
        1,
        sum(map(sum, received)),
        sum(map(max, received)),
        sum(step.messages for step in one.steps),
        sum(step.launches for step in one.steps),
        len(one.steps),
        sum(round(step.overhead * 1e13) for step in one.steps),
    )


def search_efforts() -> dict[str, Costs]:
    """Per mesh, over all changes of placement: layouts from which the search goes on, each once per plan."""
    found: dict[str, Costs] = {}
    for shape in _ON_TWO:
        layouts = _all_layouts(shape)
        transition.forget_transitions()
        with _looks() as looked:
            for _ in _plans(layouts):
                pass
        found["x".join(map(str, shape))] = (len(looked),)
    return found


@contextlib.contextmanager
def _looks() -> Iterator[list[Layout]]:
    """Layouts from which the search goes on meanwhile."""
    looked: list[Layout] = []
    moves = cheapest_steps._moves  # noqa: SLF001 - nothing else tells how far it goes

    def seen(layout: Layout, target: Layout) -> Iterator[Step]:
        looked.append(layout)
        return moves(layout, target)

    cheapest_steps._moves = seen  # noqa: SLF001 - put back below
    try:
        yield looked
    finally:
        cheapest_steps._moves = moves  # noqa: SLF001 - as it was


def plans_come_in_time() -> Iterator[str]:
    """The search goes on from so many layouts and no more, and has a plan by then, if not the cheapest."""
    mesh, most = mesh_of((2, 3)), cheapest_steps.MOST_STATES
    source = Layout.of(mesh, ((), ()), ((0, "sum"), (1, "sum")), (12, 12))
    target = Layout.of(mesh, ((0,), (1,)), (), (12, 12))
    try:
        for cheapest_steps.MOST_STATES in (1, 2, 3):
            with _looks() as looked:
                steps = cheapest_steps.cheapest_steps(source, target)
            if len(looked) != cheapest_steps.MOST_STATES or steps[-1].target is not target:
                yield f"{len(looked)} layouts looked at of {cheapest_steps.MOST_STATES}: {[str(one) for one in steps]}"
    finally:
        cheapest_steps.MOST_STATES = most


@dataclass(frozen=True)
class _Call:
    """An operator, shapes of its operands, and its other arguments."""

    op: str
    shapes: tuple[tuple[int, ...], ...]
    others: tuple[tuple[str, Any], ...] = ()
    in_place: bool = False

    def price(self, layouts: Sequence[Layout]) -> Costs | None:
        """Where operands go and results lie, as numbers; None where the call is refused."""
        rule = find_rule(self.op)
        assert isinstance(rule, Rule)
        names = [name.strip().partition("=")[0] for name in rule.signature.split(",")]
        operands = tuple(Operand(name, layout) for name, layout in zip(names, layouts, strict=False))
        args = {**{one.name: Ref(index) for index, one in enumerate(operands)}, **dict(self.others)}
        try:
            chosen = plan_call(OpCall(self.op, layouts[0].mesh, operands, args), rule, in_place=self.in_place).choice
        except HyperParallelError:
            return None
        moves = [plan_transition(now, target) for now, target in zip(layouts, chosen.targets, strict=True)]
        pieces = sum(math.prod(one.local_shape_at(at)) for one in chosen.outputs for at in coordinates(one.mesh))
        pending = sum(len(one.partials) for one in chosen.outputs)
        return (1, *_added(iter(moves)), pieces, pending, sum(map(len, chosen.varying)))


_CALLS = (
    _Call("add", ((6, 5), (6, 5)), (("alpha", 1),)),
    _Call("add", ((6, 5), (6, 5)), (("alpha", 1),), in_place=True),
    _Call("mul", ((5, 1), (12,))),
    _Call("matmul", ((5, 6), (6, 7))),
    _Call("softmax", ((6, 7),), (("dim", 1),)),
    _Call("view", ((12, 5),), (("shape", (3, 4, 5)),)),
    _Call("view", ((4, 6),), (("shape", (24,)),)),
)


def choice_costs() -> dict[str, Costs]:
    """Per call and mesh, over all placements of all operands: what is sent, and how much the results are."""
    found = {}
    for call, shape in itertools.product(_CALLS, ((3,), (2, 3))):
        mesh = mesh_of(shape)
        total: list[int] = []
        options = [_layouts(mesh, one) for one in call.shapes]
        for layouts in itertools.product(*options):
            price = call.price(layouts)
            if price is not None:
                total = [a + b for a, b in itertools.zip_longest(total, price, fillvalue=0)]
        found[f"{call.op}{list(call.shapes)} {shape}"] = tuple(total)
    return found


def _layouts(mesh: DeviceMesh, shape: tuple[int, ...]) -> list[Layout]:
    kinds = ("sum", "max", "avg") if mesh.ndim == 1 else ("sum", "max")
    return [Layout.place(mesh, one, shape) for one in all_placements(len(shape), mesh.ndim, partial=kinds)]
