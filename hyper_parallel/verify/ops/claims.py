"""Claims of a rule: operand placements for which it says that one call on one mesh needs no communication.

On one axis, each row of the rule is a claim; on several axes, each combination of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyper_parallel._tree import tree_map_named
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.placements import Partial, Placement, Shard
from hyper_parallel.core.shard.entry import Binder, binder
from hyper_parallel.core.shard.rule import OpCall, Operand, Ref, Row, Rule, Strategies, replicated_row
from hyper_parallel.core.shard.strategy import Choice, combine
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.verify.checker.shards import can_be_partial
from hyper_parallel.verify.ops.values import FilledSample, Slot, substitute

if TYPE_CHECKING:
    from hyper_parallel.core.shard.op_plan import OpPlan
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.ops.reference import Case

__all__ = [
    "Claim",
    "SampleCall",
    "axis_rows",
    "bind_sample",
    "case_strategies",
    "claims",
    "fits_values",
    "mesh_of",
    "reductions_commute",
    "row_text",
    "with_known_outputs",
]


@dataclass(frozen=True)
class SampleCall:
    """A sample with values, as a call of its rule on one mesh with all operands replicated.

    Attributes:
        rule: the operator's rule.
        call: the call.
        filled: the sample with its values.
    """

    rule: Rule
    call: OpCall
    filled: FilledSample

    def with_layouts(self, layouts: Sequence[Layout], mesh: DeviceMesh) -> OpCall:
        """Return the call with operands in ``layouts``, for the rank that ``mesh`` belongs to."""
        operands = tuple(
            Operand(operand.name, layout, operand.dtype, operand.floating)
            for operand, layout in zip(self.call.operands, layouts, strict=True)
        )
        return OpCall(self.call.op, mesh, operands, self.call.args)


@dataclass(frozen=True)
class Claim:
    """Placements of the operands for which, according to the rule, ranks compute the result without communication.

    Attributes:
        rows: a row per axis.
        choice: layouts of operands and outputs, and the mesh axes over which gradients of operands are summed.
        strategies: the return value of the rule, with the rows.
    """

    rows: tuple[Row, ...]
    choice: Choice
    strategies: Strategies

    @property
    def places(self) -> tuple[tuple[Placement, ...], ...]:
        """The placements of every operand, one per axis."""
        return tuple(layout.placements for layout in self.choice.targets)


def mesh_of(shape: Sequence[int]) -> DeviceMesh:
    """Return a mesh for planning, as rank 0 has it."""
    count = 1
    for size in shape:
        count *= size
    return DeviceMesh.abstract(
        "cpu", tuple(shape), tuple(range(count)), tuple(f"m{axis}" for axis in range(len(shape)))
    )


def bind_sample(
    platform: Platform, rule: Rule, filled: FilledSample, mesh: DeviceMesh, tensors: Sequence[Any]
) -> SampleCall:
    """Bind the arguments of a sample to the parameters of its rule.

    Raises:
        TypeError: the sample's arguments do not match the rule's signature.
    """
    signature: Binder = binder(rule.signature)
    bound = signature.bind(filled.args, filled.kwargs)
    operands: dict[int, Operand] = {}

    def reference_to(name: str, value: Any) -> Any:
        if not isinstance(value, Slot):
            return value
        array = filled.arrays[value.index]
        layout = Layout.of(mesh, ((),) * array.ndim, (), array.shape)
        tensor = tensors[value.index]
        operands[value.index] = Operand(name, layout, tensor.dtype, platform.is_floating(tensor))
        return Ref(value.index)

    args = {name: tree_map_named(reference_to, name, value) for name, value in bound.items()}
    return SampleCall(
        rule, OpCall(rule.op, mesh, tuple(operands[index] for index in range(len(operands))), args), filled
    )


def claims(sample_call: SampleCall, strategies: Strategies) -> Iterator[Claim]:
    """Yield all combinations of rows whose conditions the sizes meet, in each order of axes that shard the same dim."""
    rows = [row for row in dict.fromkeys(strategies.rows) if fits_values(row, sample_call.filled)]
    axes = sample_call.call.mesh.ndim
    for picked in itertools.product(rows, repeat=axes):
        if not reductions_commute(picked):
            continue
        for order in _orders(picked):
            choice = combine(sample_call.call, strategies, picked, order)
            if choice is not None:
                yield Claim(picked, choice, strategies)


def case_strategies(
    platform: Platform, rule: object, case: Case, shape: tuple[int, ...]
) -> tuple[SampleCall, Strategies] | None:
    """Return the call of a case on a mesh of ``shape`` and the rule's strategies for it.

    Returns None if ``rule`` is not a :class:`Rule`, if it returns layouts of the mesh or a decomposition, or if it
    refuses the call.
    """
    if not isinstance(rule, Rule):
        return None
    sample_call = bind_sample(platform, rule, case.filled, mesh_of(shape), case.reference.tensors)
    try:
        strategies = rule.strategies(sample_call.call)
    except (ValueError, HyperParallelError):
        return None
    return (sample_call, strategies) if isinstance(strategies, Strategies) else None


def with_known_outputs(strategies: Strategies, case: Case) -> Strategies:
    """Return ``strategies``; if the number or sizes of outputs depend on values, with the outputs of the reference.

    The rule of such an operator replicates all its outputs.
    """
    if not strategies.open:
        return strategies
    outputs = case.reference.outputs
    return Strategies((replicated_row(len(case.filled.arrays), len(outputs)),), tuple(out.shape for out in outputs))


def fits_values(row: Row, filled: FilledSample) -> bool:
    """Whether the operands' values can be split into the partial values that the row requires."""
    pairs = zip(row.inputs, filled.arrays, strict=True)
    return all(
        not isinstance(placement, Partial) or can_be_partial(array, placement.reduce_op) for placement, array in pairs
    )


