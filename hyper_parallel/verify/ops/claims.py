"""What a rule claims for one call on one mesh: every row, and on several axes every combination of rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.placements import Partial, Placement, Replicate, Shard
from hyper_parallel.core.shard.entry import Binder, binder
from hyper_parallel.core.shard.rule import OpCall, Operand, Ref, Row, Rule, Strategies, replicated_row
from hyper_parallel.core.shard.strategy import Choice, combine
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.verify.ops.shards import allows
from hyper_parallel.verify.ops.values import FilledSample, Slot, substitute

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.ops.reference import Case

__all__ = [
    "Claim",
    "SampleCall",
    "bind_sample",
    "claimed",
    "claims",
    "closed",
    "commute",
    "mesh_of",
    "possible",
    "row_text",
]


@dataclass(frozen=True)
class SampleCall:
    """One filled sample as its rule sees it, on one mesh, nothing placed yet.

    Attributes:
        rule: the operator's rule.
        call: the call; all operands whole.
        filled: its values.
    """

    rule: Rule
    call: OpCall
    filled: FilledSample

    def placed(self, layouts: Sequence[Layout], mesh: DeviceMesh) -> OpCall:
        """The same call with operands laid out, as a rank of ``mesh`` sees it."""
        operands = tuple(
            Operand(one.name, layout, one.dtype, one.floating)
            for one, layout in zip(self.call.operands, layouts, strict=True)
        )
        return OpCall(self.call.op, mesh, operands, self.call.args)


@dataclass(frozen=True)
class Claim:
    """One placement tuple that a rule says it computes without moving anything.

    Attributes:
        rows: a row per axis.
        choice: layouts of operands and outputs, and where whole operands vary.
        strategies: the answer that the rows come from.
    """

    rows: tuple[Row, ...]
    choice: Choice
    strategies: Strategies

    @property
    def places(self) -> tuple[tuple[Placement, ...], ...]:
        """Per operand its public placements."""
        return tuple(layout.placements for layout in self.choice.targets)


def mesh_of(shape: Sequence[int]) -> DeviceMesh:
    """A mesh to plan with, as rank 0 sees it."""
    count = 1
    for size in shape:
        count *= size
    return DeviceMesh.abstract(
        "cpu", tuple(shape), tuple(range(count)), tuple(f"m{axis}" for axis in range(len(shape)))
    )


def bind_sample(
    platform: Platform, rule: Rule, filled: FilledSample, mesh: DeviceMesh, tensors: Sequence[Any]
) -> SampleCall:
    """Bind the sample's arguments to the rule's parameters.

    Raises:
        TypeError: the sample does not fit the rule's signature.
    """
    found: Binder = binder(rule.signature)
    bound = found.bind(filled.args, filled.kwargs)
    operands: dict[int, Operand] = {}

    def refer(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)([refer(f"{name}[{index}]", item) for index, item in enumerate(value)])
        if not isinstance(value, Slot):
            return value
        array = filled.arrays[value.index]
        layout = Layout.of(mesh, ((),) * array.ndim, (), array.shape)
        tensor = tensors[value.index]
        operands[value.index] = Operand(name, layout, tensor.dtype, platform.is_floating(tensor))
        return Ref(value.index)

    args = {name: refer(name, value) for name, value in bound.items()}
    return SampleCall(
        rule, OpCall(rule.op, mesh, tuple(operands[index] for index in range(len(operands))), args), filled
    )


def claims(problem: SampleCall, strategies: Strategies) -> Iterator[Claim]:
    """Every combination of rows whose conditions the sizes meet, each order of axes that share a dim included."""
    rows = [row for row in dict.fromkeys(strategies.rows) if possible(row, problem.filled)]
    axes = problem.call.mesh.ndim
    for picked in itertools.product(rows, repeat=axes):
        if not commute(picked):
            continue
        for order in _orders(picked):
            choice = combine(problem.call, strategies, picked, order)
            if choice is not None:
                yield Claim(picked, choice, strategies)


def claimed(
    platform: Platform, rule: object, case: Case, shape: tuple[int, ...]
) -> tuple[SampleCall, Strategies] | None:
    """What ``rule`` claims of the case on a mesh of ``shape``, its operands whole.

    None where it is no rule, answers with whole layouts or a decomposition, or refuses the call.
    """
    if not isinstance(rule, Rule):
        return None
    problem = bind_sample(platform, rule, case.filled, mesh_of(shape), case.reference.tensors)
    try:
        found = rule.strategies(problem.call)
    except (ValueError, HyperParallelError):
        return None
    return (problem, found) if isinstance(found, Strategies) else None


def closed(strategies: Strategies, case: Case) -> Strategies:
    """What an operator claims whose results only its values tell: as many as the plain call returned, all whole."""
    if not strategies.open:
        return strategies
    outputs = case.reference.outputs
    return Strategies((replicated_row(len(case.filled.arrays), len(outputs)),), tuple(one.shape for one in outputs))


def possible(row: Row, filled: FilledSample) -> bool:
    """Leave out summands of kinds that the values cannot be split into."""
    pairs = zip(row.inputs, filled.arrays, strict=True)
    return all(not isinstance(place, Partial) or allows(array, place.reduce_op) for place, array in pairs)


def commute(picked: Sequence[Row]) -> bool:
    """Reductions of different kinds on different axes say different things in different orders: no layout has them."""
    places = [
        held for kind in ("inputs", "outputs") for held in zip(*(getattr(row, kind) for row in picked), strict=True)
    ]
    for held in places:
        kinds = {one.reduce_op for one in held if isinstance(one, Partial)}
        if len(kinds) > 1 and not kinds <= {"sum", "avg"}:
            return False
    return True


def _orders(picked: Sequence[Row]) -> Iterator[tuple[int, ...]]:
    axes = tuple(range(len(picked)))
    yield axes
    alike = len(axes) > 1 and all(row is picked[0] for row in picked)
    if alike and any(isinstance(place, Shard) for place in picked[0].inputs):
        yield axes[::-1]


def whole(layouts: Sequence[Layout]) -> bool:
    """True when every operand is replicated on every axis."""
    return all(isinstance(place, Replicate) for layout in layouts for place in layout.placements)


def filled_in(args: dict[str, Any], operands: Sequence[Any]) -> dict[str, Any]:
    """Bound arguments with operands in place of references."""

    def one(value: Any) -> Any:
        return operands[value.index] if isinstance(value, Ref) else value

    return {name: substitute(value, one) for name, value in args.items()}


def row_text(row: Row) -> str:
    """The row as reports write it."""
    outputs = row.outputs[:1] if len(set(row.outputs)) == 1 else row.outputs
    return f"{', '.join(map(str, row.inputs))} -> {', '.join(map(str, outputs))}"
