"""The plan of a call: the layouts that its operands need, and the layouts of its outputs. No tensors are involved."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.events import module_path
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.rule import FixedLayouts, LayoutOptions, LocalCall, OpCall, Operand, Rule, Strategies
from hyper_parallel.core.shard.strategy import Choice, cheapest, choose, varying_operands
from hyper_parallel.errors import LayoutError, MeshMismatchError, ShardMismatchError, UnsupportedOperatorError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hyper_parallel.core.dtensor.mesh import DeviceMesh


__all__ = ["OpPlan", "describe", "observing_plans", "plan_call", "replicated_layout"]


@dataclass(frozen=True)
class OpPlan:
    """The plan of one call, which the executor compiles.

    Attributes:
        call: the call that was planned.
        choice: layouts of operands and outputs.
        local: the local call, if it differs from the caller's.
        many: True when the operator returns a sequence.
        impl: function to call on local tensors instead of the framework's, or None.
        open: True if number and sizes of the outputs are known only after the call; all outputs are then replicated.
        view: True if this call returns a view of its first operand, unlike other calls of the rule.
        ordered: True if the output has the memory format (order of strides) of its operands.
    """

    call: OpCall
    choice: Choice
    local: LocalCall | None
    many: bool
    impl: Callable[..., Any] | None = None
    open: bool = False
    view: bool = False
    ordered: bool = False

    @property
    def moves(self) -> bool:
        """Whether an operand must be redistributed."""
        return any(
            operand.layout is not target
            for operand, target in zip(self.call.operands, self.choice.targets, strict=True)
        )


_OBSERVERS: ContextVar[tuple[Callable[[OpPlan], None], ...]] = ContextVar("hyper_parallel_observers", default=())


@contextmanager
def observing_plans(observe: Callable[[OpPlan], None]) -> Iterator[None]:
    """Call ``observe`` with every plan made in the block; a call whose key is cached makes no plan."""
    token = _OBSERVERS.set((*_OBSERVERS.get(), observe))
    try:
        yield
    finally:
        _OBSERVERS.reset(token)


def plan_call(call: OpCall, rule: Rule, *, in_place: bool = False) -> OpPlan:
    """Plan ``call`` by ``rule``.

    Args:
        call: the operator with the layouts of its operands.
        rule: the operator's rule.
        in_place: True if the first operand is written; it cannot be redistributed then.

    Returns:
        the plan.

    Raises:
        UnsupportedOperatorError: an in-place call needs its written operand in another layout, or a tensor was passed
            where the rule reads a number.
        LayoutError: the rule does not accept the shapes.
        MeshMismatchError: a user's strategy names layouts of another mesh.
        ShardMismatchError: a row of the rule does not have as many operands or outputs as the call.
    """
    try:
        plan = _plan(call, rule, in_place=in_place)
    except (TypeError, ValueError) as error:
        _refuse_tensors_for_numbers(call, error)
        raise
    for observe in _OBSERVERS.get():
        observe(plan)
    return plan


def _plan(call: OpCall, rule: Rule, *, in_place: bool) -> OpPlan:
    try:
        strategies = rule.strategies(call)
    except ValueError as error:
        msg = f"{describe(call)}: {error}"
        raise (MeshMismatchError if isinstance(error, MeshMismatchError) else LayoutError)(msg) from error
    if isinstance(strategies, FixedLayouts):
        layouts = tuple(operand.layout for operand in call.operands)
        choice = Choice(layouts, strategies.outputs, varying_operands(call, layouts))
        _check_in_place_layout(call, choice, in_place=in_place)
        return OpPlan(call, choice, None, strategies.many, strategies.impl)
    if isinstance(strategies, LayoutOptions):
        choice = cheapest(call, strategies)
        _check_in_place_layout(call, choice, in_place=in_place)
        return OpPlan(call, choice, None, strategies.many)
    _check_rows(call, strategies)
    chosen = choose(call, strategies, in_place=in_place)
    if chosen is None:
        raise UnsupportedOperatorError(_in_place_message(call))
    local = strategies.localize(call, chosen.targets, chosen.outputs) if strategies.localize else None
    return OpPlan(
        call, chosen, local, strategies.many, open=strategies.open, view=strategies.view, ordered=strategies.ordered
    )


def _check_in_place_layout(call: OpCall, choice: Choice, *, in_place: bool) -> None:
    """Raise if the rule would change the layout of the operand that is written in place."""
    if not in_place:
        return
    first, (output, *_) = call.operands[0], choice.outputs
    if output.with_shape(first.shape) is not first.layout:
        msg = (
            f"{describe(call)}: it writes into {first.name}, which stays {first.layout.notation()}; "
            f"its rule says that the result is {output.with_shape(first.shape).notation()}"
        )
        raise LayoutError(msg)


def _check_rows(call: OpCall, strategies: Strategies) -> None:
    """Raise if a row does not have as many operands and outputs as the call."""
    expected = (len(call.operands), len(strategies.outputs))
    for row in strategies.rows:
        counts = (len(row.inputs), len(row.outputs))
        if counts != expected:
            msg = (
                f"{describe(call)}: a row of the rule has {counts[0]} operands and {counts[1]} outputs, but the call "
                f"has {expected[0]} and {expected[1]}; this is a bug in the rule; please report it"
            )
            raise ShardMismatchError(msg)


def _refuse_tensors_for_numbers(call: OpCall, error: Exception) -> None:
    """Reject a 0-d tensor where a rule needs a size, dim or count; frameworks accept those."""
    scalars = [operand for operand in call.operands[1:] if not operand.ndim and not operand.floating]
    if scalars and (isinstance(error, ShardMismatchError) or Operand.__name__ in str(error)):
        msg = (
            f"{describe(call)}: {scalars[0].name} is a tensor where the rule needs a number; use int({scalars[0].name})"
        )
        raise UnsupportedOperatorError(msg) from error


def replicated_layout(mesh: DeviceMesh, shape: Sequence[int]) -> Layout:
    """The replicated layout of a tensor of ``shape``."""
    return Layout.of(mesh, ((),) * len(shape), (), tuple(shape))


def describe(call: OpCall) -> str:
    """Return the operator with its operands in notation: ``add(x=f32[4@tp, 3], y=f32[4, 3])``.

    If events are recorded, the text starts with the path of the running module.
    """
    operands = ", ".join(f"{operand.name}={operand.layout.notation(operand.dtype)}" for operand in call.operands)
    path = module_path()
    return f"{path}{path and ': '}{call.op}({operands})"


def _in_place_message(call: OpCall) -> str:
    first = call.operands[0]
    replicated = ", ".join("Replicate()" for _ in range(call.mesh.ndim))
    return (
        f"{describe(call)}: writing in place would have to change the layout of {first.name}; "
        f"use the out-of-place form, or {first.name} = {first.name}.redistribute(placements=[{replicated}]) first"
    )