def reductions_commute(picked: Sequence[Row]) -> bool:
    """Whether reductions may run in any order of axes: each operand or output must have reductions of one kind."""
    placements_per_tensor = [
        placements
        for side in ("inputs", "outputs")
        for placements in zip(*(getattr(row, side) for row in picked), strict=True)
    ]
    for placements in placements_per_tensor:
        ops = {placement.reduce_op for placement in placements if isinstance(placement, Partial)}
        if len(ops) > 1 and not ops <= {"sum", "avg"}:
            return False
    return True


def _orders(picked: Sequence[Row]) -> Iterator[tuple[int, ...]]:
    axes = tuple(range(len(picked)))
    yield axes
    same_row = len(axes) > 1 and all(row is picked[0] for row in picked)
    if same_row and any(isinstance(placement, Shard) for placement in picked[0].inputs):
        yield axes[::-1]


def with_operands(args: dict[str, Any], operands: Sequence[Any]) -> dict[str, Any]:
    """Return bound arguments with operands in place of each ``Ref``."""

    def operand_of(value: Any) -> Any:
        return operands[value.index] if isinstance(value, Ref) else value

    return {name: substitute(value, operand_of) for name, value in args.items()}


def row_text(row: Row) -> str:
    """Return the row as text for reports."""
    outputs = row.outputs[:1] if len(set(row.outputs)) == 1 else row.outputs
    return f"{', '.join(map(str, row.inputs))} -> {', '.join(map(str, outputs))}"


def axis_rows(plan: OpPlan) -> Iterator[tuple[int, Row]]:
    """Yield the row of a planned call on each axis with several ranks, unless everything is replicated on that axis."""
    for axis, ranks in enumerate(plan.call.mesh.shape):
        inputs = tuple(layout.placement_on(axis) for layout in plan.choice.targets)
        outputs = tuple(layout.placement_on(axis) for layout in plan.choice.outputs)
        if ranks > 1 and not all(place.is_replicate() for place in (*inputs, *outputs)):
            yield axis, Row(inputs, outputs)
